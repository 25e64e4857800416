"""The parts that all routes share: health, metrics, checks of host and key, answers to what the server refuses."""

import pytest

from dtgpt.serve.app import make_app
from tests.support.server import client, http_client, live_server, served, tiny_model


@pytest.fixture(scope="module")
def service():
    with served(tiny_model(), hosts=frozenset({"127.0.0.1", "localhost"})) as service:
        yield service


def test_health_and_metrics(service):
    with client(make_app(service)) as http:
        assert http.get("/health").json() == {"status": "ready", "model": "tiny"}
        assert "dtgpt_slots 8" in http.get("/metrics").text


def test_health_of_a_live_server(service):
    with live_server(service) as address, http_client(address) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/nothing").json()["error"]["type"] == "invalid_request_error"
        assert http.post("/health").status_code == 405

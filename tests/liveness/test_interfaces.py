"""The network interfaces that the environment names."""

import socket

import pytest

from dtgpt.liveness.interfaces import cannot_connect, check_interfaces
from dtgpt.util.errors import UserError


@pytest.fixture(autouse=True)
def interfaces(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("gloo", [None, "eth0", "eth0,ib0"])
@pytest.mark.parametrize("nccl", [None, "eth", "=eth0", "^lo", "^=lo", "eth9,ib"])
def test_interfaces_that_are_there_are_taken(monkeypatch, gloo, nccl):
    for name, value in (("GLOO_SOCKET_IFNAME", gloo), ("NCCL_SOCKET_IFNAME", nccl)):
        if value:
            monkeypatch.setenv(name, value)
    check_interfaces("cuda")


@pytest.mark.parametrize("gloo", ["eth9", "eth", "eth0,eth9"])
def test_a_missing_interface_of_gloo_is_named_with_those_that_there_are(monkeypatch, gloo):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", gloo)
    with pytest.raises(UserError, match=f"GLOO_SOCKET_IFNAME={gloo}: .* has no network .*; name one of lo, eth0, ib0"):
        check_interfaces("cpu")


@pytest.mark.parametrize("nccl", ["eth9", "=eth", "^lo,eth,ib", "^=lo,eth0,ib0"])
def test_missing_interfaces_of_nccl_are_named_on_gpus(monkeypatch, nccl):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
    check_interfaces("cpu")
    with pytest.raises(UserError, match="NCCL_SOCKET_IFNAME="):
        check_interfaces("cuda")


def test_a_failed_connection_is_one_sentence_and_other_errors_stay():
    text = "Gloo connectFullMesh failed with [/a/b.cc:152] timed out connecting: refused, remote=[10.0.0.1]:5$1\nmore"
    found = str(cannot_connect(RuntimeError(text)))
    assert "(timed out connecting: refused, remote=[10.0.0.1]:5$1)" in found and "here: lo, eth0, ib0" in found
    assert cannot_connect(RuntimeError("out of memory")) is None

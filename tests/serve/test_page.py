"""The routes of the page: its headers, what is filled into it, and what is not in it."""

import html
import re
from importlib.resources import files
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette

from dtgpt.data.library_tokenizers.chat_template import KEY
from dtgpt.inference.options import INITIAL, OPTIONS
from dtgpt.serve import page
from dtgpt.serve.app import make_app
from tests.support.server import client, served, tiny_model

FILE = files("dtgpt.serve").joinpath("web/page.html").read_text(encoding="utf-8")
SECRET = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def http():
    with served(tiny_model(), api_key="secret") as service, client(make_app(service)) as http:
        yield http


def test_the_page_is_one_file():
    assert [file.name for file in files("dtgpt.serve").joinpath("web").iterdir()] == ["page.html"]
    assert len(FILE.splitlines()) < 400


@pytest.mark.parametrize("path", ["/", "/index.html"])
def test_the_page_needs_no_key(http, path):
    answer = http.get(path)
    assert answer.status_code == 200 and answer.text.startswith("<!doctype html>")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_browser_may_run_the_pages_own_script_and_ask_this_server_alone(http):
    sent = dict(part.split(" ", 1) for part in http.get("/").headers["content-security-policy"].split("; "))
    script = re.search(r"<script>(.*)</script>", http.get("/").text, re.DOTALL)[1]
    assert sent["default-src"] == "'none'" and sent["connect-src"] == "'self'"
    assert sent["script-src"] == f"'{page.hash_of(script)}'"
    assert {"base-uri", "form-action", "frame-ancestors"} < sent.keys()
    assert "unsafe" not in str(sent) and "http" not in str(sent)


def test_what_a_browser_has_is_not_sent_again(http):
    tag = http.get("/").headers["etag"]
    again = http.get("/", headers={"If-None-Match": tag})
    assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == tag
    assert http.get("/", headers={"If-None-Match": '"another"'}).status_code == 200


def test_head_has_the_headers_alone(http):
    answer = http.head("/")
    assert answer.status_code == 200 and answer.content == b"" and int(answer.headers["content-length"]) > 1000


@pytest.mark.parametrize(
    "path", ["/web/", "/web", "/web/page.html", "/web/%2e%2e/page.py", "/chat.html", "/index.html/"]
)
def test_no_other_path_is_a_file(http, path):
    assert http.get(path, headers=SECRET).status_code == 404


def test_no_other_method_is_taken(http):
    assert http.post("/", headers=SECRET).status_code == 405


def test_a_models_name_stays_text_in_title_and_heading():
    name = "<b>\"&'{{chat}}"
    model = SimpleNamespace(known_tokenizer=SimpleNamespace(additions={KEY: {}}))
    (route, _) = page.routes(SimpleNamespace(model=model, model_id=name))
    with client(Starlette(routes=[route])) as http:
        text = http.get("/").text
    assert f"<title>{html.escape(name)} – dtgpt</title>" in text and f"<h1>{html.escape(name)}</h1>" in text
    assert "<b>" not in text and 'data-chat="yes"' in text


def test_chats_are_offered_where_there_is_a_template_alone(http):
    assert 'data-chat=""' in http.get("/").text


def test_the_file_has_no_foreign_address_and_makes_no_markup_of_text():
    text = FILE.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(?:https?:)?//\w+\.\w", text), "an address"
    assert not re.search(r"HTML|document\.write|\beval\b|\bFunction\(|javascript:", text)
    assert not re.search(r"<[^>]* (?:style=|on\w+=)", FILE), "the policy refuses what is in attributes"


def test_defaults_are_those_of_the_command():
    """An empty field leaves a key out; a number in the page must be the one that `dtgpt generate` begins with."""
    shown = {name: float(value) for name, value in re.findall(r'id="(\w+)" type="number".* value="(.+?)"', FILE)}
    assert set(shown) == {"temperature", "top_k", "top_p"}
    assert shown == {name: INITIAL.get(name, OPTIONS[name].default) for name in shown}
    assert f"const DEFAULT_LENGTH = {INITIAL['max_new_tokens']};" in FILE

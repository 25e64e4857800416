"""The routes of the page: its files, their headers, and what is not in them."""

import re
from importlib.resources import files

import pytest

from dtgpt.serve import page
from dtgpt.serve.app import make_app
from tests.support.server import client, served, tiny_model


@pytest.fixture(scope="module")
def http():
    with served(tiny_model(), api_key="secret") as service, client(make_app(service)) as http:
        yield http


def web_files():
    return list(files("dtgpt.serve").joinpath(page.FOLDER).iterdir())


@pytest.mark.parametrize("path", ["/", "/index.html"])
def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere(http, path):
    answer = http.get(path)
    assert answer.status_code == 200 and answer.text.startswith("<!doctype html>")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_every_file_that_the_page_names_is_there_with_its_type(http):
    for name in re.findall(r'(?:src|href)="(.+?)"', http.get("/").text):
        answer = http.get(f"/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"] == page.TYPES[name[name.rindex(".") :]]
        if name.endswith(".js"):
            for imported in re.findall(r'from "\./(.+?)"', answer.text):
                assert http.get(f"/{page.FOLDER}/{imported}").status_code == 200, imported


def test_what_a_browser_has_is_not_sent_again(http):
    tag = http.get("/").headers["etag"]
    again = http.get("/", headers={"If-None-Match": tag})
    assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == tag
    assert http.get("/", headers={"If-None-Match": '"another"'}).status_code == 200


def test_head_has_the_headers_alone(http):
    answer = http.head("/web/page.css")
    assert answer.status_code == 200 and answer.content == b"" and int(answer.headers["content-length"]) > 1000


@pytest.mark.parametrize(
    "path",
    ["/web/", "/web", "/web/page.py", "/web/%2e%2e/page.py", "/web/..%2fpage.py", "//web/page.css", "/web/main.js/"],
)
def test_no_other_path_is_a_file(http, path):
    assert http.get(path, headers={"Authorization": "Bearer secret"}).status_code == 404


def test_no_other_method_is_taken(http):
    assert http.post("/", headers={"Authorization": "Bearer secret"}).status_code == 405


@pytest.mark.parametrize("file", web_files(), ids=lambda file: file.name)
def test_a_file_has_no_foreign_address_and_makes_no_html_of_text(file):
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(?:https?:)?//\w+\.\w", text), "an address"
    if file.name.endswith(".js"):
        assert not re.search(r"HTML|document\.write|\beval\b|\bFunction\(|javascript:", text)
    if file.name.endswith(".html"):
        assert not re.search(r"<style|style=|\son\w+=|<script>", text), "the policy refuses what is inline"

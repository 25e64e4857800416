"""The routes about the tokenizer."""

import pytest

from dtgpt.data.library_tokenizers.byte_level import ByteLevel
from dtgpt.data.library_tokenizers.files import from_files
from dtgpt.serve.app import make_app
from dtgpt.serve.tokens import describe
from tests.support.model_by_rules import model_by_rules
from tests.support.scripted_engine import ScriptedEngine
from tests.support.server import client, served_script
from tests.support.vocabularies import gpt2_files

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return from_files(*gpt2_files(tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def http(gpt2):
    engine = ScriptedEngine(lambda request, choice: [0])
    with served_script(engine, model_by_rules([]).config, gpt2) as service, client(make_app(service)) as http:
        yield http


@pytest.mark.slow(2)
def test_text_becomes_ids_and_ids_text(http):
    text = f"Hello world, naïve €uro{END}\n\n"
    found = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert found["tokens"][:2] == [15496, 995] and found["tokens"][-2:] == [50256, 628]
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 1024 and found["token_strs"] is None
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    named = http.post("/tokenize", json={"prompt": "Hello world", "return_token_strs": True, "model": "scripted"})
    assert named.json()["token_strs"] == ["Hello", " world"]


@pytest.mark.slow(1)
def test_lm_eval_learns_the_end_of_text_from_its_name(http):
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["pad_token"], info["chat_template"]) == (END, END, None, None)
    assert http.post("/tokenize", json={"prompt": info["eos_token"]}).json()["tokens"] == [50256]


def test_nothing_becomes_nothing(http):
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("path, body, param", [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "model": "other"}, "model"), ("/tokenize", {"prompt": "a", "model": 5}, "model"),
    ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "ab"}, "tokens"),
    ("/detokenize", {"tokens": [50257]}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [True]}, "tokens"), ("/detokenize", {"tokens": [1.0]}, "tokens"),
])  # fmt: skip
def test_wrong_values_get_one_sentence(http, path, body, param):
    response = http.post(path, json=body)
    assert response.status_code == (404 if body.get("model") == "other" else 400)
    error = response.json()["error"]
    assert error["param"] == param and ";" in error["message"]


@pytest.mark.parametrize("path, sentence", [
    ("/tokenize", "run of blanks that is too long"), ("/v1/completions", "maximum context length is 1024"),
    ("/api", "longer than allowed"),
])  # fmt: skip
def test_a_text_that_the_tokenizer_cannot_split_is_one_sentence(http, path, sentence):
    text = " " * 1_040_000
    response = http.put(path, json={"prompts": [text]}) if path == "/api" else http.post(path, json={"prompt": text})
    assert response.status_code == 400 and sentence in response.text


def test_what_a_tokenizer_puts_before_every_text_is_left_out_on_request(gpt2):
    first = len(gpt2.ranks) + 1
    specials = {END: first - 1, "<s>": first}
    other = ByteLevel(gpt2.name, gpt2.pattern, gpt2.ranks, specials, begin="<s>", opens=True)
    assert describe(other, 8)["bos_token"] == "<s>"
    engine = ScriptedEngine(lambda request, choice: [0])
    with served_script(engine, model_by_rules([]).config, other) as service, client(make_app(service)) as http:
        for added, expected in ((None, [first, 27, 15496]), (True, [first, 27, 15496]), (False, [27, 15496])):
            asked = {"prompt": "<Hello", "add_special_tokens": added}
            assert http.post("/tokenize", json=asked).json()["tokens"] == expected

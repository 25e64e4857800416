"""Prompts become ids as by transformers' tokenizer in every door: names of special tokens, the begin of text once."""

import json
from pathlib import Path

import pytest

import dtgpt
from dtgpt.commands.generate import make_job
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.inference.options import OPTIONS
from dtgpt.serve.app import make_app
from dtgpt.train.setup import open_trainer
from dtgpt.util.errors import UserError
from tests.support.bodies_grpo import Low
from tests.support.chats import NAMES, write_tokenizer
from tests.support.huggingface_llamas import their_model
from tests.support.prepared import write_lines
from tests.support.runs import change
from tests.support.server import client, served
from tests.support.vocabularies import sentencepiece_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow(5)

BEGIN, TURN, END = (NAMES.index(name) for name in ("<s>", "<|im_start|>", "<|im_end|>"))
CHAT = "<s><|im_start|>user\nHello world<|im_end|>\n"
PROMPTS = ["Hello world", CHAT, CHAT.removeprefix("<s>"), "", "<s>", "<s><s>a", "a</s>b <think>", " <s>", "<|im_end"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("names") / "model"
    their_model("llama 2", vocab_size=296, max_position_embeddings=96).save_pretrained(folder)
    return write_tokenizer(folder, "mistral")


@pytest.fixture(scope="module")
def model(folder):
    return dtgpt.load(folder)


def theirs(folder: Path, text: str, **options) -> list[int]:
    """The ids of transformers' tokenizer, with one begin of text where the text has it, too."""
    ids = transformers.AutoTokenizer.from_pretrained(folder).encode(text, **options)
    return ids[1:] if ids[:2] == [BEGIN, BEGIN] and not options else ids


@pytest.mark.parametrize("text", PROMPTS)
def test_a_prompt_is_that_of_transformers_in_every_door(model, folder, text):
    expected = theirs(folder, text)
    split = theirs(folder, text, split_special_tokens=True)
    assert model.score(text).ids == expected and model.score(text, split_special_tokens=True).ids == split
    found = model.generate(text, details=True, prompt_logprobs=True, max_new_tokens=1)
    assert found.prompt.ids == expected
    base = {name: option.default for name, option in OPTIONS.items()} | {"max_new_tokens": 3}
    assert make_job(model, text, base, 0).ids == expected
    assert make_job(model, text, base | {"split_special_tokens": True}, 0).ids == split
    assert model.tokenizer.encode_prompt(text) == expected
    assert model.tokenizer.encode_bare(text) == theirs(folder, text, add_special_tokens=False)
    assert model.tokenizer.encode(text) == [BEGIN, *split[1:]] == split  # of data: names are text


def test_completions_take_the_same_ids_and_the_switch(model, folder):
    with served(model) as service, client(make_app(service)) as http:

        def prompt_tokens(path="/v1/completions", **keys) -> int:
            answer = http.post(path, json={"max_tokens": 1, **keys})
            return answer.json()["usage"]["prompt_tokens"] if answer.status_code == 200 else answer.json()["error"]

        for text in PROMPTS:
            assert prompt_tokens(prompt=text) == len(theirs(folder, text))
            split = theirs(folder, text, split_special_tokens=True)
            assert prompt_tokens(prompt=text, split_special_tokens=True) == len(split)
        assert prompt_tokens(prompt=[[]]) == prompt_tokens(prompt="") == prompt_tokens(prompt=None) == 1
        wrong = prompt_tokens(prompt="a", split_special_tokens="yes")
        assert wrong["param"] == "split_special_tokens" and ";" in wrong["message"]
        chat = {"messages": [{"role": "user", "content": "Hello"}], "split_special_tokens": True}
        assert "is for completions" in prompt_tokens("/v1/chat/completions", **chat)["message"]
        for text in PROMPTS:
            for bare in (True, False):
                given = {"prompt": text, "add_special_tokens": not bare}
                ids = http.post("/tokenize", json=given).json()["tokens"]
                assert ids == (theirs(folder, text, add_special_tokens=False) if bare else theirs(folder, text))
        megatron = http.put("/api", json={"prompts": [CHAT], "tokens_to_generate": 0, "logprobs": True}).json()
        assert len(megatron["segments"][0]) == len(theirs(folder, CHAT, split_special_tokens=True))


def test_prompts_of_samples_and_of_reinforcement(recipe, folder, tmp_path):
    from dtgpt.train.texts.generate import generate_text

    path = write_lines(tmp_path / "in.jsonl", [{"text": "Hello world " * 9}] * 40)
    data = {"path": str(path), "tokenizer": "auto", "tokenizer_file": str(folder)}
    asks = Asks(group=2, max_new_tokens=2)
    recipe = change(
        recipe, data=data, model={"vocab_size": 296, "dropout": 0.0}, grpo=asks, global_batch_size=2, micro_batch_size=2
    )
    with open_trainer(change(recipe, log={"prompt": "<s><|im_end|>", "sample_tokens": 4})) as trainer:
        assert trainer.objective.rollouts.draw(0)[0].prompt_ids == [BEGIN, TURN]
        seen = []
        trainer.dataset.tokenizer.encode_prompt = lambda text, split: seen.append((text, split)) or [BEGIN, END]
        generate_text(trainer)
        assert seen == [("<s><|im_end|>", False)]


class Asks(Low):
    def prompt(self, index: int) -> str:
        return "<|im_start|>"


@pytest.mark.parametrize("after, before", [(["END"], []), (["END"], ["BEGIN"]), ([], ["BEGIN"])])
def test_what_a_tokenizer_puts_around_texts_is_left_out_of_a_bare_one(folder, tmp_path, after, before):
    """Also what it puts behind them."""
    write_tokenizer(tmp_path, "mistral")
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    names = {"BEGIN": "<s>", "END": "</s>"}
    pieces = [*({"SpecialToken": {"id": names[one], "type_id": 0}} for one in before),
              {"Sequence": {"id": "A", "type_id": 0}},
              *({"SpecialToken": {"id": names[one], "type_id": 0}} for one in after)]  # fmt: skip
    known = {name: {"id": name, "ids": [NAMES.index(name)], "tokens": [name]} for name in names.values()}
    saved["post_processor"] |= {"single": pieces, "special_tokens": known}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = open_tokenizer(str(tmp_path))
    for text in ("", "Hello", "<s>Hello</s>", "</s>", "<s>"):
        assert tokenizer.encode_bare(text) == theirs(tmp_path, text, add_special_tokens=False)
        assert tokenizer.encode_prompt(text) == theirs(tmp_path, text)


@pytest.mark.parametrize("begin", [False, True])
def test_a_sentencepiece_model_knows_the_names_in_prompts(tmp_path, begin):
    """As transformers, which cuts the text at them."""
    sentencepiece_model(tmp_path).rename(tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": begin}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **names}))
    own, first = open_tokenizer(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "the quick", "<s>the quick</s> brown", "<s> the", "the</s>quick", "</s>", "<unk>a", "<s>[INST] a"):
        ids = first.encode(text)
        assert own.encode_prompt(text) == (ids[1:] if ids[:2] == [1, 1] else ids)
        assert own.encode_bare(text) == first.encode(text, add_special_tokens=False)
    assert own.encode_prompt("<s>", split_special_tokens=True)[-3:] == own.encode("<s>")[-3:] != [1]


def test_a_switch_that_is_none_is_refused(model):
    with pytest.raises(UserError, match="split_special_tokens='off' is not a switch; use true or false"):
        model.generate("a", split_special_tokens="off")
    with pytest.raises(UserError, match="split_special_tokens='off' is not a switch; use true or false"):
        model.score("a", split_special_tokens="off")

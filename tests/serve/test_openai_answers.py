"""Requests and answers of OpenAI's completions without a network: keys, log-probabilities, names, streams."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtgpt.data.megatron.ids import Ids
from dtgpt.data.tokenizers.open import make_tokenizer, open_tokenizer
from dtgpt.inference.library.jobs import run_jobs
from dtgpt.inference.prompts import special_ids
from dtgpt.inference.scores.options import Score
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.serve.limits import RequestLimits
from dtgpt.serve.openai_answer import CompletionAnswer, CompletionStream
from dtgpt.serve.openai_logprobs import Logprobs, TokenNames, likeliest
from dtgpt.serve.openai_request import Prompt, read_request
from dtgpt.serve.problems import HttpProblem
from tests.support.scripted_engine import ScriptedEngine
from tests.support.server import generator_of
from tests.support.vocabularies import gpt2_files, sentencepiece_model, tokenizer_json

BYTES = make_tokenizer("bytes", [], 0)
CONFIG = GPT2Config(num_layers=1, hidden_size=8, num_heads=1, vocab_size=257, seq_length=64)
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


GENERATOR = generator_of(CONFIG, BYTES)


def read(generator=GENERATOR, **body):
    return read_request(body, generator, "tiny", RequestLimits())


def problem(**body):
    with pytest.raises(HttpProblem) as caught:
        read(**body)
    assert caught.value.status == 400
    return caught.value


def test_null_stands_for_the_default_of_every_key():
    nothing = read(prompt="x", seed=0)
    every = dict.fromkeys([
        "model", "max_tokens", "temperature", "top_p", "n", "best_of", "stop", "echo", "logprobs", "stream", "suffix",
        "stream_options", "frequency_penalty", "presence_penalty", "logit_bias", "user", "top_k", "unknown",
    ])  # fmt: skip
    assert read(prompt="x", seed=0, **every) == nothing
    options = nothing.jobs[0].options
    assert (options.max_new_tokens, options.temperature, options.top_p, nothing.n) == (16, 1.0, 1.0, 1)
    assert read(prompt="x" * 60).jobs[0].options.max_new_tokens == 4  # as many as there are positions left
    assert read(prompt="x", user={"any": 1}, suffix="", repetition_penalty=1, stop="a", skip_special_tokens=False).jobs


@pytest.mark.parametrize("wrong, words", [
    ({"max_tokens": 0}, "add echo=true"), ({"prompt": []}, "prompt is empty"), ({"prompt": [300]}, "use 0 to 256"),
    ({"best_of": 1, "n": 2}, "below n=2"), ({"best_of": 2, "stream": True}, "cannot be streamed"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens=5 is above max_tokens=2"),
    ({"stop_token_ids": [999]}, "use a whole number from 0 to 256"),
    ({"logit_bias": {"999": 1}}, "use a whole number from 0 to 256"),
    ({"temperature": -1}, "temperature=-1 is not valid; use a number from 0 to 100"),
    ({"suffix": "end"}, "does not support suffix='end'"),
], ids=str)  # fmt: skip
def test_a_wrong_value_names_its_key(wrong, words):
    found = problem(**{"prompt": "x", **wrong})
    assert found.param == next(iter(wrong)) and words in found.message


@pytest.mark.parametrize("wrong", [
    {"prompt": 5}, {"prompt": {"a": 1}}, {"prompt": [True]}, {"prompt": [1, "a"]}, {"prompt": [[1], "a"]},
    {"prompt": [None]}, {"prompt": [[1.0]]}, {"prompt": [-1]}, {"prompt": [[257]]},
    {"prompt": ["x"] * 129}, {"prompt": "x" * 64}, {"max_tokens": 64}, {"max_tokens": True}, {"max_tokens": 1.5},
    {"max_tokens": "5"}, {"max_tokens": 10**30}, {"temperature": True}, {"temperature": 101}, {"temperature": "hot"},
    {"top_p": 1.1}, {"n": 0}, {"n": 129}, {"n": True}, {"best_of": 129}, {"seed": 2**64}, {"seed": 1.0},
    {"stop": [1]}, {"stop": ""}, {"stop": ["x"] * 17}, {"stop": "x" * 257}, {"stop": {}}, {"echo": 1},
    {"logprobs": 6}, {"logprobs": True}, {"logprobs": -1}, {"stream": "yes"}, {"stream_options": {}},
    {"stream": True, "stream_options": []}, {"stream": True, "stream_options": {"usage": True}},
    {"stream": True, "stream_options": {"include_usage": 1}}, {"frequency_penalty": 2.5}, {"presence_penalty": []},
    {"logit_bias": []}, {"logit_bias": {"257": 1}}, {"logit_bias": {"x": 1}}, {"logit_bias": {"5": 101}},
    {"logit_bias": {"5": None}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"9" * 400: 1}}, {"suffix": "x"},
    {"top_k": -2}, {"min_tokens": 17}, {"stop_token_ids": [257]}, {"stop_token_ids": 5}, {"min_p": 1.5},
    {"use_beam_search": True}, {"model": 5}, {"tools": []}, {"": 1}, {"top_p": 0.5, "top_p_bound": 0.6},
    {"skip_special_tokens": True},
], ids=str)  # fmt: skip
def test_a_wrong_value_is_one_sentence_that_says_what_is_right(wrong):
    found = problem(**{"prompt": "x", **wrong})
    assert ";" in found.message and "\n" not in found.message and len(found.message) < 400
    assert "max_new_tokens" not in found.message and "num_return_sequences" not in found.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.just("7"), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([
    "prompt", "max_tokens", "stop", "logit_bias", "n", "logprobs", "stream_options", "echo", "seed", "stop_token_ids",
    "temperature", "top_k", "best_of", "stream", "x",
])  # fmt: skip


@pytest.mark.slow(2)
@settings(deadline=None, max_examples=300)
@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_any_object_is_a_request_or_a_problem(body):
    try:
        asked = read(**body)
    except HttpProblem as found:
        assert found.status in (400, 404)
    else:
        assert len(asked.jobs) == len(asked.prompts) and all(job.rows == asked.best_of for job in asked.jobs)


def test_special_names_in_a_text_are_tokens_and_a_missing_prompt_begins_a_document():
    assert read(prompt="a<|endoftext|>").jobs[0].ids == [97, 256]
    assert read().prompts == [Prompt([256], "<|endoftext|>")] == read(prompt=[256]).prompts
    assert read(prompt="").prompts == [Prompt([256], "")]
    assert read(prompt=["a", ""]).jobs[1].prompt_index == 1
    characters = generator_of(CONFIG, make_tokenizer("char", ["ab\n"], 0))
    assert read(characters, prompt="ab").jobs[0].ids == [1, 2]
    with pytest.raises(HttpProblem, match="does not know the character") as caught:
        read(characters, prompt="é")
    assert caught.value.param == "prompt"


def test_a_model_of_ids_alone_takes_ids_and_no_stop_strings():
    generator = generator_of(CONFIG, Ids(257))
    assert read(generator, prompt=[5, 6], echo=True).prompts == [Prompt([5, 6], "")]
    for wrong in ({"prompt": "text"}, {}, {"prompt": [5], "stop": "x"}):
        with pytest.raises(HttpProblem, match=r"ids alone|in which stop strings"):
            read(generator, **wrong)


@pytest.mark.parametrize("asked", [
    {"prompt": [5, 257], "echo": True, "logprobs": 1}, {"prompt": [5, 257]}, {"logit_bias": {"257": 1}},
    {"stop_token_ids": [257], "min_tokens": 3},
], ids=str)  # fmt: skip
def test_ids_that_only_the_model_has_are_refused(asked):
    """A model with more tokens than its tokenizer, as where the vocabulary is padded, never draws them."""
    generator = generator_of(replace(CONFIG, vocab_size=300), BYTES)
    with pytest.raises(HttpProblem, match="0 to 256") as caught:
        read(generator, **{"prompt": "x", **asked})
    assert caught.value.status == 400


def test_tokens_are_named_by_their_text_their_bytes_or_their_id(tmp_path):
    gpt2 = open_tokenizer(vocab_file=str(gpt2_files(tmp_path)[0]), merge_file=str(tmp_path / "merges.txt"))
    names = TokenNames(gpt2)
    ids = gpt2.encode("Hello world🫠")
    assert [names[i] for i in ids] == ["Hello", " world", "bytes:\\xf0\\x9f", "bytes:\\xab", "bytes:\\xa0"]
    assert (names[50256], names[60000]) == ("<|endoftext|>", "token_id:60000")
    assert TokenNames(None)[5] == "token_id:5"
    pieces = open_tokenizer(str(sentencepiece_model(tmp_path)))
    assert "".join(TokenNames(pieces)[i] for i in pieces.encode("the quick fox")) == " the quick fox"
    part_of_a_character = pieces.encode("🫠")[-1]
    assert TokenNames(pieces)[part_of_a_character] == "bytes:\\xa0"
    json_file = open_tokenizer(str(tokenizer_json(tmp_path, bos=True)))
    ids, names = json_file.encode("the quick"), TokenNames(json_file)
    assert "".join(names[i] for i in ids) == "<s>the quick"
    echoed = Logprobs(names, json_file, Prompt(ids, "the quick"), echo=True)
    echoed.add_prompt(Score(ids=ids, logprobs=[-1.0] * (len(ids) - 1), greedy=[]))
    offsets = echoed.take(9)["text_offset"]
    assert offsets[:2] == [0, 0] and "the quick"[offsets[-1] :] == names[ids[-1]]


def test_the_chosen_token_is_among_the_likeliest_with_the_same_number_and_names_are_not_lost():
    names = TokenNames(BYTES)
    assert likeliest(names, 97, -0.5, [(97, -0.5), (98, -1.0)]) == {"a": -0.5, "b": -1.0}
    assert list(likeliest(names, 99, -3.0, [(97, -0.5), (98, -1.0)])) == ["a", "b", "c"]
    assert likeliest(names, 99, float("-inf"), []) == {"c": -9999.0}
    same = {5: "x", 6: "x", 7: "x"}
    assert likeliest(same, 6, -2.0, [(5, -1.0), (7, -1.5)]) == {"token_id:5": -1.0, "token_id:7": -1.5, "x": -2.0}
    assert likeliest(same, 5, -1.0, [(5, -1.0), (7, -1.5)]) == {"x": -1.0, "token_id:7": -1.5}


def test_offsets_count_characters_of_the_text_also_where_tokens_share_one():
    ids, text = list("aé€b".encode()), "aé€b"
    found = Logprobs(TokenNames(BYTES), BYTES, Prompt(ids, text), echo=True)
    found.add_prompt(Score(ids=ids, logprobs=[-1.0] * 6, greedy=[True] * 6))
    found.add(list("ü!".encode()), [-1.0] * 3, [])
    lists = found.take(len("aé€bü!"))
    assert lists["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 4, 4, 5]
    assert lists["tokens"][:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    broken = Logprobs(TokenNames(BYTES), BYTES, Prompt([97], "a"), echo=False)
    broken.add([0xCA, 98, 0xE2, 0x82, 99, 0xAC, 100], [-1.0] * 7, [])
    assert broken.take(6)["text_offset"] == [0, 1, 2, 2, 3, 4, 5]  # of "\ufffdb\ufffdc\ufffdd"
    empty = Logprobs(TokenNames(BYTES), BYTES, Prompt([256], ""), echo=True)
    empty.add_prompt(Score(ids=[256], logprobs=[], greedy=[]))
    empty.add([97], [-1.0], [])
    assert empty.take(1)["text_offset"] == [0, 0]


@settings(deadline=None, max_examples=120)
@given(
    texts=st.lists(st.text("ab é€\n", min_size=1, max_size=25), min_size=1, max_size=6),
    stop=st.lists(st.text("ab é\n", min_size=1, max_size=3), max_size=3), n=st.integers(1, 2), echo=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]), steps=st.integers(1, 5), new=st.integers(0, 20), ids=st.booleans(),
)  # fmt: skip
def test_the_events_of_a_stream_together_are_the_whole_answer(texts, stop, n, echo, logprobs, steps, new, ids):
    body = {
        "prompt": ["é", "b"], "n": n, "echo": echo or new == 0, "logprobs": logprobs, "stop": stop, "max_tokens": new,
        "return_token_ids": ids, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    asked = read(**body)

    def script(request, choice):
        return [*texts[(request.prompt_index + choice) % len(texts)].encode(), 256] + [97] * 30

    special = special_ids(BYTES, [BYTES.end_of_text])
    engine = ScriptedEngine(script, slots=3, steps=steps, tokenizer=BYTES, special=special)
    numbers = [engine.submit(job) for job in asked.jobs]
    answer = CompletionAnswer(asked, "tiny", BYTES, TokenNames(BYTES))
    stream, found, events = CompletionStream(answer), {}, b""
    while engine.busy:
        updates = [update._replace(job=numbers.index(update.job)) for update in engine.step()]
        events += stream.events(updates)
        found |= {update.job: update.completions for update in updates if update.completions}
    lines = (events + stream.end()).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    whole = answer.whole([found[0], found[1]])
    assert last["usage"] == whole["usage"] and len(whole["choices"]) == 2 * n
    for choice in whole["choices"]:
        parts = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        if ids:
            assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        for name in LISTS:
            assert [value for part in parts for value in part["logprobs"][name]] == choice["logprobs"][name]
        assert len({len(choice["logprobs"][name]) for name in LISTS}) == 1
        assert all(offset <= len(choice["text"]) for offset in choice["logprobs"]["text_offset"])


def test_best_of_ranks_by_the_mean_of_log_probabilities():
    asked = read(prompt="x", n=1, best_of=2, logprobs=0)
    texts = ["abcdefgh", "ab"]  # the i-th token has -i: the shorter one is likelier on average
    special = special_ids(BYTES, [256])
    engine = ScriptedEngine(lambda _, c: [*texts[c].encode(), 256], tokenizer=BYTES, special=special)
    (found,) = run_jobs(engine, asked.jobs)
    whole = CompletionAnswer(asked, "tiny", BYTES, TokenNames(BYTES)).whole([found])
    assert [choice["text"] for choice in whole["choices"]] == ["ab"]
    assert whole["usage"] == {"prompt_tokens": 1, "completion_tokens": 12, "total_tokens": 13}

"""Answers of Megatron-LM's text generation server of 2023, given again by the engine.

The cases are those of the file that DTGPT_SERVING_FIXTURES names, or of the copy in the repository: requests to a model
by rules with the answers, and distributions that filters leave. What dtgpt does otherwise on purpose is taken out of a
recorded answer before it is compared: tokens that a shorter prompt of a batch got beyond the number asked for, and the
padding of beams.
"""

import json
import os
from pathlib import Path

import pytest

from dtgpt.data.tokenizers.open import from_files
from tests.support.engines import engine_of
from tests.support.megatron_api import serve
from tests.support.model_by_rules import model_by_rules
from tests.support.vocabularies import DATA, gpt2_files

FIXTURES = json.loads(Path(os.environ.get("DTGPT_SERVING_FIXTURES") or DATA / "serving.json").read_text())
TOLERANCE = 1e-5  # absolute and relative, of log-probabilities and scores
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return from_files(*gpt2_files(tmp_path_factory.mktemp("gpt2")))


def named(case: dict) -> str:
    return case.get("note", json.dumps(case.get("request", case)))


@pytest.mark.parametrize("case", FIXTURES["behaviour"], ids=named)
def test_the_engine_answers_as_megatron_did(case, tokenizer):
    request, model = case["request"], model_by_rules(case["rules"])
    with engine_of(model, slots=8) as engine:
        ours = serve(engine, tokenizer, model.config.vocab_size, request)
    asked = request.get("tokens_to_generate", 64)
    if "scores" in case["body"]:
        assert_same(pad_beams(ours, tokenizer, request, asked), case["body"])
        return
    lengths = [len(tokenizer.encode(prompt)) + request.get("add_BOS", False) for prompt in request["prompts"]]
    recorded = without_surplus(case["body"], lengths, asked)
    if asked and request.get("prevent_newline_after_colon"):
        leave_out_forced_colons(recorded, ours, lengths)
    assert_same(ours, recorded)


def assert_same(ours: dict, recorded: dict) -> None:
    assert ours.keys() == recorded.keys()
    assert ours["segments"] == recorded["segments"]
    assert ours["text"] == recorded["text"]
    for key in ("scores", "logprobs"):
        found, wanted = (flat(answer.get(key)) for answer in (ours, recorded))
        assert found == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)


def flat(numbers: list | float | None) -> list[float]:
    if isinstance(numbers, list):
        return [x for entry in numbers for x in [float(len(flat(entry))), *flat(entry)]]
    return [] if numbers is None else [numbers]


def pad_beams(answer: dict, tokenizer, request: dict, asked: int) -> dict:
    """An answer of beams as Megatron gives it, each filled up with ends of text."""
    length = len(tokenizer.encode(request["prompts"][0])) + request.get("add_BOS", False) + asked
    missing = [length - len(own) for own in answer["segments"]]
    return answer | {
        "segments": [own + [END] * n for own, n in zip(answer["segments"], missing, strict=True)],
        "text": [own + END * n for own, n in zip(answer["text"], missing, strict=True)],
    }


def without_surplus(body: dict, lengths: list[int], asked: int) -> dict:
    """A recorded answer with at most `asked` new tokens for each prompt."""
    ends = [length + asked for length in lengths]
    texts = []
    for text, own, end in zip(body["text"], body["segments"], ends, strict=True):
        surplus = "".join(own[end:])
        assert text.endswith(surplus), "a character is cut by the number of tokens asked for: compare ids"
        texts.append(text.removesuffix(surplus) if surplus else text)
    cut = {"text": texts, "segments": [own[:end] for own, end in zip(body["segments"], ends, strict=True)]}
    if body["logprobs"] is None:
        return body | cut
    return body | cut | {"logprobs": [own[: end - 1] for own, end in zip(body["logprobs"], ends, strict=True)]}


def leave_out_forced_colons(recorded: dict, ours: dict, lengths: list[int]) -> None:
    """Megatron applies the rule of the colon to those tokens of a prompt that are behind the shortest prompt's end, in
    a batch: what follows a colon there has another log-probability than in the prompt alone."""
    if recorded["logprobs"] is None:
        return
    for theirs, own, names, length in zip(
        recorded["logprobs"], ours["logprobs"], recorded["segments"], lengths, strict=True
    ):
        for at in range(min(lengths) - 1, length - 1):
            if names[at] == ":":
                theirs[at] = own[at]

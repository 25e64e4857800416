"""Greedy text and beams of the engine are those of transformers' `generate`, for the same random weights in fp32."""

import pytest
import torch

import dtgpt
from dtgpt.inference.beams.search import Beams
from dtgpt.inference.options import Options
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.util.errors import UserError
from tests.support.engines import CPU, drain, engine_of, events_of, scores_of
from tests.support.families import twin_of
from tests.support.requests import make_request
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(4)

CONFIG = GPT2Config(num_layers=2, hidden_size=48, num_heads=4, seq_length=40, vocab_size=61, init_std=0.3)
PROMPTS = [[3], [3, 1, 4, 1, 5], [60, 0, 60], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [27, 18], [27, 18, 28]]
NEW = 14


@pytest.fixture(scope="module")
def models():
    """A model, and the same as transformers has it."""
    model = build_model(CONFIG, CPU, torch.float32, root_key(1))
    return model, twin_of(model)


def theirs(twin, prompt: list[int], **options):
    with torch.no_grad():
        return twin.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            max_new_tokens=NEW, pad_token_id=0, return_dict_in_generate=True, **options,
        )  # fmt: skip


def up_to_end(ids: list[int], stops: list[int]) -> list[int]:
    """The ids up to the first that ends them, without the padding after it."""
    end = next((at for at, token in enumerate(ids) if token in stops), len(ids))
    return ids[: end + 1]


@pytest.mark.parametrize("rules", [
    {}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 3, "min_new_tokens": 8},
])  # fmt: skip
def test_greedy_text(models, rules):
    """Six prompts share three slots; the ids that end a text are tokens that come early without them."""
    model, twin = models
    free = [theirs(twin, ids, eos_token_id=None, **rules).sequences[0, len(ids) :].tolist() for ids in PROMPTS[:2]]
    stops = [free[0][6], free[1][3]]
    sampling = Options(temperature=0.0, max_new_tokens=NEW, stop_token_ids=tuple(stops), **rules)
    with engine_of(model, slots=3) as engine:
        handles = [engine.submit(make_request(ids=prompt, sampling=sampling)) for prompt in PROMPTS]
        events = drain(engine)
    for handle, prompt in zip(handles, PROMPTS, strict=True):
        sequence = theirs(twin, prompt, eos_token_id=stops, **rules).sequences[0, len(prompt) :].tolist()
        own = [event for event in events if event.job == handle]
        assert [i for event in own for i in event.ids] == up_to_end(sequence, stops)
        ended = len(up_to_end(sequence, stops)) < NEW or sequence[-1] in stops
        assert own[-1].finish == ("stop" if ended else "length")


LENGTHS = [(2, 1.0), (5, 1.0), (5, 0.0), (2, 2.5), (5, -1.0)]  # width and length penalty
RULES = [{"early_stopping": True}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 6}, {"returned": 1}]


@pytest.mark.parametrize(
    "prompt, width, length_penalty, rules",
    # What ends a search depends on the penalty and on `early_stopping`; the other rules do not.
    [(PROMPTS[1 + i % 2], *length, {}) for i, length in enumerate(LENGTHS)]
    + [(PROMPTS[2 - i % 2], *length, RULES[0]) for i, length in enumerate(LENGTHS[::2])]
    + [(PROMPTS[1 + i % 2], *LENGTHS[1], rule) for i, rule in enumerate(RULES[1:])],
    ids=str,
)  # fmt: skip
def test_beams(models, prompt, width, length_penalty, rules):
    model, twin = models
    rules = dict(rules)
    early, returned = rules.pop("early_stopping", False), rules.pop("returned", width)
    beams = Beams(width=width, length_penalty=length_penalty, early_stopping=early)
    first = theirs(twin, prompt, eos_token_id=None).sequences[0, len(prompt) :].tolist()
    for stops in ([], [first[4]], [first[2], first[9]]):
        found = theirs(
            twin, prompt, eos_token_id=stops or None, num_beams=width, num_return_sequences=returned,
            length_penalty=length_penalty, early_stopping=early, output_scores=True, **rules,
        )  # fmt: skip
        sampling = Options(max_new_tokens=NEW, stop_token_ids=tuple(stops), **rules)
        events = events_of(model, make_request(ids=prompt, sampling=sampling, search=beams, choices=returned))
        assert [event.choice for event in events] == list(range(returned))
        sequences = [up_to_end(ids, stops) for ids in found.sequences[:, len(prompt) :].tolist()]
        assert [event.ids for event in events] == sequences
        assert scores_of(events) == pytest.approx(found.sequences_scores.tolist(), rel=1e-5)
        for event, score in zip(events, scores_of(events), strict=True):
            assert event.finish == ("stop" if event.ids[-1] in stops else "length")
            mean = sum(event.logprobs) / len(event.ids) ** length_penalty
            assert mean == pytest.approx(score, rel=1e-5)


def test_beams_of_a_model_that_transformers_saved(models, tmp_path):
    _, twin = models
    twin.save_pretrained(tmp_path)
    model = dtgpt.load(tmp_path, device="cpu", precision="fp32")
    options = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5}
    several = model.generate(PROMPTS, max_new_tokens=NEW, details=True, stop_token_ids=[15], **options)
    for prompt, found in zip(PROMPTS, several, strict=True):
        wanted = theirs(twin, prompt, eos_token_id=15, output_scores=True, **options)
        sequences = [up_to_end(ids, [15]) for ids in wanted.sequences[:, len(prompt) :].tolist()]
        assert [one.ids for one in found] == sequences
        assert [one.score for one in found] == pytest.approx(wanted.sequences_scores.tolist(), rel=1e-5)
    assert model.generate(PROMPTS[1], max_new_tokens=NEW, num_beams=4, length_penalty=0.5, stop_token_ids=15) == (
        several[1][0].ids
    )
    with pytest.raises(UserError, match="a beam search does not take top_logprobs; leave it out"):
        model.generate(PROMPTS[1], num_beams=4, top_logprobs=1, details=True)
    with pytest.raises(UserError, match="a beam search does not take repetition_penalty; leave it out"):
        model.generate(PROMPTS[1], num_beams=4, repetition_penalty=1.1)

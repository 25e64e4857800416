"""Texts that a run generates: the same under every plan, without a trace in the training, of any length."""

import gc
import weakref

import pytest
import torch

from dtgpt.inference.engine import Engine
from dtgpt.inference.request import LOGITS
from dtgpt.train.texts.generate import fit_prompt, generate_text
from tests.support import bodies_train as bodies
from tests.support.ranks import each, pool
from tests.support.runs import change, training

pytestmark = pytest.mark.slow(5)

PLANS = {"dp2_zero3": 2, "tp2_sp": 2, "pp2_interleaved": 2, "pp2_zbv": 2, "tp2_sp_pp2": 4, "dp2_tp2_zero1": 4}
RARE = ("pp2_interleaved", "tp2_sp_pp2", "dp2_tp2_zero1")


@pytest.fixture
def recipe(recipe):
    log = {"sample_tokens": 6, "prompt": "7 and"}
    model = {"num_layers": 4, "seq_length": 32}
    return change(recipe, log=log, model=model, micro_batch_size=2, global_batch_size=4)


@pytest.fixture(scope="module")
def one_process() -> dict:
    """What one process says and loses, made once."""
    return {}


@pytest.mark.parametrize("plan", [pytest.param(plan, marks=[pytest.mark.long] * (plan in RARE)) for plan in PLANS])
def test_the_text_of_a_seed_is_the_same_under_every_plan_and_changes_no_loss(recipe, one_process, plan):
    if not one_process:
        one_process["seen"] = bodies.texts_between_steps((recipe, True))
    alone, losses, _ = one_process["seen"]
    assert all(text.startswith("7 and") for text in alone) and alone[0] == alone[1]
    assert len(set(alone)) == 3
    recipe = change(recipe, plan=plan)
    cases = [(recipe, sampling) for sampling in (False, True)]
    for (_, without, _), (texts, found, cached) in pool().run(PLANS[plan], each, bodies.texts_between_steps, cases):
        assert texts == alone
        assert found == without and found == pytest.approx(losses, rel=1e-5)
        assert not any(cached)


def test_another_seed_or_temperature_gives_another_text(recipe):
    texts = [
        generate_text(training(change(recipe, **given)))
        for given in ({}, {"seed": 5}, {"log": {"temperature": 0}}, {"log": {"temperature": 50, "top_k": 0}})
    ]
    assert len(set(texts)) == 4


LONG = "a prompt of many more tokens than the positions of this model " * 3


@pytest.mark.parametrize("prompt, tokens", [("", 1), ("", 500), (LONG, 20), (LONG, 500)])
def test_no_prompt_and_no_number_of_tokens_is_too_large(recipe, prompt, tokens):
    text = generate_text(training(change(recipe, log={"prompt": prompt, "sample_tokens": tokens})))
    assert text.startswith(prompt)


@pytest.mark.parametrize("length, tokens, kept, new", [
    (5, 10, 5, 10), (5, 500, 5, 27), (31, 1, 31, 1), (32, 1, 31, 1),
    (99, 1, 31, 1), (99, 500, 16, 16), (20, 20, 16, 16),
])  # fmt: skip
def test_of_a_long_prompt_the_beginning_is_left_out(length, tokens, kept, new):
    ids = list(range(length))
    assert fit_prompt(ids, tokens, 32) == (ids[length - kept :], new)
    assert fit_prompt(ids, tokens, 1) == (ids[-1:], 0)


def test_a_request_to_end_cuts_a_text_short(recipe, monkeypatch):
    run, steps, done = training(change(recipe, log={"sample_tokens": 25})), [], Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: steps.append(engine) or done(engine))
    assert generate_text(run) is not None
    whole = len(steps)
    steps.clear()
    assert generate_text(run, lambda: len(steps) >= 2) is None and len(steps) < whole


def test_a_text_ends_at_logits_that_are_not_finite_and_says_so(recipe):
    run = training(recipe)
    with torch.no_grad():
        run.stages[0].embedding.wpe.weight[6] = torch.nan
    text = generate_text(run)
    assert text.startswith("7 and") and text.endswith(f"\n[{LOGITS}]")


def test_the_cache_is_gone_with_the_text(recipe, monkeypatch):
    caches, make = [], Engine.__init__

    def note(engine, *arguments, **options):
        make(engine, *arguments, **options)
        caches.append(weakref.ref(engine._rank_step.cache.layers[0].keys))

    monkeypatch.setattr(Engine, "__init__", note)
    run = training(recipe)
    gc.collect()
    gc.disable()
    try:
        assert generate_text(run) is not None
        assert [cache() for cache in caches] == [None]
    finally:
        gc.enable()


@pytest.mark.compiler
def test_compiled_blocks_generate_the_same_text(recipe):
    short = change(recipe, log={"sample_tokens": 4})
    assert generate_text(training(change(short, compile="on"))) == generate_text(training(change(short, compile="off")))

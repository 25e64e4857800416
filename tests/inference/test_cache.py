"""A cache changes nothing: every log-probability is that of a sequence computed anew, in whatever pieces it came."""

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtgpt.config.execution import MOST_SLOTS
from dtgpt.config.plan import Plan
from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.cache import Cache, Chunk, SlotState
from dtgpt.inference.options import Options
from dtgpt.inference.request import variant_of
from dtgpt.inference.step import Step
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.attention.core import Backend
from dtgpt.parallel.cache_sizes import bytes_per_slot, slots_that_fit
from dtgpt.util.errors import UserError
from tests.support import bodies_engine as bodies
from tests.support.other_architecture import OtherConfig
from tests.support.ranks import pool, several
from tests.support.whole_model import build_model
from tests.support.windowed_blocks import WindowedConfig

LENGTH, VOCABULARY = 20, 61
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": LENGTH, "vocab_size": VOCABULARY}
GROUPED = {"num_kv_heads": 2, "head_dim": 16, "ffn_hidden_size": 40, "qk_norm": True, "rope_factor": 4.0}
CONFIGS = {
    config: config(**SHAPE, **more, init_std=0.3)
    for config, more in ((GPT2Config, {}), (OtherConfig, {}), (LlamaConfig, GROUPED))
}
CONFIGS[WindowedConfig] = WindowedConfig(**SHAPE | {"num_layers": 4}, init_std=0.3)
BACKENDS = get_args(Backend)
IDS = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
TOLERANCE = 1e-5
quick = settings(deadline=None, max_examples=12)


def make_step(config, backend="auto", slots=3):
    stages, mesh = bodies.inference_stages(config, "single", attention=backend)
    return Step(stages, mesh, config, torch.float32, slots)


def whole_log_probabilities(config, ids):
    """[T, V] by the whole model, in one pass."""
    model = build_model(config, bodies.CPU, torch.float32, bodies.KEY)
    return torch.log_softmax(bodies.whole_logits(model, ids), dim=-1)


def cached_log_probabilities(step, ids, borders, decoded, slot):
    """[T - 1, V] of the tokens after each of ids[:-1]: chunks between borders, then `decoded` single steps."""
    rows = []
    for first, stop in pairwise(borders):
        with torch.no_grad():
            step.attach()
            logits = step.chunk_logits(torch.tensor(ids[first:stop]), Chunk(slot, first, stop - first), stop - first)
        rows.append(torch.log_softmax(logits[:, :VOCABULARY], dim=-1))
    prompt = len(ids) - decoded
    sampling = Options(max_new_tokens=decoded, temperature=0)
    step.cache.state.set(slot, SlotState.encode(ids[:prompt], sampling, SpecialIds(), 0, 0))
    variant = variant_of([sampling], alternatives=VOCABULARY)
    for token in ids[prompt:]:
        results = step.decode([slot], 1, variant).wait()
        likeliest, logprobs = results.top_ids[0], results.top_logprobs[0]
        rows.append(torch.empty(1, VOCABULARY).scatter_(1, likeliest, logprobs))
        step.cache.state.token[slot] = token
        step.cache.state.history[slot, step.cache.state.position[slot]] = token
    return torch.cat(rows)


CASES = [(kind, backend) for kind in CONFIGS for backend in BACKENDS]
UNKNOWN = [(WindowedConfig, backend) for backend in ("sdpa", "fused_softmax", "flash")]  # to which its layers are


@pytest.mark.slow(5)
@pytest.mark.parametrize("architecture, backend", [case for case in CASES if case not in UNKNOWN])
def test_cached_is_recomputed_whatever_the_back_end_the_chunks_and_what_the_slot_held(architecture, backend):
    config = CONFIGS[architecture]
    expected = whole_log_probabilities(config, IDS)
    step = make_step(config, backend)

    @quick
    @given(st.data())
    def run(data):
        length = data.draw(st.integers(2, LENGTH))
        decoded = data.draw(st.integers(0, length - 1))
        cuts = data.draw(st.sets(st.integers(1, length - 1)))
        borders = [0, *sorted(cut for cut in cuts if cut < length - decoded - 1), length - decoded - 1]
        if data.draw(st.booleans()):
            bodies.poison(step.cache)
        slot = data.draw(st.integers(0, 2))
        found = cached_log_probabilities(step, IDS[:length], sorted(set(borders)), decoded, slot)
        assert (found - expected[: length - 1]).abs().max() < TOLERANCE * expected.abs().max()

    run()


def test_slots_may_change_places():
    step = make_step(CONFIGS[GPT2Config], slots=4)
    for layer in step.cache.layers:
        for kept in (layer.keys, layer.values):
            kept.normal_(generator=torch.Generator().manual_seed(1))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in step.cache.layers]
    step.cache.copy([2, 0, 1, 1], [0, 1, 2, 3], length=5)
    for layer, old in zip(step.cache.layers, before, strict=True):
        for kept, was in zip((layer.keys, layer.values), old, strict=True):
            assert torch.equal(kept[:4, :, :5], was[[2, 0, 1, 1], :, :5])
            assert torch.equal(kept[:4, :, 5:], was[:4, :, 5:]) and torch.equal(kept[4], was[4])


def test_attention_over_the_scratch_slot_stays_short():
    step = make_step(CONFIGS[GPT2Config], slots=3)
    sampling = Options(max_new_tokens=9)
    for slot in range(3):
        step.cache.state.set(slot, SlotState.encode([5], sampling, SpecialIds(), 0, slot))
    for _ in range(3):
        step.decode([0, 1, 2], 3, variant_of([sampling]))  # four rows, one of them scratch
    assert step.cache.state.position.tolist() == [9, 9, 9, 3]


def test_a_detached_step_leaves_the_stages_as_they_were():
    config = CONFIGS[GPT2Config]
    step = make_step(config)
    (stage,) = step.stages
    before = bodies.whole_logits(stage, IDS)
    for _ in range(2):
        step.read([0], [IDS[:5]])
        with pytest.raises(RuntimeError, match="not run by a step"):
            bodies.whole_logits(stage, IDS)
        step.detach()
        assert torch.equal(bodies.whole_logits(stage, IDS), before)


@pytest.mark.slow(2)
@pytest.mark.parametrize("plan, world", [("single", 1), ("tp2_pp2", 4)])
def test_the_bytes_of_a_slot_are_what_a_rank_allocates(plan, world):
    configs = [replace(config, num_layers=3) for config in CONFIGS.values()]
    ranks = pool().run(world, several, [(bodies.bytes_of_slots, config, plan) for config in configs])
    wanted = [bytes_per_slot(config, bodies.resolve(plan, world), torch.float32) for config in configs]
    assert list(map(max, zip(*ranks, strict=True))) == wanted


def test_slots_are_as_many_as_fit_up_to_a_bound():
    config, plan = CONFIGS[GPT2Config], Plan().for_world(1)
    one = bytes_per_slot(config, plan, torch.float32)
    assert slots_that_fit(10 * one, config, plan, torch.float32) == 8  # 90 % of it, and one is scratch
    assert slots_that_fit(10**6 * one, config, plan, torch.float32) == MOST_SLOTS
    assert bytes_per_slot(config, plan, torch.bfloat16) < one
    with pytest.raises(UserError, match="MiB are free; use a plan"):
        slots_that_fit(2 * one, config, plan, torch.float32)


def test_heads_of_keys_that_tp_does_not_divide_are_refused():
    config = CONFIGS[LlamaConfig]
    with pytest.raises(UserError, match="2 heads of keys and values, which cannot be split over tp=4; use tp=1 or 2"):
        Cache([], config, Plan(tp=4), 1, torch.float32, bodies.CPU)

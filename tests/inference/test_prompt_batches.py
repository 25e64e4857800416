"""Several prompts in one pass: which ones, and that none changes another. On a GPU: test_engine_cuda.py."""

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtgpt.inference.captured.prompt_batches import (
    BATCH_TOKENS,
    FEW_TOKENS,
    PROMPT_LENGTHS,
    batch_sizes,
    group_prompts,
    padded_length,
    padded_size,
    passes_over,
)
from dtgpt.inference.captured.torch_private import without_split_k
from dtgpt.inference.options import Options
from dtgpt.inference.scheduler import PromptChunk
from dtgpt.inference.step import Step
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.util.shared.stderr import stderr_dropped
from tests.support import bodies_engine as bodies
from tests.support.eager_graphs import let_read_together
from tests.support.other_architecture import OtherConfig
from tests.support.ranks import pool, several
from tests.support.requests import make_request

quick = settings(deadline=None, max_examples=80)
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 48, "vocab_size": 61}
GROUPED = {"num_kv_heads": 2, "head_dim": 8, "ffn_hidden_size": 48}
CONFIGS = {config: config(**SHAPE, init_std=0.3, **more) for config, more in (
    (GPT2Config, {}), (OtherConfig, {}), (LlamaConfig, GROUPED),
)}  # fmt: skip
CONFIG = CONFIGS[GPT2Config]
PROMPTS = [[(7 * i + 3 * j) % 61 for j in range(length)] for i, length in enumerate((20, 17, 32, 31, 25))]


@quick
@given(st.sampled_from(PROMPT_LENGTHS), st.integers(1, 300), st.sampled_from([0, 256, 2048, BATCH_TOKENS]))
def test_passes_have_few_sizes_and_little_padding(length, prompts, most_tokens):
    sizes = batch_sizes(length, most_tokens)
    assert sizes[0] == 1 and len(sizes) <= 7 and all(size * length <= most_tokens for size in sizes[1:])
    passes = passes_over(prompts, length, most_tokens)
    assert sum(passes) == prompts and min(passes) > 0
    for count in passes:
        padded = padded_size(count, length, most_tokens)
        assert padded in sizes and padded >= count
        assert 4 * count >= 3 * padded or padded * length <= FEW_TOKENS


chunks = st.builds(
    lambda request, first, tokens: PromptChunk(request, request, first, first + tokens),
    st.integers(0, 99), st.sampled_from([0, 0, 0, 2048]), st.integers(1, 2100),
)  # fmt: skip


@quick
@given(st.lists(chunks, max_size=40, unique_by=lambda chunk: chunk.request), st.sampled_from([0, 512, BATCH_TOKENS]))
def test_prompts_of_one_padded_length_are_read_together(found, most_tokens):
    positions = 1024
    groups = group_prompts(found, positions, most_tokens)
    grouped = [chunk for group in groups for chunk in group]
    assert len(set(grouped)) == len(grouped) and set(grouped) <= set(found)
    for group in groups:
        (length,) = {padded_length(chunk.stop, positions) for chunk in group}
        assert len(group) > 1 and all(chunk.first == 0 for chunk in group)
        assert padded_size(len(group), length, most_tokens) * length <= most_tokens
    alone = [padded_length(chunk.stop, positions) for chunk in found if chunk.first == 0 and chunk not in grouped]
    for length in filter(None, alone):
        assert alone.count(length) <= (1 if 2 * length <= most_tokens else len(alone))


def test_a_prompt_longer_than_the_model_is_padded_to_nothing():
    assert [padded_length(tokens, 100) for tokens in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, None]
    assert padded_length(2049, 4096) is None


@pytest.mark.slow(4)
@pytest.mark.parametrize("plan, world", [("single", 1), ("tp2_pp2", 4)])
def test_the_cache_of_a_prompt_is_that_of_the_prompt_alone(plan, world):
    """Up to rounding, on a CPU. Commands of rank 0 reach all ranks, and stages the positions of all prompts."""
    calls = [(bodies.read_prompts, config, plan, PROMPTS, most) for config in CONFIGS.values() for most in (256, 0)]
    for caches in pool().run(world, several, calls):
        for together, alone in zip(caches[::2], caches[1::2], strict=True):
            for found, wanted in zip(together, alone, strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("plan, world", [("single", 1), ("tp2_pp2", 4)])
def test_requests_that_arrive_together_are_read_together(plan, world):
    sampling = Options(max_new_tokens=4, temperature=0.0, ends=False)
    asked = [make_request(ids=ids, sampling=sampling) for ids in PROMPTS]
    asked.append(make_request(ids=PROMPTS[0], sampling=sampling, score_prompt=True))
    answers = pool().run(world, bodies.count_batches, CONFIG, plan, asked)
    assert [counts for _, counts in answers] == [[4]] * world  # not the one of 16 tokens, nor that with scores
    texts = bodies.texts(answers[0][0])
    for index, request in enumerate(asked):
        assert texts[index, 0] == bodies.texts(bodies.generate(CONFIG, "single", [request], 1, False))[0, 0]
    assert texts[5, 0] == texts[0, 0]


def step_with_graphs(change: Callable | None = None) -> tuple[Step, list[int]]:
    """Return a `Step` as on a GPU, with graphs that run eagerly, and the sizes of the passes that it made. `change`:
    called after each pass with its size and the cache."""
    stages, mesh = bodies.inference_stages(CONFIG, "single")
    step = let_read_together(Step(stages, mesh, CONFIG, torch.float32, len(PROMPTS)), 256)
    sizes, plain = [], step.fill_padded

    def read(tokens, slots, lengths):
        sizes.append(len(slots))
        plain(tokens, slots, lengths)
        if change:
            change(len(slots), step.cache)

    step.fill_padded = read  # type: ignore[method-assign]
    return step, sizes


def test_a_shape_that_changes_bits_is_read_one_prompt_at_a_time():
    def change(size, cache):
        if size > 1:
            cache.layers[-1].values[2, 0, 5, 0] += 1e-6

    step, sizes = step_with_graphs(change)
    step.read(range(5), PROMPTS)
    assert sizes == [8, 1, 1, 1, 1, 1]
    step.read(range(5), PROMPTS)
    assert sizes[6:] == [1] * 5
    alone = bodies.read_prompts(CONFIG, "single", PROMPTS, 0)
    torch.testing.assert_close(bodies.kept_of(step.cache, 2)[..., :32, :], alone[2], rtol=1e-6, atol=1e-6)


def test_a_shape_that_changes_no_bit_is_checked_once(monkeypatch):
    step, sizes = step_with_graphs()
    monkeypatch.setattr(step, "_last_layer", lambda slots, length: torch.ones(1))  # a CPU's bits may differ
    for count in (5, 4, 5):  # 4 are padded to the same shape
        step.read(range(count), PROMPTS[:count])
    assert sizes == [8, 1, 1, 1, 1, 1, 8, 8]


def test_prompts_of_several_lengths_are_refused():
    step, _ = step_with_graphs()
    with pytest.raises(ValueError, match=r"\[3, 40\] tokens cannot be read in one pass"):
        step.read([0, 1], [[1] * 3, [1] * 40])


def test_products_split_no_sum_inside_of_the_block_alone(monkeypatch):
    settings, libraries = torch.backends.cuda.matmul, ["default"]

    def preferred(library=None):
        libraries.extend([library] if library else [])
        return libraries[-1]

    def state() -> list[bool]:
        names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
        return [getattr(settings, name + end) for name in names for end in ("", "_split_k")]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    before = state()
    settings.allow_fp16_reduced_precision_reduction = False
    changed = state()
    try:
        with pytest.raises(KeyError), without_split_k(torch.device("cuda")):
            assert (state(), libraries[-1]) == ([False] * 4, "cublaslt")
            raise KeyError
        assert (state(), libraries) == (changed, ["default", "cublaslt", "default"])
        with without_split_k(torch.device("cpu")):
            assert (state(), len(libraries)) == (changed, 3)
    finally:
        settings.allow_fp16_reduced_precision_reduction = True
    assert state() == before


def test_what_libraries_say_of_a_switch_does_not_reach_the_terminal(capfd):
    os.write(2, b"before ")
    with pytest.raises(KeyError), stderr_dropped():
        os.write(2, b"dropped ")
        raise KeyError
    os.write(2, b"after")
    assert capfd.readouterr().err == "before after"

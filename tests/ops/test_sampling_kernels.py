"""The kernels of sampling against the reference, in Triton's interpreter and on a GPU."""

import pytest
import torch

from dtgpt.ops.sampling.sample import sample
from tests.support.bodies_sampling import (
    check_broken_rows,
    check_record,
    compare_with_reference,
    random_rows,
    state_of,
    variant_for,
)
from tests.support.interpreter import needs_triton, run_interpreted


@needs_triton
def test_the_kernels_in_the_interpreter():
    run_interpreted("from tests.support.bodies_sampling import interpret; interpret()")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size, padding", [(1, 0), (9, 3), (1024, 0), (1025, 7), (50257, 47), (130_003, 0)])
def test_the_kernels_on_a_gpu(size, padding, dtype):
    for seed, (edits, filters) in enumerate([(False, True), (True, True), (False, False), (True, False)]):
        rows = random_rows(size, seed, edits, filters)
        whole = compare_with_reference(rows, dtype, "cuda", 3 * seed, padding, padding // 2)
        for i in (0, len(rows) // 2, len(rows) - 1):  # bit for bit alone and in company
            alone = compare_with_reference(rows[i : i + 1], dtype, "cuda", 3 * seed, padding, padding // 2)
            assert all(torch.equal(one[0], many[i]) for one, many in zip(alone, whole, strict=True))
        if size > 1000:
            compare_with_reference(rows, dtype, "cuda", 3 * seed, padding, padding // 2, masks=True)


@pytest.mark.cuda
def test_a_step_is_recorded_on_a_gpu():
    check_record("cuda")


@pytest.mark.cuda
def test_rows_that_are_not_finite_have_no_log_probability_on_a_gpu():
    check_broken_rows("cuda")


@pytest.mark.cuda
def test_a_graph_captures_sampling_and_its_record():
    rows = random_rows(1000, 5, edits=True)
    variant, slots = variant_for(rows), torch.arange(len(rows), device="cuda")
    logits = torch.stack([row.logits for row in rows]).cuda()
    eager, captured = state_of(rows, 16, "cuda"), state_of(rows, 16, "cuda")

    def step(state):
        state.record(slots, sample(logits, state.sequences, slots, 1000, variant).tokens)

    step(state_of(rows, 16, "cuda"))  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured)
    for _ in range(4):
        step(eager)
        graph.replay()
    assert torch.equal(eager.history, captured.history) and torch.equal(eager.position, captured.position)
    assert len(set(map(tuple, captured.history[:, 11:15].tolist()))) > 2

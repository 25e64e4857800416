"""Windows, sinks, bounded scores and scales of attention: every back end and caches that are rings, against float64."""

import math
from itertools import pairwise

import pytest
import torch

from dtgpt.data.documents.masks import document_bounds
from dtgpt.models.shared.attention_backend import backend_for
from dtgpt.ops.attention.cached import attend_chunk, attend_rows
from dtgpt.ops.attention.core import AttentionRule, Case, causal_attention, check_backend, unknown_to
from dtgpt.ops.attention.prompts import write_rings
from dtgpt.ops.kernels.attention.window import spans_of_window
from dtgpt.util.errors import UserError
from tests.support.bodies_flash import keys_of, truth
from tests.support.pairwise import each_pair

LENGTH, HEADS, GROUPS, SIZE = 19, 4, 2, 8
RULES = {
    "window": AttentionRule(window=5),
    "window of one": AttentionRule(window=1, scale=1.0),
    "wide window": AttentionRule(window=LENGTH),
    "sinks": AttentionRule(window=4, sinks=torch.tensor([-2.0, 0.0, 1.0, 30.0], dtype=torch.float64)),
    "capped": AttentionRule(softcap=0.5, scale=0.3),
    "all": AttentionRule(6, 2.0, 1.5, torch.tensor([0.5, -0.5, 1.5, 3.0], dtype=torch.float64)),
}
BACKENDS = ["explicit", "sdpa", "fused_softmax", "flash", "auto"]


def make_inputs(batch=2, length=LENGTH, dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(batch, length, n, SIZE, generator=generator).to(dtype) for n in (HEADS, GROUPS, GROUPS)]


def knows(backend: str, rule: AttentionRule) -> bool:
    return not unknown_to(backend, rule.softcap is not None, rule.sinks is not None)


@each_pair(
    lambda case: not case["p"] or not case["documents"],
    name=RULES, backend=BACKENDS, p=[0.0, 0.3], documents=[False, True],
)  # fmt: skip
def test_back_ends_have_the_values_and_gradients_of_the_definition(name, backend, p, documents):
    rule = RULES[name]
    if not knows(backend, rule):
        with pytest.raises(ValueError, match=f"the back end {backend} does not know"):
            causal_attention(*make_inputs(), backend=backend, rule=rule)
        return
    leaves = [x.requires_grad_() for x in make_inputs()]
    if rule.sinks is not None:
        leaves.append(rule.sinks.clone().requires_grad_())
        rule = rule._replace(sinks=leaves[3])
    key = keys_of(2) if p else None
    ends = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.15 if documents else None
    spans = None if ends is None else document_bounds(ends)
    found = causal_attention(*leaves[:3], key, p, (3, 0, 0), spans, backend, rule)
    expected = truth(*leaves[:3], key, p, 3, ends, rule)
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for one, other in zip(*(torch.autograd.grad(y, leaves, cotangent) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ["explicit", "sdpa", "flash"])
def test_the_last_queries_see_the_window_before_them(backend):
    q, k, v = make_inputs()
    rule = RULES["window"]
    whole = causal_attention(q, k, v, backend="explicit", rule=rule)
    for queries in (1, 7):
        found = causal_attention(q[:, -queries:], k, v, backend=backend, rule=rule)
        torch.testing.assert_close(found, whole[:, -queries:])


def test_bounds_of_a_window_are_those_of_the_definition():
    bounds = spans_of_window(3, 2, 6, torch.device("cpu"))
    assert bounds.dtype == torch.int32 and bounds.shape == (2, 6, 2)
    assert bounds[1].tolist() == [[0, 3], [0, 4], [0, 5], [1, 6], [2, 6], [3, 6]]
    documents = document_bounds(torch.tensor([[False, True, False, False, False, True]]))
    assert spans_of_window(3, 1, 6, torch.device("cpu"), documents)[0].tolist() == [
        [0, 2], [0, 2], [2, 5], [2, 6], [2, 6], [3, 6],
    ]  # fmt: skip


def rings(window: int, positions: int, dtype=torch.float64):
    """Keys and values of five slots, full of NaN."""
    return [torch.full((5, GROUPS, min(window, positions), SIZE), math.nan, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("name, cuts", [
    ("window", []), ("window", [5, 10, 15]), ("window", [1, 2, 3, 11]), ("window", [17, 18]), ("window of one", [3]),
    ("window of one", [1, 2, 3, 11]), ("wide window", [5, 10, 15]), ("wide window", [17, 18]), ("sinks", [3]),
    ("sinks", [17, 18]), ("all", []), ("all", [1, 2, 3, 11]),
])  # fmt: skip
def test_chunks_and_rows_over_a_ring_attend_as_the_whole_sequence(name, cuts):
    rule = RULES[name]
    q, k, v = make_inputs(1)
    expected = truth(q, k, v, None, 0.0, rule=rule)
    kept = rings(rule.window, LENGTH)
    borders = [0, *cuts, LENGTH - 4]
    pieces = [
        attend_chunk(q[:, a:b], k[:, a:b], v[:, a:b], *kept, slot=2, first=a, backend="explicit", rule=rule)
        for a, b in pairwise(borders)
        if a < b
    ]
    for at in range(max(borders), LENGTH):
        step = attend_rows(q[:, at], k[:, at], v[:, at], *kept, torch.tensor([2]), torch.tensor([at]), rule)
        pieces.append(step[:, None])
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=2e-6, atol=2e-6)  # rows have fp32 softmaxes
    assert all(tensor[[0, 1, 3, 4]].isnan().all() for tensor in kept)


@pytest.mark.parametrize("window", [1, 5, LENGTH])
def test_padded_prompts_leave_their_last_tokens_in_a_ring(window):
    """What is decoded next sees these alone."""
    rule, (q, k, v), lengths, slots = AttentionRule(window=window), make_inputs(3), [1, 13, LENGTH - 1], [4, 0, 1]
    kept = rings(window, LENGTH)
    padded = [x[:, : LENGTH - 1].clone() for x in (k, v)]
    for row, length in enumerate(lengths):
        for tensor in padded:
            tensor[row, length:] = 1e3
    write_rings(*padded, *kept, torch.tensor(slots), torch.tensor(lengths))
    rows = torch.arange(3), torch.tensor(lengths)
    found = attend_rows(q[rows], k[rows], v[rows], *kept, torch.tensor(slots), torch.tensor(lengths), rule)
    for row, length in enumerate(lengths):
        expected = truth(*(x[row : row + 1, : length + 1] for x in (q, k, v)), None, 0.0, rule=rule)[0, -1]
        torch.testing.assert_close(found[row], expected, rtol=2e-6, atol=2e-6)
    assert all(tensor[[2, 3]].isnan().all() for tensor in kept)


def test_a_ring_smaller_than_the_window_is_an_error():
    q, k, v = make_inputs(1)
    with pytest.raises(ValueError, match="19 positions do not fit into a slot of 5 with a window of 6"):
        attend_chunk(q, k, v, *rings(5, LENGTH), slot=0, first=0, rule=AttentionRule(window=6))


def test_what_a_back_end_does_not_know_is_refused_and_auto_finds_one_that_does():
    for backend, rule, said in (
        ("sdpa", (False, True), "attention sinks"),
        ("fused_softmax", (False, True), "attention sinks"),
        ("flash", (True, False), "softly bounded scores"),
    ):
        with pytest.raises(UserError, match=f"attention={backend} does not know {said}.*; use --attention auto"):
            check_backend(backend, 0.0, 64, [(False, False), rule])
    check_backend("flash", 0.0, 64, [(False, True)])
    here, wide = Case(torch.device("cuda"), torch.bfloat16, 64), Case(torch.device("cuda"), torch.float32, 64)
    assert backend_for(here._replace(sinks=True)) == "flash"
    assert backend_for(wide._replace(sinks=True)) == backend_for(here._replace(softcap=True)) == "explicit"

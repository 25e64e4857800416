"""Attention in tiles, with dropout by global index, against the definition in float64."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from dtgpt.data.documents.masks import document_bounds
from dtgpt.models import layers
from dtgpt.models.gpt2 import GPT2_345M
from dtgpt.models.llama import LLAMA2_7B, LLAMA32_1B, QWEN3_0_6B
from dtgpt.ops.attention.core import causal_attention
from dtgpt.ops.kernels.attention import flash, flash_launch
from dtgpt.ops.kernels.attention.packed import are_packed, keep_in_graphs
from dtgpt.ops.kernels.attention.packed import split as split_qkv
from dtgpt.ops.random.dropout import attention_mask
from tests.support.bodies_flash import TOLERANCE, check, error, gradients, inputs, keys_of, truth
from tests.support.interpreter import needs_triton, run_interpreted
from tests.support.pairwise import each_pair


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_reference_has_the_values_of_the_definition(dtype, p):
    _, qkv = inputs((2, 19, 3, 8), dtype)
    key = keys_of(2) if p else None
    assert error(flash.flash_attention(*qkv, key, p, 4), truth(*qkv, key, p, 4)) < TOLERANCE[dtype]


@pytest.mark.parametrize("documents", [0.0, 0.2])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_ops_on_a_cpu_have_the_values_and_gradients_of_the_definition(dtype, p, documents):
    check((2, 19, 3, 8), dtype, p, 4, documents=documents)


@pytest.mark.parametrize("kv_heads, columns", [(2, 0), (1, 0), (0, 31), (2, 31)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_groups_of_heads_and_earlier_columns_have_the_values_and_gradients_of_the_definition(p, kv_heads, columns):
    check((2, 19, 4, 8), torch.float64, p, 4, kv_heads=kv_heads, columns=columns)
    _, qkv = inputs((2, 19, 4, 8), torch.float64, kv_heads=kv_heads, columns=columns)
    key = keys_of(2) if p else None
    assert error(flash.flash_attention(*qkv, key, p, 4), truth(*qkv, key, p, 4)) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_shard_of_the_heads_draws_its_part_of_the_mask(kv_heads):
    _, (q, k, v) = inputs((2, 9, 4, 8), torch.float32, kv_heads=kv_heads)
    kv = [x[:, :, kv_heads // 2 :] for x in (k, v)]
    part = flash.flash_attention(q[:, :, 2:], *kv, keys_of(2), 0.4, head_start=2)
    torch.testing.assert_close(part, flash.flash_attention(q, k, v, keys_of(2), 0.4)[:, :, 2:])


def test_a_probability_that_rounds_to_nothing_drops_nothing():
    _, qkv = inputs((1, 9, 2, 8), torch.float32)
    assert torch.equal(flash.flash_attention(*qkv, keys_of(1), 1e-6), flash.flash_attention(*qkv))


@pytest.mark.parametrize("spans", [torch.zeros(2, 9, 2), torch.zeros(2, 8, 2).int(), torch.zeros(2, 9).int()])
def test_wrong_spans_are_an_error(spans):
    with pytest.raises(ValueError, match="int32"):
        causal_attention(*inputs((2, 9, 2, 8), torch.float32)[1], spans=spans, backend="flash")


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_documents_of_the_last_queries_have_the_values_and_gradients_of_the_definition(p):
    check((2, 19, 4, 8), torch.float64, p, 4, documents=0.1, kv_heads=2, columns=31)


@pytest.mark.parametrize(
    "q, k, v, keys",
    [
        ((2, 9, 8), (2, 9, 8), (2, 9, 8), 2),
        ((2, 9, 2, 8), (2, 9, 2, 8), (2, 9, 1, 8), 2),
        ((2, 9, 2, 8), (2, 9, 2, 4), (2, 9, 2, 4), 2),
        ((2, 9, 2, 8), (2, 8, 2, 8), (2, 8, 2, 8), 2),  # more queries than columns
        ((2, 9, 3, 8), (2, 9, 2, 8), (2, 9, 2, 8), 2),
        ((2, 9, 2, 8), (2, 9, 4, 8), (2, 9, 4, 8), 2),
        ((2, 9, 2, 8), (2, 9, 2, 8), (2, 9, 2, 8), 3),
    ],
)
def test_a_wrong_shape_is_an_error(q, k, v, keys):
    with pytest.raises(ValueError, match="shape"):
        causal_attention(*map(torch.randn, (q, k, v)), keys_of(keys), 0.1, backend="flash")


@pytest.mark.slow(2)
@pytest.mark.parametrize("kv_heads", [0, 1])
def test_the_ops_keep_the_contract_of_custom_ops(kv_heads):
    _, qkv = inputs((2, 5, 2, 4), torch.float32, kv_heads=kv_heads)
    spans = document_bounds(torch.eye(5, dtype=torch.bool)[:2])
    qkv = [t.detach().requires_grad_() for t in qkv]
    opcheck(flash._forward, (*qkv, keys_of(2), 0.3, 1, None))
    opcheck(flash._forward, (*qkv, None, 0.0, 0, spans))
    qkv = [t.detach() for t in qkv]
    out, *rest = flash._forward(*qkv, keys_of(2), 0.3, 1, spans)
    for packed in [False] if kv_heads else [False, True]:
        opcheck(flash._backward, (torch.randn_like(out), *qkv, out, *rest, 0.3, spans, packed))


@pytest.mark.parametrize("dropped", [True, False])
def test_backward_saves_the_output_a_number_per_query_and_a_bit_per_score(dropped):
    (_, qkv), key, sizes = inputs((2, 9, 2, 8), torch.float32), keys_of(2) if dropped else None, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        out, sums, kept = flash._forward(*qkv, key, 0.3, 0, None)
    assert sorted(sizes) == sorted(t.nbytes for t in (*qkv, out, sums, kept))
    assert kept.nbytes == (2 * 2 * 9 * 2 if dropped else 0)  # 9 columns take 2 bytes


def test_views_of_a_packed_tensor_are_read_and_their_gradient_is_returned_without_a_copy(monkeypatch):
    (qkv,), views = inputs((2, 9, 2, 8), torch.float32)
    assert are_packed(*views) and all(view.data_ptr() == qkv[..., i, :].data_ptr() for i, view in enumerate(views))
    assert not are_packed(*(view.contiguous() for view in views)) and not are_packed(*reversed(views))
    made = []
    original = flash._backward
    monkeypatch.setattr(flash, "_backward", lambda *args: made.append(original(*args)) or made[-1])
    (found,) = torch.autograd.grad(flash._forward(*views, None, 0.0, 0, None)[0].sum(), qkv)
    assert found.data_ptr() == made[0][0].data_ptr() and found.shape == qkv.shape


def test_gradients_of_other_shapes_are_stacked():
    (qkv,), views = inputs((2, 9, 2, 8), torch.float64)
    cotangents = [torch.randn_like(view) for view in views]
    (found,) = torch.autograd.grad(views, qkv, cotangents)
    assert torch.equal(found, torch.stack(cotangents, dim=3))
    (qkv,), views = inputs((2, 9, 2, 8), torch.float64)
    cotangents = torch.randn(3, *qkv.shape, dtype=torch.float64)[1].unbind(3)  # packed, in a larger buffer
    (found,) = torch.autograd.grad(views, qkv, cotangents)
    assert torch.equal(found, torch.stack(cotangents, dim=3))
    (qkv,), views = inputs((2, 9, 2, 8), torch.float64)
    (found,) = torch.autograd.grad(views[1].sum(), qkv)
    assert torch.equal(found[..., 1, :], torch.ones_like(views[1])) and not found[..., ::2, :].any()


@pytest.fixture
def merge_in_graphs():
    keep_in_graphs()


def attend_twice(x, key):
    out, *_ = flash._forward(*split_qkv(x * 2), key, 0.3, 0, None)
    return out + flash._forward(*split_qkv(x), key, 0.3, 0, None)[0]


def recomputed(x, key):
    return checkpoint(lambda *args: flash._forward(*args)[0], *split_qkv(x * 2), key, 0.3, 0, None, use_reentrant=False)


@pytest.mark.slow(5)
@pytest.mark.compiler
@pytest.mark.usefixtures("merge_in_graphs")
@pytest.mark.parametrize("layer, backend", [(attend_twice, "inductor"), (recomputed, "aot_eager")])
def test_compiled_equals_eager(layer, backend):
    (qkv,), key = inputs((2, 9, 2, 8), torch.float32)[0], keys_of(2)
    fast = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend)
    eager, compiled = (f(qkv, key) for f in (layer, fast))
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(*(torch.autograd.grad(out, qkv, torch.ones_like(out)) for out in (compiled, eager)))


@pytest.mark.usefixtures("merge_in_graphs")
@pytest.mark.parametrize("packed", [True, False])
def test_a_compiled_backward_copies_no_packed_gradient(packed):
    called = []

    def keep(graph, example):
        called.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    (qkv,), key = inputs((2, 9, 2, 8), torch.float32)[0], keys_of(2)
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=keep)
    layer = (
        recomputed if packed else lambda x, key: flash._forward(*map(torch.clone, split_qkv(x)), key, 0.3, 0, None)[0]
    )
    torch.autograd.grad(torch.compile(layer, backend=backend, fullgraph=True)(qkv, key).sum(), qkv)
    copies = [target for target in called[0] if target in (torch.ops.aten.cat.default, torch.ops.aten.stack.default)]
    assert torch.ops.dtgpt.flash_backward.default in called[0] and bool(copies) is not packed


@needs_triton
def test_the_kernels_in_the_interpreter():
    cases = "((2, 70, 2, 16), f, 0.3, 3), ((1, 128, 1, 24), f, 0.0), ((1, 1, 1, 16), f, 0.5)"
    cases += ", ((2, 150, 1, 16), f, 0.3, 0, 'cpu', 0.02), ((1, 128, 2, 16), f, 0.0, 0, 'cpu', 0.2)"
    cases += ", ((1, 70, 4, 16), f, 0.3, 3, 'cpu', 0.0, 2), ((1, 40, 2, 16), f, 0.3, 0, 'cpu', 0.0, 1, 150)"
    cases += ", ((1, 64, 2, 16), f, 0.0, 0, 'cpu', 0.0, 0, 128), ((2, 1, 2, 16), f, 0.0, 0, 'cpu', 0.0, 0, 77)"
    cases += ", ((1, 100, 4, 16), f, 0.3, 0, 'cpu', 0.05, 2), ((1, 70, 2, 16), f, 0.0, 0, 'cpu', 0.0, 2)"
    # Documents of the last queries, of which some columns belong to none
    cases += ", ((1, 40, 2, 16), f, 0.3, 0, 'cpu', 0.05, 1, 150), ((2, 70, 2, 16), f, 0.0, 0, 'cpu', 0.02, 0, 200)"
    cases += ", ((1, 64, 2, 16), f, 0.3, 1, 'cpu', 0.03, 0, 128), ((1, 64, 2, 64), h, 0.0, 1, 'cpu', 0.03, 1, 192)"
    # Read by descriptors: 16 bits, no dropout; then not, for lack of a common length
    cases += ", ((1, 128, 2, 64), h, 0.0, 0, 'cpu', 0.0, 1), ((1, 256, 2, 64), h, 0.0, 0, 'cpu', 0.03, 1)"
    cases += ", ((1, 128, 2, 128), h, 0.0, 0, 'cpu', 0.03, 2), ((2, 70, 4, 64), h, 0.0, 0, 'cpu', 0.02, 2)"
    cases += ", ((2, 201, 2, 128), h, 0.0, 0, 'cpu', 0.0, 1), ((1, 1, 2, 64), h, 0.0, 0, 'cpu', 0.0, 1)"
    cases += ", ((1, 128, 1, 256), h, 0.0, 0, 'cpu', 0.03), ((1, 70, 4, 64), h, 0.0, 0, 'cpu', 0.02, 2, 100)"
    # Windows and sinks, by descriptors and not, with documents and dropout
    cases += ", ((1, 256, 1, 128), h, 0.0, {'window': 70, 'sinks': 2.0, 'scale': 0.2})"
    cases += ", ((2, 143, 2, 64), h, 0.0, 0, 'cpu', 0.03, 1, {'window': 33, 'sinks': 0.5})"
    cases += ", ((1, 150, 2, 16), f, 0.3, 1, 'cpu', 0.0, 1, {'window': 33, 'sinks': 0.5})"
    cases += ", ((1, 100, 2, 16), f, 0.3, 0, 'cpu', 0.03, 1, {'window': 1, 'sinks': -1.0})"
    cases += ", ((1, 70, 2, 16), f, 0.1, 0, 'cpu', 0.0, {'sinks': 20.0})"
    code = "from torch import float16 as h, float32 as f; from tests.support.bodies_flash import interpret; "
    run_interpreted(f"{code}interpret({cases})")


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [((2, 1024, 3, 64), BF16, 0.1), ((1, 1024, 2, 64), BF16, 0.0), ((2, 1, 2, 64), BF16, 0.5)]
SHAPES += [((1, length, 2, 64), BF16, 0.2) for length in (31, 77, 129, 1000, 4095)]
SHAPES += [((1, 200, 5, 80), BF16, 0.1), ((2, 256, 2, 128), FP16, 0.1), ((1, 100, 2, 16), FP16, 0.0)]
SHAPES += [((2, 70, 2, 64), FP32, 0.3), ((1, 300, 2, 256), BF16, 0.1), ((1, 512, 2, 256), FP16, 0.0)]
SHAPES += [((1, 77, 3, 160), BF16, 0.2), ((1, 200, 1, 192), BF16, 0.0)]


@pytest.mark.cuda
@pytest.mark.parametrize("shape, dtype, p", SHAPES, ids=str)
def test_the_kernels_have_the_values_and_gradients_of_float64(shape, dtype, p, poison):
    check(shape, dtype, p, 3, "cuda")


@pytest.mark.cuda
@each_pair(size=[(1, 64), (777, 64), (1024, 128)], p=[0.0, 0.2], kv=[(1, 0), (2, 0), (0, 1500), (2, 1024)])
def test_the_kernels_serve_groups_of_heads_and_earlier_columns(size, p, kv, poison):
    (length, width), (kv_heads, columns) = size, kv
    check((2, length, 4, width), BF16, p, 3, "cuda", kv_heads=kv_heads, columns=columns)


GROUPED = [((2, 1024, 8, 64), BF16, 2), ((1, 4096, 4, 64), FP16, 1), ((1, 4096, 4, 128), BF16, 1)]
GROUPED += [((2, 1024, 2, 128), FP16, 2), ((1, 4095, 4, 64), BF16, 1), ((1, 300, 6, 72), BF16, 3)]
GROUPED += [((1, 1024, 4, 256), BF16, 1), ((2, 333, 2, 256), BF16, 1)]


@pytest.mark.cuda
@each_pair(grouped=GROUPED, p=[0.0, 0.1], documents=[0.0, 0.005, 0.5])
def test_the_kernels_serve_groups_of_heads_with_documents(grouped, p, documents, poison):
    shape, dtype, kv_heads = grouped
    check(shape, dtype, p, 3, "cuda", documents, kv_heads=kv_heads)


@pytest.mark.cuda
@each_pair(grouped=GROUPED, p=[0.0, 0.1], window=[1, 100, 1000], documents=[0.0, 0.005])
def test_the_kernels_serve_windows_and_sinks(grouped, p, window, documents, poison):
    shape, dtype, kv_heads = grouped
    check(shape, dtype, p, 3, "cuda", documents, kv_heads=kv_heads, window=window, sinks=1.0)


@pytest.mark.cuda
@pytest.mark.parametrize("offset", [0, 1])
def test_the_kernels_read_views_of_any_strides(offset):
    """Keys and values in one tensor with the queries, and an address that is no multiple of 16 bytes."""
    memory = torch.randn(2 * 256 * 2 * 6 * 64 + offset, device="cuda").to(BF16)
    packed = memory[offset:].view(2, 256, 2, 6, 64)  # [B, T, G, R + 2, D]
    views = packed[..., :4, :].flatten(2, 3), packed[..., 4, :], packed[..., 5, :]
    grad, found = torch.randn_like(views[0]), []
    for qkv in (views, [x.clone(memory_format=torch.contiguous_format) for x in views]):
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = flash.flash_attention(*leaves)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_the_kernels_find_rows_beyond_32_bits(p):
    rows = torch.empty(1, 2200, 1 << 20, device="cuda", dtype=BF16)[..., : 3 * 2 * 64].normal_()
    assert rows.shape[1] * rows.stride(1) > 1 << 31
    key, found = keys_of(1, device="cuda") if p else None, []
    for leaf in (rows, rows.contiguous()):
        leaf = leaf.unflatten(2, (2, 3, 64)).requires_grad_()
        out = flash.flash_attention(*split_qkv(leaf), key, p)
        found.append([out, *torch.autograd.grad(out, leaf, torch.ones_like(out))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("case, documents", [
    (case, documents) for turn, case in enumerate(case for case in SHAPES if case[0][1] < 4000)
    for documents in ((0.003, 0.5) if turn % 2 else (0.02, 1.0))
], ids=str)  # fmt: skip
def test_the_kernels_keep_documents_apart(case, documents, poison):
    shape, dtype, p = case
    check(shape, dtype, p, 3, "cuda", documents)


@pytest.mark.cuda
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_forward_and_backward_draw_the_mask_of_the_reference(p):
    """With equal scores a query's probabilities are equal; unit vectors as values and gradients show them singly."""
    length, width, key = 192, 64, keys_of(2)
    expected = attention_mask(key, [range(7, 10), range(length), range(length)], p).tril()  # [B, N, query, column]
    for first in range(0, length, width):
        chosen = torch.eye(length, device="cuda", dtype=BF16)[:, first : first + width]
        qkv = torch.zeros(2, length, 3, 3, width, device="cuda", dtype=BF16)
        qkv[..., 2, :] = chosen[None, :, None]
        out, *_ = flash._forward(*split_qkv(qkv.requires_grad_()), key.cuda(), p, 7, None)
        columns = expected[..., first : first + width].transpose(1, 2)
        assert torch.equal(out.detach().cpu() != 0, columns)
        _, _, dv = gradients(out, [qkv], chosen[None, :, None].expand(out.shape))
        queries = expected[..., first : first + width, :].permute(0, 3, 1, 2)
        assert torch.equal(dv.cpu() != 0, queries)


@pytest.mark.cuda
@pytest.mark.parametrize("key", [True, False])
@pytest.mark.parametrize("length, columns", [(128, 128), (77, 77), (70, 150)])
def test_a_compiler_knows_the_shapes_of_what_the_kernels_return(length, columns, key):
    _, qkv = inputs((2, length, 2, 64), BF16, "cuda", columns=columns)
    arguments = *[t.detach() for t in qkv], keys_of(2, device="cuda") if key else None, 0.3, 1, None
    opcheck(flash._forward, arguments, test_utils="test_faketensor")


@pytest.mark.cuda
def test_large_scores_do_not_overflow():
    qkv = (100 * torch.randn(1, 300, 2, 3, 64, device="cuda")).to(BF16).requires_grad_()
    out = flash.flash_attention(*split_qkv(qkv), keys_of(1).cuda(), 0.1)
    assert error(out, truth(*split_qkv(qkv), keys_of(1).cuda(), 0.1)) < TOLERANCE[BF16]
    assert torch.autograd.grad(out, qkv, torch.ones_like(out))[0].isfinite().all()


@pytest.mark.cuda
@pytest.mark.usefixtures("merge_in_graphs")
@pytest.mark.parametrize("size, kv_heads", [(64, 0), (64, 2), (128, 1), (256, 1), (256, 0)])
def test_every_run_gives_the_same_bits_eager_compiled_and_in_a_graph_with_new_keys(size, kv_heads):
    """Groups of heads drop nothing, which other kernels compute: there, the key scales the queries."""
    stream = torch.cuda.Stream()  # autograd waits for the stream on which leaves were made: one that can be captured
    with torch.cuda.stream(stream):
        leaves, _ = inputs((2, 1024, 4, size), BF16, "cuda", kv_heads)
        keys, others = (keys_of(2, seed).cuda() for seed in (1, 2))

    def attend(key, *leaves):
        if kv_heads:
            return flash.flash_attention(leaves[0] * (1 + key[0, 0] % 127), *leaves[1:])
        return flash.flash_attention(*split_qkv(leaves[0]), key, 0.1)

    def run(key, function=attend):
        out = function(key, *leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))

    with torch.cuda.stream(stream):
        static = keys.clone()
        first, second = run(keys), run(others)
        compiled = run(keys, torch.compile(attend, fullgraph=True, dynamic=False))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = run(static)
    torch.cuda.current_stream().wait_stream(stream)
    for key, expected in ((keys, first), (others, second)):
        static.copy_(key)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(captured, expected, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(compiled, first, strict=True))
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    "model, expected", [(LLAMA32_1B, True), (QWEN3_0_6B, True), (LLAMA2_7B, True), (GPT2_345M, False)]
)
def test_models_get_the_kernels_that_are_meant_for_them(model, expected, monkeypatch):
    """By the shapes and strides that a block passes, none of which has to be copied first."""
    monkeypatch.setattr(flash_launch, "has_hopper", lambda device: True)
    seen = []

    def attend(q, k, v, key, p, *_, **__):
        described = [stride * x.element_size() % 16 for x in (q, k, v) for stride in x.stride()[:3]]
        seen.append((key is None and p == 0 and flash_launch.takes_tiles(q, k), any(described)))
        return torch.empty_like(q)

    monkeypatch.setattr(layers, "causal_attention", attend)
    with torch.device("meta"):
        block = model.make_block(0).bfloat16()
        block(torch.empty(2, 128, model.hidden_size, dtype=torch.bfloat16), layers.Context())
    assert seen == [(expected, False)]


@pytest.mark.parametrize("length, columns, size, kv_heads, dtype, expected", [
    (4096, 4096, 64, 2, BF16, True), (4096, 4096, 128, 4, FP16, True), (128, 128, 128, 1, BF16, True),
    (4096, 4096, 64, 4, BF16, False), (4096, 4096, 64, 2, FP32, False), (4001, 4001, 64, 2, BF16, True),
    (128, 256, 64, 2, BF16, False), (4096, 4096, 256, 1, BF16, True), (4096, 4096, 96, 2, BF16, False),
    (4096, 4096, 32, 2, BF16, False)
])  # fmt: skip
def test_descriptors_serve_queries_of_all_columns(length, columns, size, kv_heads, dtype, expected, monkeypatch):
    monkeypatch.setattr(flash_launch, "has_hopper", lambda device: True)
    for batch, shards in ((1, 1), (3, 1), (1, 2)):  # the same for each micro-batch and each part of the heads
        heads = (4 // shards, max(1, kv_heads // shards)) if kv_heads > 1 else (4, 1)
        q, k = (torch.empty(batch, n, h, size, dtype=dtype) for n, h in zip((length, columns), heads, strict=True))
        assert flash_launch.takes_tiles(q, k) == expected
    monkeypatch.setattr(flash_launch, "has_hopper", lambda device: False)
    assert not flash_launch.takes_tiles(q, k)

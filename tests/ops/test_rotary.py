"""Rotary positions on a packed projection, with and without norms of the heads, against float64."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from torch.library import opcheck
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dtgpt.interop.hf.llama import LLAMA
from dtgpt.ops.kernels import rotary as kernels
from dtgpt.ops.norms import norm_reference
from dtgpt.ops.operation import split_backward
from dtgpt.ops.rotary_positions import angle_table, frequencies, rotary_qkv, rotation_of
from tests.support.bodies_norm import (
    EPS,
    ROTATION,
    capture,
    check_rotary,
    custom_ops,
    in_interpreter,
    results,
    saved_bytes,
)
from tests.support.interpreter import needs_triton

CUDA = torch.device("cuda")
BOTH = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])


def weights(size: int, normed: bool, **options) -> list[torch.Tensor]:
    return [(1 + 0.3 * torch.randn(size)).to(**options) for _ in range(2 * normed)]


@BOTH
def test_the_reference_turns_pairs_of_columns_as_complex_numbers(normed):
    qkv, positions = torch.randn(2, 3, 2, 5, 6, dtype=torch.float64), torch.tensor([[5, 0, 9], [1, 1, 2]])
    pair = weights(6, normed, dtype=torch.float64)
    cosine, sine = angle_table(ROTATION, 6, 10, torch.device("cpu")).double()
    turn = torch.complex(cosine, sine)[positions][:, :, None, None]
    found = rotary_qkv(qkv, positions, ROTATION, 10, *pair, eps=EPS)
    for head, weight in zip((qkv[..., :3, :], qkv[..., 3:4, :]), pair or (None, None), strict=True):
        head = head if weight is None else norm_reference(head, weight, None, EPS)
        turned = torch.complex(*head.chunk(2, dim=-1)) * turn
        true = torch.cat([turned.real, turned.imag], dim=-1).flatten(2, 3)
        torch.testing.assert_close(found[head.shape[3] == 1], true)
    assert torch.equal(found[2], qkv[..., 4, :])


SCALED: dict[str, dict] = {
    "default": {}, "linear": {"factor": 3.5},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 512},
    "yarn without rounding": {"factor": 2.5, "original_max_position_embeddings": 90, "truncate": False},
    "yarn with betas": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 7.5, "beta_slow": 0.4},
    "yarn with a factor": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.9},
    "yarn with scales": {"factor": 40.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn of one column": {"factor": 40.0, "original_max_position_embeddings": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_frequencies_are_those_of_transformers(name, tmp_path):
    """Over random bases and sizes of heads, with what transformers' own functions return."""
    kind, generator = name.split()[0], torch.Generator().manual_seed(len(name))
    for _ in range(12):
        size = 2 * int(torch.randint(4, 65, (), generator=generator))
        theta = float(10 ** (2 + 4 * torch.rand((), generator=generator)))
        rope = {"rope_type": kind, "rope_theta": theta, **SCALED[name]}
        sizes = {"num_attention_heads": 2, "hidden_size": 2 * size, "max_position_embeddings": 1024}
        config = transformers.LlamaConfig(**sizes, head_dim=size, rope_parameters=dict(rope))
        if kind == "default":
            expected, amplitude = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            expected, amplitude = ROPE_INIT_FUNCTIONS[kind](config)
        ours = LLAMA.read_config({"model_type": "llama", **sizes, "head_dim": size, "rope_parameters": rope}, tmp_path)
        torch.testing.assert_close(frequencies(ours.rotation, size), expected, rtol=1e-6, atol=0)
        assert ours.rotation.amplitude == pytest.approx(amplitude, rel=1e-12)
        assert rotation_of(ours.rotation.numbers) == ours.rotation
        table = angle_table(ours.rotation, size, 40, torch.device("cpu"))
        angles = torch.outer(torch.arange(40.0), expected)
        torch.testing.assert_close(table, torch.stack([angles.cos(), angles.sin()]) * amplitude, rtol=1e-5, atol=1e-5)


@BOTH
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_ops_on_a_cpu_have_the_values_and_gradients_of_float64(dtype, placed, normed):
    check_rotary((2, 5, 3, 4, 10), dtype, normed, placed)
    with custom_ops():
        check_rotary((2, 5, 3, 4, 10), dtype, normed, placed)


@pytest.mark.slow(2)
@BOTH
def test_the_op_keeps_the_contract_of_custom_ops(normed):
    qkv, pair = torch.randn(2, 3, 1, 4, 6).requires_grad_(), weights(6, normed) or [None, None]
    pair = [t if t is None else t.requires_grad_() for t in pair]
    opcheck(kernels._rotary, (qkv, torch.tensor([[0, 1, 2], [0, 0, 1]]), *pair, EPS, ROTATION.numbers, 10))


@pytest.mark.parametrize("shape, options, words", [
    ((2, 3, 1, 2, 6), {}, "R > 0"), ((2, 3, 1, 3, 5), {}, "an even D"), ((2, 11, 1, 3, 6), {}, "11 positions"),
    ((2, 3, 1, 3, 6), {"positions": torch.zeros(3, dtype=torch.int64)}, "int64"),
    ((2, 3, 1, 3, 6), {"positions": torch.zeros(2, 3, dtype=torch.int32)}, "int32"),
    ((2, 3, 1, 3, 6), {"q_weight": torch.ones(6)}, "both"),
    ((2, 3, 1, 3, 6), {"q_weight": torch.ones(6), "k_weight": torch.ones(3)}, r"the shape \(3,\)")
])  # fmt: skip
def test_what_does_not_fit_is_refused(shape, options, words):
    with pytest.raises(ValueError, match=words):
        rotary_qkv(torch.zeros(shape), options.pop("positions", None), ROTATION, 10, **options)


@BOTH
def test_backward_saves_nothing_but_positions_and_what_norms_need(normed):
    qkv, positions = torch.randn(2, 3, 1, 4, 6, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int64)
    pair = weights(6, normed, dtype=torch.bfloat16)
    expected = positions.nbytes + (qkv.nbytes + 2 * pair[0].nbytes if normed else 0)

    def function(place):
        return lambda qkv, *pair: rotary_qkv(qkv, place, ROTATION, 10, *pair, eps=EPS)

    with custom_ops():
        assert saved_bytes(function(positions), [qkv, *pair]) == expected
    on_meta = [t.to("meta") for t in (qkv, *pair)]
    assert saved_bytes(function(positions.to("meta")), on_meta) == expected
    assert saved_bytes(function(None), on_meta) == expected - positions.nbytes


@BOTH
@pytest.mark.parametrize("ops_of", [custom_ops, nullcontext], ids=["custom", "plain"])
def test_compiled_equals_eager(normed, ops_of):
    qkv, pair = torch.randn(2, 3, 1, 4, 6), weights(6, normed)
    inputs = [t.requires_grad_() for t in (qkv, *pair)]
    cotangents = [torch.randn(2, 3, heads, 6) for heads in (2, 1, 1)]

    def layer(qkv, *pair):
        return rotary_qkv(2 * qkv, None, ROTATION, 10, *pair, eps=EPS)

    with ops_of():
        eager = results(layer, inputs, cotangents)
        compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
        for one, other in zip(results(compiled, inputs, cotangents), eager, strict=True):
            torch.testing.assert_close(one, other)


@needs_triton
def test_the_kernels_in_the_interpreter():
    cases = [((2, 5, 3, 4, 10), False, True), ((1, 3, 1, 3, 2), True, False), ((2, 150, 2, 3, 64), True, True)]
    in_interpreter(check_rotary=", ".join(f"({shape}, torch.float32, {n}, {p})" for shape, n, p in cases))


SHAPES = [
    ((3, 33, 8, 6, 64), torch.bfloat16),
    ((1, 1, 8, 6, 128), torch.bfloat16),
    ((2, 2048, 8, 4, 128), torch.bfloat16),
]
SHAPES += [((2, 77, 4, 3, 80), torch.float16), ((3, 50, 3, 5, 10), torch.float32), ((2, 9, 1, 34, 256), torch.bfloat16)]
SHAPES += [
    ((2, 300, 5, 3, 2), torch.float32),
    ((2, 130, 32, 3, 128), torch.bfloat16),
    ((1, 70, 2, 9, 96), torch.float32),
]


@BOTH
@pytest.mark.cuda
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("shape, dtype", SHAPES, ids=str)
def test_the_kernels_have_the_values_and_gradients_of_float64(shape, dtype, placed, normed):
    check_rotary(shape, dtype, normed, placed, CUDA)


@BOTH
@pytest.mark.cuda
def test_gradients_may_have_any_strides(normed):
    shape = (2, 70, 3, 4, 64)
    options = {"dtype": torch.float32, "device": CUDA}
    inputs = [t.requires_grad_() for t in (torch.randn(shape, **options), *weights(64, normed, **options))]
    cotangents = [torch.randn(2, 70, heads, 64, **options) for heads in (6, 3, 3)]
    by_heads = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in cotangents]
    by_columns = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in cotangents]
    both = torch.stack(cotangents[1:], dim=3)
    mixed = [by_heads[0], *both.unbind(3)]

    def layer(qkv, *pair):
        return rotary_qkv(qkv, None, ROTATION, 70, *pair, eps=EPS)

    expected = results(layer, inputs, cotangents)
    for strided in (by_heads, by_columns, mixed):
        found = results(layer, inputs, strided)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    packed = inputs[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    with split_backward():
        plain = results(layer, [packed, *inputs[1:]], cotangents)
    for one, other in zip(plain, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_tokens_do_not_depend_on_their_batch():
    qkv, pair = torch.randn(4, 100, 8, 6, 64, device=CUDA).bfloat16(), weights(64, True, device=CUDA)
    whole = rotary_qkv(qkv, None, ROTATION, 100, *pair, eps=EPS)
    part = rotary_qkv(qkv[2:3, :7], None, ROTATION, 100, *pair, eps=EPS)
    assert all(torch.equal(one[2:3, :7], other) for one, other in zip(whole, part, strict=True))


@BOTH
@pytest.mark.cuda
def test_gradients_are_the_same_in_every_run_compiled_and_in_a_replayed_graph(normed):
    options = {"dtype": torch.bfloat16, "device": CUDA}
    inputs = [torch.randn(2, 1024, 8, 4, 128, **options), *weights(128, normed, **options)]
    inputs = [t.requires_grad_() for t in inputs]
    cotangents = [torch.randn(2, 1024, heads, 128, **options) for heads in (16, 8, 8)]

    def layer(qkv, *pair):
        return rotary_qkv(2 * qkv, None, ROTATION, 1024, *pair, eps=EPS)

    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    eager, again, third = (results(f, inputs, cotangents) for f in (layer, layer, compiled))
    replayed = capture(lambda: results(layer, inputs, cotangents))
    for found in (again, third, replayed):
        assert all(torch.equal(one, other) for one, other in zip(found, eager, strict=True))

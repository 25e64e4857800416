"""Matrices in 4 bits: what they are, and that kernels make the same bits of them."""

import pytest
import torch
from torch import Tensor

from dtgpt.ops.nf4.form import BLOCK, GROUP, STEPS, VALUES, Nf4, Place, whole
from dtgpt.ops.nf4.linear import nf4_linear
from dtgpt.ops.nf4.quantise import dequantise, quantise, reference
from tests.support.bodies_norm import saved_bytes
from tests.support.interpreter import needs_triton, run_interpreted

PARTS = [(slice(0, 8), slice(0, 1)), (slice(8, 24), slice(2, 5)), (slice(5, 24), slice(1, 4))]  # rows and blocks


def matrix(rows: int = 24, blocks: int = 5) -> Tensor:
    """Values of many sizes, rows of which groups of scales begin in the middle, and a block of zeros."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(rows, blocks * BLOCK, generator=generator)
    made *= torch.rand(rows, 1, generator=generator).mul(6).sub(4).exp()
    made[1, BLOCK : 2 * BLOCK] = 0
    return made


def part_of(made: Nf4, rows: slice, blocks: slice) -> tuple[Nf4, Place]:
    codes = made.codes[rows].unflatten(1, (-1, BLOCK // 2))[:, blocks].flatten(1)
    return Nf4(codes, made.scales[rows, blocks], made.groups), Place(rows.start, blocks.start, made.scales.shape[1])


def test_the_definition_is_what_it_says():
    """By one element at a time, in float64."""
    x = matrix(4 * GROUP // 5, 5)  # more than two groups
    made = quantise(x)
    largest = x.view(-1, BLOCK).abs().amax(1).double()
    mean, *peaks = made.groups.view(torch.float32).flatten().double().tolist()
    assert mean == pytest.approx(largest.mean().item(), rel=1e-7)
    rest = largest - mean
    assert peaks == pytest.approx([part.abs().max().item() for part in rest.split(GROUP)], rel=1e-6)
    steps, values = torch.tensor(STEPS, dtype=torch.float64), torch.tensor(VALUES, dtype=torch.float64)
    found = dequantise(made, whole(made), torch.float32).double().view(-1, BLOCK)
    for index in (0, 6, GROUP - 1, GROUP, len(largest) - 1):  # of blocks; 6 has zeros alone
        nearest = steps[(rest[index] / peaks[index // GROUP] - steps).abs().argmin()]
        scale = nearest * peaks[index // GROUP] + mean
        block = x.view(-1, BLOCK)[index].double()
        codes = (block[:, None] / max(largest[index].item(), 1e-30) - values).abs().argmin(1)
        torch.testing.assert_close(found[index], values[codes] * scale, rtol=0, atol=1e-6 * mean)
    assert (len(STEPS), STEPS[127], STEPS[0]) == (256, 0.0, -STEPS[-2])


def test_threads_and_neighbours_change_no_bit():
    x, threads = matrix(512, 64), torch.get_num_threads()
    made = quantise(x)
    try:
        torch.set_num_threads(2)
        again = quantise(x.clone())
    finally:
        torch.set_num_threads(threads)
    backwards = quantise(x.flip(0))  # the mean is a sum in another order
    assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True))
    assert torch.equal(backwards.groups[0], made.groups[0])


@pytest.mark.parametrize("rows, blocks", PARTS)
def test_a_part_has_the_bits_of_the_whole(rows, blocks):
    made = quantise(matrix())
    part, place = part_of(made, rows, blocks)
    columns = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
    expected = dequantise(made, whole(made), torch.bfloat16)[rows, columns]
    assert torch.equal(dequantise(part, place, torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiler_is_told_the_shape_and_the_type(dtype):
    made = quantise(matrix())
    told = dequantise(Nf4(*(each.to("meta") for each in made)), whole(made), dtype)
    assert told.shape == matrix().shape and told.dtype == dtype and told.is_meta


def test_a_product_keeps_its_4_bits_alone_and_has_the_gradient_of_its_input():
    made, x = quantise(matrix()), torch.randn(2, 3, 5 * BLOCK).requires_grad_()
    plain, weight = x.detach().clone().requires_grad_(), dequantise(made, whole(made), torch.float32)
    bias = torch.randn(24)
    found, expected = nf4_linear(x, made, whole(made), bias), torch.nn.functional.linear(plain, weight, bias)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(x.grad, plain.grad)
    kept = saved_bytes(lambda x: nf4_linear(x, made, whole(made), None), [x.detach().requires_grad_()])
    assert kept == sum(each.nbytes for each in made)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused(wrong):
    x = matrix()
    x[3, 7] = wrong
    with pytest.raises(ValueError, match="a value that is not finite"):
        quantise(x)


def test_the_bits_are_those_of_bitsandbytes():
    """Of the paper's authors' library, whose steps and mean differ by rounding."""
    theirs = pytest.importorskip("bitsandbytes.functional")
    x = matrix(256, 8)
    made = quantise(x)
    codes, state = theirs.quantize_4bit(x, blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
    assert torch.equal(codes.view(-1), made.codes.view(-1))
    alike = state.absmax.view(-1) == made.scales.view(-1)
    assert alike.float().mean() > 0.99
    found, others = dequantise(made, whole(made), torch.float32), theirs.dequantize_4bit(codes, state)
    found, others = (each.reshape(-1, BLOCK)[alike] for each in (found, others))
    torch.testing.assert_close(found, others, rtol=0, atol=1e-6 * x.abs().max().item())


def check_kernel(device: str, rounds: bool) -> None:
    """The kernel has the definition's bits, of the whole and of parts. rounds: whether 16 bits are rounded as by
    PyTorch: Triton's interpreter cuts bfloat16."""
    from dtgpt.ops.kernels import nf4_kernels

    made = Nf4(*(each.to(device) for each in quantise(matrix())))
    cases = [(made, whole(made)), *(part_of(made, *part) for part in PARTS)]
    for case, place in cases:
        for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if rounds else [])):
            found = nf4_kernels.dequantise(*case, *place, dtype)
            assert torch.equal(found, reference(*case, *place, dtype)), (place, dtype)
            assert torch.equal(found.cpu(), reference(*(each.cpu() for each in case), *place, dtype)), (place, dtype)


@needs_triton
def test_the_kernel_in_the_interpreter():
    run_interpreted("from tests.ops.test_nf4 import check_kernel; check_kernel('cpu', False)")


@pytest.mark.cuda
def test_a_gpu_has_the_same_bits():
    check_kernel("cuda", True)
    for x in (matrix(), matrix(256, 64)):
        for one, other in zip(quantise(x.cuda()), quantise(x), strict=True):
            assert torch.equal(one.cpu(), other)

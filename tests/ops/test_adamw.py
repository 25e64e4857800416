"""AdamW against torch.optim.AdamW in float64; the kernels in Triton's interpreter, and on a GPU."""

import copy
import importlib

import pytest
import torch
from torch import Tensor

from dtgpt.ops.optim.adamw import AdamW, Slot
from dtgpt.ops.optim.optimizer import Accumulator, squared_norm
from tests.support.bodies_adamw import (
    DTYPES,
    SETTINGS,
    check_mixed_dtypes,
    check_norms,
    check_tensors_off_16_bytes,
    check_totals,
    everything,
    follow_truth,
    make_gradients,
    make_slots,
    number,
)
from tests.support.interpreter import first_kernels_of, needs_triton, run_interpreted


@pytest.mark.parametrize("narrow", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gradient", DTYPES)
def test_steps_are_those_of_torch(gradient, narrow):
    follow_truth(gradient, narrow)


def test_a_step_without_a_flag_is_one_that_is_not_skipped():
    torch.manual_seed(0)
    slots = make_slots(torch.bfloat16)
    others = copy.deepcopy(slots)
    optimizers = [AdamW(s, **SETTINGS) for s in (slots, others)]
    gradients = make_gradients(slots, torch.bfloat16)
    optimizers[0].step(gradients, number(0.1), number(1.0))
    optimizers[1].step(gradients, number(0.1), number(1.0), number(False))
    assert all(map(torch.equal, everything(optimizers[0], slots), everything(optimizers[1], others)))


def test_the_first_updates_keep_their_precision():
    """1 - beta^t cancels: in fp32 the first step with beta2 = 0.999 would be off by 3e-5."""
    slots = [Slot(torch.zeros(1000), None, decay=False)]
    optimizer = AdamW(slots, beta1=0.9, beta2=0.9999, eps=0.0, weight_decay=0.0)
    optimizer.step([torch.randn(1000)], number(1.0), number(1.0))
    torch.testing.assert_close(slots[0].master.abs(), torch.ones(1000), rtol=5e-7, atol=0)


def test_a_restored_optimizer_goes_on_bitwise():
    torch.manual_seed(0)
    slots = make_slots(torch.bfloat16)
    optimizer, gradients = AdamW(slots, **SETTINGS), [make_gradients(slots, torch.bfloat16) for _ in range(4)]
    for g in gradients[:2]:
        optimizer.step(g, number(0.1), number(0.5))
    others = [Slot(torch.empty_like(s.master), torch.empty_like(s.low_precision), s.decay) for s in slots]
    other = AdamW(others, **SETTINGS)
    for old, new in zip(slots, others, strict=True):
        new.master.copy_(old.master)
        new.low_precision.copy_(old.master)
    for old, new in zip(optimizer.exp_avg + optimizer.exp_avg_sq, other.exp_avg + other.exp_avg_sq, strict=True):
        new.copy_(old)
    other.updates.fill_(optimizer.updates.item())
    for g in gradients[2:]:
        optimizer.step(g, number(0.1), number(0.5))
        other.step(g, number(0.1), number(0.5))
    assert all(map(torch.equal, everything(optimizer, slots), everything(other, others)))


def test_parameters_that_need_gradients_are_written():
    weight = torch.nn.Parameter(torch.ones(3))
    narrow = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdamW([Slot(weight, narrow, decay=False)], **SETTINGS)
    optimizer.step([torch.ones(3)], number(0.5), number(1.0))
    assert weight.tolist() == pytest.approx([0.5] * 3) and narrow.tolist() == [0.5] * 3 and weight.grad_fn is None


def test_gradients_may_have_strides():
    slots = [Slot(torch.ones(3, 5), None, decay=True)]
    others = [Slot(torch.ones(3, 5), None, decay=True)]
    gradient = torch.randn(5, 3).T
    AdamW(slots, **SETTINGS).step([gradient], number(0.1), number(1.0))
    AdamW(others, **SETTINGS).step([gradient.contiguous()], number(0.1), number(1.0))
    assert torch.equal(slots[0].master, others[0].master)


@pytest.mark.parametrize("master, narrow, words", [
    (torch.ones(2, dtype=torch.float64), None, "slot 0: the master must be fp32"),
    (torch.ones(4, 4).T[1:], None, "contiguous"), (torch.ones(2), torch.ones(2), "bf16 or fp16"),
    (torch.ones(2), torch.ones(3, dtype=torch.float16), "one shape")
])  # fmt: skip
def test_slots_that_the_kernel_cannot_write_are_refused(master, narrow, words):
    with pytest.raises(ValueError, match=words):
        AdamW([Slot(master, narrow, decay=True)], **SETTINGS)


@pytest.mark.parametrize("gradients, words", [
    ([], "0 gradients for 1 tensors"),
    ([torch.ones(3)], r"gradient 0 is torch.float32 \(3,\) on cpu; its tensor is \(2,\)"),
    ([torch.ones(2, dtype=torch.float64)], "float64"), ([torch.ones(2, device="meta")], "on meta")
])  # fmt: skip
def test_gradients_that_do_not_fit_are_refused(gradients, words):
    with pytest.raises(ValueError, match=words):
        AdamW([Slot(torch.ones(2), None, decay=True)], **SETTINGS).step(gradients, number(0.1), number(1.0))
    with pytest.raises(ValueError, match=words):
        Accumulator([torch.ones(2)]).add(gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares(dtype):
    check_norms(dtype)


def test_sums_of_squares_are_fp32_whatever_the_dtype():
    assert squared_norm([torch.full((1000,), 6e4, dtype=torch.float16)]).item() == pytest.approx(3.6e12, rel=1e-3)
    assert squared_norm([torch.full((4097,), 1.0, dtype=torch.bfloat16)]).item() == pytest.approx(4097, rel=1e-6)
    gradient = torch.randn(3_000_000)
    assert squared_norm([gradient]).item() == pytest.approx(gradient.double().square().sum().item(), rel=1e-6)


def test_sums_of_squares_show_what_is_not_finite_and_bear_empty_tensors():
    infinite, missing = torch.tensor([1.0, float("inf")]).half(), torch.tensor([float("nan"), 1.0]).half()
    found = squared_norm([torch.empty(0).half(), infinite, missing, torch.ones(3).half()])
    assert found[0] == 0 and found[1].isinf() and found[2].isnan() and found[3].item() == pytest.approx(3)
    assert squared_norm([torch.empty(0)]).tolist() == [0]


@pytest.mark.parametrize("dtypes", [[torch.bfloat16], [torch.float16], [torch.float32, torch.bfloat16]])
def test_totals_are_sums_of_gradients(dtypes):
    check_totals(dtypes)


def test_totals_must_be_fp32():
    with pytest.raises(ValueError, match="total 1 must be fp32"):
        Accumulator([torch.ones(2), torch.ones(2).half()])


def test_mixed_dtypes():
    check_mixed_dtypes()


def interpreted() -> None:
    """Run by the test below in a process of its own: the kernels, on CPU tensors."""
    from tests.support.bodies_exact import check_fixed_point, check_pieces, check_squares  # of a capability

    importlib.import_module("dtgpt.ops.kernels.adamw_kernels").CHUNK = 1024
    with first_kernels_of("adamw", "accumulate"):
        interpreted_rules()
    with first_kernels_of("accumulate_fixed_point", "add_fixed_point_of_ranks", "squares_of_rows"):
        check_fixed_point(torch.float32, 49)
        check_fixed_point(torch.float16, 32)
        check_pieces(torch.bfloat16)
        check_squares()


def interpreted_rules() -> None:
    follow_truth(torch.bfloat16, torch.bfloat16, steps=3)
    follow_truth(torch.float32, None, steps=3)
    test_a_step_without_a_flag_is_one_that_is_not_skipped()
    test_gradients_may_have_strides()
    check_tensors_off_16_bytes()
    check_mixed_dtypes()
    check_totals([torch.float32, torch.bfloat16])
    AdamW([Slot(torch.empty(0), None, decay=True)], **SETTINGS).step([torch.empty(0)], number(0.1), number(1.0))


@needs_triton
def test_the_kernels_in_tritons_interpreter():
    run_interpreted("from tests.ops.test_adamw import interpreted; interpreted()")


@pytest.mark.cuda
@pytest.mark.parametrize("gradient, narrow", [
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.bfloat16),
    (torch.float32, None)
])  # fmt: skip
def test_the_kernel_follows_torch(gradient, narrow):
    follow_truth(gradient, narrow, "cuda", steps=12)


@pytest.mark.cuda
def test_the_kernels_take_tensors_of_any_alignment_and_dtype():
    check_tensors_off_16_bytes("cuda")
    check_mixed_dtypes("cuda")
    check_totals([torch.bfloat16, torch.float16, torch.float32], "cuda")
    for dtype in DTYPES:
        check_norms(dtype, "cuda")


@pytest.mark.cuda
def test_a_large_tensor_is_reached_to_its_end():
    """More than 2^31 bytes, and more programs than a grid's second dimension takes."""
    size = (1 << 29) + 5
    master = torch.zeros(size, device="cuda")
    gradient = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    gradient[-1], gradient[1 << 28] = 1.0, -1.0
    AdamW([Slot(master, None, decay=True)], **SETTINGS).step([gradient], number(0.5, "cuda"), number(1.0, "cuda"))
    assert master[-1].item() == pytest.approx(-0.5) and master[1 << 28].item() == pytest.approx(0.5)
    assert master.count_nonzero().item() == 2
    Accumulator([master]).add([gradient])
    assert master[-1].item() == pytest.approx(0.5)


@pytest.mark.cuda
def test_nothing_waits_for_the_device():
    slots = make_slots(torch.bfloat16, "cuda")
    optimizer, accumulator = AdamW(slots, **SETTINGS), Accumulator([torch.zeros_like(s.master) for s in slots])
    lr, scale, skip = number(0.1, "cuda"), number(1.0, "cuda"), number(False, "cuda")

    def work() -> None:
        gradients = [torch.randn_like(slot.low_precision) for slot in slots]  # at new addresses
        accumulator.store(gradients)
        accumulator.add(gradients)
        squared_norm(accumulator.totals)
        optimizer.step(gradients, lr, scale, skip)
        optimizer.step(accumulator.totals, lr, scale)

    work()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_cuda_graphs_replay_with_the_addresses_they_captured():
    """Two graphs whose gradients are allocated while they are captured, and eager steps in between."""
    torch.manual_seed(0)
    device = "cuda"
    slots = make_slots(torch.bfloat16, device)
    others = copy.deepcopy(slots)
    optimizer, other = AdamW(slots, **SETTINGS), AdamW(others, **SETTINGS)
    sources = [make_gradients(slots, torch.bfloat16) for _ in range(2)]
    totals = [torch.zeros_like(s.master) for s in slots]
    accumulator = Accumulator(totals)
    lr, scale, skip = number(0.1, device), number(0.5, device), number(False, device)

    def work(source: list[Tensor]) -> None:
        gradients = [g * 2 for g in source]
        accumulator.store(gradients)
        accumulator.add([g + 1 for g in gradients])
        optimizer.step(totals, lr, scale, skip)
        optimizer.step(gradients, lr, scale, skip)

    def expected(source: list[Tensor]) -> None:
        gradients = [g * 2 for g in source]
        sums = [g.float() + (g + 1).float() for g in gradients]
        other.step(sums, lr, scale, skip)
        other.step(gradients, lr, scale, skip)

    skip.fill_(True)
    work(sources[0])  # compiles, changes nothing
    skip.fill_(False)
    graphs = []
    for source in sources:
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], capture_error_mode="thread_local"):
            work(source)
    for i, flag in ((0, False), (1, False), (0, True), (1, False)):
        skip.fill_(flag)
        for gradient in sources[i]:
            gradient.normal_()
        lr.mul_(0.5)
        graphs[i].replay()
        expected(sources[i])
        work(sources[1 - i])
        expected(sources[1 - i])
    assert all(map(torch.equal, everything(optimizer, slots), everything(other, others)))
    assert optimizer.updates.item() == 12

"""What tests of AdamW do on a CPU, in Triton's interpreter and on a GPU alike."""

import os

import torch
from torch import Tensor

from dtgpt.ops.optim.adamw import AdamW, Slot
from dtgpt.ops.optim.optimizer import Accumulator, squared_norm

SETTINGS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(7, 5), (1,), (0, 4), (33,), (64, 65), (4096,), (2, 2049)]  # empty, odd, whole chunks, and a bit more
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def make_slots(narrow: torch.dtype | None, device="cpu", shapes=SHAPES) -> list[Slot]:
    masters = [torch.randn(shape, device=device) for shape in shapes]
    return [Slot(m, None if narrow is None else m.to(narrow), decay=m.dim() > 1) for m in masters]


def make_gradients(slots: list[Slot], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn_like(slot.master).to(dtype) for slot in slots]


def number(value, device="cpu") -> Tensor:
    return torch.tensor(value, device=device)


class Truth:
    """torch.optim.AdamW on float64 copies."""

    def __init__(self, slots: list[Slot]):
        self.weights = [torch.nn.Parameter(slot.master.detach().double()) for slot in slots]
        groups = [
            {"params": [w for w, s in zip(self.weights, slots, strict=True) if s.decay is decay], "weight_decay": share}
            for decay, share in ((True, SETTINGS["weight_decay"]), (False, 0.0))
        ]
        betas = SETTINGS["beta1"], SETTINGS["beta2"]
        self.optimizer = torch.optim.AdamW(groups, betas=betas, eps=SETTINGS["eps"])

    def step(self, gradients: list[Tensor], lr: float, scale: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient.double() * scale
        self.optimizer.step()

    def check(self, optimizer: AdamW, slots: list[Slot], tolerance: float = 1e-6) -> None:
        for i, (slot, weight) in enumerate(zip(slots, self.weights, strict=True)):
            state = self.optimizer.state[weight]
            close(slot.master, weight, tolerance)
            close(optimizer.exp_avg[i], state["exp_avg"], tolerance)
            close(optimizer.exp_avg_sq[i], state["exp_avg_sq"], tolerance)
            if slot.low_precision is not None:
                assert torch.equal(slot.low_precision, rounded(slot.master, slot.low_precision.dtype))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    if INTERPRETED and dtype == torch.bfloat16:  # Triton's interpreter cuts bits off where a GPU rounds
        x = (x.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return x.to(dtype)


def close(found: Tensor, truth: Tensor, tolerance: float) -> None:
    assert (found.double() - truth).norm() <= tolerance * truth.norm()


def everything(optimizer: AdamW, slots: list[Slot]) -> list[Tensor]:
    narrow = [slot.low_precision for slot in slots if slot.low_precision is not None]
    return [*(s.master for s in slots), *narrow, *optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.updates]


def follow_truth(gradient: torch.dtype, narrow: torch.dtype | None, device="cpu", steps: int = 5) -> None:
    """Steps, one of them skipped for a gradient that is not finite, at a changing learning rate."""
    torch.manual_seed(0)
    slots = make_slots(narrow, device)
    optimizer, truth = AdamW(slots, **SETTINGS), Truth(slots)
    for step in range(steps):
        gradients, lr = make_gradients(slots, gradient), 0.01 * (step + 1)
        optimizer.step(gradients, number(lr, device), number(0.25, device), number(False, device))
        truth.step(gradients, lr, 0.25)
        if step == 2:
            before = [t.clone() for t in everything(optimizer, slots)]
            gradients[0][0, 0] = float("nan")
            optimizer.step(gradients, number(lr, device), number(float("inf"), device), number(True, device))
            assert all(map(torch.equal, everything(optimizer, slots), before))
    truth.check(optimizer, slots)
    assert optimizer.updates.item() == steps


def check_norms(dtype: torch.dtype, device="cpu") -> None:
    gradients = make_gradients(make_slots(None, device), dtype)
    found = squared_norm(gradients)
    assert found.dtype == torch.float32
    truth = torch.stack([g.double().square().sum() for g in gradients])
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=0)
    assert torch.equal(found, squared_norm(gradients))


def check_totals(dtypes: list[torch.dtype], device="cpu") -> None:
    """Sums of micro-batches; totals begin as NaN."""
    shapes = SHAPES * len(dtypes)
    totals = [torch.full(shape, float("nan"), device=device) for shape in shapes]
    accumulator, truth = Accumulator(totals), None
    for i in range(3):
        gradients = [torch.randn_like(t).to(dtypes[j // len(SHAPES)]) for j, t in enumerate(totals)]
        (accumulator.store if i == 0 else accumulator.add)(gradients)
        truth = [g.double() + (truth[j] if i else 0) for j, g in enumerate(gradients)]
    for total, expected in zip(totals, truth, strict=True):
        close(total, expected, 1e-6)


def check_tensors_off_16_bytes(device="cpu") -> None:
    """Parts of one memory begin anywhere; chunks that are whole but not aligned, and aligned but not whole."""
    torch.manual_seed(0)
    memory = torch.randn(20_000, device=device)
    parts = [memory[1:5001], memory[5004:9100], memory[9101:17_293]]
    slots = [Slot(part, part.to(torch.bfloat16), decay=True) for part in parts]
    untouched = memory[5001:5004].clone(), memory[17_293:].clone()
    optimizer, truth = AdamW(slots, **SETTINGS), Truth(slots)
    gradients = [torch.randn(9000, device=device).to(torch.bfloat16)[3:][: p.numel()] for p in parts]
    for _ in range(2):
        optimizer.step(gradients, number(0.1, device), number(1.0, device))
        truth.step(gradients, 0.1, 1.0)
    truth.check(optimizer, slots)
    assert torch.equal(memory[5001:5004], untouched[0]) and torch.equal(memory[17_293:], untouched[1])
    totals = [torch.zeros(9000, device=device)[1:][: p.numel()] for p in parts]
    Accumulator(totals).add(gradients)
    assert all(torch.equal(t, g.float()) for t, g in zip(totals, gradients, strict=True))


def check_mixed_dtypes(device="cpu") -> None:
    """Of gradients, and of weights: each pair is a launch of its own."""
    torch.manual_seed(0)
    slots = make_slots(None, device)[:4] + make_slots(torch.bfloat16, device) + make_slots(torch.float16, device)[3:]
    optimizer, truth = AdamW(slots, **SETTINGS), Truth(slots)
    for shift in range(2):
        gradients = [g.to(DTYPES[(i + shift) % 3]) for i, g in enumerate(make_gradients(slots, torch.float32))]
        optimizer.step(gradients, number(0.1, device), number(1.0, device))
        truth.step(gradients, 0.1, 1.0)
    truth.check(optimizer, slots)

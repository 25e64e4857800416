"""The output projection with its loss, forward and backward, and the passes over the logits alone."""

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from cases import Case, run_cases
from torch import Tensor

import dtgpt.ops.kernels.cross_entropy_kernels as kernels
import dtgpt.ops.loss.head as head

VOCAB, WIDTH = 50257, 50304
SIZES = [(16, 1024), (32, 1024), (64, 768)]  # thousands of tokens, H
LAUNCHES = [(16384, 16, 2), (8192, 16, 2), (16384, 16, 1), (16384, 32, 1), (8192, 8, 4), (4096, 8, 4)]


def inputs(tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(1, tokens, hidden, device="cuda").bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(WIDTH, hidden, device="cuda")).bfloat16().requires_grad_()
    return x, weight, torch.randint(VOCAB, (1, tokens), device="cuda")


def gradients(loss: Callable[..., Tensor], x: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(loss(x, weight, targets, VOCAB), (x, weight))


def under(module: ModuleType, work: Callable[[], object], **settings: int) -> Callable[[], object]:
    """`work` with constants of the module set for as long as it is launched or captured."""

    def run() -> object:
        before = {name: getattr(module, name) for name in settings}
        vars(module).update(settings)
        try:
            return work()
        finally:
            vars(module).update(before)

    return run


def plain(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """As models without padding do it: a slice would cost a copy of the logits."""
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1).float(), targets.flatten())


def products(x: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], object]:
    """What cannot be left out: three matrix products."""
    rows, table = x.detach()[0], weight.detach()

    def run() -> object:
        logits = rows @ table.t()
        return logits @ table, logits.t() @ rows

    return run


def peak(work: Callable[[], object]) -> str:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return f"peak {(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB"


def whole(thousands: int, hidden: int) -> Case:
    tokens = 1024 * thousands
    given = inputs(tokens, hidden)
    ours = gradients(head.head_loss, *given)
    bounds = (2,) if thousands == 16 else (1, 2, 4, 8)  # at 16 thousand tokens all is one chunk
    variants = {f"ours, {gib} GiB chunks": under(head, ours, LOGITS_BYTES=gib << 30) for gib in bounds}
    variants["products alone"] = products(*given)
    variants["torch.compile"] = gradients(torch.compile(plain, dynamic=False), *given)
    if thousands < 64:
        variants["eager"] = gradients(plain, *given)
    flops = 6 * tokens * WIDTH * hidden
    notes = {name: peak(work) for name, work in variants.items()}
    return Case(f"head and loss, {thousands}k tokens, H {hidden}", variants, flops=flops, notes=notes)


def passes(tokens: int = 16384) -> list[Case]:
    logits = torch.randn(tokens, WIDTH, device="cuda").bfloat16()
    targets, one = torch.randint(VOCAB, (tokens,), device="cuda"), torch.ones((), device="cuda")
    largest, total, _ = kernels.launch_terms(logits, targets, 0, VOCAB).unbind()
    works = {
        "loss and gradient": (lambda: kernels.launch_loss(logits, targets, one, VOCAB), 2),
        "row terms": (lambda: kernels.launch_terms(logits, targets, 0, VOCAB), 1),
        "gradient": (lambda: kernels.launch_gradient(logits, targets, largest, total, one, 0, VOCAB), 2),
    }
    cases = []
    for name, (work, times) in works.items():
        variants = {
            f"{b} bytes, {w} warps, {p} a SM": under(kernels, work, BLOCK_BYTES=b, WARPS=w, PROGRAMS=p)
            for b, w, p in LAUNCHES
        }
        if times == 2:
            variants["multiply in place"] = lambda: logits.mul_(1)
        cases.append(Case(f"{name}, 16k x {WIDTH}", variants, bytes=times * logits.nbytes))
    return cases


def cases() -> list[Case]:
    return [*passes(), *(whole(*size) for size in SIZES)]


if __name__ == "__main__":
    run_cases(cases())

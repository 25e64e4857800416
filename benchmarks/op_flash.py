"""Attention with dropout and the choices of its kernels, at the sizes of GPT-2 345M and 1558M; groups of heads and long
samples, at those of LLaMA and Qwen3; documents kept apart; sliding windows.

python benchmarks/op_flash.py [--documents | --grouped | --windows]      (these alone)
"""

import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from cases import Case, run_cases
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dtgpt.data.documents.masks import document_bounds
from dtgpt.ops.attention.core import AttentionRule, causal_attention, hidden_columns, split_qkv
from dtgpt.ops.kernels.attention import flash, flash_launch
from dtgpt.ops.kernels.attention.window import spans_of_window
from dtgpt.ops.random.philox import fold, root_key

LENGTH, WIDTH, P = 1024, 64, 0.1
SIZES = [(16, 16), (32, 16), (8, 25)]  # B, N
WINDOWS = [(1, 32768, n, n // 4, width) for width in (64, 128, 256) for n in (8, 32)]  # B, T, N, G, D
LAUNCHES = {
    "forward": [(128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2)],
    "keys": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (32, 64, 4, 3), (64, 64, 8, 2)],
    "queries": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 2)],
}
GROUPED = [
    (4, 4096, 32, 8, 64),
    (2, 4096, 32, 8, 128),
    (1, 8192, 32, 8, 128),
    (8, 1024, 16, 8, 128),
    (2, 4096, 16, 4, 256),
    (64, 1024, 6, 6, 128),
]  # B, T, N, G, D
GROUPED_LAUNCHES = {
    "forward": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2)],
    "keys": [(64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 3), (64, 128, 8, 2)],
    "queries": [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2)],
}
LARGE_LAUNCHES = {  # D of 256
    "forward": [(128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 1)],
    "keys": [(32, 64, 8, 2), (32, 64, 8, 3), (64, 64, 8, 1), (64, 64, 8, 2)],
    "queries": [(64, 64, 4, 2), (128, 64, 8, 1), (64, 64, 8, 2), (64, 32, 4, 2)],
}
Work = Callable[[], object]


def launched(name: str, how: tuple[int, ...], work: Work, band: int = flash_launch.BAND) -> Work:
    """With a kernel launched that way."""
    tables = [flash_launch.NARROW, flash_launch.NARROW_DROPPING, flash_launch.NARROW_TILES, flash_launch.WIDE_TILES]
    tables.append(flash_launch.LARGE_TILES)

    def run() -> object:
        before, band_before = [table[name] for table in tables], flash_launch.BAND
        flash_launch.BAND = band
        for table in tables:
            table[name] = flash_launch.FlashLaunch(*how)
        try:
            return work()
        finally:
            flash_launch.BAND = band_before
            for table, launch in zip(tables, before, strict=True):
                table[name] = launch

    return run


class Inputs:
    def __init__(self, batch: int, heads: int):
        self.qkv = torch.randn(batch, LENGTH, heads, 3, WIDTH, device="cuda").bfloat16().requires_grad_()
        self.grad = torch.randn(batch, LENGTH, heads, WIDTH, device="cuda").bfloat16()
        self.key = fold(root_key(1), torch.arange(batch)).cuda()
        self.name = f"B{batch} N{heads} T{LENGTH} D{WIDTH}"
        self.flops = 2 * 2 * batch * heads * LENGTH * LENGTH * WIDTH / 2  # two products, half of them hidden
        self.size = self.qkv.nbytes

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return split_qkv(self.qkv.detach())

    def flash(self, key: Tensor | None = None, p: float = 0.0, spans: Tensor | None = None) -> Tensor:
        return flash.flash_attention(*split_qkv(self.qkv), key, p, spans=spans)

    def sdpa(self, p: float = 0.0) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv.unbind(3))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p).transpose(1, 2)

    def forward(self, p: float) -> Work:
        key = self.key if p else None
        return lambda: flash_launch.launch_forward(*self.parts(), key, p, 0, None)

    def backward(self, p: float) -> Work:
        key, parts = self.key if p else None, self.parts()
        saved = flash_launch.launch_forward(*parts, key, p, 0, None)
        return lambda: flash_launch.launch_backward(self.grad, *parts, *saved, p, None, True)

    def both(self, function: Callable[[], Tensor]) -> Work:
        return lambda: torch.autograd.grad(function(), self.qkv, self.grad)


def whole(batch: int, heads: int) -> list[Case]:
    x = Inputs(batch, heads)
    forward: dict[str, Work] = {"PyTorch, no dropout": x.sdpa, "PyTorch, dropout": lambda: x.sdpa(P)}
    forward |= {f"ours, {'dropout' if p else 'no dropout'}": x.forward(p) for p in (0.0, P)}
    backward = {f"ours, {'dropout' if p else 'no dropout'}": x.backward(p) for p in (0.0, P)}
    both = {"PyTorch, no dropout": x.both(x.sdpa), "PyTorch, dropout": x.both(lambda: x.sdpa(P))}
    both |= {f"ours, {'dropout' if p else 'no dropout'}": x.both(lambda p=p: x.flash(x.key, p)) for p in (0.0, P)}
    return [
        Case(f"forward {x.name}", forward, x.size * 4 / 3, x.flops),
        Case(f"backward {x.name}", backward, x.size * 8 / 3, 2.5 * x.flops),
        Case(f"forward and backward {x.name}", both, x.size * 4, 3.5 * x.flops),
    ]


def parts(batch: int, heads: int) -> list[Case]:
    """Each kernel alone."""
    x = Inputs(batch, heads)
    qkv = x.parts()
    out, sums, words = flash_launch.launch_forward(*qkv, x.key, P, 0, None)
    pairs, cases = sums.new_empty(*sums.shape, 2), []
    dq, dk, dv = torch.empty_like(x.qkv).unbind(3)
    call = flash_launch.Call(*qkv, P, words, None, None)
    cases.append(Case(f"masks {x.name}", {"draw": lambda: call.draw(x.key, P, 0)}, words.nbytes))
    call.backward(x.grad, out, sums, pairs, dq, dk, dv)
    tensors = {"forward": (out, sums, None), "keys": (x.grad, pairs, dk, dv), "queries": (out, x.grad, sums, pairs, dq)}
    made = {"forward": None, "keys": dk, "queries": dq}
    for name, share in (("forward", 1), ("keys", 2), ("queries", 1.5)):
        scales = () if name == "forward" else (1 / math.sqrt(WIDTH),)
        variants = {}
        for p in (0.0, P):
            site = call if p else flash_launch.Call(*qkv, 0.0, None, None, None)

            def work(site=site, name=name, scales=scales) -> None:
                site._run(name, *tensors[name], made=made[name], scale=scales)

            for how in LAUNCHES[name]:
                if not (p and how[1] != 64):
                    variants[f"{'drop ' if p else ''}{'x'.join(map(str, how))}"] = launched(name, how, work)
            for band in (8, 256):
                variants[f"{'drop ' if p else ''}bands of {band}"] = launched(name, LAUNCHES[name][0], work, band)
        cases.append(Case(f"{name} {x.name}", variants, x.size, share * x.flops))
    return cases


def apart(batch: int, heads: int, mean: int) -> Case:
    """Documents of `mean` tokens on average, that see nothing of each other; the floor is that of one document."""
    x = Inputs(batch, heads)
    torch.manual_seed(1)
    spans = document_bounds(torch.rand(batch, LENGTH) < 1 / mean).cuda()
    starts, seen = spans[..., 0], ~hidden_columns(LENGTH, LENGTH, spans.device, spans)
    blocks = create_block_mask(
        lambda b, _, q, column: (q >= column) & (starts[b, q] <= column), batch, None, LENGTH, LENGTH, "cuda"
    )
    flex = torch.compile(flex_attention, dynamic=False)

    def split() -> tuple[Tensor, ...]:
        return tuple(part.transpose(1, 2) for part in x.qkv.unbind(3))

    variants = {
        "PyTorch, a mask": lambda: F.scaled_dot_product_attention(*split(), attn_mask=seen).transpose(1, 2),
        "PyTorch, FlexAttention": lambda: flex(*split(), block_mask=blocks).transpose(1, 2),
        "ours, no dropout": lambda: x.flash(spans=spans),
        "ours, dropout": lambda: x.flash(x.key, P, spans),
        "ours, one document": x.flash,
        "ours, one document, dropout": lambda: x.flash(x.key, P),
    }
    works = {name: x.both(function) for name, function in variants.items()}
    return Case(f"forward and backward {x.name}, documents of {mean}", works, x.size * 4, 3.5 * x.flops)


def grouped(batch: int, length: int, heads: int, kv_heads: int, width: int) -> list[Case]:
    """Long samples whose heads of q share heads of k and v: our back end and those of PyTorch, then our launches, where
    there is a choice of them."""
    sizes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads)]
    leaves = [torch.randn(size, device="cuda").bfloat16().requires_grad_() for size in sizes]
    grad = torch.randn(sizes[0], device="cuda").bfloat16()
    name = f"B{batch} T{length} N{heads} G{kv_heads} D{width}"
    product = 2 * batch * heads * length * length * width / 2  # half of it hidden
    moved = sum(t.nbytes for t in leaves) + grad.nbytes

    def pytorch(kernel: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in leaves)
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        return run

    def ours(key: Tensor | None = None, p: float = 0.0) -> Tensor:
        return flash.flash_attention(*leaves, key, p)

    key = fold(root_key(1), torch.arange(batch)).cuda()
    functions = {
        "ours": ours,
        "ours, dropout": lambda: ours(key, P),
        "PyTorch, cuDNN": pytorch(SDPBackend.CUDNN_ATTENTION),
        "PyTorch, FlashAttention-2": pytorch(SDPBackend.FLASH_ATTENTION),
    }
    both = {k: lambda f=f: torch.autograd.grad(f(), leaves, grad) for k, f in functions.items()}
    q, k, v = (t.detach() for t in leaves)
    saved = flash_launch.launch_forward(q, k, v, None, 0.0, 0, None)

    def backward() -> object:
        return flash_launch.launch_backward(grad, q, k, v, *saved, 0.0, None, False)

    def forward() -> object:
        return flash_launch.launch_forward(q, k, v, None, 0.0, 0, None)

    cases = [
        Case(f"forward {name}", functions, moved, 2 * product),
        Case(f"forward and backward {name}", both, 3 * moved, 7 * product),
    ]
    tried = LARGE_LAUNCHES if width > 128 else GROUPED_LAUNCHES
    chosen = length != 4096 or flash_launch.takes_warps(q, k, False, None)
    for kernel, launches in () if chosen else tried.items():
        work, products = (forward, 2) if kernel == "forward" else (backward, 5)
        variants = {"x".join(map(str, how)): launched(kernel, how, work) for how in launches}
        cases.append(Case(f"launches of {kernel} in {work.__name__} {name}", variants, moved, products * product))
    return cases


def windowed(batch: int, length: int, heads: int, kv_heads: int, width: int, window: int = 1024) -> list[Case]:
    """A window, all columns, and PyTorch's own, which sees all. The floor is that of the columns of a window."""
    sizes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads)]
    leaves = [torch.randn(size, device="cuda").bfloat16().requires_grad_() for size in sizes]
    grad = torch.randn(sizes[0], device="cuda").bfloat16()
    spans = spans_of_window(window, batch, length, grad.device)
    pairs, seen = length * (length + 1) / 2, window * (window + 1) / 2 + (length - window) * window
    product = 2 * batch * heads * seen * width
    moved = sum(t.nbytes for t in leaves) + grad.nbytes
    name = f"B{batch} T{length} N{heads} G{kv_heads} D{width}, window of {window}: {seen / pairs:.4f} of the columns"

    def pytorch() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in leaves)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    functions = {
        "window": lambda: causal_attention(*leaves, backend="flash", rule=AttentionRule(window=window)),
        "window, its bounds at hand": lambda: flash.flash_attention(*leaves, spans=spans),
        "all columns": lambda: causal_attention(*leaves, backend="flash"),
        "PyTorch, all columns": pytorch,
    }
    both = {k: lambda f=f: torch.autograd.grad(f(), leaves, grad) for k, f in functions.items()}
    for how in (LARGE_LAUNCHES if width > 128 else GROUPED_LAUNCHES)["forward"]:
        functions["x".join(map(str, how))] = launched("forward", how, functions["window, its bounds at hand"])
    return [
        Case(f"forward {name}", functions, moved, 2 * product),
        Case(f"forward and backward {name}", both, 3 * moved, 7 * product),
    ]


def cases(arguments: list[str]) -> list[Case]:
    if "--windows" in arguments:
        return [case for shape in WINDOWS for case in windowed(*shape)]
    if "--grouped" in arguments:
        return [case for shape in GROUPED for case in grouped(*shape)]
    kept_apart = [apart(16, 16, mean) for mean in (4096, 512, 128)]
    if "--documents" in arguments:
        return kept_apart
    packed = parts(16, 16) + [case for size in SIZES for case in whole(*size)]
    whole_windows = [case for shape in WINDOWS for case in windowed(*shape)]
    return packed + [case for shape in GROUPED for case in grouped(*shape)] + kept_apart + whole_windows


if __name__ == "__main__":
    run_cases(cases(sys.argv[1:]))

"""How the kernels of `flash` are launched: which, with which tiles, and on what memory.

`FLASH` has them in order of preference. The choice depends on the model, the GPU and the version of Triton, never on
the number of samples and heads, and on T only where no bits do.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.ops.kernels.devices import GLUON_VERSIONS, has_gluon, has_hopper, multiprocessors, shared_memory, why_below
from dtgpt.ops.operation import Kernel
from dtgpt.ops.random.dropout import keep_scale, threshold
from dtgpt.util.shared.gpu_limits import HOPPER, SIXTEEN_BITS, TRITON
from dtgpt.util.shared.ordered_sums import sum_by_halves
from dtgpt.util.torch_private import constant_result

LOG2_E = 1 / math.log(2)
WORD = 64  # decisions of dropout in a word, as in `flash_mask`
PLACES = 1 << 31  # that 32 bits tell apart
BAND = 32  # heads whose keys and values should fit in the L2 cache together


class FlashLaunch(NamedTuple):
    """Tile sizes and compile options of a kernel."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


Launches = dict[str, FlashLaunch]
NARROW = {
    "forward": FlashLaunch(64, 64, 4, 3),
    "keys": FlashLaunch(64, 64, 4, 3),
    "queries": FlashLaunch(64, 64, 4, 2),
}  # D <= 64
NARROW_DROPPING = NARROW | {"queries": FlashLaunch(64, 64, 4, 3)}  # whose words take the registers of a fourth program
NARROW_GROUPED = NARROW | {"forward": FlashLaunch(64, 128, 4, 2)}  # where NARROW_TILES serve training
WIDE = {"forward": FlashLaunch(128, 64, 8, 2), "keys": FlashLaunch(64, 64, 8, 2), "queries": FlashLaunch(64, 64, 4, 2)}
SINGLE = {
    "forward": FlashLaunch(32, 64, 8, 1),
    "keys": FlashLaunch(16, 64, 8, 1),
    "queries": FlashLaunch(32, 64, 8, 1),
}  # fp32
NARROW_TILES = {
    "forward": FlashLaunch(64, 128, 4, 2),
    "keys": FlashLaunch(64, 64, 4, 3),
    "queries": FlashLaunch(64, 64, 4, 2),
}
WIDE_TILES = {
    "forward": FlashLaunch(64, 64, 4, 3),
    "keys": FlashLaunch(64, 64, 4, 2),
    "queries": FlashLaunch(64, 64, 4, 2),
}
WARP_ROWS = 64  # of a tile of `warp_kernels`; a program computes one for each of its groups of warps
WARPS = {
    "forward": FlashLaunch(3 * WARP_ROWS, WARP_ROWS, 4, 2),
    "keys": FlashLaunch(WARP_ROWS, 2 * WARP_ROWS, 4, 2),
    "queries": FlashLaunch(2 * WARP_ROWS, WARP_ROWS, 4, 3),
}
SHORT = 2048  # T below which programs of fewer queries read fewer columns that they hide
BOUNDED = 8192  # T from which they serve documents and windows, too: documents of 256 tokens are faster without them
WARPS_OF_SHORT = WARPS | {"forward": FlashLaunch(2 * WARP_ROWS, WARP_ROWS, 4, 2)}
LARGE = {
    "forward": FlashLaunch(128, 64, 8, 2),
    "keys": FlashLaunch(32, 64, 8, 2),
    "queries": FlashLaunch(64, 64, 8, 1),
}  # D > 128
LARGE_TILES = {
    "forward": FlashLaunch(128, 64, 8, 2),
    "keys": FlashLaunch(64, 64, 8, 2),
    "queries": FlashLaunch(64, 64, 4, 2),
}
LARGE_MEMORY = 200_000  # bytes of shared memory that suffice for LARGE and LARGE_TILES
EXACT_STAGES, EXACT_STAGES_OF_MANY = 3, 2  # the latter leave memory for more programs, where there are CROWDED of them
CROWDED = 3  # programs for each multiprocessor


class Call:
    """The arguments that the kernels of one operation share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, p: float, words: Tensor | None, spans: Tensor | None,
        scale: float | None,
    ):  # fmt: skip
        """words: keep decisions in the layout of `flash_mask`, or None."""
        from dtgpt.ops.kernels.attention import descriptor_kernels, flash_kernels

        self.kernels, self.descriptor_kernels = flash_kernels, descriptor_kernels
        self.q, self.k, self.v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        self.batch, self.length, self.heads, self.size = q.shape
        self.columns, self.kv_heads = k.shape[1:3]
        self.sizes = (self.length, self.columns - self.length or None, self.heads)
        self.places = self.batch * self.heads
        self.shape = {"D": self.size, "WIDTH": max(16, 1 << (self.size - 1).bit_length())}
        self.words, self.rescale = words, 1.0 if words is None else keep_scale(p)
        self.count = 0 if words is None else words.shape[1]
        self.spans = None if spans is None else spans.contiguous()
        self.scale = 1 / math.sqrt(self.size) if scale is None else scale
        gains = words is None and gains_by_tiles(q.dtype, self.heads, self.kv_heads, self.size, q.device)
        served = next(kernel for kernel in FLASH if kernel.serves(q, k, words is not None, spans))
        self.by_warps, self.by_tiles = served is FLASH[0], served is not FLASH[-1]
        launches = launches_of(q.dtype, self.size, self.by_tiles, gains, words is not None)
        if self.by_warps:
            launches = WARPS_OF_SHORT if self.length < SHORT else WARPS
        self.launches = launches

    def draw(self, key: Tensor, p: float, head_start: int) -> None:
        """Draw the keep decisions."""
        from dtgpt.ops.kernels.attention.flash_mask import draw_kernel

        assert self.words is not None
        grid = (self.places, math.ceil(self.columns / WORD))
        draw_kernel[grid](
            key, *key.stride(), self.words, self.spans, *self.sizes, self.count, head_start, threshold(p),
            SHUFFLE=self.q.is_cuda, SPANS=self.spans is not None,
        )  # fmt: skip

    def forward(self, out: Tensor, sums: Tensor, sinks: Tensor | None) -> None:
        """Compute the output and the logarithms of the sums."""
        if self.by_tiles:
            self._run_tiles("forward", (), out, sums, sinks, made=out)
        else:
            self._run("forward", out, sums, sinks)

    def backward(
        self, grad: Tensor, out: Tensor, sums: Tensor, pairs: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> None:
        """Compute the gradients; pairs: memory `[B, N, T, 2]` for sums of the first kernel."""
        scale = (self.scale,)
        if self.by_tiles:
            self._run_tiles("queries", (grad,), out, sums, pairs, dq, made=dq, scale=scale)
            self._run_tiles("keys", (grad,), pairs, dk, dv, made=dk, scale=scale)
        else:
            self._run("queries", out, grad, sums, pairs, dq, made=dq, scale=scale)
            self._run("keys", grad, pairs, dk, dv, made=dk, scale=scale)

    def _run(
        self, name: str, *tensors: Tensor | None, made: Tensor | None = None, scale: tuple[float, ...] = ()
    ) -> None:
        """Launch a kernel of `flash_kernels`. made: the output with strides of its own."""
        q, k, v = _readable(self.q, self.k, self.v)
        strided = (q, k) if made is None else (q, k, made)
        grid, places, constants = self._tiles(name)
        long = self.columns * max(self.heads * self.size, q.stride(1), k.stride(1)) >= PLACES
        getattr(self.kernels, f"{name}_kernel")[grid](
            q, k, v, *tensors, None if self.words is None else self.words.view(torch.int32), self.spans,
            *(stride for tensor in strided for stride in tensor.stride()[:3]), *self.sizes, self.count, places,
            LOG2_E * self.scale, self.rescale, *scale, **self.shape, **constants, LONG=long,
            DROP=self.words is not None,
        )  # fmt: skip

    def _run_tiles(
        self, name: str, read: tuple[Tensor, ...], *tensors: Tensor | None, made: Tensor, scale: tuple[float, ...] = ()
    ) -> None:
        """Launch a kernel of `warp_kernels` or `descriptor_kernels`. read: what it reads beside q, k and v, in tiles of
        queries."""
        how, sources = self.launches[name], (self.q, self.k, self.v, *read)
        grid, places, constants = self._tiles(name)
        rest = self.spans, *made.stride()[:3], self.length, self.heads, places, LOG2_E * self.scale, *scale
        if self.by_warps:
            from dtgpt.ops.kernels.attention import warp_kernels

            described = (_describe(t, WARP_ROWS, True) for t in sources)
            shared = {key: constants[key] for key in ("GROUP", "BLOCK_M", "BLOCK_N", "BAND", "num_warps")}
            kernel = getattr(warp_kernels, f"{name}_by_warps")
            kernel[grid](*described, *tensors, *rest, **shared, STAGES=how.num_stages)
        else:
            rows = (how.BLOCK_M, how.BLOCK_N, how.BLOCK_N, *(how.BLOCK_M for _ in read))
            described = (_describe(t, r) for t, r in zip(sources, rows, strict=True))
            kernel = getattr(self.descriptor_kernels, f"{name}_by_tiles")
            kernel[grid](*described, *tensors, *rest, D=self.size, **constants)

    def _tiles(self, name: str) -> tuple[tuple[int], int, dict[str, Any]]:
        """Return (grid, number of pairs of sample and head, constants) of a kernel over tiles of keys or of queries."""
        how, of_keys = self.launches[name], name == "keys"
        tiles = math.ceil(self.columns / how.BLOCK_N) if of_keys else math.ceil(self.length / how.BLOCK_M)
        places = self.batch * self.kv_heads if of_keys else self.places
        largest = max(how.BLOCK_M, how.BLOCK_N)
        constants = {**how._asdict(), "GROUP": self.heads // self.kv_heads, "BAND": BAND}
        constants["BOUND"] = self.length % largest + self.columns % largest != 0
        return (tiles * places,), places, constants | {"SPANS": self.spans is not None}


def takes_tiles(q: Tensor, k: Tensor, drops: bool = False, spans: Tensor | None = None) -> bool:
    """Return whether `descriptor_kernels` serve q `[B, T, N, D]` and k `[B, S, N_kv, D]`."""
    (_, length, heads, size), (_, columns, kv_heads, _) = q.shape, k.shape
    return not drops and length == columns and gains_by_tiles(q.dtype, heads, kv_heads, size, q.device)


def takes_warps(q: Tensor, k: Tensor, drops: bool, spans: Tensor | None) -> bool:
    """Return whether `warp_kernels` take the place of `descriptor_kernels`, with the same bits."""
    fits = q.shape[-1] == 128 and (spans is None or q.shape[1] >= BOUNDED)
    return fits and takes_tiles(q, k, drops) and has_gluon(q.device)


def why_no_warps(device: torch.device) -> str | None:
    """Return why `warp_kernels` do not run on a device; None where they do."""
    reason = why_below(HOPPER, device)
    if reason is None and not has_gluon(device):
        return f"they need a Hopper GPU (9.0) and Triton {GLUON_VERSIONS[0]}x"
    return reason


FLASH = (
    Kernel(
        name="warp_kernels",
        serves=takes_warps,
        run=Call._run_tiles,
        why_not=why_no_warps,
        when="what descriptor_kernels serve, with heads of 128: faster, with the same bits; documents and windows from "
        "8,192 tokens on",
    ),
    Kernel(
        name="descriptor_kernels",
        serves=takes_tiles,
        run=Call._run_tiles,
        why_not=partial(why_below, HOPPER),
        when="16 bits, no dropout, as many queries as columns; heads of 128 and 256, and those of 64 that share keys",
    ),
    Kernel(  # heads of 64 that share no keys are as fast by these
        name="flash_kernels",
        serves=lambda q, k, drops, spans: True,
        run=Call._run,
        why_not=partial(why_below, SIXTEEN_BITS),
        when="all else",
    ),
)


def gains_by_tiles(dtype: torch.dtype, heads: int, kv_heads: int, size: int, device: torch.device) -> bool:
    """Return whether `descriptor_kernels` serve such heads without dropout, in samples without earlier columns."""
    gains = size in (128, 256) or (size == 64 and kv_heads < heads)
    return dtype.itemsize == 2 and gains and has_hopper(device)


def launches_of(dtype: torch.dtype, size: int, by_tiles: bool, gains: bool, drops: bool) -> Launches:
    """Return the launches of the kernels. Tiles of keys in `forward` are as wide in `flash_kernels` as in the kernels
    that serve other lengths of the same heads, since the order of sums follows from them."""
    if dtype == torch.float32:
        return SINGLE
    if by_tiles:
        return NARROW_TILES if size <= 64 else WIDE_TILES if size <= 128 else LARGE_TILES
    if size > 64:
        return WIDE if size <= 128 else LARGE
    return NARROW_DROPPING if drops else NARROW_GROUPED if gains else NARROW


@constant_result
def largest_head(dtype: torch.dtype, device: torch.device) -> int:
    """Return the largest D that the kernels take: 256 in 16 bits where a program may use as much shared memory as on a
    Hopper GPU, else 128. 0: a GPU is here without Triton; a plan for other machines supposes that they have it."""
    if not TRITON and torch.cuda.is_available():
        return 0
    return 256 if dtype.itemsize == 2 and shared_memory(device) >= LARGE_MEMORY else 128


def exact_launch(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, rows: int, device: torch.device
) -> FlashLaunch:
    """Return the launch of a kernel for one query each of some heads of `rows` samples, with the bits of `forward`: as
    wide tiles of keys, and rows of scores that one warp holds, or in fp32 the same threads."""
    if dtype == torch.float32:
        return SINGLE["forward"]
    gains = gains_by_tiles(dtype, heads, kv_heads, size, device)
    keys = launches_of(dtype, size, False, gains, False)["forward"].BLOCK_N
    wanted = EXACT_STAGES if kv_heads * rows < CROWDED * multiprocessors(device) else EXACT_STAGES_OF_MANY
    stages = min(wanted, shared_memory(device) // (2 * keys * size * dtype.itemsize))
    return FlashLaunch(BLOCK_M=16, BLOCK_N=keys, num_warps=1, num_stages=max(stages, 1))


def _describe(x: Tensor, rows: int, gluon: bool = False) -> Any:
    """Return a descriptor of x `[B, T, N, D]` as `[B, N, T, D]`, read in tiles `[rows, D]`. Rows start at multiples of
    16 bytes, as the copy engine needs. gluon: for a kernel in Gluon, which is told how tiles lie in shared memory."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if x.data_ptr() % 16 or any(stride * x.element_size() % 16 for stride in x.stride()[:3]):
        x = x.contiguous()
    x = x.transpose(1, 2)
    described = x, list(x.shape), list(x.stride()), [1, 1, rows, x.shape[-1]]
    if not gluon:
        return TensorDescriptor(*described)
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia import hopper

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=4)
    return hopper.TensorDescriptor(*described, layout)


def _readable(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return q, k, v as `flash_kernels` read them: k and v with common strides, and None for a v right after k."""
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    return q, k, None if v.data_ptr() - k.data_ptr() == k.shape[-1] * k.element_size() else v


def mask_words(queries: int, columns: int) -> int:
    """Return how many words hold the keep decisions of a head for `queries` (T) and `columns` (S): one for 64 columns
    of a query and one for 64 queries of a column. Where S = T, those that causality hides whole are left out."""
    groups, rows = math.ceil(columns / WORD), math.ceil(queries / WORD)
    if queries != columns:
        return groups * queries + rows * columns
    return groups * queries + WORD * groups  # triangles: less 64 g (g - 1) / 2 of one, 64 g (g + 1) / 2 of the other


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, p: float, head_start: int, spans: Tensor | None,
    scale: float | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the kernels of the operation `flash_forward`."""
    (batch, length, heads, _), columns = q.shape, k.shape[1]
    words = q.new_empty(batch * heads, 0 if key is None else mask_words(length, columns), dtype=torch.int64)
    call = Call(q, k, v, p, None if key is None else words, spans, scale)
    out = q.new_empty(q.shape)
    sums = q.new_empty(batch, heads, length, dtype=torch.float32)
    if key is not None:
        call.draw(key, p, head_start)
    call.forward(out, sums, None if sinks is None else sinks.contiguous())
    return out, sums, words


def launch_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, kept: Tensor, p: float,
    spans: Tensor | None, packed: bool, scale: float | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the kernels of the operation `flash_backward`."""
    call = Call(q, k, v, p, kept if kept.numel() else None, spans, scale)
    pairs = sums.new_empty(*sums.shape, 2)
    if packed:
        gradient = q.new_empty(*q.shape[:3], 3, q.shape[3])
        dq, dk, dv = gradient.unbind(3)
    else:
        dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    call.backward(grad, out, sums, pairs, dq, dk, dv)
    # The kernels' sums of products leave out the factor of what dropout keeps.
    d_sinks = q.new_empty(0) if sinks is None else sinks_gradient(sinks, sums, pairs[..., 1] * call.rescale)
    return (gradient, q.new_empty(0), q.new_empty(0), d_sinks) if packed else (dq, dk, dv, d_sinks)


def sinks_gradient(sinks: Tensor, sums: Tensor, products: Tensor) -> Tensor:
    """Return the gradient of sinks `[N]`: less the probability of each times `products`, the sums of out * grad over D.
    sums, the binary logarithms of the sums of exponentials, and products: `[B, N, T]`."""
    shares = torch.exp2(sinks.to(sums.dtype)[:, None] * LOG2_E - sums)
    rows = (shares * products).transpose(0, 1).flatten(1)
    return -sum_by_halves(rows)[:, 0].to(sinks.dtype)

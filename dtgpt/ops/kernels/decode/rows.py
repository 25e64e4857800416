"""Launch the CUDA kernels of transformer blocks for one token each of a few sequences, `rows.cu`.

Five launches a block. The kernels are built for the sizes of one model when they are first needed, which takes some
seconds once a machine. Sharding rule: that of `blocks`; tensor-parallel ranks send their parts of a branch to each
other, and sum them in the norm that follows.
"""

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.ops.kernels.decode.exchange import Exchange, Fields
from dtgpt.ops.kernels.decode.weights import BlockWeights, Rotary
from dtgpt.ops.kernels.devices import has_hopper, multiprocessors, why_below, why_no_build
from dtgpt.ops.kernels.extension import library
from dtgpt.util.shared.gpu_limits import HOPPER

SOURCE = Path(__file__).with_name("rows.cu")
MOST_ROWS, MOST_ROWS_OF_LARGE = 4, 2  # beyond, the kernels of `kernels.py` are as fast; large: not all weights are kept
MOST_KEPT = 4  # chains of a warp whose weights fit into its registers
MOST_LARGE = 8192  # H and F: beyond, the inputs leave no room for a ring of weights
SPLIT = SEGMENT = 128  # positions of attention; columns of a chain
WARPS, TILE = 8, 8
LEVEL = WARPS * TILE * (2 * SEGMENT + 16)  # bytes of a ring: a piece for each warp
MOST_BYTES = 110 * 1024  # of shared memory of a CTA
LONGEST = 8192  # positions of a slot: beyond, each CTA of a projection would merge too many splits
TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}


class Sizes(NamedTuple):
    """The sizes of a model, for which the kernels are built."""

    type: str
    hidden: int  # H
    inner: int  # F
    packed: int  # N_kv (R + 2) D
    width: int  # N D
    head: int  # D
    kv_heads: int
    length: int  # positions of a slot
    ranks: int  # of tensor parallelism; the other sizes are those of one
    rms: int = 0  # whether norms are RMSNorms
    gated: int = 0  # whether the MLP is SwiGLU, whose first matrix has 2 F rows
    rotary: int = 0  # whether positions are: 1; after a norm of each head of q and k: 2
    biases: int = 2  # of the products: 0 of none, 1 of some, 2 of all


class Gpu(NamedTuple):
    """What the kernels are built for, besides."""

    multiprocessors: int
    room: int  # bytes of shared memory of a CTA, of which two fit on a multiprocessor and three do not


class Product(ctypes.Structure):
    """The arguments of a product; `product.cuh` has the meaning of the fields."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "x", "norm_weight", "norm_bias", "partial", "state")),
        *((name, ctypes.c_void_p) for name in ("residual", "out", "keys", "values", "slots", "positions")),
        *((name, ctypes.c_void_p) for name in ("branch_bias", "stream")),
        *((name, ctypes.c_int) for name in ("rows", "dependent")),
        ("eps", ctypes.c_float),
        ("index", ctypes.c_int),
        ("exchange", Fields),
    )


class Attention(ctypes.Structure):
    """The arguments of attention; `attention.cuh` has the meaning of the fields."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "partial", "state", "slots", "positions")),
        ("rows", ctypes.c_int),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("table", "q_norm", "k_norm")),
        ("places", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


STRUCTS = (("Product", Product), ("Attention", Attention), ("Exchange", Fields))  # that rows.cu has, too


def most_rows(sizes: Sizes, ctas: int) -> int:
    """Return the number of rows up to which the kernels serve a model of these sizes, 0 where they do not. `ctas`: the
    multiprocessors over which rows of a weight are spread."""
    heads = sizes.packed // sizes.head
    small = max(sizes.hidden, sizes.inner, sizes.width) <= MOST_LARGE and sizes.length <= LONGEST
    known = small and sizes.head in (64, 128) and heads <= 10 * sizes.kv_heads and sizes.head * heads == sizes.packed
    unit = 1 + sizes.gated  # rows of a weight that stay together
    products = (
        (sizes.packed, sizes.hidden),
        (sizes.hidden, sizes.width),
        (unit * sizes.inner, sizes.hidden),
        (sizes.hidden, sizes.inner),
    )
    if not known or any(size % (SEGMENT // 2) for _, size in products):
        return 0

    def tiles(columns: int) -> int:
        return math.ceil(unit * math.ceil(columns / unit / ctas) / TILE)

    def kept(columns: int, size: int) -> bool:
        return tiles(columns) * math.ceil(size / SEGMENT / WARPS) <= MOST_KEPT and size % SEGMENT == 0

    def fits_a_ring(columns: int, size: int) -> bool:
        """Return whether a ring of two levels fits beside the inputs and the partial sums."""
        row = math.ceil(size / SEGMENT) * tiles(columns) * TILE * 4 + 2 * size + 16
        return WARPS * 16 + MOST_ROWS_OF_LARGE * row + 2 * LEVEL <= MOST_BYTES

    if all(kept(*product) for product in products):
        return MOST_ROWS
    return MOST_ROWS_OF_LARGE if all(kept(*product) or fits_a_ring(*product) for product in products) else 0


def flags(sizes: Sizes, gpu: Gpu) -> tuple[str, ...]:
    """Return the flags of nvcc that give the sources their sizes."""
    named = {**sizes._asdict(), "ctas": gpu.multiprocessors, "room": gpu.room}
    return tuple(f"-DDTGPT_{name.upper()}={value}" for name, value in named.items())


def serves(block: BlockWeights) -> bool:
    """Return whether the kernels compute blocks of this kind: with norms that are alike, GELU, or SwiGLU without a
    bias, learned or rotary positions."""
    if block.router is not None or block.joint is not None:
        return False
    rotary, activation = block.rotary, block.activation
    alike = (block.norm_1_bias is None) == (block.norm_2_bias is None)
    known = activation == "gelu" or (activation == "swiglu" and block.fc_bias is None)
    return alike and known and (rotary is None or (rotary.q_norm is None) == (rotary.k_norm is None))


def sizes_of(block: BlockWeights, keys: Tensor, ranks: int = 1) -> Sizes:
    """Return the sizes of a block and of its cache `[slots, N_kv, P, D]`, of one of `ranks` tensor-parallel ranks."""
    kv_heads, length, head = keys.shape[1:]
    (hidden, width), inner, rotary = block.proj.shape, block.out.shape[1], block.rotary
    there = [bias is not None for bias in (block.qkv_bias, block.proj_bias, block.fc_bias, block.out_bias)]
    return Sizes(
        TYPES[keys.dtype],
        hidden,
        inner,
        len(block.qkv),
        width,
        head,
        kv_heads,
        length,
        ranks,
        rms=int(block.norm_1_bias is None),
        gated=int(block.activation == "swiglu"),
        rotary=0 if rotary is None else 1 + rotary.normalises(),
        biases=any(there) + all(there),
    )


def why_no_rows(device: torch.device) -> str | None:
    """Return why the kernels do not run on a device; None where they do."""
    return why_below(HOPPER, device) or why_no_build(device)


@functools.cache
def kernels_for(sizes: Sizes, device: torch.device) -> "RowKernels | None":
    """Return the kernels for a model on a CUDA device, or None where there are none: on a GPU without dependent launch,
    for other sizes, and, with a warning, where they cannot be built."""
    properties = torch.cuda.get_device_properties(device)
    per_multiprocessor = getattr(properties, "shared_memory_per_multiprocessor", 0)
    gpu = Gpu(multiprocessors(device), per_multiprocessor // 3)
    if not has_hopper(device) or gpu.room < 76_000 or not most_rows(sizes, gpu.multiprocessors):
        return None
    built = library(SOURCE, device, flags(sizes, gpu), "Triton", STRUCTS)
    return None if built is None else RowKernels(built, sizes, most_rows(sizes, gpu.multiprocessors))


class RowKernels:
    """The kernels for one model."""

    def __init__(self, built: ctypes.CDLL, sizes: Sizes, most_rows: int):
        self._sizes, self.most_rows = sizes, most_rows
        self._launch = {}
        for name in ("qkv", "attention", "proj", "fc", "out", "join"):
            function = getattr(built, f"launch_{name}")
            function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_char_p
            self._launch[name] = function

    def run(
        self,
        x: Tensor,
        blocks: Sequence[BlockWeights],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        slots: Tensor,
        positions: Tensor,
        exchange: Exchange | None = None,
    ) -> Tensor:
        """Return the residual stream `[M, H]` after `blocks`, M up to `most_rows`; arguments as of `run_blocks`, blocks
        such as `serves` accepts. `exchange`: of tensor-parallel ranks. Raises RuntimeError where CUDA refuses a launch.

        A kernel begins to copy weights while others before it still run. What else it reads early, slots, positions and
        the cache of older tokens, must not be written within this call: therefore the first kernel waits for all.
        """
        rows, sizes, first = len(x), self._sizes, True
        stream = Stream(self, x) if exchange is None else SharedStream(self, x, exchange)
        splits = math.ceil(sizes.length / SPLIT)
        packed, inner = x.new_empty(rows, sizes.packed), x.new_empty(rows, sizes.inner)
        heads = sizes.width // sizes.head
        partial = x.new_empty(rows, heads, splits, sizes.head, dtype=torch.float32)
        state = x.new_empty(rows, heads, splits, 2, dtype=torch.float32)
        place = {"slots": slots, "positions": positions}
        for block, k, v in zip(blocks, keys, values, strict=True):
            cache, eps = {"keys": k, "values": v}, {"eps": block.eps}
            norm_1 = {"norm_weight": block.norm_1, "norm_bias": block.norm_1_bias, **eps, **stream.read()}
            qkv = {"weight": block.qkv, "bias": block.qkv_bias, "out": packed}
            self.launch("qkv", rows, dependent=not first, **qkv, **norm_1, **cache, **place)
            first = False
            self._attention(block.rotary, q=packed, partial=partial, state=state, **cache, **place)
            stream.add("proj", block.proj, block.proj_bias, partial=partial, state=state, positions=positions)
            norm_2 = {"norm_weight": block.norm_2, "norm_bias": block.norm_2_bias, **eps, **stream.read()}
            self.launch("fc", rows, weight=block.fc, bias=block.fc_bias, out=inner, **norm_2)
            stream.add("out", block.out, block.out_bias, x=inner)
        return stream.whole()

    def launch(self, name: str, rows: int, dependent: bool = True, **fields: Any) -> None:
        """Launch a kernel whose arguments are those of a product."""
        self._call(name, Product(rows=rows, dependent=dependent, **pointers(fields)), fields["x"].device)

    def _attention(self, rotary: Rotary | None, **fields: Any) -> None:
        rows, scale = len(fields["q"]), math.log2(math.e) / math.sqrt(self._sizes.head)
        if rotary is not None:
            fields |= {**rotary._asdict(), "places": rotary.table.shape[1]}
        self._call("attention", Attention(rows=rows, scale=scale, **pointers(fields)), fields["q"].device)

    def _call(self, name: str, arguments: Any, device: torch.device) -> None:
        with torch.cuda.device(device):
            error = self._launch[name](ctypes.byref(arguments), torch.cuda.current_stream().cuda_stream)
        if error is not None:
            raise RuntimeError(f"the decode kernel {name} cannot be launched: {error.decode()}")


def pointers(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a struct, tensors as their addresses."""
    return {key: value.data_ptr() if isinstance(value, Tensor) else value for key, value in fields.items()}


class Stream:
    """The residual stream on one GPU: a product adds its branch to it."""

    def __init__(self, kernels: RowKernels, x: Tensor):
        self._kernels, self._x = kernels, x

    def read(self) -> dict[str, Any]:
        """Return the arguments of a product that begins with the norm of the stream."""
        return {"x": self._x}

    def add(self, name: str, weight: Tensor, bias: Tensor | None, **fields: Any) -> None:
        """Launch the product of a branch."""
        out = torch.empty_like(self._x)
        fields = {"x": self._x, "weight": weight, "bias": bias, "residual": self._x, "out": out, **fields}
        self._kernels.launch(name, len(out), **fields)
        self._x = out

    def whole(self) -> Tensor:
        """Return the stream `[M, H]`."""
        return self._x


class SharedStream:
    """The residual stream of tensor-parallel ranks: a product sends its part of a branch, and the kernel that reads the
    stream next adds the sum of the parts to it."""

    def __init__(self, kernels: RowKernels, x: Tensor, exchange: Exchange):
        self._kernels, self._x, self._exchange = kernels, x, exchange
        self._bias: Tensor | None = None  # of the branch that is under way
        self._sent, self._under_way = 0, False

    def read(self) -> dict[str, Any]:
        """Return the arguments of a kernel that begins with the stream."""
        if not self._under_way:
            return {"x": self._x}
        whole, old = torch.empty_like(self._x), self._x
        joined = {"x": old, "branch_bias": self._bias, "stream": whole, **self._place()}
        self._x, self._under_way = whole, False
        return joined

    def add(self, name: str, weight: Tensor, bias: Tensor | None, **fields: Any) -> None:
        """Launch the product of a branch."""
        self._sent += 1
        self._kernels.launch(name, len(self._x), **{"x": self._x, "weight": weight, **self._place(), **fields})
        self._bias, self._under_way = bias, True

    def whole(self) -> Tensor:
        """Return the stream `[M, H]`, behind which the exchanges are complete."""
        self._kernels.launch("join", len(self._x), **self.read())
        return self._x

    def _place(self) -> dict[str, Any]:
        return {"index": self._sent - 1, "exchange": self._exchange.fields}

"""What serves the sums of pieces on a GPU. Needs Triton.

A product of 16-bit matrices that sums K in one chain of tensor-core operations has the same bits in tiles of any size,
and so has one of cuBLAS that does not split K. `tree_kernel` adds up the pieces of a tile as they are made: what
PyTorch would write for each piece is never in memory. `gradient_kernel` sums rows in chains whose number follows from
the size of a piece alone. In both a program computes several tiles in one loop, so that the copy engine reads on while
a tile ends: all that its places in memory depend on stands under one condition, or Triton would not read ahead.

Nodes that wait are packed, two bf16 numbers in a register: as 16-bit values they would take a register each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtgpt.ops.kernels.descriptors import described
from dtgpt.ops.kernels.devices import has_gluon, multiprocessors
from dtgpt.parallel.exact_tp.products import operand
from dtgpt.parallel.exact_tp.tree import tree_sum

MOST = 8  # pieces of a program
LEVELS = 2  # of nodes that wait in memory, of so many pieces
SMALL = 2**18  # numbers of a piece of a gradient below which its rows are summed in `CHAINS`
CHAINS = 4


class Tile(NamedTuple):
    """Tile sizes and compile options of a product."""

    BM: int
    BN: int
    BK: int = 64
    num_warps: int = 8
    num_stages: int = 4


TREE = Tile(128, 128)  # wider ones have no registers for a node that waits
WARPS = Tile(128, 256, num_warps=4, num_stages=3)  # of `warp_kernels`
GRADIENT = Tile(128, 256, num_stages=3), Tile(128, 128, num_warps=4)
GAIN = 1.07  # of the first of these over the second, where both have tiles for all multiprocessors


@triton.jit
def rounded(total, TYPE: tl.constexpr, PACKED: tl.constexpr):
    """Return fp32 `[M, N]` in 16 bits: PACKED as int32 `[M, N / 2]`, two neighbours in each number."""
    M: tl.constexpr = total.shape[0]
    N: tl.constexpr = total.shape[1]
    if PACKED:
        a, b = tl.split(tl.reshape(total, (M, N // 2, 2)))
        made = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], tl.int32, True, 1)
    else:
        made = total.to(TYPE)
    return made


@triton.jit
def added(left, right, TYPE: tl.constexpr, PACKED: tl.constexpr):
    """Return the sum of two nodes, rounded. PACKED rounds once: what fp32 would cut off is far below half a unit."""
    if PACKED:
        made = tl.inline_asm_elementwise("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], tl.int32, True, 1)
    else:
        made = (left.to(tl.float32) + right.to(tl.float32)).to(TYPE)
    return made


@triton.jit
def unpacked(node, PACKED: tl.constexpr):
    """Return a node as numbers `[M, N]`."""
    if PACKED:
        types: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        a, b = tl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [node], types, True, 1)
        node = tl.reshape(tl.join(a, b), (node.shape[0], node.shape[1] * 2))
    return node


@triton.jit
def keep(places, level, node, PACKED: tl.constexpr):
    """Write a node of a level to the `places` of a program, each thread its own numbers."""
    at = places + level * (node.shape[0] * node.shape[1] * (4 if PACKED else 1))
    if PACKED:  # tl.store would move the numbers between threads first
        tl.inline_asm_elementwise("st.global.b32 [$1], $2; mov.b32 $0, $2;", "=r,l,r", [at, node], tl.int32, False, 1)
    else:
        tl.store(at, node)


@triton.jit
def kept(places, level, PACKED: tl.constexpr):
    """Return the node of a level, which the same threads have kept."""
    at = places + level * (places.shape[0] * places.shape[1] * (4 if PACKED else 1))
    if PACKED:
        node = tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [at], tl.int32, False, 1)
    else:
        node = tl.load(at)
    return node


@triton.jit
def places_of(memory, BM: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """Return where a program has the numbers of its first node, `[BM, WIDTH]`: pointers, or if PACKED addresses. Those
    of the threads of a warp are neighbours."""
    r, c = tl.arange(0, BM)[:, None], tl.arange(0, WIDTH)[None, :]
    begin, within = tl.program_id(0).to(tl.int64) * (2 * BM * WIDTH), (c // 4 * BM + r) * 4 + c % 4
    return hidden(memory) + begin * 4 + within.to(tl.int64) * 4 if PACKED else memory + begin + within


@triton.jit
def hidden(memory):
    """Return the address in a way that hides where it is from: else the compiler computes that of each number before
    the loop, and has no registers left."""
    return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [memory.to(tl.int64)], tl.int64, False, 1)


@triton.jit
def corner(tile, down, across, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and column of a tile; GROUP rows of tiles share the columns in L2."""
    first = tile // (GROUP * across) * GROUP
    high = tl.minimum(down - first, GROUP)
    inner = tile % (GROUP * across)
    return (first + inner % high) * BM, inner // high * BN


@triton.jit
def tree_kernel(
    x, w, out, memory, down, across, steps,
    COUNT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BY_INPUTS: tl.constexpr,
    PACKED: tl.constexpr, GROUP: tl.constexpr = 8,
):  # fmt: skip
    """Write tiles of the sum of COUNT pieces of K, `steps` BK each: x `[M, COUNT K]`, w `[N, COUNT K]` where it is
    BY_INPUTS, else `[COUNT K, N]`, and out `[M, N]`, all descriptors; M is `down` BM, N `across` BN. memory: of each
    program two nodes, which wait there, of two pieces and of four; that of one piece waits in registers."""
    WIDTH: tl.constexpr = BN // 2 if PACKED else BN
    TYPE: tl.constexpr = x.dtype
    programs = tl.num_programs(0)
    tile = tl.program_id(0)
    own = (down * across - tile + programs - 1) // programs
    of_tile = steps * COUNT
    total = tl.zeros((BM, BN), tl.float32)
    waiting = tl.zeros((BM, WIDTH), memory.dtype.element_ty)
    tile -= programs
    at = -1
    step = -1
    piece = 0
    row = 0
    column = 0
    for _ in range(own * of_tile):
        at = tl.where(at == of_tile - 1, 0, at + 1)
        step = tl.where(step == steps - 1, 0, step + 1)
        piece = tl.where(at == 0, 0, tl.where(step == 0, piece + 1, piece))
        if at == 0:
            tile += programs
            row, column = corner(tile, down, across, BM, BN, GROUP)
        k = at * BK
        w_part = w.load([column, k]).T if BY_INPUTS else w.load([k, column])
        total = tl.dot(x.load([row, k]), w_part, total)
        if step == steps - 1:
            made = rounded(total, TYPE, PACKED)
            total = tl.zeros((BM, BN), tl.float32)
            places = places_of(memory, BM, WIDTH, PACKED)
            if COUNT == 1:
                out.store([row, column], unpacked(made, PACKED))
            elif piece % 2 == 0:
                waiting = made
            else:
                made = added(waiting, made, TYPE, PACKED)
                if COUNT == 2:
                    out.store([row, column], unpacked(made, PACKED))
                elif piece % 4 == 1:
                    keep(places, 0, made, PACKED)
                else:
                    made = added(kept(places, 0, PACKED), made, TYPE, PACKED)
                    if COUNT == 4:
                        out.store([row, column], unpacked(made, PACKED))
                    elif piece == 3:
                        keep(places, 1, made, PACKED)
                    else:
                        made = added(kept(places, 1, PACKED), made, TYPE, PACKED)
                        out.store([row, column], unpacked(made, PACKED))


def tree_product(x: Tensor, weight: Tensor, count: int, by_inputs: bool) -> Tensor:
    """Return the sum over `count` pieces of K of x `[M, K]` and a weight, `[N, K]` where pieces are of its inputs, else
    `[K, N]`."""
    x, weight, parts = operand(x), operand(weight), max(1, count // MOST)
    pairs = zip(x.chunk(parts, 1), weight.chunk(parts, int(by_inputs)), strict=True)
    return tree_sum(_launch_tree(*pair, count // parts, by_inputs) for pair in pairs)


def _launch_tree(x: Tensor, weight: Tensor, count: int, by_inputs: bool) -> Tensor:
    (rows, size), columns = x.shape, weight.shape[0 if by_inputs else 1]
    tile, packed = TREE, x.is_cuda
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if columns % WARPS.BN == 0 and has_gluon(x.device):
        return _launch_warps(x, weight, out, count, by_inputs)
    down, across = rows // tile.BM, columns // tile.BN
    programs = min(down * across, programs_of(x.device))
    numbers = programs * LEVELS * tile.BM * tile.BN
    memory = torch.empty(numbers // 2 if packed else numbers, dtype=torch.int32 if packed else x.dtype, device=x.device)
    block = [tile.BN, tile.BK] if by_inputs else [tile.BK, tile.BN]
    tree_kernel[(programs,)](
        described(x, tile.BM, tile.BK), described(weight, *block), described(out, tile.BM, tile.BN), memory,
        down, across, size // count // tile.BK,
        COUNT=count, BM=tile.BM, BN=tile.BN, BK=tile.BK, BY_INPUTS=by_inputs, PACKED=packed,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _launch_warps(x: Tensor, weight: Tensor, out: Tensor, count: int, by_inputs: bool) -> Tensor:
    """Compute what `tree_kernel` does in wider tiles, whose halves two groups of warps compute."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from dtgpt.parallel.exact_tp.warp_kernels import tree_by_warps

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows, columns = out.shape
    down, across = rows // WARPS.BM, columns // WARPS.BN
    programs = min(down * across, programs_of(x.device))
    memory = torch.empty(programs, WARPS.BM * WARPS.BN // 2, dtype=torch.int32, device=x.device)
    half = WARPS.BM // 2
    blocks = [half, WARPS.BK], [WARPS.BN, WARPS.BK] if by_inputs else [WARPS.BK, WARPS.BN], [half, WARPS.BN]
    pairs = zip((x, weight, out), blocks, strict=True)
    tree_by_warps[(programs,)](
        *(TensorDescriptor(t, list(t.shape), list(t.stride()), block, layout) for t, block in pairs),
        memory, down, across, x.shape[1] // count // WARPS.BK,
        COUNT=count, BY_INPUTS=by_inputs, STAGES=WARPS.num_stages, GROUP=8, num_warps=WARPS.num_warps,
    )  # fmt: skip
    return out


def programs_of(device: torch.device) -> int:
    """Return the programs that run at once; where kernels are interpreted, two."""
    return multiprocessors(device) if device.type == "cuda" else 2


def fits(rows: int, columns: int, terms: int) -> bool:
    """Return whether `tree_product` serves so many rows and columns of a product, and terms of a piece: whole tiles."""
    return rows % TREE.BM == columns % TREE.BN == terms % TREE.BK == 0


@triton.jit
def gradient_kernel(
    dy, x, out, parts, down, across, steps,
    CHAINS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    GROUP: tl.constexpr = 8,
):  # fmt: skip
    """Write tiles of dy^T x, dy `[M, N]`, x `[M, K]`, summed over rows in CHAINS of `steps` BK each: one to out
    `[N, K]`, several to parts fp32 `[CHAINS, N, K]`, each a tile of its own. dy, x and out are descriptors; N is `down`
    BM, K `across` BN."""
    programs = tl.num_programs(0)
    tile = tl.program_id(0)
    own = (down * across * CHAINS - tile + programs - 1) // programs
    total = tl.zeros((BM, BN), tl.float32)
    tile -= programs
    at = -1
    chain = 0
    row = 0
    column = 0
    for _ in range(own * steps):
        at = tl.where(at == steps - 1, 0, at + 1)
        if at == 0:
            tile += programs
            row, column = corner(tile // CHAINS, down, across, BM, BN, GROUP)
            chain = tile % CHAINS
        m = (chain * steps + at) * BK
        total = tl.dot(dy.load([m, row]).T, x.load([m, column]), total)
        if at == steps - 1:
            if CHAINS == 1:
                out.store([row, column], total.to(dy.dtype))
            else:
                r = tl.cast(chain, tl.int64) * (down * BM) + row + tl.arange(0, BM)[:, None]
                if PACKED:  # as in `keep`
                    a, b = tl.split(tl.reshape(total, (BM, BN // 2, 2)))
                    at_part = r * (across * BN) + column + 2 * tl.arange(0, BN // 2)[None, :]
                    tl.inline_asm_elementwise(
                        "st.global.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0;",
                        "=r,l,f,f", [hidden(parts) + 4 * at_part, a, b], tl.int32, False, 1,
                    )  # fmt: skip
                else:
                    tl.store(parts + r * (across * BN) + column + tl.arange(0, BN)[None, :], total)
            total = tl.zeros((BM, BN), tl.float32)


@triton.jit
def chains_kernel(parts, out, size, CHAINS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of parts fp32 `[CHAINS, size]`, one after the other, to out `[size]`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, at < size, 0.0)
    for chain in tl.static_range(1, CHAINS):
        total += tl.load(parts + chain * size + at, at < size, 0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), at < size)


def gradient_product(dy: Tensor, x: Tensor, count: int, by_inputs: bool) -> Tensor:
    """Return dy^T x `[N, K]` of dy `[M, N]` and x `[M, K]`, of `count` pieces of K by the inputs, or N: sums in chains
    whose number follows from the size of a piece."""
    dy, x = operand(dy), operand(x)
    (rows, height), width = dy.shape, x.shape[1]
    chains = chains_of(height, width, count)
    tile = choose_gradient(height, width, chains, programs_of(x.device))
    out, packed = torch.empty(height, width, dtype=x.dtype, device=x.device), x.is_cuda
    parts = out if chains == 1 else torch.empty(chains, height, width, dtype=torch.float32, device=x.device)
    down, across = height // tile.BM, width // tile.BN
    gradient_kernel[(min(down * across * chains, programs_of(x.device)),)](
        described(dy, tile.BK, tile.BM), described(x, tile.BK, tile.BN), described(out, tile.BM, tile.BN), parts,
        down, across, rows // chains // tile.BK,
        CHAINS=chains, BM=tile.BM, BN=tile.BN, BK=tile.BK, PACKED=packed,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if chains > 1:
        chains_kernel[(triton.cdiv(out.numel(), 2048),)](parts, out, out.numel(), CHAINS=chains, BLOCK=2048)
    return out


def chains_of(height: int, width: int, count: int) -> int:
    """Return the chains of a gradient `[height, width]` of `count` pieces."""
    return 1 if height * width // count >= SMALL else CHAINS


def choose_gradient(height: int, width: int, chains: int, processors: int) -> Tile:
    """Return the tile that leaves the fewest multiprocessors without one: of the larger ones each is faster."""
    large, small = GRADIENT

    def busy(tile: Tile) -> float:
        units = height // tile.BM * (width // tile.BN) * chains
        return units / (-(-units // processors) * processors)

    return large if width % large.BN == 0 and GAIN * busy(large) >= busy(small) else small


def serves_gradient(rows: int, sizes: Sequence[int]) -> bool:
    """Return whether `gradient_product` serves so many rows and such sizes, of a piece and of the other dimension:
    whole tiles."""
    small = GRADIENT[1]
    return rows % (CHAINS * small.BK) == 0 and all(size % small.BM == 0 for size in sizes)

"""A Gluon kernel of `kernels.tree_product` whose warps have tasks of their own. Needs Triton 3.6 and a Hopper GPU.

It has the bits of `tree_kernel`. One warp of a program loads; each of two groups of four warps computes half of the
rows of a tile of 128 x 256. Nothing holds the groups in step: while one adds up pieces, the tensor cores multiply for
the other. A node is int32, two bf16 numbers in each, of which every thread has those of its own products: it waits in
registers (of one piece), in shared memory (of two), or in memory that stays in the L2 cache (of four).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS, COLUMNS, TERMS = gl.constexpr(64), gl.constexpr(256), gl.constexpr(64)  # of a group's part of a tile, and a step
NODE = gl.constexpr(64 * 256 // 2)
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
FLAT = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
KEPT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# So called until Triton 3.7.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
wait_for_group = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def _rounded(total):
    """Return fp32 `[ROWS, COLUMNS]` as a node. No number moves between threads."""
    a, b = gl.split(gl.reshape(total, (ROWS, COLUMNS // 2, 2)))
    node = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], gl.int32, True, 1)
    node = gl.permute(gl.reshape(node, (4, 2, 8, COLUMNS // 16, 2, 4)), (3, 0, 2, 5, 4, 1))
    return gl.convert_layout(gl.reshape(node, (NODE,)), FLAT)


@gluon.jit
def _added(left, right):
    """Return the sum of two nodes, rounded once: as by way of fp32, where what is cut off is far below half a unit."""
    return gl.inline_asm_elementwise("add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], gl.int32, True, 1)


@gluon.jit
def _write(out, node, place, row, column):
    """Let the copy engine write a node to out bf16 `[M, N]`, by way of its place in shared memory."""
    node = gl.permute(gl.reshape(node, (COLUMNS // 16, 4, 8, 4, 2, 2)), (1, 5, 2, 0, 4, 3))
    node = gl.reshape(node, (ROWS, COLUMNS // 2))
    a, b = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [node], (gl.bfloat16, gl.bfloat16), True, 1)
    numbers = gl.convert_layout(gl.reshape(gl.join(a, b), (ROWS, COLUMNS)), SUMS)
    place = place._reinterpret(gl.bfloat16, [ROWS, COLUMNS], out.layout)
    tma.store_wait(0)
    wait_for_group()
    place.store(numbers)
    fence_async_shared()
    wait_for_group()
    tma.async_copy_shared_to_global(out, [row, column], place)


@gluon.jit
def _corner(tile, down, across, GROUP: gl.constexpr):
    """Return the first row and column of a tile; GROUP rows of tiles share the columns in L2."""
    first = tile // (GROUP * across) * GROUP
    high = gl.minimum(down - first, GROUP)
    inner = tile % (GROUP * across)
    return (first + inner % high) * (2 * ROWS), inner // high * COLUMNS


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    slot += 1
    last = slot == STAGES
    return gl.where(last, 0, slot), phase ^ last.to(gl.int32)


@gluon.jit
def _load(x, w, xs, ws, full, empty, down, across, steps, BY_INPUTS: gl.constexpr, GROUP: gl.constexpr):
    """Load the parts of all tiles of a program, `steps` of each."""
    STAGES: gl.constexpr = full.shape[0]
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        row, column = _corner(tile, down, across, GROUP)
        for step in range(steps):
            k = step * TERMS
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), 2 * x.block_type.nbytes + w.block_type.nbytes)
            copy_tile(x, [row, k], full.index(slot), xs.index(2 * slot))
            copy_tile(x, [row + ROWS, k], full.index(slot), xs.index(2 * slot + 1))
            if BY_INPUTS:
                copy_tile(w, [column, k], full.index(slot), ws.index(slot))
            else:
                copy_tile(w, [k, column], full.index(slot), ws.index(slot))
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _add(
    PART: gl.constexpr, xs, ws, full, empty, kept, out, memory, down, across, steps,
    COUNT: gl.constexpr, BY_INPUTS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Compute the rows of the group PART of all tiles of a program; `steps` of a piece."""
    STAGES: gl.constexpr = full.shape[0]
    total = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
    waiting = gl.zeros([NODE], gl.int32, FLAT)
    memory += (gl.program_id(0) * 2 + PART) * NODE
    at = gl.arange(0, NODE, layout=FLAT)
    slot = 0
    phase = 0
    before = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        row, column = _corner(tile, down, across, GROUP)
        for piece in gl.static_range(COUNT):
            for step in range(steps):
                mbarrier.wait(full.index(slot), phase)
                part = ws.index(slot)
                if BY_INPUTS:
                    part = part.permute((1, 0))
                total = warpgroup_mma(xs.index(2 * slot + PART), part, total, use_acc=step > 0, is_async=True)
                total = warpgroup_mma_wait(1, deps=[total])
                mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
                before = slot
                slot, phase = _next(slot, phase, STAGES)
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(empty.index(before), count=1)
            made = _rounded(total)
            if piece % 2 == 0 and COUNT > 1:
                waiting = made
            else:
                if COUNT > 1:
                    made = _added(waiting, made)
                if piece % 4 == 3:
                    made = _added(kept.index(PART).load(FLAT), made)
                if piece == 7:
                    made = _added(gl.load(memory + at), made)
                if piece == COUNT - 1:
                    _write(out, made, kept.index(PART), row + PART * ROWS, column)
                elif piece % 4 == 1:
                    if piece == 1:  # what was written of the last tile has left its place
                        tma.store_wait(0)
                        wait_for_group()
                    kept.index(PART).store(made)
                else:
                    gl.store(memory + at, made)
    tma.store_wait(0)


@gluon.jit
def tree_by_warps(
    x, w, out, memory, down, across, steps,
    COUNT: gl.constexpr, BY_INPUTS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Write tiles of the sum of COUNT pieces of K, `steps` of 64 each: arguments are those of `kernels.tree_kernel`,
    but that `memory` has one node of each group. x is read in blocks `[64, 64]`, w `[256, 64]` or `[64, 256]`, and out
    is written in blocks `[64, 256]`."""
    xs = gl.allocate_shared_memory(x.dtype, [2 * STAGES, ROWS, TERMS], x.layout)
    if BY_INPUTS:
        ws = gl.allocate_shared_memory(w.dtype, [STAGES, COLUMNS, TERMS], w.layout)
    else:
        ws = gl.allocate_shared_memory(w.dtype, [STAGES, TERMS, COLUMNS], w.layout)
    kept = gl.allocate_shared_memory(gl.int32, [2, NODE], KEPT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_add, (0, xs, ws, full, empty, kept, out, memory, down, across, steps, COUNT, BY_INPUTS, GROUP)),
            (_add, (1, xs, ws, full, empty, kept, out, memory, down, across, steps, COUNT, BY_INPUTS, GROUP)),
            (_load, (x, w, xs, ws, full, empty, down, across, steps * COUNT, BY_INPUTS, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )

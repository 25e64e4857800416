"""Tiles of `warp_kernels`: how the warps of a program hand them to each other. Needs Triton and a Hopper GPU.

Tiles are `[ROWS, D]`. They lie in rings, tuples (tiles, full, empty): slots in shared memory, used in turn, and two
barriers a slot. The warp that loads waits until a slot is empty, which each group that reads it tells; the groups wait
until it is full. A slot may hold the tiles of two tensors. The tiles that one group alone reads are a ring, too, of one
slot a group, filled once. PARTS: groups of a program. Other names are those of the kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

ROWS, D = gl.constexpr(64), gl.constexpr(128)
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))  # what the tensor cores read from registers
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))  # of one number for each row of SCORES
COLUMN = gl.constexpr(gl.SliceLayout(0, SCORES.value))
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # so called until Triton 3.7


@gluon.jit
def ring_of(source, SLOTS: gl.constexpr, READERS: gl.constexpr, TENSORS: gl.constexpr):
    """Return a ring for tiles of TENSORS tensors a slot, read by READERS groups."""
    tiles = gl.allocate_shared_memory(source.dtype, [SLOTS * TENSORS, 1, 1, ROWS, D], source.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return tiles, full, empty


@gluon.jit
def load(ring, i, sources, sample, head, first):
    """Load the rows from `first` on of a head of each source into the slot of turn i, once it is empty."""
    tiles, full, empty = ring
    slot = i % full.shape[0]
    mbarrier.wait(empty.index(slot), ((i // full.shape[0]) & 1) ^ 1)
    mbarrier.expect(full.index(slot), len(sources) * sources[0].block_type.nbytes)
    for n in gl.static_range(len(sources)):
        copy_tile(sources[n], [sample, head, first, 0], full.index(slot), tiles.index(len(sources) * slot + n))


@gluon.jit
def wait(ring, i):
    """Wait for the tiles of turn i."""
    _, full, _ = ring
    mbarrier.wait(full.index(i % full.shape[0]), (i // full.shape[0]) & 1)


@gluon.jit
def tile_of(ring, i, n: gl.constexpr):
    """Return the tile of turn i and tensor n, `[ROWS, D]`."""
    tiles, full, _ = ring
    return tiles.index(tiles.shape[0] // full.shape[0] * (i % full.shape[0]) + n).reshape([ROWS, D])


@gluon.jit
def free(ring, i):
    """Tell that this group needs the tiles of turn i no more."""
    _, _, empty = ring
    mbarrier.arrive(empty.index(i % empty.shape[0]), count=1)


@gluon.jit
def store(base, begin, stride, value, T):
    """Store value `[ROWS, D]` as the rows from `begin` on."""
    rows = begin + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
    pointers = base + rows.to(gl.int64)[:, None] * stride + gl.arange(0, D, layout=gl.SliceLayout(0, STORED))[None, :]
    gl.store(pointers, gl.convert_layout(value.to(base.dtype.element_ty), STORED), mask=(rows < T)[:, None])


@gluon.jit
def products(a, b):
    """Begin a @ b.T, `[ROWS, ROWS]`."""
    zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def seen(values, rows, first, hidden: gl.constexpr):
    """Return values, or `hidden` where a query may not attend to a column of the tile from `first` on."""
    columns = first + gl.arange(0, ROWS, layout=COLUMN)
    return gl.where(rows[:, None] >= columns[None, :], values, hidden)


@gluon.jit
def column_tiles(begin, T):
    """Return how many tiles of columns the queries from `begin` on see; the last of them is on the diagonal."""
    return gl.minimum(begin // ROWS + 1, gl.cdiv(T, ROWS))


@gluon.jit
def load_columns(own, k_ring, v_ring, queries, k, v, sample, head, group, begin, T, PARTS: gl.constexpr):
    """Load the queries of all groups, from `begin` on, and the columns that any of them sees."""
    _, full, _ = k_ring
    # A group leaves tiles unread that only the later queries see: no load may wait until their slots are empty.
    gl.static_assert(full.shape[0] >= PARTS - 1)
    for n in gl.static_range(PARTS):
        load(own, n, queries, sample, head, begin + n * ROWS)
    for i in range(column_tiles(begin + (PARTS - 1) * ROWS, T)):
        load(k_ring, i, (k,), sample, group, i * ROWS)
        load(v_ring, i, (v,), sample, group, i * ROWS)


@gluon.jit
def next_queries(head, first, begin, T):
    """Return the tile of queries after (head, first); those of a head start at `begin`."""
    first += ROWS
    last = first >= T
    return head + last.to(gl.int32), gl.where(last, begin, first)


@gluon.jit
def load_queries(own, ring, k, v, q, grad, sample, group, begin, T, GROUP: gl.constexpr):
    """Load the keys of both groups, from `begin` on, and the queries from there on of all heads that share them."""
    for n in gl.static_range(2):
        load(own, n, (k, v), sample, group, begin + n * ROWS)
    head, first = group * GROUP, begin
    for i in range(gl.cdiv(T - begin, ROWS) * GROUP):
        load(ring, i, (q, grad), sample, head, first)
        head, first = next_queries(head, first, begin, T)

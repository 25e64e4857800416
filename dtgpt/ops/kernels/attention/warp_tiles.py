"""Tiles of `warp_kernels`: how the warps of a program hand them to each other. Needs Triton and a Hopper GPU.

Tiles are `[ROWS, D]`. They lie in rings, tuples (tiles, full, empty): slots in shared memory, used in turn, and two
barriers a slot. The warp that loads waits until a slot is empty, which each group that reads it tells; the groups wait
until it is full. A slot may hold the tiles of two tensors. The tiles that one group alone reads are a ring, too, of one
slot a group, filled once. Turns count the tiles that a program loads. PARTS: groups of a program. spans: those of its
sample, or None. Other names are those of the kernels.
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
PAIRS = gl.constexpr(gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0]))
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
def seen(values, rows, starts, first, hidden: gl.constexpr):
    """Return values, or `hidden` where a query may not attend to a column of the tile from `first` on. starts: the
    first column that each query sees, or None."""
    columns = first + gl.arange(0, ROWS, layout=COLUMN)
    values = gl.where(rows[:, None] >= columns[None, :], values, hidden)
    if starts is not None:
        values = gl.where(starts[:, None] <= columns[None, :], values, hidden)
    return values


@gluon.jit
def columns_of(PART: gl.constexpr, spans, begin, T):
    """Return (first query, first tile of columns, number of tiles) of the tile PART of the queries from `begin` on. All
    parts go from the first tile that the query at `begin` sees up to that on their diagonal."""
    low = 0
    if spans is not None:
        low = gl.load(spans + 2 * begin) // ROWS
    begin += PART * ROWS
    return begin, low, gl.minimum(begin // ROWS + 1, gl.cdiv(T, ROWS)) - low


@gluon.jit
def bounds_of_rows(spans, begin, low, T):
    """Return (the first column that each query of the tile from `begin` on sees, the first turn whose tile all of them
    see). low: the tile of the first turn."""
    rows = begin + gl.arange(0, ROWS, layout=ROW)
    last = gl.load(spans + 2 * gl.minimum(begin + ROWS - 1, T - 1))
    return gl.load(spans + 2 * rows, mask=rows < T, other=0), gl.cdiv(last, ROWS) - low


@gluon.jit
def hides(i, clear, count):
    """Return whether the tile of turn i hides columns: the last, on the diagonal, and those before `clear`."""
    if clear is None:
        return i + 1 == count
    else:
        return (i + 1 == count) | (i < clear)


@gluon.jit
def load_columns(own, k_ring, v_ring, queries, k, v, spans, sample, head, group, begin, T, PARTS: gl.constexpr):
    """Load the queries of all groups, from `begin` on, and the columns that any of them sees."""
    _, full, _ = k_ring
    # A group leaves tiles unread that only the later queries see: no load may wait until their slots are empty.
    gl.static_assert(full.shape[0] >= PARTS - 1)
    for n in gl.static_range(PARTS):
        load(own, n, queries, sample, head, begin + n * ROWS)
    _, low, count = columns_of(PARTS - 1, spans, begin, T)
    for i in range(count):
        load(k_ring, i, (k,), sample, group, (low + i) * ROWS)
        load(v_ring, i, (v,), sample, group, (low + i) * ROWS)


@gluon.jit
def end_of_queries(spans, begin, T):
    """Return the end of the queries that see any key of both groups, which begin at `begin`."""
    if spans is None:
        return T
    else:
        return gl.load(spans + 2 * gl.minimum(begin + 2 * ROWS - 1, T - 1) + 1)


@gluon.jit
def next_queries(head, first, begin, end):
    """Return the tile of queries after (head, first); those of a head go from `begin` to `end`."""
    first += ROWS
    last = first >= end
    return head + last.to(gl.int32), gl.where(last, begin, first)


@gluon.jit
def load_pairs(sums, head, first, T, needed):
    """Load the sums of a tile of queries of a head, zeros from T on, or if they are not needed."""
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, PAIRS))
    side = gl.arange(0, 2, layout=gl.SliceLayout(0, PAIRS))
    pointers = sums + head.to(gl.int64) * 2 * T + 2 * rows[:, None] + side[None, :]
    return gl.load(pointers, mask=((rows < T) & needed)[:, None], other=0.0)


@gluon.jit
def put_pairs(memory, slot, pairs):
    """Write what `load_pairs` returned, as two tensors `[ROWS]`, for all threads to read."""
    level, delta = gl.split(pairs)
    memory.index(2 * slot).store(level)
    memory.index(2 * slot + 1).store(delta)


@gluon.jit
def load_queries(own, ring, k, v, q, grad, spans, sample, group, begin, T, GROUP: gl.constexpr):
    """Load the keys of both groups, from `begin` on, and the queries that see any of all heads that share them."""
    for n in gl.static_range(2):
        load(own, n, (k, v), sample, group, begin + n * ROWS)
    head, first, end = group * GROUP, begin, end_of_queries(spans, begin, T)
    for i in range(gl.cdiv(end - begin, ROWS) * GROUP):
        load(ring, i, (q, grad), sample, head, first)
        head, first = next_queries(head, first, begin, end)

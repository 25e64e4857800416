"""Transformer blocks for one token each of M sequences, in eight launches a block, nine where heads are normalised, one
more where the MLPs are experts (`experts`) but two fewer for a row alone, or five where M is small (`rows`).

Fast path for 16-bit weights on a GPU; the reference is the model's own modules. The result of a row does not depend on
the other rows or their number, bit for bit (see `kernels`). Sharding rule: heads and F may be sharded over
tensor-parallel ranks, each with its own `BlockWeights`; `all_reduce` then sums the outputs of branches over ranks, and
`exchange` does within the kernels of few rows.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.ops.kernels.attention.cached import Splits, decode_attention, decode_splits
from dtgpt.ops.kernels.decode import experts
from dtgpt.ops.kernels.decode.exchange import Exchange
from dtgpt.ops.kernels.decode.rows import MOST_ROWS, RowKernels, kernels_for, serves, sizes_of, why_no_rows
from dtgpt.ops.kernels.decode.weights import BlockWeights, EmbeddingWeights, HeadWeights
from dtgpt.ops.kernels.descriptors import described
from dtgpt.ops.kernels.devices import has_hopper, has_triton, multiprocessors, shared_memory, why_no_triton
from dtgpt.ops.operation import Kernel, Operation

GROUP = 512  # elements of K in a group, as in `kernels`
EPILOGUES = ("groups", "logits", "plain", "gelu", "qkv", "swiglu")
JOINED = 1  # rows up to which attention of blocks with experts is two launches behind the projection, as measured
AllReduce = Callable[[Tensor], Tensor]  # fp32 `[1, M, H]`: the sum of `[G, M, H]` over groups and tensor-parallel ranks


class Tile(NamedTuple):
    """Tile sizes and compile options of a product."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int
    each: int = 1  # groups of K that a program computes, one after the other


LARGE = (
    Tile(256, 128, 64, 8, 4), Tile(128, 128, 64, 4, 5), Tile(64, 128, 64, 4, 6), Tile(64, 64, 128, 4, 4),
    Tile(64, 32, 128, 4, 6),
)  # fmt: skip
FILLED = 0.7  # of the multiprocessors, by tiles of the size that is taken
WIDE = 0.55  # of the multiprocessors, by tiles of 128 rows and columns, where K is not one chain


def choose_tile(
    rows: int, columns: int, groups: int, size: int, head_dim: int, processors: int, chain: bool = False
) -> Tile:
    """Return the tile of a product, as measured by `benchmarks/op_decode.py` on an H200. BN divides `head_dim`. chain:
    whether K is one chain; otherwise the kernel holds three sums, for which a large tile needs eight warps."""
    if groups > 1 and rows > 16:
        return choose_groups(rows, columns, groups, processors)
    large = size >= 2048 and columns > (8192 if groups == 1 else 2047)  # as in models of a billion parameters
    if rows <= 16 and large:
        tile = Tile(16, 32, 128, 4, 4) if 1 < groups <= 4 else Tile(16, 64, 128, 4, 3)
    elif rows <= 16 and size >= 2048 and columns > 4096:
        tile = Tile(16, 32, 128, 4, 4)
    elif rows <= 16:
        tile = Tile(16, 32, 128, 2, 4) if columns > 8192 or groups > 4 else Tile(16, 16, 128, 2, 6)
    elif rows <= 64 and columns > 8192:
        tile = Tile(32 if rows <= 32 else 64, 64, 128, 4, 3)
    elif rows <= 32:
        tile = Tile(32, 32, 128, 4, 5)
    elif rows <= 64:
        tile = Tile(64, 32, 128, 4, 5 if columns <= 4096 else 4)  # with four stages, two fit on a multiprocessor
    elif math.ceil(rows / 128) * math.ceil(columns / 128) >= WIDE * processors:
        tile = Tile(128, 128, 64, 4 if chain else 8, 3)
    else:
        tile = Tile(64, 64, 128, 4, 3)
    return tile._replace(BN=min(tile.BN, head_dim))


def choose_groups(rows: int, columns: int, groups: int, processors: int) -> Tile:
    """Return the tile of a product of more than 16 rows by groups of K, as measured on an H200: all programs run at
    once, two on a multiprocessor, and each has as little to do as that allows."""

    def all_at_once(tile: Tile) -> Tile:
        tiles = math.ceil(rows / tile.BM) * math.ceil(columns / tile.BN)
        return tile._replace(each=min(groups, math.ceil(groups / max(1, 2 * processors // tiles))))

    BM = 32 if rows <= 32 else 64
    wide, narrow = all_at_once(Tile(BM, 64, 128, 4, 3)), all_at_once(Tile(BM, 32, 128, 4, 4))
    return narrow if rows <= 64 and narrow.each < 2 * wide.each else wide


def choose_chain(rows: int, columns: int, size: int, itemsize: int, processors: int) -> Tile:
    """Return the tile of an exact product, whose K is not split: fewer columns a tile where there are few in all. In
    fp32 routers of experts have many rows: `benchmarks/op_experts.py --cases router` measures their tiles."""
    if itemsize == 4 and rows <= 16:
        return Tile(16, 32, 32, 4, 3)
    if itemsize == 4:
        fills = math.ceil(rows / 128) * math.ceil(columns / 64) >= 2 * processors
        return Tile(128, 64, 16, 4, 3) if fills else Tile(64, 64 if columns > 32 else 32, 32, 4, 3)
    if rows > 16 and columns <= 2048:
        return Tile(32 if rows <= 32 else 64, 16 if rows <= 64 else 32, 128, 4, 5)
    return choose_tile(rows, columns, 1, size, 128, processors, chain=True)


def gains_by_tiles(rows: int, columns: int, size: int, groups: int, chain: bool) -> bool:
    """Return whether a product gains from the copy engine, which leaves registers for large tiles, on an H200."""
    return rows > 64 or (rows > 16 and (groups > 1 or (columns > 8192 if chain else size > 1024)))


def choose_large(rows: int, columns: int, processors: int) -> Tile:
    """Return the largest tile of `LARGE` that leaves few multiprocessors without one, as measured on an H200."""

    def fills(tile: Tile) -> bool:
        programs = math.ceil(rows / tile.BM) * math.ceil(columns / tile.BN)
        return 2 * rows > tile.BM and programs >= FILLED * processors

    return next(filter(fills, LARGE), LARGE[-1])


def copied_in_tiles(x: Tensor) -> bool:
    """Return whether the copy engine reads tiles of 16-bit x `[R, K]`: rows begin at multiples of 16 bytes."""
    return x.itemsize == 2 and x.is_contiguous() and x.data_ptr() % 16 == 0 and x.shape[1] % 8 == 0


@functools.cache
def kernels():
    from dtgpt.ops.kernels.decode import kernels  # imported on first use, since it needs Triton

    return kernels


@functools.cache
def joined_kernels():
    from dtgpt.ops.kernels.decode import joined_kernels  # imported on first use, since it needs Triton

    return joined_kernels


class Residual(NamedTuple):
    """A residual stream, whose last branch is still to be added."""

    x: Tensor  # [M, H]
    branch: Tensor | None = None  # fp32 [G, M, H]: the groups of a sum; with weights the rows [R, H] of slots
    bias: Tensor | None = None  # [H], of the branch
    weights: Tensor | None = None  # fp32 [M, k] of slots
    places: Tensor | None = None  # int64 [M, k]: the row of each slot; None: they are in the order of the weights

    @property
    def groups(self) -> int:
        """The number of addends of the branch."""
        if self.branch is None:
            return 0
        return len(self.branch) if self.weights is None else self.weights.shape[1]

    def whole(self) -> Tensor:
        """Return the sum `[M, H]`."""
        if self.branch is None:
            return self.x
        weight = self.x[0] if self.bias is None else self.bias
        return residual_norm(self, weight, self.bias, 1.0)[0]  # the norm is not used


def next_rows(slots: Tensor, token: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next token and its position of each of `slots`, int64 `[M]`, from the state int64 `[slots]`."""
    tokens, positions = torch.empty_like(slots), torch.empty_like(slots)
    kernels().next_kernel[(len(slots),)](slots, token, position, tokens, positions, num_warps=1)
    return tokens, positions


def embed(tokens: Tensor, positions: Tensor, weights: EmbeddingWeights) -> Tensor:
    """Return activations `[M, H]` of tokens at positions, int64 `[M]`."""
    table, places = weights
    size = table.shape[1]
    out = table.new_empty(len(tokens), size)
    kernels().embed_kernel[(len(tokens),)](
        tokens, positions, table, places, out, size, BLOCK=1 << (size - 1).bit_length(), num_warps=4
    )
    return out


def residual_norm(stream: Residual, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return (total, LayerNorm(total)), `[M, H]` each, of a residual stream with its branch; bias None: an RMSNorm."""
    x, branch, branch_bias, weights, places = stream
    rows, size = x.shape
    out, total = torch.empty_like(x), x if branch is None else torch.empty_like(x)
    pdl = has_hopper(x.device)
    kernels().norm_kernel[(rows,)](
        x, branch, branch_bias, weights, places, weight, bias, total, out, rows, size, eps,
        GROUPS=stream.groups, BLOCK=1 << (size - 1).bit_length(), PDL=pdl,
        num_warps=8 if size < 2048 else 16, launch_pdl=pdl,
    )  # fmt: skip
    return total, out


class Write(NamedTuple):
    """Where a product of queries, keys and values puts the latter two."""

    keys: Tensor  # [slots, N_kv, P, D]
    values: Tensor
    slots: Tensor  # int64 [M]
    positions: Tensor  # int64 [M]


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: str,
    write: Write | None = None,
    exact: bool = False,
    pieces: int = 1,
) -> Tensor:
    """Return x w^T of x `[M, K]`, weight `[N, K]`, by an epilogue of `kernels.product_kernel`: "groups" fp32
    `[ceil(K / 512), M, N]`, "logits" fp32 `[M, N]`; in x's dtype "plain", "gelu" and "qkv" `[M, N]`, "swiglu"
    `[M, N / 2]`. exact: as training computes "plain", "gelu" and "swiglu", all of K in one chain, or in so many
    `pieces`, a power of two that divides K, each rounded to x's dtype and added in a tree."""
    if epilogue not in EPILOGUES:  # which the kernel would take for "plain"
        raise ValueError(f"decode kernels do not know {epilogue}; they have {', '.join(EPILOGUES)}")
    (rows, size), columns = x.shape, len(weight)
    groups = math.ceil(size / GROUP) if epilogue == "groups" else 1
    dtype = torch.float32 if epilogue in ("groups", "logits") else x.dtype
    made = columns // 2 if epilogue == "swiglu" else columns
    shape = (groups, rows, made) if epilogue == "groups" else (rows, made)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    keys, values, slots, positions = write or (None, None, None, None)
    kv_heads, length, head_dim = (1, 1, 128) if keys is None else keys.shape[1:]
    pdl, processors = has_hopper(x.device), multiprocessors(x.device)
    chain = exact or epilogue == "logits"
    fast = pdl and pieces == 1  # a large tile would keep several nodes of a tree
    by_tiles = fast and gains_by_tiles(rows, columns, size, groups, chain) and all(map(copied_in_tiles, (x, weight)))
    if by_tiles and chain and rows > 64:
        tile = choose_large(rows, columns, processors)
    elif exact:
        tile = choose_chain(rows, columns, size, x.itemsize, processors)
    else:
        tile = choose_tile(rows, columns, groups, size, head_dim, processors, chain)
    if pieces > 1:
        tile = tile._replace(BM=min(tile.BM, 64), BN=min(tile.BN, 32), num_warps=4)
    stage = (tile.BM + tile.BN) * tile.BK * x.itemsize  # bytes; smaller GPUs have room for fewer stages
    even, stages = columns % tile.BN == 0 and size // pieces % 128 == 0, shared_memory(x.device) // stage
    if by_tiles:
        x, weight = described(x, tile.BM, tile.BK), described(weight, tile.BN, tile.BK)
    kernels().product_kernel[(math.ceil(rows / tile.BM), math.ceil(columns / tile.BN), math.ceil(groups / tile.each))](
        x, weight, bias, out, keys, values, slots, positions, rows, columns, size,
        BM=tile.BM, BN=tile.BN, BK=tile.BK, EPILOGUE=epilogue, EVEN=even,
        PARTS=columns // (kv_heads * head_dim), SIZE=head_dim, LENGTH=length, PDL=pdl, EXACT=exact, TILES=by_tiles,
        EACH=tile.each, PIECES=pieces, num_warps=tile.num_warps, num_stages=min(tile.num_stages, stages),
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def attend(h: Tensor, block: BlockWeights, write: Write) -> Tensor:
    """Return the heads' outputs `[M, N D]` of normalised activations `[M, H]`, and write the new tokens' k and v."""
    keys, values, slots, positions = write
    if block.rotary is None:
        packed = product(h, block.qkv, block.qkv_bias, "qkv", write)
        queries = packed.view(len(h), keys.shape[1], -1, block.head_dim)[:, :, :-2]
        return decode_attention(queries, keys, values, slots, positions).flatten(1)
    packed = product(h, block.qkv, block.qkv_bias, "plain").view(len(h), keys.shape[1], -1, block.head_dim)
    heads = decode_attention(packed[:, :, :-2], keys, values, slots, positions, block.rotary, joint=block.joint)
    return heads.flatten(1)


def merged_product(splits: Splits, weight: Tensor) -> Tensor:
    """Return what `merged` and then `product` with the epilogue "groups" do, fp32 `[G, M, H]`, of very few rows."""
    partial, state, positions = splits
    rows, heads, count, size = partial.shape
    (columns, inner), device = weight.shape, weight.device
    groups, pdl = math.ceil(inner / GROUP), has_hopper(device)
    tile = choose_tile(rows, columns, groups, inner, 128, multiprocessors(device))
    tiles = math.ceil(columns / tile.BN)
    own = weight.new_empty(tiles * groups, rows, GROUP)
    out = torch.empty(groups, rows, columns, dtype=torch.float32, device=device)
    joined_kernels().merged_product_kernel[(tiles, groups)](
        partial, state, positions, weight, own, out, rows, columns, inner, HEADS=heads, SIZE=size, SPLITS=count,
        BLOCK=1 << (count - 1).bit_length(), BM=tile.BM, BN=tile.BN, EVEN=columns % tile.BN == 0 and inner % GROUP == 0,
        PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def attend_few(h: Tensor, block: BlockWeights, write: Write) -> Tensor:
    """Return the branch of attention, fp32 `[G, M, H]`, of very few normalised rows `[M, H]` with rotary positions, in
    two launches behind the projection, and write the new tokens' k and v."""
    packed = product(h, block.qkv, block.qkv_bias, "plain").view(len(h), write.keys.shape[1], -1, block.head_dim)
    splits = decode_splits(packed[:, :, :-2], *write, block.rotary, joint=block.joint, joined=True)
    return merged_product(splits, block.proj)


def run_experts(stream: Residual, block: BlockWeights, all_reduce: AllReduce | None) -> Residual:
    """Return the stream with the branch of experts, from that before their norm."""
    router = block.router
    assert router is not None
    if len(stream.x) <= experts.JOINED:
        x, h, logits = experts.norm_and_route(stream, stream.groups, block.norm_2, block.eps, router)
    else:
        x, h = residual_norm(stream, block.norm_2, None, block.eps)
        logits = experts.logits_of(h, router.weight, router.bias)
    made, weights, places = experts.rows_of(h, logits, block)
    if all_reduce is None:
        return Residual(x, made, None, weights, places)
    return Residual(x, all_reduce(experts.sums_of(made, weights, places)[None]))


def kernels_of_few_rows(blocks: Sequence[BlockWeights], keys: Sequence[Tensor], ranks: int = 1) -> RowKernels | None:
    """Return the kernels of few rows for `blocks`, which are built if need be; None where there are none, or where
    blocks differ in size."""
    sizes = {sizes_of(block, kept, ranks) for block, kept in zip(blocks, keys, strict=True)}
    if len(sizes) != 1 or not all(map(serves, blocks)):
        return None
    return kernels_for(*sizes, keys[0].device)


def _run_few_rows(
    x: Tensor,
    blocks: Sequence[BlockWeights],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    slots: Tensor,
    positions: Tensor,
    all_reduce: AllReduce | None,
    exchange: Exchange | None,
) -> Residual:
    few = kernels_of_few_rows(blocks, keys, exchange.ranks if exchange else 1)
    if few is None or len(x) > few.most_rows:
        return _run_rows(x, blocks, keys, values, slots, positions, all_reduce, exchange)
    return Residual(few.run(x.contiguous(), blocks, keys, values, slots, positions, exchange))


def _run_rows(
    x: Tensor,
    blocks: Sequence[BlockWeights],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    slots: Tensor,
    positions: Tensor,
    all_reduce: AllReduce | None,
    exchange: Exchange | None,
) -> Residual:
    def over_ranks(branch: Tensor) -> Tensor:
        return branch if all_reduce is None else all_reduce(branch)

    stream = Residual(x)
    for block, k, v in zip(blocks, keys, values, strict=True):
        x, h = residual_norm(stream, block.norm_1, block.norm_1_bias, block.eps)
        write = Write(k, v, slots, positions)
        if block.router is not None and block.rotary is not None and len(x) <= JOINED:
            branch = attend_few(h, block, write)
        else:
            branch = product(attend(h, block, write), block.proj, None, "groups")
        stream = Residual(x, over_ranks(branch), block.proj_bias)
        if block.router is not None:
            stream = run_experts(stream, block, all_reduce)
            continue
        x, h = residual_norm(stream, block.norm_2, block.norm_2_bias, block.eps)
        inner = product(h, block.fc, block.fc_bias, str(block.activation))
        stream = Residual(x, over_ranks(product(inner, block.out, None, "groups")), block.out_bias)
    return stream


def _is_few(
    x: Tensor,
    blocks: Sequence[BlockWeights],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    slots: Tensor,
    positions: Tensor,
    all_reduce: AllReduce | None,
    exchange: Exchange | None,
) -> bool:
    return len(x) <= MOST_ROWS and (all_reduce is None or exchange is not None)


def _no_modules(*_: Any) -> Residual:
    raise NotImplementedError("these blocks have kernels alone; on other devices the modules of the model compute them")


DECODE_BLOCKS = Operation("decode_blocks", _no_modules, "blocks of a model for one token each of M sequences")
BLOCKS = (
    Kernel(
        name="rows.cu",
        serves=_is_few,
        run=_run_few_rows,
        why_not=why_no_rows,
        when="16 bits, up to 4 rows, of large models 2. Heads of "
        "64 or 128, blocks of one size; H and F: multiples of 64, up to 8,192; slots of up to 8,192 positions. Else "
        "Triton's",
    ),
    Kernel(
        name="Triton",
        serves=has_triton,
        run=_run_rows,
        why_not=why_no_triton,
        when="16 bits, heads of 16, 32, 64 or 128; GPT-2 and LLaMA blocks with tanh-GELU, SwiGLU or "
        "experts that see all tokens",
    ),
    Kernel(
        name="Triton, exact",
        serves=lambda *_: False,
        run=_no_modules,
        why_not=why_no_triton,
        when="by exact=True alone, in fp32, too: the bits of training",
    ),
)


def run_blocks(
    x: Tensor, blocks: Sequence[BlockWeights], keys: Sequence[Tensor], values: Sequence[Tensor],
    slots: Tensor, positions: Tensor, all_reduce: AllReduce | None = None, exchange: Exchange | None = None,
) -> Residual:  # fmt: skip
    """Return the residual stream `[M, H]` after `blocks`, from x `[M, H]`, and write the new tokens' k and v.

    keys, values: of each block, `[slots, N_kv, P, D]`. slots, positions: int64 `[M]`.
    """
    return DECODE_BLOCKS(x, blocks, keys, values, slots, positions, all_reduce, exchange)


def run_head(stream: Residual, head: HeadWeights) -> Tensor:
    """Return logits fp32 `[M, V]`."""
    _, h = residual_norm(stream, head.norm, head.norm_bias, head.eps)
    return product(h, head.table, None, "logits")

"""Kernels of decode steps against plain torch in float64, and rows that do not depend on each other. CUDA only."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.attention.cached import attend_rows, attend_rows_reference, write_prompts
from dtgpt.ops.decode.blocks import run_blocks, run_head
from dtgpt.ops.decode.weights import BlockWeights, HeadWeights

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
POSITIONS = (0, 1, 127, 128, 300, 399)
LENGTH = 400
SHAPES = {  # hidden size, heads, heads of k and v, D, F
    "345m": (1024, 16, 16, 64, 4096), "124m": (768, 12, 12, 64, 3072), "1558m": (1600, 25, 25, 64, 6400),
    "grouped": (512, 8, 2, 64, 1024), "one": (256, 4, 1, 64, 512), "wide": (512, 4, 4, 128, 2048),
    "small": (96, 3, 3, 32, 160),
}  # fmt: skip


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (scale * torch.randn(shape, device=CUDA)).to(dtype)


def weights(shape: str, dtype: torch.dtype) -> BlockWeights:
    hidden, heads, kv_heads, dim, inner = SHAPES[shape]
    rows, width = (heads + 2 * kv_heads) * dim, heads * dim

    def matrix(*sizes: int) -> Tensor:
        return random(*sizes, scale=1 / math.sqrt(sizes[-1]), dtype=dtype)

    def vector(size: int) -> Tensor:
        return random(size, scale=0.1, dtype=dtype)

    return BlockWeights(
        1 + vector(hidden), vector(hidden), matrix(rows, hidden), vector(rows), matrix(hidden, width), vector(hidden),
        1 + vector(hidden), vector(hidden), matrix(inner, hidden), vector(inner), matrix(hidden, inner), vector(hidden),
        eps=1e-5, head_dim=dim,
    )  # fmt: skip


class Case:
    """Two blocks, and sequences at all of `POSITIONS` behind which the cache holds NaN."""

    def __init__(self, shape: str, rows: int, dtype: torch.dtype = torch.bfloat16):
        torch.manual_seed(0)
        hidden, _, kv_heads, dim, _ = SHAPES[shape]
        self.blocks = [weights(shape, dtype) for _ in range(2)]
        self.positions = torch.tensor([POSITIONS[i % len(POSITIONS)] for i in range(rows)], device=CUDA)
        self.slots = torch.randperm(rows, device=CUDA)
        self.x = random(rows, hidden, dtype=dtype)
        self.head = HeadWeights(1 + random(hidden, scale=0.1, dtype=dtype), random(hidden, dtype=dtype),
                                random(384, hidden, scale=0.05, dtype=dtype), 1e-5)  # fmt: skip
        kept = [random(rows, kv_heads, LENGTH, dim, scale=0.5, dtype=dtype) for _ in range(4)]
        for tensor in kept:
            for slot, position in zip(self.slots.tolist(), self.positions.tolist(), strict=True):
                tensor[slot, :, position:] = math.nan
        self.keys, self.values = kept[:2], kept[2:]

    def run(self, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the logits of some rows, and the caches after the step."""
        keys, values = ([tensor.clone() for tensor in kept] for kept in (self.keys, self.values))
        stream = run_blocks(self.x[rows], self.blocks, keys, values, self.slots[rows], self.positions[rows])
        return run_head(stream, self.head), keys + values

    def reference(self) -> Tensor:
        x = self.x.double()
        for block, keys, values in zip(self.blocks, self.keys, self.values, strict=True):
            w = BlockWeights(*(value.double() if isinstance(value, Tensor) else value for value in block))
            h = F.layer_norm(x, x.shape[-1:], w.norm_1, w.norm_1_bias, w.eps)
            packed = (h @ w.qkv.T + w.qkv_bias).unflatten(1, (keys.shape[1], -1, w.head_dim))
            q, k, v = packed[:, :, :-2].flatten(1, 2), packed[:, :, -2], packed[:, :, -1]
            kept = keys.double(), values.double()
            for tensor, new in zip(kept, (k, v), strict=True):
                tensor[self.slots, :, self.positions] = new
            x = x + attend_rows_reference(q, *kept, self.slots, self.positions).flatten(1) @ w.proj.T + w.proj_bias
            h = F.layer_norm(x, x.shape[-1:], w.norm_2, w.norm_2_bias, w.eps)
            x = x + F.gelu(h @ w.fc.T + w.fc_bias, approximate="tanh") @ w.out.T + w.out_bias
        head = HeadWeights(*(value.double() if isinstance(value, Tensor) else value for value in self.head))
        return F.layer_norm(x, x.shape[-1:], head.norm, head.norm_bias, head.eps) @ head.table.T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_are_those_of_float64(shape, dtype):
    case = Case(shape, 12, dtype)
    logits, _ = case.run(torch.arange(12, device=CUDA))
    expected = case.reference()
    assert (logits.double() - expected).norm() / expected.norm() < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("shape", ["345m", "1558m", "grouped"])
def test_a_row_has_the_same_bits_in_every_company(shape):
    case = Case(shape, 130)
    everyone, kept = case.run(torch.arange(130, device=CUDA))
    for count in (1, 2, 7, 16, 17, 33, 64, 65, 129):
        rows = torch.randperm(130, device=CUDA)[:count]
        logits, own = case.run(rows)
        assert torch.equal(logits, everyone[rows]), count
        slots, positions = case.slots[rows], case.positions[rows]
        for alone, together in zip(own, kept, strict=True):
            assert torch.equal(alone[slots, :, positions], together[slots, :, positions]), count


@pytest.mark.parametrize(("length", "dim"), [(16, 64), (130, 32), (192, 128), (64, 24)])
def test_prompts_are_written_where_the_reference_writes_them(length, dim):
    packed = random(3, length, 2, 4, dim)  # as a packed projection holds k and v: their positions are not dense
    k, v = packed[:, :, :, 2], packed[:, :, :, 3]
    slots = torch.tensor([4, 0, 2], device=CUDA)
    found, expected = ([torch.zeros(6, 2, 200, dim, dtype=k.dtype, device=CUDA) for _ in range(2)] for _ in range(2))
    write_prompts(k, v, *found, slots)
    for kept, new in zip(expected, (k, v), strict=True):
        kept[slots, :, :length] = new.transpose(1, 2)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (8, 2, 32), (6, 1, 128), (2, 2, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 20])
def test_attention_over_slots(heads, kv_heads, dim, dtype, rows):
    torch.manual_seed(0)
    q, k, v = (random(rows, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    keys, values = (torch.full((rows + 1, kv_heads, LENGTH, dim), math.nan, dtype=dtype, device=CUDA) for _ in range(2))
    slots = torch.randperm(rows, device=CUDA)
    positions = torch.tensor([POSITIONS[-1 - i % len(POSITIONS)] for i in range(rows)], device=CUDA)
    for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
        for kept in (keys, values):
            kept[slot, :, :position] = random(kv_heads, position, dim, dtype=dtype)
    made = attend_rows(q, k, v, keys, values, slots, positions)
    expected = attend_rows_reference(q.double(), keys.double(), values.double(), slots, positions)
    assert (made.double() - expected).norm() / expected.norm() < (1e-6 if dtype == torch.float32 else 1e-2)

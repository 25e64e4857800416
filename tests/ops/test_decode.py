"""Kernels of decode steps against plain torch in float64, and rows that do not depend on each other. CUDA only."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.ops.activations import swiglu_reference as swiglu
from dtgpt.ops.attention.cached import attend_rows, attend_rows_reference
from dtgpt.ops.attention.core import PLAIN_RULE, AttentionRule
from dtgpt.ops.attention.prompts import write_prompts
from dtgpt.ops.kernels.decode import blocks
from dtgpt.ops.kernels.decode.blocks import embed, run_blocks, run_head
from dtgpt.ops.kernels.decode.weights import BlockWeights, EmbeddingWeights, HeadWeights, Rotary
from dtgpt.ops.norms import norm_reference
from dtgpt.ops.rotary_positions import Rotation, angle_table, rotate
from dtgpt.parallel.exact_tp.tree import tree_sum
from tests.support.pairwise import each_pair

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
POSITIONS = (0, 1, 127, 128, 300, 399)
LENGTH, LONG = 400, 20_000  # a slot of the latter has more splits than programs
SHAPES = {  # hidden size, heads, heads of k and v, D, F
    "345m": (1024, 16, 16, 64, 4096), "124m": (768, 12, 12, 64, 3072), "1558m": (1600, 25, 25, 64, 6400),
    "long": (2048, 32, 32, 64, 8192),
    "grouped": (512, 8, 2, 64, 1024), "one": (256, 4, 1, 64, 512), "wide": (512, 4, 4, 128, 2048),
    "small": (96, 3, 3, 32, 160),
}  # fmt: skip
ROTARY = {  # the same, of blocks with rotary positions, RMSNorm and SwiGLU
    "llama32_1b": (2048, 32, 8, 64, 8192), "llama3_8b": (4096, 32, 8, 128, 14336), "llama2": (512, 4, 4, 128, 1376),
    "r8": (512, 8, 1, 64, 768), "r7": (448, 14, 2, 32, 600), "r3": (96, 3, 1, 32, 160),
}  # fmt: skip
QWEN = {"qwen3_0_6b": (1024, 16, 8, 128, 3072), "r2": (96, 4, 2, 16, 136)}  # heads of q and k are normalised
SHAPES = SHAPES | ROTARY | QWEN
ROTATION = Rotation(500000.0, 8.0, 1.0, 4.0, 100)
EPS = 1e-5


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (scale * torch.randn(shape, device=CUDA)).to(dtype)


def matrix(*sizes: int, dtype: torch.dtype) -> Tensor:
    return random(*sizes, scale=1 / math.sqrt(sizes[-1]), dtype=dtype)


def weights(shape: str, dtype: torch.dtype) -> BlockWeights:
    hidden, heads, kv_heads, dim, inner = SHAPES[shape]
    rows, width = (heads + 2 * kv_heads) * dim, heads * dim
    rotates = shape in ROTARY or shape in QWEN

    def vector(size: int) -> Tensor:
        return random(size, scale=0.1, dtype=dtype)

    def bias(size: int) -> Tensor | None:
        return None if rotates else vector(size)

    rotary = None
    if rotates:
        norms = (1 + vector(dim), 1 + vector(dim), EPS) if shape in QWEN else ()
        rotary = Rotary(angle_table(ROTATION, dim, LONG + 5, CUDA), *norms)
    return BlockWeights(
        1 + vector(hidden), bias(hidden), matrix(rows, hidden, dtype=dtype), bias(rows),
        matrix(hidden, width, dtype=dtype), bias(hidden), 1 + vector(hidden), bias(hidden),
        matrix(2 * inner if rotates else inner, hidden, dtype=dtype), bias(inner),
        matrix(hidden, inner, dtype=dtype), bias(hidden), eps=EPS, head_dim=dim,
        activation="swiglu" if rotates else "gelu", rotary=rotary,
    )  # fmt: skip


def wide(value):
    """Tensors of weights, but angles, in float64."""
    return value.double() if isinstance(value, Tensor) else value


def norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return norm_reference(x, weight, None, EPS)
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.T if bias is None else x @ weight.T + bias


class Case:
    """Two blocks, and sequences at all of `POSITIONS`, or in longer slots at multiples of these, behind which the cache
    holds NaN."""

    def __init__(self, shape: str, rows: int, dtype: torch.dtype = torch.bfloat16, length: int = LENGTH):
        torch.manual_seed(0)
        hidden, _, kv_heads, dim, _ = SHAPES[shape]
        self.blocks = [weights(shape, dtype) for _ in range(2)]
        places = [position * (length // LENGTH) for position in POSITIONS]
        self.positions = torch.tensor([places[i % len(places)] for i in range(rows)], device=CUDA)
        self.slots = torch.randperm(rows, device=CUDA)
        self.x = random(rows, hidden, dtype=dtype)
        bias = None if self.blocks[0].rotary else random(hidden, dtype=dtype)
        self.head = HeadWeights(1 + random(hidden, scale=0.1, dtype=dtype), bias,
                                random(384, hidden, scale=0.05, dtype=dtype), EPS)  # fmt: skip
        kept = [random(rows, kv_heads, length, dim, scale=0.5, dtype=dtype) for _ in range(4)]
        for tensor in kept:
            for slot, position in zip(self.slots.tolist(), self.positions.tolist(), strict=True):
                tensor[slot, :, position:] = math.nan
        self.keys, self.values = kept[:2], kept[2:]

    def run(self, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the logits of some rows, and the caches after the step."""
        keys, values = ([tensor.clone() for tensor in kept] for kept in (self.keys, self.values))
        stream = run_blocks(self.x[rows], self.blocks, keys, values, self.slots[rows], self.positions[rows])
        return run_head(stream, self.head), keys + values

    def reference(self) -> tuple[Tensor, list[Tensor]]:
        """Return what `run` does for all rows."""
        x, caches = self.x.double(), [tensor.double() for tensor in self.keys + self.values]
        for block, keys, values in zip(self.blocks, caches[:2], caches[2:], strict=True):
            w = BlockWeights(*map(wide, block))
            packed = product(norm(x, w.norm_1, w.norm_1_bias), w.qkv, w.qkv_bias)
            q, k, v = self.heads(packed.unflatten(1, (keys.shape[1], -1, w.head_dim)), w.rotary)
            for tensor, new in ((keys, k), (values, v)):
                tensor[self.slots, :, self.positions] = new
            heads = attend_rows_reference(q, keys, values, self.slots, self.positions).flatten(1)
            x = x + product(heads, w.proj, w.proj_bias)
            inner = product(norm(x, w.norm_2, w.norm_2_bias), w.fc, w.fc_bias)
            inner = swiglu(inner) if w.activation == "swiglu" else F.gelu(inner, approximate="tanh")
            x = x + product(inner, w.out, w.out_bias)
        head = HeadWeights(*map(wide, self.head))
        return norm(x, head.norm, head.norm_bias) @ head.table.T, caches

    def heads(self, packed: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = packed[:, :, :-2].flatten(1, 2), packed[:, :, -2], packed[:, :, -1]
        if rotary is None:
            return q, k, v
        if rotary.q_norm is not None and rotary.k_norm is not None:
            q, k = norm_reference(q, rotary.q_norm, None, EPS), norm_reference(k, rotary.k_norm, None, EPS)
        cosine, sine = rotary.table[:, self.positions].unsqueeze(-2)
        return rotate(q, cosine, sine), rotate(k, cosine, sine), v


@pytest.mark.parametrize(("shape", "length"), [*((shape, LENGTH) for shape in SHAPES), ("r3", LONG), ("wide", LONG)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_are_those_of_float64(shape, length, dtype):
    case = Case(shape, 12, dtype, length)
    logits, caches = case.run(torch.arange(12, device=CUDA))
    expected, kept = case.reference()
    bound = 1e-2 if dtype == torch.bfloat16 else 2e-3
    assert (logits.double() - expected).norm() / expected.norm() < bound
    for found, wanted in zip(caches, kept, strict=True):
        new, exact = (tensor[case.slots, :, case.positions].double() for tensor in (found, wanted))
        assert (new - exact).norm() / exact.norm() < bound
        assert torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize(("shape", "length"), [
    ("345m", LENGTH), ("1558m", LENGTH), ("long", LENGTH), ("grouped", LENGTH), ("llama32_1b", LENGTH),
    ("qwen3_0_6b", LENGTH), ("r7", LONG)
])  # fmt: skip
def test_a_row_has_the_same_bits_in_every_company(shape, length):
    case = Case(shape, 130, length=length)
    everyone, kept = case.run(torch.arange(130, device=CUDA))
    for count in (1, 2, 7, 16, 17, 33, 64, 65, 129):
        rows = torch.randperm(130, device=CUDA)[:count]
        logits, own = case.run(rows)
        assert torch.equal(logits, everyone[rows]), count
        slots, positions = case.slots[rows], case.positions[rows]
        for alone, together in zip(own, kept, strict=True):
            assert torch.equal(alone[slots, :, positions], together[slots, :, positions]), count


@pytest.mark.parametrize("epilogue", ["plain", "gelu", "swiglu"])
@pytest.mark.parametrize(
    ("rows", "columns", "size"), [(65, 104, 40), (200, 3000, 768), (512, 16384, 256), (40, 8200, 72)]
)
def test_exact_products_of_many_rows_have_the_bits_of_few(epilogue, rows, columns, size):
    """Many rows take larger tiles, which are read in another way; neither 64 rows nor 32 columns divide these sizes."""
    x, weight, bias = random(rows, size), random(columns, size, scale=size**-0.5), random(columns)
    for added in (None, bias):
        found = blocks.product(x, weight, added, epilogue, exact=True)
        alone = [blocks.product(part, weight, added, epilogue, exact=True) for part in x.split(32)]
        assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize(("rows", "size", "pieces"), [(1, 1024, 8), (40, 4096, 8), (200, 4096, 4), (17, 704, 2)])
def test_exact_products_in_pieces_are_trees_of_chains(rows, size, pieces):
    x, weight = random(rows, size), random(768, size, scale=size**-0.5)
    parts = zip(x.chunk(pieces, 1), weight.chunk(pieces, 1), strict=True)
    chains = [blocks.product(a.contiguous(), b.contiguous(), None, "plain", exact=True) for a, b in parts]
    assert torch.equal(blocks.product(x, weight, None, "plain", exact=True, pieces=pieces), tree_sum(chains))


@pytest.mark.parametrize(("columns", "size"), [(2048, 8192), (4096, 4040), (1600, 6400), (1000, 1100)])
def test_groups_of_products_have_the_bits_of_few_rows(columns, size):
    """Many rows take several groups of K a program, one after the other, up to all of them for 512 rows."""
    x, weight = random(512, size), random(columns, size, scale=size**-0.5)
    found = blocks.product(x, weight, None, "groups")
    exact = x.double() @ weight.double().T
    assert (found.double().sum(0) - exact).norm() / exact.norm() < 1e-5
    for count in (5, 16, 20, 40, 64, 130, 256):
        assert torch.equal(blocks.product(x[:count], weight, None, "groups"), found[:, :count]), count


@pytest.mark.parametrize("learned", [True, False])
def test_embeddings(learned):
    tokens, positions = torch.tensor([3, 0, 3], device=CUDA), torch.tensor([0, 6, 5], device=CUDA)
    table, places = random(9, 96), random(7, 96) if learned else None
    expected = table[tokens] if places is None else (table[tokens].float() + places[positions].float()).to(table.dtype)
    assert torch.equal(embed(tokens, positions, EmbeddingWeights(table, places)), expected)


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


@each_pair(
    sizes=[(4, 4, 64), (8, 2, 32), (6, 1, 128), (2, 2, 16), (4, 1, 256)], dtype=[torch.float32, torch.bfloat16],
    rows=[1, 20], ruled=[False, True],
)  # fmt: skip
def test_attention_over_slots(sizes, dtype, rows, ruled):
    torch.manual_seed(0)
    heads, kv_heads, dim = sizes
    q, k, v = (random(rows, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    keys, values = (torch.full((rows + 1, kv_heads, LENGTH, dim), math.nan, dtype=dtype, device=CUDA) for _ in range(2))
    slots = torch.randperm(rows, device=CUDA)
    positions = torch.tensor([POSITIONS[-1 - i % len(POSITIONS)] for i in range(rows)], device=CUDA)
    for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
        for kept in (keys, values):
            kept[slot, :, :position] = random(kv_heads, position, dim, dtype=dtype)
    rule = AttentionRule(scale=0.2, sinks=random(heads, dtype=torch.float32)) if ruled else PLAIN_RULE
    made = attend_rows(q, k, v, keys, values, slots, positions, rule)
    expected = attend_rows_reference(q.double(), keys.double(), values.double(), slots, positions, rule)
    assert (made.double() - expected).norm() / expected.norm() < (2e-6 if dtype == torch.float32 else 1e-2)

"""Kernels of the experts of a few tokens: against the definitions, tokens that do not depend on each other, whole
blocks, and on a GPU the bits of products of sorted rows."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dtgpt.ops.experts import few
from dtgpt.ops.experts.routing import Choice, Routing, router_logits
from dtgpt.ops.kernels.decode import experts as kernels
from tests.support.interpreter import needs_triton, run_interpreted

CUDA = torch.device("cuda")
SHAPES: dict[str, tuple[int, int, int, str, Routing, bool]] = {  # E, H, F, activation, rule, whether there are biases
    "olmoe": (8, 48, 24, "silu", Routing(3), False),
    "gpt_oss": (6, 33, 40, "clamped_swiglu", Routing(2, "softmax_of_chosen"), True),
    "all": (5, 64, 18, "gelu_tanh", Routing(5, normalised=True, factor=2.5), False),
    "many": (40, 32, 16, "relu2", Routing(2), True),
    "gelu": (7, 32, 16, "gelu", Routing(1), False),
}
LARGE: dict[str, tuple[int, int, int, str, Routing, bool]] = {
    "olmoe": (64, 2048, 1024, "silu", Routing(8), False),
    "gpt_oss": (32, 2880, 2880, "clamped_swiglu", Routing(4, "softmax_of_chosen"), True),
    "mixtral": (8, 1024, 3584, "silu", Routing(2, normalised=True), False),
    "uneven": (160, 512, 256, "silu", Routing(6), False),
}


@dataclass
class Given:
    """Tokens and a mixture of experts."""

    x: Tensor
    router: tuple[Tensor, Tensor | None, Routing]
    stacks: tuple[Any, ...]

    def at(self, rows: int) -> "Given":
        return Given(self.x[:rows].contiguous(), self.router, self.stacks)

    def made(self) -> tuple[Tensor, Choice, Tensor]:
        """By the kernels: logits, choice and results of slots."""
        weight, bias, rule = self.router
        logits = kernels.logits_of(self.x, weight, bias)
        choice = kernels.choice_of(logits, rule)
        return logits, choice, kernels.few_products(self.x, choice, *self.stacks)

    def made_at_once(self) -> tuple[Choice, Tensor]:
        """Of one token: the product chooses."""
        logits, choice, _ = self.made()
        chosen = Choice(torch.full_like(choice.experts, -7), torch.full_like(choice.weights, torch.nan))
        return chosen, kernels.few_products(self.x, chosen, *self.stacks, logits, self.router[2])


def given(shape: tuple, dtype: torch.dtype, rows: int, device: torch.device | str = "cpu") -> Given:
    count, size, width, name, rule, has_biases = shape
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*sizes, generator=generator)).to(dtype).to(device)

    x, router = numbers(rows, size), numbers(count, size, scale=size**-0.5)
    first, second = numbers(count, 2 * width, size, scale=size**-0.5), numbers(count, size, width, scale=width**-0.5)
    shifts = (numbers(count), numbers(count, 2 * width), numbers(count, size)) if has_biases else (None,) * 3
    return Given(x, (router, shifts[0], rule), (first, shifts[1], second, shifts[2], name))


def check(shape: tuple, dtype: torch.dtype, tolerance: float, device: torch.device | str = "cpu") -> None:
    whole = given(shape, dtype, 16, device)
    logits, choice, made = whole.made()
    weight, bias, rule = whole.router
    torch.testing.assert_close(logits, router_logits(whole.x, weight, bias), rtol=1e-4, atol=1e-4)
    expected = few._choice(whole.x, weight, bias, rule)
    assert torch.equal(choice.experts, expected.experts)
    torch.testing.assert_close(choice.weights, expected.weights, rtol=1e-4, atol=1e-5)
    found = kernels.sums_of(made, choice.weights, None, dtype)
    torch.testing.assert_close(found, few._sums(whole.x, choice, *whole.stacks), rtol=tolerance, atol=tolerance)
    for rows in (1, 3):  # of which the experts of some are those of others
        part = whole.at(rows)
        for one, other in zip(_flat(part.made()), _flat((logits, choice, made)), strict=True):
            assert torch.equal(one, other[: len(one)])
    chosen, alone = whole.at(1).made_at_once()
    assert torch.equal(alone, made[: len(alone)])
    assert all(map(torch.equal, chosen, (each[:1] for each in choice)))


def _flat(made: tuple[Tensor, Choice, Tensor]) -> list[Tensor]:
    logits, choice, results = made
    return [logits, *choice, results]


INTERPRETED = """
import torch
from tests.ops.test_few_experts import SHAPES, check
for name, dtype, tolerance in {cases}:
    check(SHAPES[name], dtype, tolerance)
"""


@needs_triton
@pytest.mark.slow(20)
@pytest.mark.parametrize(
    "cases",
    ["('olmoe', torch.float32, 2e-5), ('gelu', torch.float32, 2e-5)", "('gpt_oss', torch.float16, 2e-2),",
     "('all', torch.float32, 2e-5),", "('many', torch.float16, 2e-2),"],
)  # fmt: skip
def test_kernels_are_the_definitions_in_the_interpreter(cases):
    run_interpreted(INTERPRETED.format(cases=f"({cases})"))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_kernels_are_the_definitions(name, dtype):
    check(LARGE[name], dtype, 1e-4 if dtype == torch.float32 else 3e-2, CUDA)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["olmoe", "mixtral"])
def test_results_have_the_bits_of_products_of_sorted_rows(name):
    whole = given(LARGE[name], torch.bfloat16, 16, CUDA)
    _, choice, made = whole.made()
    found = kernels.sums_of(made, choice.weights, None, torch.bfloat16)
    assert torch.equal(found, few._sums(whole.x, choice, *whole.stacks))


@needs_triton
@pytest.mark.slow(30)
@pytest.mark.parametrize(("name", "rows"), [("olmoe", 1), ("olmoe", 5), ("qwen3_moe", 1), ("mixtral", 17)])
def test_blocks_of_kernels_are_the_modules(name, rows):
    """Their bounded heads that are normalised together, too."""
    run_interpreted(f"from tests.ops.test_few_experts import check_blocks; check_blocks({name!r}, {rows})")


@needs_triton
@pytest.mark.slow(15)
def test_joined_kernels_have_the_bits_of_those_that_they_replace():
    """Where the last group of K is not whole, and the new token is in the second of three splits."""
    run_interpreted("from tests.ops.test_few_experts import check_joined; check_joined()")


def check_joined() -> None:
    from dtgpt.ops.kernels.decode import blocks
    from dtgpt.ops.kernels.decode.weights import BlockWeights, Rotary

    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return (torch.randn(*sizes, generator=generator) * sizes[-1] ** -0.5).to(dtype)

    size, heads, kv_heads, dim = 64, 10, 5, 64
    nothing: Any = None
    rotary = Rotary(numbers(2, 300, dim // 2, dtype=torch.float32), numbers(heads * dim), numbers(kv_heads * dim), 1e-5)
    block = BlockWeights(
        nothing, None, numbers((heads + 2 * kv_heads) * dim, size), None, numbers(size, heads * dim), None, nothing,
        None, nothing, None, nothing, None, 1e-5, dim, rotary=rotary, joint=1.5,
    )  # fmt: skip
    h, cache = numbers(2, size), [numbers(2, kv_heads, 300, dim) for _ in range(2)]
    made = []
    for joined in (False, True):
        keys, values = (each.clone() for each in cache)
        write = blocks.Write(keys, values, torch.tensor([1, 0]), torch.tensor([200, 5]))
        if joined:
            branch = blocks.attend_few(h, block, write)
        else:
            branch = blocks.product(blocks.attend(h, block, write), block.proj, None, "groups")
        made.append((branch, keys, values))
    assert not torch.equal(made[0][1], cache[0])
    assert all(map(torch.equal, *made))


def check_blocks(name: str, rows: int) -> None:
    """Compare a decode step through blocks by kernels with that by modules."""
    from dtgpt.config.plan import Plan
    from dtgpt.inference.cache import Cache, DecodeRows
    from dtgpt.inference.kernels.weights import decode_weights
    from dtgpt.models.families.mixtral import MixtralConfig
    from dtgpt.models.families.olmoe import OlmoeConfig
    from dtgpt.models.families.qwen3_moe import Qwen3MoeConfig
    from dtgpt.models.layers import Context
    from dtgpt.ops.kernels.decode import blocks
    from dtgpt.ops.random.philox import root_key
    from tests.support.whole_model import build_model

    shape = {
        "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_experts": 8,
        "experts_per_token": 3, "seq_length": 32, "vocab_size": 128, "init_std": 0.3, "ffn_hidden_size": 24,
    }  # fmt: skip
    kinds = {
        "olmoe": lambda: OlmoeConfig(**shape, clip_qkv=2.0),
        "qwen3_moe": lambda: Qwen3MoeConfig(**shape, expert_size=24),
        "mixtral": lambda: MixtralConfig(**shape),
    }
    cpu, dtype, generator = torch.device("cpu"), torch.float16, torch.Generator().manual_seed(0)
    model = build_model(kinds[name](), cpu, dtype, root_key(1)).to(dtype)
    cache = Cache([model], model.config, Plan().for_world(1), rows, dtype, cpu)
    for layer in cache.layers:
        layer.keys.copy_(torch.randn(layer.keys.shape, generator=generator))
        layer.values.copy_(torch.randn(layer.keys.shape, generator=generator))
    slots = torch.randperm(rows, generator=generator)
    positions = torch.randint(0, 32, (rows,), generator=generator)
    context = Context(positions=positions[None])
    with torch.no_grad():
        weights = [decode_weights(block) for block in model.blocks.values()]
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        x = model.embedding(torch.arange(rows)[None], context)
        inputs = x[0], weights, *zip(*before, strict=True), slots, positions
        found = blocks._run_rows(*inputs, None, None).whole()
        summed = blocks._run_rows(*inputs, lambda parts: parts.sum(0, keepdim=True), None).whole()
        cache.attach()
        cache.expect(DecodeRows(slots, positions))
        for block in model.blocks.values():
            x = block(x, context)
    torch.testing.assert_close(found, x[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(summed, found, rtol=5e-3, atol=5e-3)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        torch.testing.assert_close(layer.keys, keys, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(layer.values, values, rtol=1e-2, atol=1e-2)

"""`--reduce exact_tp` of experts on GPUs: what serves pieces of stacks has the same bits for any share of them."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from dtgpt.ops.experts.products import Groups, grouped_linear
from dtgpt.ops.kernels.attention.flash_launch import sinks_gradient
from dtgpt.ops.operation import load_kernels
from dtgpt.parallel.exact_tp.tree import tree_sum
from dtgpt.parallel.graphs.captured import WARM_UP
from dtgpt.parallel.more_pieces import serve, stacks
from dtgpt.parallel.more_pieces.stacks import column_stack, row_stack
from tests.parallel.test_exact_tp_cuda import HOPPER, RECIPES, TWO
from tests.support.interpreter import chosen, definitions_of
from tests.support.plans_on_gpus import records

pytestmark = pytest.mark.cuda
PIECES = 8
NAMES = ["addends_of_stacks", "columns_of_stacks", "weight_gradient_of_stacks"]
BF16, FP32 = torch.bfloat16, torch.float32
SIZES = [  # rows, experts, width of tokens, of an expert
    (16384, 64, 2048, 1024, BF16),  # OLMoE
    (8192, 32, 1024, 512, BF16),  # Granite
    (4096, 16, 2048, 768, BF16),  # Qwen3
    (4096, 8, 2880, 2880, BF16),  # GPT-OSS, whose pieces no step of the kernel divides
    (300, 5, 72, 48, FP32),
]


def groups_of(rows: int, experts: int, behind: int) -> Groups:
    """Uneven loads: the second expert has no rows, and some rows behind are nobody's."""
    loads = torch.rand(experts, device="cuda") ** 2
    loads[1] = 0
    ends = (loads.cumsum(0) / loads.sum() * (rows - behind)).round().int()
    ends[-1] = rows - behind
    return Groups(ends, behind == 0)


def of_ranks(stack, ranks: int, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, groups: Groups):
    """The output and the gradients of a stack, as so many ranks make and add them up."""
    by_inputs, made, last = stack is row_stack, [], int(groups.ends[-1])
    for rank in range(ranks):
        own = x.chunk(ranks, 1)[rank] if by_inputs else x
        cut = weight.chunk(ranks, 2 if by_inputs else 1)[rank]
        given = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in (own, cut)]
        added = None if by_inputs else bias.chunk(ranks, 1)[rank].clone().requires_grad_()
        y = stack(PIECES // ranks, None, *given, added, groups)
        y.backward(dy if by_inputs else dy.chunk(ranks, 1)[rank])
        dbias = [] if added is None else [added.grad]
        made.append([y[:last].detach(), given[0].grad[:last], given[1].grad, *dbias])
    y, dx, dweight, *dbias = zip(*made, strict=True)
    if by_inputs:
        return {"y": tree_sum(y), "dx": torch.cat(dx, 1), "dweight": torch.cat(dweight, 2)}
    return {"y": torch.cat(y, 1), "dx": tree_sum(dx), "dweight": torch.cat(dweight, 1), "dbias": torch.cat(*dbias, 1)}


@pytest.mark.parametrize("way", ["kernels", "grouped products", "definitions"])
@pytest.mark.parametrize("stack", [column_stack, row_stack])
@pytest.mark.parametrize("rows, experts, hidden, width, dtype", SIZES)
def test_a_stack_of_ranks_has_the_bits_of_one_process(rows, experts, hidden, width, dtype, stack, way, monkeypatch):
    torch.manual_seed(0)
    terms, columns = (width, hidden) if stack is row_stack else (hidden, 2 * width)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", dtype=dtype)

    groups = groups_of(rows, experts, behind=100)
    given = draw(rows, terms), draw(experts, columns, terms) / terms**0.5, draw(experts, columns), draw(rows, columns)
    if way == "grouped products":
        load_kernels(stacks.ADDENDS.name)
        monkeypatch.setattr(stacks.ADDENDS, "kernels", list(serve.ADDENDS[1:]))
    with definitions_of(*NAMES) if way == "definitions" else nullcontext():
        whole = of_ranks(stack, 1, *given, groups)
        for ranks in (2, 4, 8):
            for name, made in of_ranks(stack, ranks, *given, groups).items():
                assert torch.equal(made, whole[name]), (ranks, name)
    x, weight, bias, dy = (t.double().requires_grad_() for t in given)
    y = grouped_linear(x, weight, None if stack is row_stack else bias, *groups)
    y[: groups.ends[-1]].backward(dy[: groups.ends[-1]])
    for name, exact in {"y": y, "dx": x.grad, "dweight": weight.grad, "dbias": bias.grad}.items():
        if name in whole:
            limit = (3e-2 if dtype is BF16 else 1e-5) * exact.abs().max()
            assert (whole[name].double() - exact[: len(whole[name])]).abs().max() < limit, name


@HOPPER
def test_published_sizes_are_served():
    x, ends = torch.empty(16384, 1024, device="cuda", dtype=BF16), torch.zeros(64, device="cuda", dtype=torch.int32)
    weight, dy = (torch.empty(*size, device="cuda", dtype=BF16) for size in ((64, 2048, 1024), (16384, 2048)))
    for expected, operation, *given in (
        (serve.ADDENDS[0], stacks.ADDENDS, x, weight, ends, PIECES, True),
        (serve.ADDENDS[0], stacks.ADDENDS, dy, weight, ends, PIECES, False),
        (serve.ADDENDS[1], stacks.ADDENDS, x[:, :960].contiguous(), weight[:, :, :960], ends, PIECES, True),
        (serve.COLUMNS[0], stacks.COLUMNS, dy, weight, ends, PIECES, True),
        (serve.WEIGHT_GRADIENT[0], stacks.WEIGHT_GRADIENT, dy, x, ends, PIECES, True),
    ):
        assert chosen(operation, *given) == expected, operation.name


def test_the_gradient_of_a_sink_does_not_depend_on_other_heads():
    torch.manual_seed(0)
    sinks, sums, products = torch.randn(64).cuda(), torch.randn(3, 64, 1000).cuda(), torch.randn(3, 64, 1000).cuda()
    whole = sinks_gradient(sinks, sums, products)
    for ranks in (2, 8, 64):
        parts = zip(sinks.chunk(ranks), sums.chunk(ranks, 1), products.chunk(ranks, 1), strict=True)
        assert torch.equal(torch.cat([sinks_gradient(*(t.contiguous() for t in part)) for part in parts]), whole)
    exact = -(torch.exp2(sinks[:, None] * 1.4426950408889634 - sums).double() * products).sum((0, 2))
    torch.testing.assert_close(whole.double(), exact, rtol=1e-4, atol=1e-3)


SMALL = [
    "--model.hidden_size", "512", "--model.num_heads", "8", "--model.num_kv_heads", "4", "--model.head_dim", "64",
    "--model.ffn_hidden_size", "256", "--model.dropout", "0.1", "--model.seq_length", "256",
    "--balance.loss", "0.01", "--balance.z_loss", "0.001",
]  # fmt: skip


@TWO
@pytest.mark.parametrize("precision, attention", [("bf16", "flash"), ("fp32", "explicit")])
def test_captured_steps_of_two_gpus_have_the_bits_of_one(tmp_path, precision, attention):
    options = [
        *SMALL,
        "--precision",
        precision,
        "--attention",
        attention,
        "--graph",
        "on",
        "--reduce",
        "exact_tp",
        "--micro_batch_size",
        "8",
    ]

    def of(plan: str) -> dict:
        made = {"recipe": str(RECIPES / "moe_tiny.py"), "steps": WARM_UP + 4}
        return {"name": plan, "options": [*options, "--plan", plan], **made}

    (reference,) = records([of("single")], tmp_path, 1).values()
    for plan, found in records([of("tp2"), of("tp2_sp")], tmp_path, 2).items():
        assert found.losses == reference.losses and found.norms == reference.norms, plan
        assert [key for key, t in found.tensors.items() if not torch.equal(t, reference.tensors[key])] == [], plan

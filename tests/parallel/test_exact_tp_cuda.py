"""`--reduce exact_tp` on GPUs: what serves sums of pieces has the same bits for any share of them."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from dtgpt.ops.activations import bias_gelu
from dtgpt.ops.operation import OPERATIONS
from dtgpt.parallel.exact_tp import products, rows, serve
from dtgpt.parallel.exact_tp.products import column_product, row_product
from dtgpt.parallel.exact_tp.tree import Share, tree_sum
from dtgpt.parallel.graphs.captured import WARM_UP
from tests.support.interpreter import chosen, definitions_of
from tests.support.plans_on_gpus import records

pytestmark = pytest.mark.cuda
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)
RECIPES = Path(__file__).parents[2] / "recipes"
PIECES = 8
NAMES = [name for name in OPERATIONS if name.endswith("_of_pieces")]
SIZES = [(16384, 1024, 3072), (16384, 1024, 4096), (16384, 1024, 1024), (2048, 2048, 8192), (4096, 4096, 1024)]


def draw(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def of_ranks(product, ranks: int, x, weight, bias, dy) -> dict[str, torch.Tensor]:
    """The output of a product and its gradients, as so many ranks make and add them up."""
    by_inputs, made = product is row_product, []
    for rank in range(ranks):
        own = x.chunk(ranks, 1)[rank].contiguous() if by_inputs else x
        cut = weight.chunk(ranks, int(by_inputs))[rank].contiguous()
        given = [t.detach().clone().requires_grad_() for t in (own[None], cut)]
        if not by_inputs:
            given.append(bias.chunk(ranks)[rank].clone().requires_grad_())
        y = product(PIECES // ranks, *given, *[None] * by_inputs)
        y.backward((dy if by_inputs else dy.chunk(ranks, 1)[rank])[None])
        made.append([y[0].detach(), given[0].grad[0], *(t.grad for t in given[1:])])
    y, dx, dweight, *dbias = zip(*made, strict=True)
    if by_inputs:
        return {"y": tree_sum(y), "dx": torch.cat(dx, 1), "dweight": torch.cat(dweight, 1)}
    return {"y": torch.cat(y, 1), "dx": tree_sum(dx), "dweight": torch.cat(dweight), "dbias": torch.cat(*dbias)}


@pytest.mark.parametrize("way", ["kernels", "definitions"])
@pytest.mark.parametrize("product", [column_product, row_product])
@pytest.mark.parametrize("count, terms, columns", SIZES)
def test_a_product_of_ranks_has_the_bits_of_one_process(count, terms, columns, product, way):
    torch.manual_seed(0)
    if product is row_product:
        terms, columns = columns, terms
    x, weight, bias, dy = draw(count, terms), draw(columns, terms) / terms**0.5, draw(columns), draw(count, columns)
    with nullcontext() if way == "kernels" else definitions_of(*NAMES):
        whole = of_ranks(product, 1, x, weight, bias, dy)
        for ranks in (2, 4, 8):
            for name, made in of_ranks(product, ranks, x, weight, bias, dy).items():
                assert torch.equal(made, whole[name]), (ranks, name)
    y = x.float() @ weight.float().t() + (bias.float() if product is column_product else 0)
    torch.testing.assert_close(whole["y"].float(), y, rtol=0.02, atol=0.1)


@HOPPER
def test_the_sizes_of_gpt2_are_served():
    x, weight, dy = draw(16384, 1024), draw(4096, 1024), draw(16384, 4096)
    for expected, operation, *given in (
        (serve.ADDENDS, products.ADDENDS, dy, weight.t().contiguous(), PIECES, True),
        (serve.COLUMNS, products.COLUMNS, x, weight, None, PIECES, False),
        (serve.WEIGHT_GRADIENT, products.WEIGHT_GRADIENT, dy, x, PIECES, False),
        (serve.COLUMN_SUMS, products.COLUMN_SUMS, dy, PIECES),
        (serve.PIECE_SUMS, rows.PIECE_SUMS, x.view(16, 1024, 1024), None, PIECES, 0.0, False),
    ):
        assert chosen(operation, *given) in expected, operation.name


@HOPPER
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("by_inputs", [True, False])
@pytest.mark.parametrize("rows, columns, terms", [(640, 256, 128), (16384, 1024, 64), (4096, 4096, 192)])
def test_all_kernels_of_a_tree_have_the_bits_of_its_definition(rows, columns, terms, by_inputs, count, monkeypatch):
    from dtgpt.parallel.exact_tp import kernels

    x = draw(rows, terms * count)
    weight = draw(*((columns, terms * count) if by_inputs else (terms * count, columns)))
    expected = products._addends(x, weight, count, by_inputs)
    for has_gluon in (kernels.has_gluon, lambda device: False):
        monkeypatch.setattr(kernels, "has_gluon", has_gluon)
        assert torch.equal(kernels.tree_product(x, weight, count, by_inputs), expected)


@pytest.mark.parametrize("shifted, drops", [(True, True), (True, False), (None, False)])
@pytest.mark.parametrize("centred", [True, False, None])
def test_norms_of_a_rank_have_the_sums_that_one_process_has_of_them(shifted, centred, drops):
    if shifted is centred is None:
        pytest.skip("nothing to compute")
    torch.manual_seed(0)
    (x, branch, *dy), vectors, key = draw(4, 4, 1024, 1024), draw(3, 1024), torch.arange(8, device="cuda").view(4, 2)

    def results(function, ranks: int) -> list[torch.Tensor]:
        made, sums = [], []
        for rank in range(ranks):
            own = [t.chunk(ranks, 1)[rank].contiguous().requires_grad_() for t in (x, branch)]
            shift, weight, bias = leaves = [v.clone().requires_grad_() for v in vectors]
            share = Kept(PIECES // ranks)
            total, normed = function(
                own[0], own[1] if shifted else None, shift if shifted else None, None if centred is None else weight,
                bias if centred else None, 1e-5, key if drops else None, 0.1, (1024 // ranks * rank, 0), share,
            )  # fmt: skip
            grads = [d.chunk(ranks, 1)[rank].contiguous() for d in dy]
            outs = [total] if normed is None else [total, normed]
            torch.autograd.backward(outs, grads[: len(outs)])
            made.append([*(out.detach() for out in outs), *(t.grad for t in own if t.grad is not None)])
            sums.append(share.seen)
            found = [v.grad for v in leaves if v.grad is not None]
        whole = [torch.cat(parts, 1) for parts in zip(*made, strict=True)]
        return [*whole, *(torch.cat(parts) for parts in zip(*sums, strict=True)), *(found if ranks == 1 else [])]

    whole = results(rows.NORM_IN_PIECES, 1)
    for ranks in (2, 4, 8):
        for one, other in zip(results(rows.NORM_IN_PIECES, ranks), whole, strict=False):
            assert torch.equal(one, other), ranks
    with definitions_of("norm_in_pieces", "row_sums_of_pieces"):
        plain = results(rows.NORM_IN_PIECES, 1)
    outputs = 3 + (centred is not None) - (not shifted)
    for one, other in zip(whole[:outputs], plain[:outputs], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.05)
    count = (2 if centred else centred is not None) + (shifted is True)
    for one, other in zip(whole[-count:], plain[-count:], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=2.0)


class Kept(Share):
    """The pieces of one rank, which keeps what it was to gather."""

    def __init__(self, *given):
        self.seen = []

    def gather(self, own):
        self.seen.append(own)
        return super().gather(own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows_of_x, columns", [(16384, 4096), (16384, 2048), (4096, 1536), (168, 80), (100, 64)])
def test_the_bias_of_an_activation_has_the_same_gradient_without_the_other_columns(rows_of_x, columns, dtype):
    torch.manual_seed(0)
    x, dy, bias = draw(rows_of_x, columns).to(dtype), draw(rows_of_x, columns).to(dtype), draw(columns).to(dtype)
    if dtype == torch.float32:
        x, dy = x * torch.rand_like(x), dy * torch.rand_like(dy)  # numbers of all bits

    def gradients(ranks: int) -> torch.Tensor:
        made = []
        for own, grad, shift in zip(*(t.chunk(ranks, -1) for t in (x, dy, bias)), strict=True):
            leaf = shift.clone().requires_grad_()
            rows.ACTIVATED(own.contiguous(), leaf, bias_gelu, PIECES // ranks).backward(grad.contiguous())
            made.append(leaf.grad)
        return torch.cat(made)

    for ranks in (2, 4, 8):
        assert torch.equal(gradients(ranks), gradients(1)), ranks
    made = gradients(1)
    with definitions_of("activated_in_pieces", "column_sums_of_pieces"):
        torch.testing.assert_close(made, gradients(1), rtol=0.02, atol=2.0)


@pytest.mark.parametrize("centred", [False, True])
def test_the_rows_of_a_rank_have_the_sums_that_one_process_has_of_them(centred):
    torch.manual_seed(0)
    dy, x = draw(4, 1024, 1024), draw(4, 1024, 1024)
    for given in (None, x):
        whole = rows.PIECE_SUMS(dy, given, PIECES, 1e-5, centred)
        for ranks in (2, 4, 8):
            parts = zip(dy.chunk(ranks, 1), [None] * ranks if given is None else x.chunk(ranks, 1), strict=True)
            made = [rows.PIECE_SUMS(*part, PIECES // ranks, 1e-5, centred) for part in parts]
            assert torch.equal(torch.cat(made), whole), ranks
        torch.testing.assert_close(whole, rows._piece_sums(dy, given, PIECES, 1e-5, centred), rtol=1e-3, atol=1e-2)


SMALL = {  # sizes that all kernels serve
    "gpt2_tiny": ["--model.hidden_size", "1024", "--model.num_heads", "16", "--model.dropout", "0.1"],
    "llama_tiny": [
        "--model.hidden_size", "1024", "--model.num_heads", "16", "--model.num_kv_heads", "8", "--model.head_dim", "64",
        "--model.ffn_hidden_size", "2048", "--model.dropout", "0.1",
    ],
}  # fmt: skip


@TWO
@pytest.mark.parametrize("name", SMALL)
def test_captured_steps_of_two_gpus_have_the_bits_of_one(tmp_path, name):
    options = [
        *SMALL[name],
        "--precision",
        "bf16",
        "--graph",
        "on",
        "--reduce",
        "exact_tp",
        "--model.seq_length",
        "256",
    ]
    made = {"recipe": str(RECIPES / f"{name}.py"), "steps": WARM_UP + 4}

    def of(plan: str) -> dict:
        return {"name": plan, "options": [*options, "--micro_batch_size", "8", "--plan", plan], **made}

    (reference,) = records([of("single")], tmp_path, 1).values()
    for plan, found in records([of("tp2"), of("tp2_sp")], tmp_path, 2).items():
        assert found.losses == reference.losses and found.norms == reference.norms, plan
        assert [key for key, t in found.tensors.items() if not torch.equal(t, reference.tensors[key])] == [], plan

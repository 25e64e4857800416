"""What ranks and Triton's interpreter do in test_exact_tp.py."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dtgpt.config.recipe import Recipe
from dtgpt.evaluation.scoring import Sample, Scorer
from dtgpt.models.batch import Batch
from dtgpt.models.config import ModelConfig
from dtgpt.parallel.exact_tp import build, loss, products, rows, tree
from dtgpt.parallel.exact_tp.tree import Share
from tests.support.bodies_engine import inference_stages, training_stages
from tests.support.bodies_exact import all_by_rows, bits_of_gradients, losses_kept


def _whole_addends(x: Tensor, weight: Tensor, count: int, by_inputs: bool) -> Tensor:
    return x @ (weight.t() if by_inputs else weight)


def _in_turn(addends: Any) -> Tensor:
    first, *others = addends
    for each in others:
        first = first + each
    return first


def _own_rows(share: Share, dtype: torch.dtype, *given: Any) -> Tensor:
    dy, x, *rest = given
    made = rows.PIECE_SUMS(dy, x, 1, *rest)  # of all rows of the rank at once
    return (share.gather(made.expand(share.number, *made.shape[1:])).sum(0) / share.number).to(dtype)


# By name: what a plan would do without one part of the capability.
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "products": (products.ADDENDS, "definition", _whole_addends),
    "order": (products, "tree_sum", _in_turn),
    "rows": (rows, "_whole", _own_rows),
    "loss": (loss, "tree_sum", _in_turn),
    "pieces": (build, "values_of", lambda settings: mock.Mock(pieces=settings.plan.tp)),
}


def bits_with_fault(fault: str, recipe: Recipe) -> dict[str, str]:
    """Return what `bits_of_gradients` does of a run with a fault."""
    with mock.patch.object(*FAULTS[fault]):
        return bits_of_gradients(recipe)


def trained_and_scored(config: ModelConfig, plan: str) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the tokens of texts `[B, T]`, by training and by a scorer of exact ones of as many
    tp ranks, where no row of a product depends on the others."""
    tokens = torch.randint(0, config.vocab_size, (3, config.seq_length + 1), generator=torch.Generator().manual_seed(2))
    choices: dict[str, Any] = {"attention": "explicit", "reduce": "exact_tp"}
    trained, _ = training_stages(config, plan, **choices)
    stages, mesh = inference_stages(config, plan.removesuffix("_sp"), **choices)
    with all_by_rows():
        with losses_kept() as kept:
            trained[0](*Batch(tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())).backward()
        scorer = Scorer(stages, mesh, config, torch.float32, exact=True)
        scores = scorer.score([Sample(tuple(row.tolist()), 1) for row in tokens])
    return -kept[0].view(len(tokens), -1), torch.stack([torch.from_numpy(each.logprobs) for each in scores])


def check_kernels() -> None:
    """Hold the kernels against their definitions, and a part of the pieces against all of them. Numbers of 16 bits are
    fp16 here: numpy has no bf16."""
    from dtgpt.parallel.exact_tp import kernels, row_kernels

    torch.manual_seed(0)
    for centred, (samples, length, size) in ((True, (2, 32, 48)), (False, (3, 16, 64))):
        dy, x = torch.randn(2, samples, length, size).half().unbind()
        for given in (x, None):
            check_close(row_kernels.piece_sums, rows._piece_sums, dy, given, 4, 1e-5, centred)
            whole = row_kernels.piece_sums(dy, given, 4, 1e-5, centred)
            half = None if given is None else given[:, length // 2 :]
            assert torch.equal(row_kernels.piece_sums(dy[:, length // 2 :], half, 2, 1e-5, centred), whole[2:])
    for shifted, centred, drops in ((True, True, True), (True, None, True), (False, True, False), (None, False, False)):
        check_norm(shifted, centred, drops)
    stack = torch.randn(8, 3, 40)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(row_kernels.tree_of_stack(stack, dtype), tree._tree_of_stack(stack.clone(), dtype))
    for columns, count, by_inputs in (
        (128, 2, True),
        (256, 2, False),
        (128, 8, True),
        (256, 16, False),
        (128, 1, False),
    ):
        terms = 1024 if count > 1 else 512
        x, weight = torch.randn(384, terms).half(), torch.randn(columns, terms).half() / 16
        matrix = weight if by_inputs else weight.t().contiguous()
        assert kernels.fits(len(x), columns, terms // count)
        check_close(kernels.tree_product, products._addends, x, matrix, count, by_inputs)
    for height, width, count in ((1024, 256, 1), (512, 256, 4), (128, 128, 1)):
        dy, x = torch.randn(2, 512, max(height, width)).half().unbind()
        dy, x = dy[:, :height], x[:, :width] / 16
        assert kernels.serves_gradient(len(x), (height // count, width))
        check_close(kernels.gradient_product, products._weight_gradient, dy, x, count, False)


def check_norm(shifted: bool | None, centred: bool | None, drops: bool) -> None:
    """Hold the norm in pieces against its definition, and the sums over a rank's pieces against their part of all.
    shifted: whether the branch has a bias; None: there is no branch. centred: likewise the norm."""
    from dtgpt.parallel.exact_tp import row_kernels

    def results(function: Callable[..., Any], first: int, last: int) -> tuple[list[Tensor], list[Tensor]]:
        share = Parts(last - first)
        own = [t[:, 8 * first : 8 * last].clone().requires_grad_() for t in (x, branch)]
        vectors = [t.clone().requires_grad_() for t in (shift, weight, bias)]
        made = function(
            own[0], None if shifted is None else own[1], vectors[0] if shifted else None,
            None if centred is None else vectors[1], vectors[2] if centred else None, 1e-5,
            key if drops else None, 0.3, (8 * first, 0), share,
        )  # fmt: skip
        pairs = [(t, d[:, 8 * first : 8 * last]) for t, d in zip(made, dy, strict=True) if t is not None]
        torch.autograd.backward(*zip(*pairs, strict=True))
        return [*(t.detach() for t, _ in pairs), *(t.grad for t in (*own, *vectors) if t.grad is not None)], share.seen

    x, branch, *dy = torch.randn(4, 2, 32, 64).half().unbind()
    shift, weight, bias = torch.randn(3, 64).half().unbind()
    key = torch.tensor([[1, 2], [3, 4]])
    (ours, (sums,)), (theirs, _) = (results(run, 0, 4) for run in (row_kernels.NormInPieces.apply, rows._norm))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=1e-2)
    _, (half,) = results(row_kernels.NormInPieces.apply, 2, 4)
    assert torch.equal(half, sums[2:])


class Parts(Share):
    """The pieces of one rank, which keeps what it was to gather."""

    def gather(self, own: Tensor) -> Tensor:
        self.seen.append(own)
        return super().gather(own)

    def __init__(self, *given: Any):
        self.seen: list[Tensor] = []


def check_close(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *given: Any) -> None:
    expected = theirs(*given)
    torch.testing.assert_close(ours(*given), expected, rtol=2e-3, atol=2e-3)

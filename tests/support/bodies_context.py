"""What the ranks of tests/parallel/test_context.py do."""

from types import SimpleNamespace

import torch
from torch import Tensor

from dtgpt.evaluation.batches import Sample
from dtgpt.evaluation.scoring import Scorer
from dtgpt.models.batch import Batch
from dtgpt.models.layers import AttentionCore
from dtgpt.ops.random.dropout import dropout_keys
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.context import HeadExchange, whole_samples
from dtgpt.parallel.mesh import Mesh
from dtgpt.train.startup import open_trainer
from tests.support.bodies_engine import resolve

BATCH, LENGTH, HEADS, GROUPS, SIZE = 2, 12, 8, 4, 6


def attend(plan: str) -> list[Tensor]:
    """Return this rank's tokens of an attention's output, and of the gradients of q, k and v, under dropout and
    document bounds."""
    resolved = resolve(plan, int(plan.removeprefix("cp") if plan != "single" else 1))
    mesh = Mesh(resolved, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)

    def own(heads: int) -> Tensor:
        whole = torch.randn(BATCH, LENGTH, heads, SIZE, generator=generator)
        return whole.chunk(resolved.cp, dim=1)[mesh.place.cp].clone().requires_grad_()

    q, k, v, gradient = own(HEADS), own(GROUPS), own(GROUPS), own(HEADS).detach()
    core = AttentionCore()
    run = core if mesh.cp_group is None else HeadExchange(core, mesh.cp_group)
    key = dropout_keys(root_key(3), torch.arange(BATCH), 1)[:, 0]
    ends = torch.tensor([5] * 5 + [LENGTH] * (LENGTH - 5))
    bounds = torch.stack([torch.where(torch.arange(LENGTH) < 5, 0, 5), ends], -1).int().expand(BATCH, LENGTH, 2)
    out = run(q, k, v, (key, 0.3, (mesh.place.cp * HEADS // resolved.cp, 0, 0)), bounds)
    out.backward(gradient)
    return [out.detach(), q.grad, k.grad, v.grad]


def train_with_weights(recipe, masked: range) -> tuple[float, float, float]:
    """Return (loss, gradient norm, validation loss) of a step in which the tokens at the positions `masked` do not
    count."""

    def apply(batch: Batch) -> Batch:
        weights = torch.ones(batch.tokens.shape)
        weights[:, masked.start : masked.stop] = 0
        return batch._replace(loss_weights=weights)

    with open_trainer(recipe) as trainer:
        trainer.masks = SimpleNamespace(apply=apply)
        result = trainer.train_step()
        return trainer.mean_loss(result), float(result.norm), trainer.held_out_loss()[0]


def score_and_sample(recipe) -> tuple[list[float], str]:
    """Return log-probabilities of a text, and a text, both from stages that are trained."""
    with open_trainer(recipe) as trainer:
        scorer = Scorer(trainer.stages, trainer.mesh, trainer.settings.model, trainer.settings.dtype, 64)
        with whole_samples(trainer.stages):
            scores = scorer.score([Sample((1, 2, 3, 4, 5, 6, 7), 3)] if trainer.mesh.rank == 0 else None)
        return scores[0].logprobs.tolist(), trainer.sample()

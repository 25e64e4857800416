"""What the ranks of tests/parallel/context_parallel/test_context.py do."""

from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtgpt.data.documents.masks import DocumentMasks
from dtgpt.evaluation.batches import Sample
from dtgpt.evaluation.scoring import Scorer
from dtgpt.models.batch import Batch
from dtgpt.models.binding import bind
from dtgpt.models.layers import AttentionCore
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.random.dropout import dropout_keys
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.context_parallel.degrees import ranks_of_heads
from dtgpt.parallel.context_parallel.slices import exchange_heads, whole_samples
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shared_memory import all_to_all
from dtgpt.train.setup import open_trainer
from dtgpt.train.texts.generate import generate_text
from tests.support.bodies_engine import resolve
from tests.support.bodies_exact import losses_kept, products_by_rows
from tests.support.bodies_pushes import shared_files

BATCH, LENGTH, HEADS, SIZE = 2, 24, 12, 6


def attend(
    plan: str, groups: int, dtype: torch.dtype = torch.float32, backend: str = "auto", plain: bool = False
) -> list[Tensor]:
    """Return this rank's tokens of an attention's output, and of the gradients of q, k and v, under dropout and
    document bounds. plain: without them. groups: heads of keys and values."""
    resolved = resolve(plan, int(plan.removeprefix("cp") if plan != "single" else 1))
    mesh = Mesh(resolved, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)

    def own(heads: int) -> Tensor:
        whole = torch.randn(BATCH, LENGTH, heads, SIZE, generator=generator).to(dtype)
        return whole.chunk(resolved.cp, dim=1)[mesh.place.cp].clone().requires_grad_()

    q, k, v, gradient = own(HEADS), own(groups), own(groups), own(HEADS).detach()
    part = nn.Module()
    part.config = LlamaConfig(num_heads=HEADS, num_kv_heads=groups, num_layers=1, hidden_size=8, ffn_hidden_size=8)
    part.core = AttentionCore()
    bind(part.core, backend=backend)
    if mesh.cp_group is not None:
        exchange_heads(part, mesh.cp_group, resolved)
    key = None if plain else dropout_keys(root_key(3), torch.arange(BATCH), 1)[:, 0]
    ends = torch.tensor([7] * 7 + [LENGTH] * (LENGTH - 7))
    bounds = torch.stack([torch.where(torch.arange(LENGTH) < 7, 0, 7), ends], -1).int().expand(BATCH, LENGTH, 2)
    ranks = ranks_of_heads(resolved, part.config)
    first_head = mesh.place.cp % ranks * (HEADS // ranks)
    out = part.core(q, k, v, (key, 0.0 if plain else 0.3, (first_head, 0, 0)), None if plain else bounds)
    out.backward(gradient)
    return [out.detach(), q.grad, k.grad, v.grad]


def train_with_weights(recipe, masked: range) -> tuple[float, float, float]:
    """Return (loss, gradient norm, validation loss) of a step in which the tokens at the positions `masked` do not
    count."""

    class Masks(DocumentMasks):
        def apply(self, batch: Batch) -> Batch:
            weights = torch.ones(batch.tokens.shape)
            weights[:, masked.start : masked.stop] = 0
            return batch._replace(loss_weights=weights)

    with open_trainer(recipe) as trainer:
        trainer.objective.masks = Masks(None, False, False, False)
        result = trainer.train_step()
        return trainer.mean_loss(result), float(result.norm), trainer.held_out_loss()[0]


def score_and_sample(recipe) -> tuple[list[float], str]:
    """Return log-probabilities of a text, and a text, both from stages that are trained."""
    with open_trainer(recipe) as trainer:
        scorer = Scorer(trainer.stages, trainer.mesh, trainer.settings.model, trainer.settings.dtype, 64)
        with whole_samples(trainer.stages):
            scores = scorer.score([Sample((1, 2, 3, 4, 5, 6, 7), 3)] if trainer.mesh.rank == 0 else None)
        return scores[0].logprobs.tolist(), generate_text(trainer)


def losses_of_tokens(recipe) -> Tensor:
    """Return the losses of this rank's tokens of a micro-batch `[B, T / cp]`, by products of rows."""
    with open_trainer(recipe) as trainer, products_by_rows(), losses_kept() as kept:
        trainer.gradients()
    return kept[0].view(recipe.micro_batch_size, -1)


def two_steps(recipe) -> tuple[list[float], int]:
    return first_steps(recipe, 2)


def first_steps(recipe, count: int) -> tuple[list[float], int]:
    """Return losses and gradient norms of `count` steps, and how many all-to-alls this rank took part in. A compiled
    step is traced and differentiated by torch.compile, which takes seconds, on the last rank alone; its code is not
    generated, which takes minutes. The other ranks take the step that was not compiled: the messages are the same."""
    counted = patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single)
    with open_trainer(recipe) as trainer, counted as exchanges:
        is_last = trainer.mesh.rank == trainer.mesh.world - 1
        traced = ("default", "aot_eager_decomp_partition") if is_last else ("force_eager", None)
        with torch.compiler.set_stance(traced[0], force_backend=traced[1]):
            steps = [trainer.train_step() for _ in range(count)]
        assert trainer.settings.compile == (recipe.compile == "on")
        values = [value for step in steps for value in (trainer.mean_loss(step), float(step.norm))]
        return values, exchanges.call_count


def steps_in_shared_memory(folder: Path, recipe, count: int, also_apart: bool = True) -> list[tuple[list[float], int]]:
    """`first_steps` of ranks that share memory, in several turns of an exchange, and of ranks that do not."""
    with shared_files(folder), patch.object(all_to_all, "ROOM", 1 << 10):
        shared = first_steps(recipe, count)
    return [shared, first_steps(recipe, count)] if also_apart else [shared]

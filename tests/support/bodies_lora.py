"""What ranks do in tests of adapters."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from dtgpt.compare.gate import Reference
from dtgpt.compare.record import Tracing
from dtgpt.compare.trace import Key
from dtgpt.compare.whole_tensors import gather_whole
from dtgpt.config.recipe import Recipe
from dtgpt.models.batch import Batch
from dtgpt.planning.parameters import Rank
from dtgpt.train.setup import open_trainer
from tests.support.bodies_optimizer import train_part
from tests.support.runs import traced_record


def train_and_save(recipe: Recipe, run: Path, last: int) -> tuple[list[float], dict[str, Tensor | None]]:
    """Train a part of a run. Return (losses, what is trained, whole, on rank 0)."""
    return train_part(recipe, run, last)[:2]


def codes_of(recipe: Recipe) -> tuple[dict[str, Tensor | None], int, int]:
    """Return what holds the base in 4 bits, whole, on rank 0; the bytes that are planned for this rank's weights and
    the optimizer's state, and those that it has."""
    with open_trainer(recipe) as trainer:
        frozen = trainer.shards.frozen
        assert frozen is not None
        states = [trainer.optimizer.rule.state(shard.index) for shard in trainer.shards]
        held = [shard.local for shard in (*frozen, *trainer.shards)] + [t for each in states for t in each.values()]
        planned = Rank(trainer.settings, trainer.mesh.rank)
        chosen = lambda shard: not shard.local.is_floating_point()  # noqa: E731
        codes = dict(gather_whole(frozen, lambda shard: shard.local, chosen))
        return codes, planned.weight_bytes + planned.optimizer_bytes, sum(tensor.nbytes for tensor in held)


def steps_of_peft(
    model: nn.Module, batches: Iterable[Batch], rate: float, parameters: int = 2 * 7 * 2
) -> Iterator[float]:
    """Train what a model of peft trains by torch's AdamW, and yield the loss of each step. parameters: how many tensors
    that is; of adapters, two of each of seven matrices in two blocks."""
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == parameters
    rule = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    for batch in batches:
        logits = model(batch.tokens).logits.float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        rule.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        rule.step()
        yield loss.item()


def assert_gradients_of_float64(recipe: Recipe, folder: Path) -> None:
    """The gate's float64 has the parameters of adapters, and their gradients are those of a run."""
    file = folder / "one"
    record = traced_record(recipe, Tracing(file, folder / "shared", is_reference=True))
    exact = Reference(file, record).exact
    names = {key.name for key in exact.keys if key.kind == "parameter"}
    assert names == {name.removeprefix("first gradient/") for name in record.tensors if name.startswith("first grad")}
    for name in names:
        found, expected = record.tensors[f"first gradient/{name}"], exact[Key(0, "parameter", name)]
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name

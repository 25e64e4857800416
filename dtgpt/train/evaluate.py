"""The loss on validation and test text."""

from collections.abc import Callable

import torch
from torch import Tensor

from dtgpt.data.dataset import PART_NAMES, Part, bits_per_byte
from dtgpt.models.batch import Batch
from dtgpt.parallel.engine import TrainingEngine
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.console import counted, say
from dtgpt.util.hardware import to_device


@torch.no_grad()
def held_out_loss(
    engine: TrainingEngine, mesh: Mesh, batches: list[Tensor], to_batch: Callable[[Tensor], Batch], token_bytes: Tensor,
    interrupted: Callable[[], bool], part: Part = "valid",
) -> tuple[float, float | None] | None:  # fmt: skip
    """Return (mean loss in nats per token, bits per byte where bytes are known) over batches of windows of a part of
    the data, the same on every rank; None where there are none, where no token of them counts, which is said, or when
    `interrupted` became true in between. `token_bytes [V]`: the bytes that each token spells."""
    dp = mesh.plan.dp
    totals = torch.zeros(3, dtype=torch.float64)  # nats, tokens, bytes
    for first in range(0, len(batches), dp):
        if interrupted():
            return None
        # Each replica takes a batch; one without a batch repeats another, uncounted, to keep in step.
        turn = first + mesh.place.dp
        batch = to_batch(to_device(batches[turn if turn < len(batches) else first], mesh.device))
        if mesh.plan.cp > 1:
            batch = batch.slice(mesh.place.cp, mesh.plan.cp)
        loss = engine.mean_loss(batch)
        if loss is not None and turn < len(batches):
            assert batch.targets is not None
            targets = batch.targets.cpu()
            weights = torch.ones(targets.shape) if batch.loss_weights is None else batch.loss_weights.cpu()
            counts = [loss.item() * targets.numel(), weights.sum(), (token_bytes[targets] * weights).sum()]
            totals += torch.tensor(counts, dtype=torch.float64)
    nats, tokens, text_bytes = (mesh.sum(*totals) / mesh.plan.tp).tolist()
    if batches and not tokens:
        say(f"there is no {PART_NAMES[part]} loss: no token of {counted(len(batches), 'batch', 'batches')} counts",
            warning=True)  # fmt: skip
    return (nats / tokens, bits_per_byte(nats, text_bytes)) if tokens else None

"""What a run says of its model in between: the loss on held-out text, and a sample."""

from collections.abc import Callable

import torch
from torch import Tensor

from dtgpt.data.dataset import Dataset, Part, bits_per_byte
from dtgpt.data.end_of_document import EndOfDocument
from dtgpt.device import to_device
from dtgpt.generate import sample_text
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.passes import Passes, whole_row
from dtgpt.recipe import Recipe
from dtgpt.tokenizers.tokenizer import Tokenizer


@torch.no_grad()
def held_out_loss(
    passes: Passes, mesh: Mesh, recipe: Recipe, dataset: Dataset, ends: EndOfDocument, interrupted: Callable[[], bool],
    part: Part = "valid",
) -> tuple[float, float | None] | None:  # fmt: skip
    """(mean loss in nats per token, bits per byte where bytes are known) over the fixed windows of a part, the same on
    every rank; None where there are none, or when `interrupted` became true in between."""
    dp = mesh.plan.dp
    token_bytes = torch.from_numpy(dataset.tokenizer.token_bytes())
    totals = torch.zeros(3, dtype=torch.float64)  # nats, tokens, bytes
    batches = list(dataset.held_out(part, recipe.model.seq_length, recipe.micro_batch_size, recipe.log.eval_samples))
    for first in range(0, len(batches), dp):
        if interrupted():
            return None
        # Each replica takes a batch; one that is left without repeats another, uncounted, to keep in step.
        turn = first + mesh.place.dp
        windows = batches[turn if turn < len(batches) else first]
        on_device = to_device(windows, mesh.device)
        marks = ends.marks(on_device[:, :-1])
        loss = passes.mean_loss(on_device[:, :-1].contiguous(), on_device[:, 1:].contiguous(), marks)
        if loss is not None and turn < len(batches):
            targets = windows[:, 1:]
            weights = torch.ones(targets.shape) if marks.weights is None else marks.weights.cpu()
            counts = [loss.item() * targets.numel(), weights.sum(), (token_bytes[targets] * weights).sum()]
            totals += torch.tensor(counts, dtype=torch.float64)
    nats, tokens, text_bytes = (mesh.sum(*totals) / mesh.plan.tp).tolist()
    return (nats / tokens, bits_per_byte(nats, text_bytes)) if tokens else None


def sample(
    passes: Passes, mesh: Mesh, recipe: Recipe, tokenizer: Tokenizer, key: Tensor, interrupted: Callable[[], bool]
) -> str | None:
    """A text as `recipe.log` wants it; None where it wants none, or when `interrupted` cut it short. `key [2]`."""
    log = recipe.log
    if not log.sample_tokens or not tokenizer.spells or interrupted():
        return None

    def logits_at(window: Tensor, position: int) -> Tensor:
        return whole_row(passes.logits(window), position, recipe.model, mesh)

    text = sample_text(
        logits_at, recipe.model, tokenizer, log.prompt, log.sample_tokens, key.to(mesh.device), log.temperature,
        log.top_k, interrupted,
    )  # fmt: skip
    return None if interrupted() else text

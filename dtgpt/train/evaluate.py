"""The loss on held-out text, and generated texts."""

from collections.abc import Callable

import torch
from torch import Tensor

from dtgpt.config.sections import LogConfig
from dtgpt.data.dataset import bits_per_byte
from dtgpt.data.document_masks import DocumentMasks
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.generate import Sampling, sample_text
from dtgpt.models.batch import Batch
from dtgpt.models.config import ModelConfig
from dtgpt.parallel.engine import Engine, gather_logits
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.hardware import to_device


@torch.no_grad()
def held_out_loss(
    engine: Engine, mesh: Mesh, batches: list[Tensor], masks: DocumentMasks, token_bytes: Tensor,
    interrupted: Callable[[], bool],
) -> tuple[float, float | None] | None:  # fmt: skip
    """Return (mean loss in nats per token, bits per byte where bytes are known) over batches of windows `[B, T + 1]`,
    the same on every rank; None where there are none, or when `interrupted` became true in between. `token_bytes [V]`:
    the bytes that each token spells."""
    dp = mesh.plan.dp
    totals = torch.zeros(3, dtype=torch.float64)  # nats, tokens, bytes
    for first in range(0, len(batches), dp):
        if interrupted():
            return None
        # Each replica takes a batch; one without a batch repeats another, uncounted, to keep in step.
        turn = first + mesh.place.dp
        windows = batches[turn if turn < len(batches) else first]
        on_device = to_device(windows, mesh.device)
        batch = masks.apply(Batch(on_device[:, :-1].contiguous(), targets=on_device[:, 1:].contiguous()))
        loss = engine.mean_loss(batch)
        if loss is not None and turn < len(batches):
            targets = windows[:, 1:]
            weights = torch.ones(targets.shape) if batch.loss_weights is None else batch.loss_weights.cpu()
            counts = [loss.item() * targets.numel(), weights.sum(), (token_bytes[targets] * weights).sum()]
            totals += torch.tensor(counts, dtype=torch.float64)
    nats, tokens, text_bytes = (mesh.sum(*totals) / mesh.plan.tp).tolist()
    return (nats / tokens, bits_per_byte(nats, text_bytes)) if tokens else None


def sample(
    engine: Engine, mesh: Mesh, config: ModelConfig, tokenizer: Tokenizer, log: LogConfig, key: Tensor,
    interrupted: Callable[[], bool],
) -> str:  # fmt: skip
    """Return a generated text as `log` wants it, the same on every rank. `key [2]`."""

    def logits_at(window: Tensor, position: int) -> Tensor:
        return gather_logits(engine.logits(window), position, config, mesh)

    sampling = Sampling(log.sample_tokens, log.temperature, log.top_k)
    return sample_text(logits_at, config, tokenizer, log.prompt, sampling, key, interrupted)

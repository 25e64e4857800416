"""The loss on validation and test text, and generated texts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.sections import LogConfig
from dtgpt.data.dataset import PART_NAMES, Beginning, Part, bits_per_byte
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.broadcast import broadcast_json
from dtgpt.inference.engine import Engine
from dtgpt.inference.finite import NotFinite
from dtgpt.inference.options import Options
from dtgpt.inference.prompts import encode, special_ids
from dtgpt.inference.session import PromptJob, Session
from dtgpt.models.batch import Batch
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.context import slice_of
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
        whole = to_batch(to_device(batches[turn if turn < len(batches) else first], mesh.device))
        batch = slice_of(whole, mesh.place)
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


def sample(
    stages: list[Decoder], mesh: Mesh, settings: Settings, tokenizer: Tokenizer, ends: Sequence[int], log: LogConfig,
    beginnings: Sequence[Beginning], seed: int, step: int, interrupted: Callable[[], bool],
) -> str:  # fmt: skip
    """Return a generated text as `log` wants it, or the `beginnings` with what the model adds to each, the same on
    every rank and under every plan. It ends early when `interrupted` is true on rank 0. The stages are those that are
    trained."""
    config = settings.model
    options = Options(temperature=log.temperature, top_k=log.top_k, seed=seed)
    if beginnings:
        jobs = [_going_on(begin, options, log.sample_tokens, config.seq_length, step) for begin in beginnings]
    else:
        ids, tokens = fit_prompt(encode(log.prompt, tokenizer, config), log.sample_tokens, config.seq_length)
        if not tokens:  # a model of one position
            return log.prompt
        jobs = [PromptJob(ids, replace(options, max_new_tokens=tokens), step)]
    vocab_size = min(tokenizer.vocab_size, config.vocab_size)
    with torch.compiler.set_stance("force_eager"):  # single tokens would be compiled anew
        engine = Engine(stages, mesh, config, settings.dtype, slots=1, vocab_size=vocab_size)
        if mesh.rank:
            engine.follow()
            return broadcast_json(mesh)
        session, texts = Session(engine, tokenizer, special_ids(tokenizer, ends)), list[str]()
        for job in jobs:
            if interrupted():
                break
            text, ids, failure = log.prompt, list(job.ids), ""
            try:
                for update in session.stream(job):
                    text += update.text
                    ids += update.ids
                    if interrupted():
                        break
            except NotFinite as error:
                failure = f"\n[{error}]"
            texts.append((tokenizer.decode(ids) if beginnings else text) + failure)
        session.close()
        return broadcast_json(mesh, "\n\n".join(texts))


def _going_on(begin: Beginning, options: Options, tokens: int, positions: int, step: int) -> PromptJob:
    """Return the job of at most `tokens` more tokens."""
    options = replace(options, max_new_tokens=min(tokens, positions - len(begin.ids)), stop_token_ids=begin.ends)
    return PromptJob(begin.ids, options, step)


def fit_prompt(ids: list[int], tokens: int, positions: int) -> tuple[list[int], int]:
    """Return (prompt, number of new tokens) that fit into the positions of a model. A sample must not end a run: of a
    prompt that is too long the beginning is left out, but not more than half of the positions are taken from it."""
    kept = min(len(ids), max(positions - tokens, positions // 2, 1))
    return ids[-kept:], min(tokens, positions - kept)

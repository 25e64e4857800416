"""Texts that a run generates between its steps, with the stages that it trains."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from dtgpt.data.dataset import AnswerStart
from dtgpt.inference.commands import broadcast_json
from dtgpt.inference.engine import Engine
from dtgpt.inference.options import Options
from dtgpt.inference.prompts import encode, special_ids
from dtgpt.inference.request import NotFinite, PromptJob
from dtgpt.inference.scheduler import Scheduler
from dtgpt.train.objective import never
from dtgpt.train.trainer import Trainer
from dtgpt.util.shared.as_loaded import as_loaded

SHOWN = 3  # beginnings that a sample goes on with


def generate_text(trainer: Trainer, interrupted: Callable[[], bool] = never) -> str | None:
    """Return a text as the log options want it, or sequences of the data that the model went on with, the same on
    every rank and under every plan; None where they want none, or `interrupted` is true on any rank, whose texts may
    differ."""
    log, config, tokenizer = trainer.log, trainer.settings.model, trainer.dataset.tokenizer
    if not log.sample_tokens or not tokenizer.spells or trainer.mesh.any(interrupted()):
        return None
    options = Options(temperature=log.temperature, top_k=log.top_k, seed=trainer.seed)
    beginnings = [] if log.prompt else trainer.dataset.beginnings(SHOWN, config.seq_length)
    if beginnings:
        jobs = [_going_on(begin, options, log.sample_tokens, config.seq_length, trainer.step) for begin in beginnings]
    else:
        ids, tokens = fit_prompt(encode(log.prompt, tokenizer, config), log.sample_tokens, config.seq_length)
        jobs = [PromptJob(ids, replace(options, max_new_tokens=tokens), trainer.step)]
        if not tokens:  # a model of one position
            return log.prompt
    with as_loaded(trainer):
        text = _generate(trainer, jobs, None if beginnings else log.prompt, interrupted)
    return None if trainer.mesh.any(interrupted()) else text


def _going_on(begin: AnswerStart, options: Options, tokens: int, positions: int, step: int) -> PromptJob:
    """Return the job of at most `tokens` more tokens."""
    options = replace(options, max_new_tokens=min(tokens, positions - len(begin.ids)), stop_token_ids=begin.ends)
    return PromptJob(begin.ids, options, step)


class _InOrder(Scheduler):
    """One job after the other."""


class _TextEngine(Engine):
    """An engine for these jobs, which ask for nothing that a capability adds: none is imported."""

    turns = _InOrder


def _generate(trainer: Trainer, jobs: list[PromptJob], prompt: str | None, interrupted: Callable[[], bool]) -> str:
    """Return the texts of the jobs, the same on every rank: after the `prompt`, or where that is None the whole
    sequences. They end early when `interrupted` is true on rank 0."""
    mesh, settings, tokenizer = trainer.mesh, trainer.settings, trainer.dataset.tokenizer
    vocab_size = min(tokenizer.vocab_size, settings.model.vocab_size)
    # Single tokens would be compiled anew. Without a compiled block, nothing imports the compiler.
    with torch.compiler.set_stance("force_eager") if settings.compile else nullcontext():
        engine = _TextEngine(
            trainer.stages,
            mesh,
            settings.model,
            settings.dtype,
            slots=1,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            special=special_ids(tokenizer, trainer.ends),
        )
        if mesh.rank:
            engine.follow()
            return broadcast_json(mesh)
        texts = list[str]()
        for job in jobs:
            if interrupted():
                break
            text, ids, failure = prompt or "", list(job.ids), ""
            try:
                for update in engine.stream(job):
                    text += update.text
                    ids += update.ids
                    if interrupted():
                        break
            except NotFinite as error:
                failure = f"\n[{error}]"
            texts.append((tokenizer.decode(ids) if prompt is None else text) + failure)
        engine.release()
        return broadcast_json(mesh, "\n\n".join(texts))


def fit_prompt(ids: list[int], tokens: int, positions: int) -> tuple[list[int], int]:
    """Return (prompt, number of new tokens) that fit into the positions of a model. A sample must not end a run: of a
    prompt that is too long the beginning is left out, but not more than half of the positions are taken from it."""
    kept = min(len(ids), max(positions - tokens, positions // 2, 1))
    return ids[-kept:], min(tokens, positions - kept)

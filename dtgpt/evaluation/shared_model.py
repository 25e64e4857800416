"""A model under any plan for a program that runs on rank 0 alone: the other ranks follow what it asks for."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.evaluation.batches import Sample
from dtgpt.evaluation.scoring import TokenScores, scorer_of
from dtgpt.inference.commands import broadcast_json
from dtgpt.inference.engine import Engine
from dtgpt.inference.library.jobs import run_jobs
from dtgpt.inference.library.load import load
from dtgpt.inference.library.model import LibraryModel
from dtgpt.inference.model import Need, need_of
from dtgpt.inference.request import PromptJob

SCORE, GENERATE, END = "score", "generate", "end"


def open_shared(
    model: str,
    plan: str | None = None,
    device: str = "auto",
    precision: str = "auto",
    slots: int | None = None,
    max_length: int | None = None,
    tokenizer: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    exact: bool = False,
    recipe: str | None = None,
) -> "SharedModel":
    """Return the model at the path `model`, on every rank. vocab_file, merge_file: of a BPE like GPT-2's, in place of
    `tokenizer`. Raise UserError where an argument is wrong."""
    given: Tokenizer | str | None = tokenizer
    if vocab_file is not None or merge_file is not None:
        given = open_tokenizer(tokenizer or "gpt2", vocab_file, merge_file)
    at_once: int | Literal["auto"] = "auto" if slots is None else slots
    return SharedModel(load(model, plan, device, precision, at_once, given, max_length, exact, recipe=recipe))


class SharedModel:
    """Rank 0 calls `score` and `generate`, and `end` when it is done; every other rank calls `follow`, which returns
    then. Where rank 0 fails, the others do."""

    def __init__(self, model: LibraryModel):
        self.model = model
        self._in_step = True  # whether the other ranks wait for a command

    def score(
        self, samples: Sequence[Sample], tokens: int | None, progress: Callable[[int], None]
    ) -> list[TokenScores]:
        """Return the scores of the samples. tokens: of a batch, padding included; None: as many as keep the device
        busy. `progress` is called with the number of samples that are new."""
        self._command(SCORE, tokens)
        scores = self._score(samples, tokens, progress)
        self._in_step = True
        return scores

    def generate(self, jobs: Sequence[PromptJob], progress: Callable[[int], None]) -> list[str]:
        """Return the text of each job, which has one sequence, without the names of special tokens. An end that is
        none of these is part of the text, as in the harness's `hf` back end."""
        tokenizer = self.model.tokenizer
        assert tokenizer is not None  # without which nothing asks for texts
        silent = set(np.flatnonzero(tokenizer.token_bytes() == 0).tolist())
        hidden = silent.union(self.model.special.ends)  # in `Completion.text`, or to be left out of it
        self._command(GENERATE)

        def prepare() -> tuple[Need, None]:
            for job in jobs:
                self.model.check(job)
            return need_of(jobs), None

        def work(engine: Engine, _: None) -> list[str]:
            texts = []
            for completions in run_jobs(engine, jobs):
                ids = completions[0].ids
                named = not hidden.isdisjoint(ids)
                texts.append(
                    tokenizer.decode(i for i in ids if i not in silent) if named else completions[0].text or ""
                )
                progress(1)
            return texts

        texts = self.model.run(prepare, work)
        self._in_step = True
        return texts

    def end(self) -> None:
        """Let the other ranks return, unless one of the calls has failed: then they have failed, too."""
        if self._in_step:
            self._command(END)

    def follow(self) -> None:
        """Take part in what rank 0 asks for, until it ends."""
        mesh = self.model.mesh
        while True:
            kind, tokens = broadcast_json(mesh)
            if kind == END:
                return
            if kind == SCORE:
                self._score(None, tokens, lambda done: None)
            else:
                self.model.run(_unused, _unused)

    def _score(
        self, samples: Sequence[Sample] | None, tokens: int | None, progress: Callable[[int], None]
    ) -> list[TokenScores]:
        with self.model.alone():
            scores = scorer_of(self.model, tokens).score(samples, lambda done: progress(done * self.model.mesh.plan.dp))
        assert scores is not None  # nothing interrupts it
        return scores

    def _command(self, kind: str, tokens: int | None = None) -> None:
        self._in_step = False
        broadcast_json(self.model.mesh, [kind, tokens])


def _unused(*_: object) -> Any:
    raise AssertionError("rank 0 alone prepares and works")

"""Log-probabilities of given tokens: large batches through the stages of a model, without a cache.

    scorer = Scorer(model.stages, model.mesh, model.config, model.dtype)
    scores = scorer.score([Sample([464, 3290, 318], context=1)])      # every rank calls it; rank 0's samples count

The stages may be those that `dtgpt.load` builds, or those of a run in training. The head computes logits of the asked
positions alone, piece by piece, and no batch waits for the host. Replicas take batches in turn.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtgpt.evaluation.batches import LENGTH_MULTIPLE, Rows, Sample, make_rows, pack, share_samples
from dtgpt.inference.model import Model
from dtgpt.inference.request import NotFinite
from dtgpt.inference.scores.tokens import Scores, token_scores
from dtgpt.inference.step import Pending, exact_bits, gather_columns
from dtgpt.models.batch import Batch
from dtgpt.models.binding import bind
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.collectives import GroupCollectives
from dtgpt.parallel.engine import reshard
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.stages import run_in_turn
from dtgpt.util.hardware import to_device

TOKENS = {"cuda": 1 << 15, "cpu": 1 << 12}  # of a batch: enough to keep all cores busy
PIECE_LOGITS = 1 << 27  # that are in memory at a time
IN_FLIGHT = 3  # batches whose results have not been read
CHECKED = 8  # batches of each replica between two questions whether to end early


class TokenScores(NamedTuple):
    """Scores of the tokens of a sample after its context."""

    logprobs: np.ndarray  # fp32 [n], natural logarithms
    greedy: np.ndarray  # bool [n], whether the token is the likeliest, the smallest id among equals

    @property
    def logprob(self) -> float:
        """The sum of the log-probabilities."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def all_greedy(self) -> bool:
        return bool(self.greedy.all())


class Scorer:
    """Scores samples with the stages of a model. All ranks of its mesh call the same methods. Compiled stages of a run
    in training need `torch.compiler.set_stance("force_eager")` around them: their code is made for a batch."""

    def __init__(
        self,
        stages: Sequence[Decoder],
        mesh: Mesh,
        config: ModelConfig,
        dtype: torch.dtype,
        tokens: int | None = None,
        exact: bool = False,
    ):
        """dtype: of activations. tokens: of a batch, padding included; None: as many as keep the device busy. exact:
        with the bits of the loss in training."""
        self.stages, self.mesh, self.config, self.dtype = stages, mesh, config, dtype
        self.exact, self.tokens = exact, tokens or TOKENS.get(mesh.device.type, TOKENS["cuda"])

    @torch.no_grad()
    def score(
        self,
        samples: Sequence[Sample] | None,
        progress: Callable[[int], None] = lambda done: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> list[TokenScores] | None:
        """Return the scores of the samples of rank 0, on every rank; None where `interrupted`, which every rank asks
        together, became true in between. `progress` is called with the number of samples that this rank has finished
        since its last call. Raise UserError, on every rank, for a sample that the model cannot score, and NotFinite
        where its logits are NaN or infinite."""
        shared = share_samples(self.mesh, samples, self.config)
        results = torch.zeros(2, shared.num_targets)
        plan, place = self.mesh.plan, self.mesh.place
        multiple = LENGTH_MULTIPLE * (plan.tp if plan.sequence_parallel else 1)
        batches = pack(shared, self.tokens, multiple, self.config.seq_length)
        queue: deque[tuple[Rows, Pending[Scores] | None]] = deque()

        def finish(rows: Rows, pending: Pending[Scores] | None) -> None:
            if pending is not None and place.tp == place.cp == 0:
                scores = pending.wait()
                results[:, rows.places] = torch.stack([scores.logprobs, scores.greedy.float()])
            progress(len(rows.tokens))

        try:
            for number, first in enumerate(range(0, len(batches), plan.dp)):
                if number % CHECKED == 0 and interrupted():
                    return None
                # Stages that are sharded over replicas run in step: one without a batch repeats another, uncounted.
                turn = first + place.dp
                rows = make_rows(shared, *batches[turn if turn < len(batches) else first])
                scores = self._score_batch(rows)
                if turn < len(batches):
                    queue.append((rows, None if scores is None else Pending(scores)))
                if len(queue) > IN_FLIGHT:
                    finish(*queue.popleft())
            while queue:
                finish(*queue.popleft())
        finally:
            reshard(*self.stages)
        if self.mesh.world > 1:  # each result is not zero on the one rank that has it
            dist.all_reduce(results, group=self.mesh.commands)
        if results.isnan().any():
            raise NotFinite
        logprobs, greedy = results[0].numpy(), results[1].numpy() > 0
        return [TokenScores(logprobs[at], greedy[at]) for at in map(shared.targets_of, range(len(shared)))]

    def _score_batch(self, rows: Rows) -> Scores | None:
        """Return the scores of the asked positions; None on a rank that does not hold the head."""
        tokens, asked, targets = (to_device(tensor, self.mesh.device) for tensor in rows[:3])
        scores: list[Scores] = []
        with _scoring_head(self.stages, self.mesh, asked, targets, scores, self.exact):
            run_in_turn(self.stages, self.mesh, Batch(tokens), self.dtype)
        return scores[0] if scores else None


def scorer_of(model: Model, tokens: int | None = None) -> Scorer:
    """Return a scorer of a model that `dtgpt.load` has made. tokens: of a batch, padding included; None: as many as
    keep the device busy. While it scores, nothing else may use the model."""
    return Scorer(model.stages, model.mesh, model.config, model.dtype, tokens, model.exact)


@contextmanager
def _scoring_head(
    stages: Sequence[Decoder], mesh: Mesh, asked: Tensor, targets: Tensor, scores: list[Scores], exact: bool
) -> Iterator[None]:
    """Let the head, where this rank holds it, append to `scores` what it finds at the `asked` positions, int64 `[M]`,
    in place of making logits of all positions."""
    head = next((stage.head for stage in stages if stage.head is not None), None)
    if head is None:
        yield
        return
    config = stages[0].config
    num_parts = mesh.plan.tp if mesh.plan.sequence_parallel else 1
    own_part = mesh.place.tp if num_parts > 1 else 0

    def score(x: Tensor, *_: Tensor | None) -> Tensor:
        whole = x if num_parts == 1 or mesh.tp_group is None else GroupCollectives(mesh.tp_group).gather(x, 1)
        selected = whole.flatten(0, 1)[asked]
        size = max(1, PIECE_LOGITS // config.padded_vocab_size)
        parts = []
        for first in range(0, len(asked), size):
            piece = selected[first : first + size]
            count = len(piece)
            # Under sequence parallelism the head takes a part of the rows from each rank, all of the same size.
            own = F.pad(piece, (0, 0, 0, -count % num_parts)).chunk(num_parts)[own_part]
            logits = head.compute(own[None])[0, :count]
            columns = gather_columns(logits, mesh, config.padded_vocab_size)
            wanted = targets[first : first + size]
            part = token_scores(columns, wanted, config.vocab_size)
            if exact:
                part = part._replace(**exact_bits().exact_scores(logits, wanted, part.top_ids, stages, mesh))
            parts.append(part)
        scores.append(Scores(*(torch.cat(values) for values in zip(*parts, strict=True))))
        return scores[0].logprobs

    bind(head, run=score)
    try:
        yield
    finally:
        bind(head, run=None)

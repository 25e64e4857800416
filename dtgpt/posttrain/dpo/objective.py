"""The objective of pairs: that an answer becomes more likely than the other one, relative to the first model."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from dtgpt.data.dataset import PART_NAMES, Dataset, HeldOutPart
from dtgpt.models.batch import Batch
from dtgpt.models.shared.coupled import set_loss
from dtgpt.posttrain.chats.packed import PackedPart
from dtgpt.posttrain.dpo.loss import PreferenceLoss, figures_of
from dtgpt.posttrain.dpo.pairs import PairDataset, with_answers
from dtgpt.posttrain.dpo.reference import read_reference, save_reference
from dtgpt.posttrain.totals import IntervalTotals, TotalledModel
from dtgpt.train.objective import Given, HeldOut, Interrupted, Parts, never, own_tokens, turns
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import to_device


class Preferences(TotalledModel):
    """The loss of packed pairs. Their reference is the model with which the run begins, or what its folder kept."""

    dataset: PairDataset

    @classmethod
    def check(cls, given: Given, dataset: Dataset) -> None:
        if not isinstance(dataset, PairDataset):
            raise UserError(
                f"dpo.beta={given.section.beta:g} trains on pairs of answers, which {dataset.source} does not have; "
                "prepare them with dtgpt prepare --preferences, or leave dpo.beta out"
            )

    def bind(self, parts: Parts) -> None:
        super().bind(parts)
        dpo, mesh = self.given.section, parts.mesh
        self.loss = PreferenceLoss(dpo.loss, dpo.beta, dpo.label_smoothing, mesh.device, mesh.cp_group)
        self.totals = self.loss.totals
        set_loss(parts.stages, self.loss)

    def prepare(self, step: int, run: Path | None, interrupted: Interrupted = never) -> bool:
        """Give the data the log-probabilities of pairs under the model with which the run began: that of now, or where
        a run goes on, what its folder holds."""
        data = self.dataset
        if run is not None:
            read_reference(run, data)
            return True
        pairs = sum(len(part.chats) for part in data.parts.values()) // 2
        say(f"measuring the log-probabilities of {counted(pairs, 'pair')} before training")
        for name, part in data.parts.items():
            found = self.score(part, len(part), interrupted)
            if found is None:
                return False
            data.reference[name] = found
        return True

    def save(self, run: Path) -> None:
        save_reference(run, self.dataset)

    def read(self, step: int) -> tuple[Tensor, ...]:
        windows, sample_ids, key = super().read(step)
        return windows, sample_ids, key, self.dataset.references(sample_ids)

    def add(self, batch: Batch, windows: Tensor, sample_ids: Tensor, *more: Tensor) -> Batch:
        (reference,) = more
        return with_answers(batch, windows, self.dataset.answers, reference)

    @torch.no_grad()
    def score(self, part: PackedPart, samples: int, interrupted: Interrupted = never) -> np.ndarray | None:
        """Return the log-probabilities of the answers of the first samples, fp64 `[C]`, the same on every rank, under
        the weights of now; None when `interrupted` became true in between."""
        data, mesh, size = self.dataset, self.parts.mesh, self.parts.settings.micro_batch_size
        values = torch.zeros(int(part.bounds[samples]), dtype=torch.float64, device=mesh.device)
        begins, place = list(range(0, samples, size)), mesh.place
        for index, counts_here in turns([min(size, samples - begin) for begin in begins], mesh):
            if interrupted():
                return None
            begin = begins[index]
            numbers = np.arange(begin, min(begin + size, samples))
            windows = to_device(part.windows(numbers), mesh.device)
            batch = with_answers(data.to_batch(windows, self.masks), windows, data.answers, None)
            sums = self.parts.engine.evaluate(own_tokens(batch, place))
            if sums is not None and counts_here and place.tp == place.cp == 0:
                counts = np.diff(part.bounds[begin : numbers[-1] + 2])
                there = torch.arange(data.answers) < torch.from_numpy(counts)[:, None]
                bounds = slice(int(part.bounds[begin]), int(part.bounds[numbers[-1] + 1]))
                values[bounds] = sums[there.to(mesh.device)]
        return mesh.all_reduce(values, ReduceOp.SUM).cpu().numpy()

    def held_out(self, part: HeldOutPart, samples: int, interrupted: Interrupted = never) -> HeldOut | None:
        """Return the loss of the first pairs of a part, and what `figures_of` names."""
        data, loss = self.dataset, self.loss
        pairs = data.parts[part]
        samples = min(len(pairs), samples)
        if not samples or (found := self.score(pairs, samples, interrupted)) is None:
            return None
        relative = torch.from_numpy(found - data.reference[part][: len(found)]).view(1, -1)
        answers = pairs.chats[: len(found)]
        weights = pairs.sequences.read_weights(answers, pairs.sequences.lengths[answers].astype(np.int64))
        ends = np.cumsum(pairs.sequences.lengths[answers].astype(np.int64))
        # The first token of an answer's chat is a prompt's, which never counts.
        counts = np.add.reduceat(weights.astype(np.int64), np.concatenate([[0], ends[:-1]]))
        losses, _ = loss.of_pairs(relative, torch.from_numpy(counts).clamp(min=1).view(1, -1))
        there = torch.ones_like(losses, dtype=torch.bool)
        figures = {"loss": losses.mean().item(), **figures_of(loss.figures(relative, there).tolist())}
        digits = {"accuracy": ".3f", "margin": ".4f", "chosen": ".4f"}
        rewards = "  ".join(f"{name} {figures[f'reward_{name}']:{form}}" for name, form in digits.items())
        shown = f"loss {figures['loss']:.4f}  {rewards}"
        return HeldOut(figures, shown, {f"{PART_NAMES[part]} loss": figures["loss"]})

    def figures(self, interval: IntervalTotals) -> dict[str, float]:
        return figures_of(interval.totals())

    def caution(self, figures: dict[str, float]) -> str | None:
        return self.loss.caution(figures)

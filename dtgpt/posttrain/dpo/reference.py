"""Log-probabilities of answers before training, which a run folder keeps, and figures of held-out pairs."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.distributed import ReduceOp

from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.data.dataset import Part
from dtgpt.ops.loss.preference import figures_of
from dtgpt.parallel.context import slice_of
from dtgpt.posttrain.chats.packed import PackedPart
from dtgpt.posttrain.dpo.pairs import PairDataset, with_answers
from dtgpt.train.trainer import Trainer, never
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import to_device
from dtgpt.util.storage import atomic_file, parse_json, read_regular

FILE = "reference.bin"  # of a run folder: a line of JSON, and after it fp64 of all answers, part by part

LONGEST_HEADER = 1 << 16  # bytes
LARGEST_SUM = 1.0  # above every sum of log-probabilities, whose rounding may make them positive


def find_reference(trainer: Trainer, checkpoint: Checkpoint | None, interrupted: Callable[[], bool] = never) -> bool:
    """Give the trainer the log-probabilities of its pairs under the model with which the run began: that of the trainer
    now, or where a run goes on from `checkpoint`, what its folder holds. Returns False where it was interrupted."""
    data = trainer.dataset
    if not isinstance(data, PairDataset):
        return True
    if checkpoint is not None:
        read_reference(checkpoint.folder.parents[1], data)
        return True
    pairs = sum(len(part.chats) for part in data.parts.values()) // 2
    say(f"measuring the log-probabilities of {counted(pairs, 'pair')} before training")
    for name, part in data.parts.items():
        found = score(trainer, part, len(part), interrupted)
        if found is None:
            return False
        data.reference[name] = found
    return True


@torch.no_grad()
def score(
    trainer: Trainer, part: PackedPart, samples: int, interrupted: Callable[[], bool] = never
) -> np.ndarray | None:
    """Return the log-probabilities of the answers of the first samples, fp64 `[C]`, the same on every rank, under the
    trainer's weights; None when `interrupted` became true in between."""
    data, mesh, size = trainer.dataset, trainer.mesh, trainer.settings.micro_batch_size
    assert isinstance(data, PairDataset)
    values = torch.zeros(int(part.bounds[samples]), dtype=torch.float64, device=mesh.device)
    begins, place = list(range(0, samples, size)), mesh.place
    for first in range(0, len(begins), mesh.plan.dp):
        if interrupted():
            return None
        # Each replica takes a batch; one without a batch repeats another, uncounted, to keep in step.
        turn = first + place.dp
        begin = begins[turn if turn < len(begins) else first]
        numbers = np.arange(begin, min(begin + size, samples))
        windows = to_device(part.windows(numbers), mesh.device)
        batch = with_answers(trainer.masks.batch(windows), windows, data.answers, None)
        sums = trainer.engine.mean_loss(slice_of(batch, place))
        if sums is not None and turn < len(begins) and place.tp == place.cp == 0:
            counts = np.diff(part.bounds[begin : numbers[-1] + 2])
            there = torch.arange(data.answers) < torch.from_numpy(counts)[:, None]
            bounds = slice(int(part.bounds[begin]), int(part.bounds[numbers[-1] + 1]))
            values[bounds] = sums[there.to(mesh.device)]
    return mesh.all_reduce(values, ReduceOp.SUM).cpu().numpy()


def held_out_figures(trainer: Trainer, part: Part, interrupted: Callable[[], bool] = never) -> dict[str, float] | None:
    """Return the loss and what `figures_of` names, of the first pairs of a part, the same on every rank; None where
    there are none, or when interrupted."""
    data, objective = trainer.dataset, trainer.objective
    assert isinstance(data, PairDataset) and objective is not None
    pairs = data.parts[part]
    samples = min(len(pairs), trainer.log.eval_samples)
    if not samples or (found := score(trainer, pairs, samples, interrupted)) is None:
        return None
    relative = torch.from_numpy(found - data.reference[part][: len(found)]).view(1, -1)
    answers = pairs.chats[: len(found)]
    weights = pairs.sequences.read_weights(answers, pairs.sequences.lengths[answers].astype(np.int64))
    ends = np.cumsum(pairs.sequences.lengths[answers].astype(np.int64))
    # The first token of an answer's chat is a prompt's, which never counts.
    counts = np.add.reduceat(weights.astype(np.int64), np.concatenate([[0], ends[:-1]]))
    losses, _ = objective.of_pairs(relative, torch.from_numpy(counts).clamp(min=1).view(1, -1))
    there = torch.ones_like(losses, dtype=torch.bool)
    return {"loss": losses.mean().item(), **figures_of(objective.figures(relative, there).tolist())}


def save_reference(run: Path, data: PairDataset) -> None:
    """Write the reference of the data into the folder of a run."""
    content = b"".join(values.astype("<f8").tobytes() for values in data.reference.values())
    header = {
        "pairs": data.pairs_digest,
        "answers": {name: len(values) for name, values in data.reference.items()},
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    with atomic_file(run / FILE) as file:
        file.write(json.dumps(header).encode() + b"\n" + content)


def read_reference(run: Path, data: PairDataset) -> None:
    """Give the data the reference in the folder of a run. Raises UserError where it is missing, damaged or of other
    pairs."""
    path, remedy = run / FILE, "go on with the data that the run began with, or begin a new run with --init_from"
    try:
        expected = {name: len(part.chats) for name, part in data.parts.items()}
        header, _, rest = read_regular(path, LONGEST_HEADER + 8 * sum(expected.values())).partition(b"\n")
        found, values = parse_json(header), np.frombuffer(rest, "<f8")
        if found["answers"] != expected or found["pairs"] != data.pairs_digest or len(values) != sum(expected.values()):
            raise UserError(f"{path} holds log-probabilities of other pairs, or another order of them; {remedy}")
        digest = hashlib.sha256(rest).hexdigest()
        if found.get("sha256", digest) != digest:  # files of older versions have none
            raise ValueError("its content was changed")
        if "sha256" not in found and not (values <= LARGEST_SUM).all():  # nor is a value that is no number
            raise ValueError("it has no digest, and values that are no log-probabilities")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}, the log-probabilities before training, cannot be read ({error}); put it back, or begin a new run "
            "with --init_from"
        ) from None
    cuts = np.cumsum([len(part.chats) for part in data.parts.values()])[:-1]
    data.reference = dict(zip(data.parts, np.split(values, cuts), strict=True))

"""Runs with receipts that are altered on purpose, so that only the receipts can show it: sizes, sha256 and digests of
checkpoints are made to fit, and where an alteration says so the chain of receipts, too.

Each alteration is a function of a run of 8 steps with checkpoints of steps 2, 4, 6 and 8. `ALTERATIONS` says what finds
it, and where.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtgpt.checkpoint.manifest import STATE, step_folder, write_state
from dtgpt.checkpoint.shard_file import Written, read_header
from dtgpt.receipts.book import FILE, chained
from dtgpt.receipts.state import decoded, encoded

WEIGHT, OTHER = "blocks.1.mlp.fc.weight", "blocks.0.attn.qkv.weight"


@dataclass(frozen=True)
class Alteration:
    work: Callable[[Path], None]
    kind: str  # of the problem, or of the first difference
    step: int | None
    named: str  # a part of the sentence
    step_to_audit: int | None = None  # None: the files show it


def checkpoint(run: Path, step: int) -> Path:
    return step_folder(run / "checkpoints", step)


def fit(folder: Path, **changes: Any) -> None:
    """Let the state of a checkpoint be that of its files, with these changes."""
    import hashlib

    state = json.loads((folder / STATE).read_text())
    for name in ("format", "version", "digest"):
        state.pop(name)
    files = {name: (folder / name).read_bytes() for name in state.pop("files")}
    written = {name: Written(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    write_state(folder, state | changes, written)


def elements(folder: Path, name: str) -> tuple[Path, int, int]:
    """Return the file of a tensor, where its elements begin in it, and how many there are."""
    for path in sorted(folder.glob("*.safetensors")):
        for piece, position in read_header(path):
            if piece.name == name:
                return path, position, piece.num_bytes // 4
    raise KeyError(name)


def values_of(folder: Path, name: str, mode: str = "r+") -> np.ndarray:
    path, position, count = elements(folder, name)
    return np.memmap(path, "<f4", mode, position, (count,))


def change(run: Path, step: int, name: str, index: int = 5, by: float = 1e-3) -> None:
    """Add to an element of a tensor in a checkpoint."""
    values = values_of(checkpoint(run, step), name)
    values[index] += by
    values.flush()
    fit(checkpoint(run, step))


def exchange(run: Path, step: int, name: str, other: str) -> None:
    """Exchange an element of a tensor with another one, of the same or another tensor."""
    one, two = values_of(checkpoint(run, step), name), values_of(checkpoint(run, step), other)
    one[3], two[11] = two[11].copy(), one[3].copy()
    one.flush()
    two.flush()
    fit(checkpoint(run, step))


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / FILE).read_text().splitlines()]


def write_lines(run: Path, lines: list[dict[str, Any]], fitting: bool) -> None:
    """Write lines. fitting: with a chain that is made anew."""
    texts = [json.dumps(line).encode() for line in lines]
    if fitting:
        texts = chained([{k: v for k, v in line.items() if k != "before"} for line in lines], "")
    (run / FILE).write_bytes(b"".join(text + b"\n" for text in texts))


def edit(run: Path, step: int, kind: str = "step", fitting: bool = True, **values: Any) -> None:
    """Change values of a line. A function is called with the former value."""
    lines = lines_of(run)
    (line,) = (line for line in lines if line.get(kind) == step)
    line |= {name: value(line[name]) if callable(value) else value for name, value in values.items()}
    write_lines(run, lines, fitting)


def drop(run: Path, fitting: bool) -> None:
    write_lines(run, [line for line in lines_of(run) if line.get("step") != 5], fitting)


def repeat(run: Path, fitting: bool) -> None:
    lines = lines_of(run)
    place = next(i for i, line in enumerate(lines) if line.get("step") == 5)
    write_lines(run, [*lines[: place + 1], lines[place], *lines[place + 1 :]], fitting)


def exchange_lines(run: Path) -> None:
    lines = lines_of(run)
    places = [i for i, line in enumerate(lines) if line.get("step") in (3, 7)]
    one, two = places
    lines[one], lines[two] = lines[two] | {"step": 3}, lines[one] | {"step": 7}
    write_lines(run, lines, fitting=True)


def take_line(run: Path, fitting: bool) -> None:
    """Put the line of another run, which is beside this one, in place of this one's."""
    other = next(line for line in lines_of(run.with_name("other")) if line.get("step") == 5)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in metrics if fitting else ():
        if record["step"] == 5:
            record |= {"loss": other["loss"], "step_loss": other["loss"], "grad_norm": other["norm"], "lr": other["lr"]}
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    write_lines(run, [other if line.get("step") == 5 else line for line in lines_of(run)], fitting)


def metric(run: Path, name: str) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["step"] == 6 and name in record:
            record[name] *= 0.99
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def swap_checkpoints(run: Path) -> None:
    one, two, other = checkpoint(run, 4), checkpoint(run, 6), run / "checkpoints" / "x"
    one.rename(other)
    two.rename(one)
    other.rename(two)
    fit(one, step=4, consumed_samples=state_of(two)["consumed_samples"], updates=4)
    fit(two, step=6, consumed_samples=state_of(one)["consumed_samples"], updates=6)


def state_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_text())


def older_checkpoint(run: Path) -> None:
    state = state_of(checkpoint(run, 8))
    shutil.rmtree(checkpoint(run, 8))
    shutil.copytree(checkpoint(run, 4), checkpoint(run, 8))
    fit(checkpoint(run, 8), **{name: state[name] for name in ("step", "updates", "consumed_samples", "tokens")})


def recipe_file(run: Path) -> None:
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["optimizer"]["lr"] *= 1.01
    (run / "recipe.json").write_text(json.dumps(recipe))


def recipe_everywhere(run: Path) -> None:
    """Say another learning rate than that of the steps in all files, with a chain that fits."""
    recipe_file(run)
    lines = lines_of(run)
    lines[0]["recipe"]["optimizer"]["lr"] *= 1.01
    write_lines(run, lines, fitting=True)
    for folder in (run / "checkpoints").glob("step_*"):
        recipe = state_of(folder)["recipe"]
        recipe["optimizer"]["lr"] *= 1.01
        fit(folder, recipe=recipe)


def one_digest(run: Path, label: str, step: int = 5, kind: str = "step") -> None:
    """Change the digest of a tensor in a line, with a chain that fits."""
    parts = lines_of(run)[0]["parts"]
    labels = parts[step % len(parts)]
    if kind == "checkpoint":
        labels = [name for part in parts for name in part if not name.startswith("gradient/")]

    def changed(text: str) -> str:
        sums = decoded(text)
        sums[labels.index(label)] ^= 1
        return encoded(np.array(sums))

    edit(run, step, kind, digests=changed)


def weight_and_receipt(run: Path) -> None:
    """Change a weight in a checkpoint, and the receipt of the checkpoint and the chain so that they fit."""
    from dtgpt.checkpoint.manifest import Checkpoint
    from dtgpt.receipts.check import table_of

    change(run, 6, WEIGHT, by=1e-2)
    parts = lines_of(run)[0]["parts"]
    labels = [name for part in parts for name in part if not name.startswith("gradient/")]
    edit(run, 6, "checkpoint", digests=encoded(np.array(table_of(Checkpoint(checkpoint(run, 6)), labels))))


def loss_everywhere(run: Path) -> None:
    edit(run, 6, loss=lambda loss: loss * 0.99)
    metric(run, "loss")
    metric(run, "step_loss")


def without_file(run: Path, name: str) -> None:
    (run / name).unlink()


ALTERATIONS: dict[str, Alteration] = {
    "a weight": Alteration(lambda run: change(run, 8, WEIGHT), "checkpoint", 8, WEIGHT),
    "a bit of a weight": Alteration(lambda run: change(run, 4, WEIGHT, by=1e-8), "checkpoint", 4, WEIGHT),
    "two weights exchanged": Alteration(lambda run: exchange(run, 6, WEIGHT, WEIGHT), "checkpoint", 6, WEIGHT),
    "weights of two tensors exchanged": Alteration(lambda run: exchange(run, 6, WEIGHT, OTHER), "checkpoint", 6, OTHER),
    "a moment": Alteration(lambda run: change(run, 6, f"{OTHER}.exp_avg_sq"), "checkpoint", 6, "exp_avg_sq"),
    "two moments exchanged": Alteration(
        lambda run: exchange(run, 8, f"{OTHER}.exp_avg", f"{OTHER}.exp_avg"), "checkpoint", 8, "exp_avg"
    ),
    "two checkpoints swapped": Alteration(swap_checkpoints, "checkpoint", 4, "weights of step 6"),
    "an older checkpoint": Alteration(older_checkpoint, "checkpoint", 8, "weights of step 4"),
    "samples that a checkpoint has seen": Alteration(
        lambda run: fit(checkpoint(run, 6), consumed_samples=999), "checkpoint", 6, "consumed_samples=999"
    ),
    "a recipe": Alteration(recipe_file, "recipe", 0, "optimizer.lr"),
    "a loss of a step in metrics.jsonl": Alteration(lambda run: metric(run, "step_loss"), "metrics", 6, "step_loss"),
    "a mean loss in metrics.jsonl": Alteration(lambda run: metric(run, "loss"), "metrics", 6, "says loss="),
    "a norm in metrics.jsonl": Alteration(lambda run: metric(run, "grad_norm"), "metrics", 6, "grad_norm"),
    "a loss in a receipt": Alteration(lambda run: edit(run, 3, fitting=False, loss=1.0), "chain", 4, "(step 3)"),
    "a dropped line": Alteration(lambda run: drop(run, False), "chain", 6, "(step 6)"),
    "a dropped line, the chain made to fit": Alteration(lambda run: drop(run, True), "steps", 5, "step 5 has no"),
    "a line of another run": Alteration(lambda run: take_line(run, False), "chain", 5, "(step 5)"),
    "a line twice": Alteration(lambda run: repeat(run, False), "chain", 5, "(step 5)"),
    "a line twice, the chain made to fit": Alteration(lambda run: repeat(run, True), "steps", 5, "taken twice"),
    "two lines exchanged, the chain made to fit": Alteration(exchange_lines, "metrics", 3, "step_loss"),
    # All files fit: what remains is to compute the step again.
    "a line of another run, metrics and chain made to fit": Alteration(
        lambda run: take_line(run, True), "tokens", 5, "batch of step 5", 5
    ),
    "a batch": Alteration(
        lambda run: edit(run, 5, batch=lambda batch: batch | {"tokens": "0" * 16}), "tokens", 5, "the tokens", 5
    ),
    "a loss, metrics and chain made to fit": Alteration(loss_everywhere, "loss", 6, "the loss of step 6", 6),
    "a learning rate in all files": Alteration(recipe_everywhere, "learning rate", 5, "the learning rate of step 5", 5),
    "a gradient": Alteration(lambda run: one_digest(run, f"gradient/{WEIGHT}"), "gradient", 5, WEIGHT, 5),
    "a weight and its receipt": Alteration(weight_and_receipt, "weight", 6, WEIGHT, 6),
    "a weight of a step": Alteration(lambda run: one_digest(run, f"weight/{OTHER}", 7), "weight", 7, OTHER, 7),
    "a moment of a checkpoint's receipt": Alteration(
        lambda run: one_digest(run, f"exp_avg/{OTHER}", 6, "checkpoint"), "checkpoint", 6, "exp_avg"
    ),
}  # fmt: skip

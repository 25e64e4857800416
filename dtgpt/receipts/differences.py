"""In what steps that were computed again differ from their receipts.

Where the bits must be equal (the same kind of GPU and the same versions, and the same plan or `--reduce exact`), any
other bit is a difference. Elsewhere two right runs differ by rounding, and the limits of `dtgpt compare` decide:
losses, norms, and the tensors of a checkpoint that is kept of an audited step. Batches and learning rates have no
rounding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dtgpt.compare.finding import Verdict
from dtgpt.compare.record import Record
from dtgpt.compare.verdict import Limits, limits_of, relative
from dtgpt.receipts.check import Receipts, tensor, words
from dtgpt.receipts.state import GRADIENT, WEIGHT, decoded

ROUNDINGS = ("none", "order", "sums", "products")  # of `dtgpt.compare.record`, from the least to the most
NONE = Limits(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Difference:
    """The first thing in which steps that were computed again differ from their receipts."""

    step: int
    # "checkpoint", "tokens", "answers", "loss", "gradient", "gradient norm", "learning rate", "state" or "weight"
    kind: str
    tensor: str | None
    module: str | None
    difference: float | None  # relative; None: only that it differs is known
    verdict: Verdict | None  # None: only that it differs is known
    said: str


@dataclass(frozen=True)
class Basis:
    """What a comparison of bits rests on."""

    exact: bool  # whether the bits must be equal
    why: list[str]  # where they need not be
    limits: Limits
    eps: float  # the relative distance of neighbours in the type of the activations
    notes: list[str]  # what may explain a difference


def basis_of(here: dict[str, Any], starts: list[dict[str, Any]]) -> Basis:
    """Return what the comparison of steps of these starts with steps of here rests on."""
    why = []
    for name, value in here["machine"].items():
        others = {str(start["machine"].get(name)) for start in starts} - {str(value)}
        if others:
            why.append(f"{name} is {value} here, and was {', '.join(sorted(others))}")
    other_machine = bool(why)
    execution = ("plan", "micro_batch_size", "dtype", "reduce")
    same = all(start[name] == here[name] for start in starts for name in execution)
    rounding = max((each["rounding"] for each in (here, *starts)), key=ROUNDINGS.index)
    if not same and rounding != "none":
        plans = ", ".join(sorted({start["plan"] for start in starts}))
        exact = all(start["reduce"] != "fast" for start in starts)
        how = "computes sums in other pieces" if exact else "is without --reduce exact"
        why.append(f"{here['plan']} beside {plans} {how}")
    record = Record(
        dtype=here["dtype"],
        rounding="products" if other_machine else rounding,
        losses=[],
        norms=[],
        rates=[],
        scales=[],
        memory=[],
        planned=None,
        initial="",
        tensors={},
    )
    codes = {start["code"] for start in starts} - {here["code"]}
    notes = (
        [f"the files of dtgpt are others here ({here['code']}) than those of the run ({', '.join(codes)})"]
        if codes
        else []
    )
    return Basis(not why, why, limits_of(record) if why else NONE, record.eps, notes)


def differences_of(receipts: Receipts, begin: int, found: dict[str, Any], basis: Basis) -> Iterator[Difference]:
    """Yield in what the steps differ from their receipts, in the order in which they were computed."""
    for label in differing(receipts.labels_of_table(begin), receipts.tables[begin].value, found["tables"][str(begin)]):
        said = f"{words(label)} in the checkpoint of step {begin} is not that of its receipt"
        yield _difference(begin, "checkpoint", label, None, None, said)
    for line in found["lines"]:
        step, theirs = line["step"], receipts.steps[line["step"]].value
        yield from of_inputs(step, line, theirs)
        labels = receipts.labels(step)
        others = differing(labels, theirs, line["digests"]) if basis.exact else []
        apart: dict[str, float] = next(
            (found["apart"][at] for at in sorted(found["apart"], key=int) if int(at) >= step), {}
        )
        yield from of_figure(step, "loss", line["loss"], theirs["loss"], basis.limits.loss, basis)
        yield from (of_tensor(step, label, apart, basis) for label in others if label.startswith(f"{GRADIENT}/"))
        yield from of_figure(step, "gradient norm", line["norm"], theirs["norm"], basis.limits.tensors, basis)
        yield from of_figure(step, "learning rate", line["lr"], theirs["lr"], 0.0, basis)
        yield from (of_tensor(step, label, apart, basis) for label in others if not label.startswith(f"{GRADIENT}/"))
        if str(step) in found["tables"]:
            yield from of_checkpoint(receipts, step, found, basis)


def differing(labels: list[str], line: dict[str, Any], digests: str) -> list[str]:
    """Return the labels whose digests differ from those of a line; states before the weights that they move."""
    pairs = zip(labels, decoded(line["digests"]), decoded(digests), strict=True)
    return sorted((label for label, a, b in pairs if a != b), key=lambda label: label.startswith(f"{WEIGHT}/"))


def of_inputs(step: int, ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Difference]:
    """Yield the parts of the batch of a step that are not those of its receipt."""
    if ours.get("answers") != theirs.get("answers"):
        said = f"the answers of step {step}, or their rewards, are not those of its receipt"
        yield Difference(step, "answers", None, None, None, "fault", said)
    for name, digest in ours.get("batch", {}).items():
        if digest != theirs.get("batch", {}).get(name):
            said = f"the {name} of the batch of step {step} are not those of its receipt"
            yield Difference(step, "tokens", name, None, None, "fault", said)


def of_figure(step: int, kind: str, ours: Any, theirs: Any, limit: float, basis: Basis) -> Iterator[Difference]:
    """Yield how a figure of a step differs by more than its limit."""
    if ours == theirs:
        return
    if not isinstance(ours, float) or not isinstance(theirs, float):
        said = f"the {kind} of step {step} is {ours}, and its receipt says {theirs}"
        yield Difference(step, kind, None, None, None, "fault", said)
        return
    apart = relative(theirs, ours)
    if apart > limit:
        verdict = verdict_of(apart, basis)
        said = f"the {kind} of step {step} is {ours!r}, and its receipt says {theirs!r}: {apart:.1e} apart"
        yield Difference(step, kind, None, None, apart, verdict, said)


def of_tensor(step: int, label: str, apart: dict[str, float], basis: Basis) -> Difference:
    """Return the difference of a tensor whose digest is not that of the receipt. apart: of the next checkpoint that is
    kept, by how much its tensors differ."""
    known = None if label.startswith(f"{GRADIENT}/") else apart.get(label)
    size = f", by {known:.1e} in the next checkpoint" if known else ""
    said = f"{words(label)} after step {step} has other bits than its receipt{size}"
    return _difference(step, _kind(label), label, known or None, verdict_of(known, basis) if known else None, said)


def of_checkpoint(receipts: Receipts, step: int, found: dict[str, Any], basis: Basis) -> Iterator[Difference]:
    """Yield the tensors of a checkpoint, or of its receipt, that are not those of the step."""
    apart = found["apart"].get(str(step), {})
    for label in differing(receipts.labels_of_table(step), receipts.tables[step].value, found["tables"][str(step)]):
        by = apart.get(label)
        if basis.exact or (by is not None and by > (basis.limits.weights or basis.limits.tensors)):
            size = f", by {by:.1e}" if by else ""
            said = f"{words(label)} in the checkpoint of step {step}, or its receipt, is not that of the step{size}"
            yield _difference(step, _kind(label), label, by or None, verdict_of(by, basis) if by else None, said)


def verdict_of(apart: float, basis: Basis) -> Verdict:
    """Return whether a relative difference is of the last bits, one of rounding by the limits of `dtgpt compare`, or a
    fault. Where bits must be equal, rounding is what sums in another order would do."""
    limit = max(basis.limits.tensors, 1e-4 if basis.eps < 1e-6 else 2 * basis.eps)
    return "bits" if apart <= basis.eps else "rounding" if apart <= limit else "fault"


def _kind(label: str) -> str:
    kind = label.partition("/")[0]
    return kind if kind in (GRADIENT, WEIGHT) else "state"


def _difference(step: int, kind: str, label: str, by: float | None, verdict: Verdict | None, said: str) -> Difference:
    return Difference(step, kind, tensor(label), label.partition("/")[2].rpartition(".")[0], by, verdict, said)

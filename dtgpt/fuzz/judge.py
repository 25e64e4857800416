"""The verdict on a case: what its plan did, against what one process did."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dtgpt.fuzz.case import Case
from dtgpt.fuzz.measure import Seen
from dtgpt.train.compare import TOLERANCE, Record, difference, tensor_differences

Verdict = Literal["right", "refused", "differs", "fails", "hangs"]
# Some gradients are zero but for rounding, such as those of queries that see one token. One that is smaller than this
# share of the whole gradient's norm is held against that: an error shows from 1e-7 of the whole gradient on.
LEAST = 1e-3
ROUNDINGS = 4.0  # by which two runs may be apart
BAD = ("differs", "fails", "hangs")


class Figures(NamedTuple):
    """The largest relative differences from one process."""

    loss: float = 0.0
    gradient: float = 0.0
    weight: float = 0.0
    held_out: float = 0.0


class Outcome(NamedTuple):
    case: Case
    verdict: Verdict
    sentence: str = ""  # why, unless all is right
    figures: Figures | None = None  # of a case that ran to its end
    kind: str = ""  # of failure: a smaller case must fail in the same way

    @property
    def is_bad(self) -> bool:
        return self.verdict in BAD


def judge(
    case: Case, ranks: Sequence[Seen], reference: Seen, rounded: Seen | None = None, tolerance: float | None = None
) -> Outcome:
    """Compare what every rank of the plan saw with what one process saw.

    rounded: a run that differs from the reference by rounding alone: one process in fp32, of a case in 16 bits, or one
    whose initial weights were moved by a last bit. tolerance: in place of those of `dtgpt compare`.
    """
    ours, theirs = ranks[0].record, reference.record
    if ours is None or theirs is None:
        raise ValueError("rank 0 returned no record")
    if ours.tensors.keys() != theirs.tensors.keys():
        other = ", ".join(sorted(ours.tensors.keys() ^ theirs.tensors.keys()))
        return Outcome(case, "differs", f"only one of them has {other}", kind="differs")
    found = difference(ours, theirs, LEAST)
    held_out = max(_relative(seen.held_out, reference.held_out) for seen in ranks)
    loss, tensors = TOLERANCE[theirs.dtype] if tolerance is None else (tolerance, tolerance)
    problems = [
        "" if found.same_initial else "initial weights differ",
        _samples(ranks, reference),
        "" if found.loss <= loss else f"loss differs by {found.loss:.1e}",
        *_tensors(ours, theirs, rounded and rounded.record, tensors),
        "" if held_out <= loss else f"held-out loss differs by {held_out:.1e}",
        _copies(ranks),
    ]
    wrong = [problem for problem in problems if problem]
    figures = Figures(found.loss, found.gradient, found.weight, held_out)
    return Outcome(case, "differs" if wrong else "right", "; ".join(wrong), figures, kind="differs" if wrong else "")


def _tensors(ours: Record, theirs: Record, rounded: Record | None, tolerance: float) -> list[str]:
    """Return the worst gradient and the worst weight that are too far from the reference. What rounding does to a
    tensor is accepted beside the tolerance, since one of few numbers may be rounding for the most part."""
    rounding = tensor_differences(theirs, rounded, LEAST) if rounded else {}
    beyond: dict[str, tuple[float, str]] = {}
    for name, value in tensor_differences(ours, theirs, LEAST).items():
        if value <= tolerance + ROUNDINGS * rounding.get(name, 0.0):
            continue
        kind = name.partition("/")[0].split()[-1]
        seen = beyond.get(kind, (0.0, ""))
        beyond[kind] = max(seen, (value, name), key=lambda pair: (math.isnan(pair[0]), pair[0]))
    return [f"{name.replace('/', ' of ')} differs by {value:.1e}" for value, name in beyond.values()]


def _relative(ours: float | None, theirs: float | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    away = abs(ours - theirs) / abs(theirs)
    return math.inf if math.isnan(away) else away


def _samples(ranks: Sequence[Seen], reference: Seen) -> str:
    """Return what is wrong with the order of samples: the replicas of the plan share each step's, in turn."""
    by_replica = {seen.dp: seen.samples for seen in ranks}
    if any(seen.samples != by_replica[seen.dp] for seen in ranks):
        return "ranks of one replica train on different samples"
    replicas = [by_replica[dp] for dp in sorted(by_replica)]
    for step, expected in enumerate(reference.samples):
        if [sample for samples in replicas for sample in samples[step]] != expected:
            return f"step {step + 1} has other samples"
    return ""


def _copies(ranks: Sequence[Seen]) -> str:
    """Return which tensors are not the same, bit for bit, on all ranks that hold them."""
    held: dict[str, set[str]] = {}
    for seen in ranks:
        for where, digest in seen.copies:
            held.setdefault(where, set()).add(digest)
    apart = sorted(where for where, digests in held.items() if len(digests) > 1)
    return f"copies of {apart[0]} differ ({len(apart)} of {len(held)} tensors)" if apart else ""

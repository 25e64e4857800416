"""The verdict on a case: what its plan did, against what one process did."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from dtgpt.compare.fuzz.case import Case
from dtgpt.compare.fuzz.measure import Seen
from dtgpt.compare.record import Record
from dtgpt.compare.verdict import ROUNDINGS, Difference, Limits, difference, limits_of, problems, relative
from dtgpt.util.console import counted

Verdict = Literal["right", "refused", "empty", "differs", "fails", "hangs"]
# Some gradients are zero but for rounding, such as those of queries that see one token. One that is smaller than this
# fraction of the whole gradient's norm is held against that: an error shows from 1e-7 of the whole gradient on.
LEAST = 1e-3
GAP = 8.0  # times eps: by how much the scores of two experts may differ where one run chose the one, one the other
BAD = ("differs", "fails", "hangs")


class Figures(NamedTuple):
    """The largest relative differences from one process."""

    loss: float = 0.0
    first_gradient: float = 0.0
    last_gradient: float = 0.0
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


class Alone(NamedTuple):
    """What one process saw."""

    reference: Seen
    exact: Seen | None = None  # in fp32, of a case in 16 bits
    moved: Seen | None = None  # from initial weights that were moved by a last bit: what rounding alone does


def judge(
    case: Case, ranks: Sequence[Seen], alone: Alone, tolerance: float | None = None, first: Sequence[Seen] = ()
) -> Outcome:
    """Compare what every rank of the plan saw with what one process saw. tolerance: in place of the limits of `dtgpt
    compare`. first: what every rank of the first plan saw, where the case has two."""
    reference, moved = alone.reference, alone.moved
    ours, theirs = joined([seen[0].record for seen in (first, ranks) if seen]), joined([reference.record])
    if ours.tensors.keys() != theirs.tensors.keys():
        other = ", ".join(sorted(ours.tensors.keys() ^ theirs.tensors.keys()))
        return Outcome(case, "differs", f"only one of them has {other}", kind="differs")
    found = difference(ours, theirs, LEAST)
    rounded = [difference(joined([moved.record]), theirs, LEAST)] if moved else []
    explained = rounded
    if ours.rounding == "none":  # rounding explains no difference from one process
        explained, moved = [], None
    if not found.same_skips and any(not other.same_skips for other in explained):
        return Outcome(case, "empty", "rounding decides which steps fp16 skips")
    limits = limits_of(ours) if tolerance is None else Limits(tolerance, tolerance, tolerance, tolerance)
    before = first[0].between if first else ()
    # One try shows what rounding does: in validation losses it may be little by chance, and more in those of steps.
    shown = [_held_out(_held_out_losses(moved), reference)] if moved else []
    rounding = max([*shown, *(each.loss for each in explained)], default=0.0)
    held_out = max(_held_out([*before, *_held_out_losses(seen)], reference) for seen in ranks)
    all_problems = [
        *problems(found, limits, explained),
        _samples(first, reference),
        _samples(ranks, reference, len(first[0].samples) if first else 0),
        "" if held_out <= limits.loss + ROUNDINGS * rounding else f"validation loss differs by {held_out:.1e}",
        _texts(first, ranks, reference, moved),
        _copies(first),
        _copies(ranks),
        "" if not first or first[0].end == ranks[0].begin else "weights or moments read are not those saved",
        *_in_16_bits(alone, rounded),
        _choices(ours, moved),
        "" if ours.loads == theirs.loads else "experts have other loads",
    ]
    wrong = [problem for problem in all_problems if problem]
    figures = Figures(found.loss, found.first_gradient, found.last_gradient, found.weight, held_out)
    if wrong:
        return Outcome(case, "differs", "; ".join(wrong), figures, kind="differs")
    if not found.applied:
        return Outcome(case, "empty", "fp16 skips every step")
    return Outcome(case, "right", ours.told_choices if ours.turned else "", figures)


def joined(records: Sequence[Record | None]) -> Record:
    """Return the record of a run that had these parts, of one step or more each. Raises ValueError where a part has
    none, which it has on rank 0."""
    parts = [part for part in records if part is not None]
    if len(parts) < len(records):
        raise ValueError("rank 0 returned no record")
    begin, end = parts[0], parts[-1]
    gradients = {name: value for name, value in begin.tensors.items() if name.startswith("first ")}
    return replace(
        end,
        rounding=end.rounding if begin.rounding == "none" else begin.rounding,  # which the first gradient depends on
        losses=[loss for part in parts for loss in part.losses],
        norms=[norm for part in parts for norm in part.norms],
        rates=[rate for part in parts for rate in part.rates],
        scales=[scale for part in parts for scale in part.scales],
        initial=begin.initial,
        loads=[loads for part in parts for loads in part.loads],
        flips=[flip for part in parts for flip in part.flips],
        turned=sum(part.turned for part in parts),
        chosen=sum(part.chosen for part in parts),
        tensors={**end.tensors, **gradients},
    )


def _in_16_bits(alone: Alone, rounded: Sequence[Difference]) -> list[str]:
    """Return what is wrong with the first step of one process in 16 bits, against one in fp32: what all plans would get
    wrong in the same way."""
    if alone.exact is None:
        return []
    ours, theirs = joined([alone.reference.record]), joined([alone.exact.record])
    if math.isinf(ours.norms[0]):
        return []
    found = difference(first_step(ours), first_step(theirs), LEAST)
    eps = 2 * limits_of(replace(ours, rounding="products")).first_gradient
    return [f"in fp32, {problem}" for problem in problems(found, Limits(eps, eps, eps, eps), rounded)]


def first_step(record: Record) -> Record:
    """Return the first step of a record."""
    tensors = {name: value for name, value in record.tensors.items() if name.startswith("first ")}
    return replace(record, losses=record.losses[:1], norms=record.norms[:1], rates=[], scales=[], tensors=tensors)


def _choices(record: Record, moved: Seen | None) -> str:
    """Return what is wrong with the experts that a plan chose: rounding explains another choice where the scores of
    both are nearly equal, or where it turns over choices as clear as this one on one process."""
    shown = [] if moved is None or moved.record is None else moved.record.flips
    most = 0.0 if record.rounding == "none" else max([GAP * record.eps, *(ROUNDINGS * abs(f.gap) for f in shown)])
    worst = max(record.flips, key=lambda flip: abs(flip.gap), default=None)
    return "" if worst is None or abs(worst.gap) <= most else f"a choice that rounding does not explain: {worst}"


def _held_out_losses(seen: Seen) -> list[float | None]:
    return [*seen.between, seen.held_out]


def _held_out(losses: Sequence[float | None], reference: Seen) -> float:
    """Return the largest relative difference of validation losses, infinity for one that is missing."""
    expected = _held_out_losses(reference)
    return max(map(_relative, losses, expected)) if len(losses) == len(expected) else math.inf


def _texts(first: Sequence[Seen], ranks: Sequence[Seen], reference: Seen, moved: Seen | None) -> str:
    """Return what is wrong with the generated texts. Rounding may decide on a token: one process in other rounding
    then has another text, and in 16 bits any text is accepted."""
    if any(len({seen.texts for seen in some}) > 1 for some in (first, ranks)):
        return "ranks have different texts"
    texts = [text for some in (first, ranks) if some for text in some[0].texts]
    record = reference.record
    if len(texts) != len(reference.texts):
        return f"{counted(len(texts), 'text')}, one process {len(reference.texts)}"
    if record is None or record.dtype != "torch.float32" or (moved and moved.texts != reference.texts):
        return ""
    apart = [step for step, pair in enumerate(zip(texts, reference.texts, strict=True), 1) if pair[0] != pair[1]]
    return f"text {apart[0]} of {len(texts)} differs" if apart else ""


def _relative(ours: float | None, theirs: float | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    away = relative(ours, theirs)
    return math.inf if math.isnan(away) else away


def _samples(ranks: Sequence[Seen], reference: Seen, before: int = 0) -> str:
    """Return what is wrong with the order of samples: the replicas of the plan share each step's, in turn. before:
    steps that another plan took."""
    by_replica = {seen.dp: seen.samples for seen in ranks}
    if any(seen.samples != by_replica[seen.dp] for seen in ranks):
        return "ranks of one replica train on different samples"
    replicas = [by_replica[dp] for dp in sorted(by_replica)]
    for step, own in enumerate(zip(*replicas, strict=True), before):
        if [sample for samples in own for sample in samples] != reference.samples[step]:
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

"""The verdict on a case: what its plan did, against what one process did."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from dtgpt.fuzz.case import Case
from dtgpt.fuzz.measure import Seen
from dtgpt.train.compare import TOLERANCE, Record, difference, tensor_differences
from dtgpt.util.console import counted

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
    case: Case, ranks: Sequence[Seen], reference: Seen, rounded: Sequence[Seen] = (), tolerance: float | None = None,
    first: Sequence[Seen] = (),
) -> Outcome:  # fmt: skip
    """Compare what every rank of the plan saw with what one process saw.

    rounded: runs that differ from the reference by rounding alone: one process in fp32, of a case in 16 bits, and one
    whose initial weights were moved by a last bit. tolerance: in place of those of `dtgpt compare`. first: what every
    rank of the first plan saw, where the case has two.
    """
    ours, theirs = joined([seen[0].record for seen in (first, ranks) if seen]), reference.record
    if theirs is None:
        raise ValueError("the reference returned no record")
    if ours.tensors.keys() != theirs.tensors.keys():
        other = ", ".join(sorted(ours.tensors.keys() ^ theirs.tensors.keys()))
        return Outcome(case, "differs", f"only one of them has {other}", kind="differs")
    skips = [[not math.isfinite(norm) for norm in record.norms] for record in (ours, theirs)]
    if skips[0] != skips[1]:
        steps = [[step for step, skipped in enumerate(some, 1) if skipped] for some in skips]
        return Outcome(case, "differs", f"skips steps {steps[0]}, one process {steps[1]}", kind="differs")
    if any(skips[0]):  # the run in fp32 takes these steps
        ours, theirs, rounded = _without_skipped(ours), _without_skipped(theirs), ()
    found = difference(ours, theirs, LEAST)
    before = first[0].between if first else ()
    held_out = max(_held_out([*before, *_held_out_losses(seen)], reference) for seen in ranks)
    loss, tensors = TOLERANCE[theirs.dtype] if tolerance is None else (tolerance, tolerance)
    others = [seen.record for seen in rounded if seen.record]
    rounding = max((difference(theirs, other, LEAST).loss for other in others), default=0.0)
    rounding_held_out = max((_held_out(_held_out_losses(seen), reference) for seen in rounded), default=0.0)
    done = len(first[0].samples) if first else 0
    problems = [
        "" if found.same_initial else "initial weights differ",
        _samples(first, reference),
        _samples(ranks, reference, done),
        "" if found.loss <= loss + ROUNDINGS * rounding else f"loss differs by {found.loss:.1e}",
        *_tensors(ours, theirs, others, tensors),
        "" if held_out <= loss + ROUNDINGS * rounding_held_out else f"held-out loss differs by {held_out:.1e}",
        _texts(first, ranks, reference, rounded),
        _copies(first),
        _copies(ranks),
        "" if not first or first[0].end == ranks[0].begin else "weights or moments read are not those saved",
    ]  # fmt: skip
    wrong = [problem for problem in problems if problem]
    figures = Figures(found.loss, found.gradient, found.weight, held_out)
    return Outcome(case, "differs" if wrong else "right", "; ".join(wrong), figures, kind="differs" if wrong else "")


def joined(records: Sequence[Record | None]) -> Record:
    """Return the record of a run that had these parts, of one step or more each. Raises ValueError where a part has
    none, which it has on rank 0."""
    parts = [part for part in records if part is not None]
    if len(parts) < len(records):
        raise ValueError("rank 0 returned no record")
    begin, end = parts[0], parts[-1]
    gradients = {name: value for name, value in begin.tensors.items() if name.startswith("first ")}
    return replace(
        end, losses=[loss for part in parts for loss in part.losses], norms=[n for part in parts for n in part.norms],
        initial=begin.initial, travel=sum(part.travel for part in parts), tensors={**end.tensors, **gradients},
    )  # fmt: skip


def _without_skipped(record: Record) -> Record:
    """Return the record without the gradients of steps that fp16 skips, which are not finite."""
    skipped = {f"{kind} gradient" for kind, n in (("first", 0), ("last", -1)) if not math.isfinite(record.norms[n])}
    left = {name: value for name, value in record.tensors.items() if name.partition("/")[0] not in skipped}
    return replace(record, tensors=left)


def _tensors(ours: Record, theirs: Record, rounded: Sequence[Record], tolerance: float) -> list[str]:
    """Return the worst gradient and the worst weight that are too far from the reference. What rounding does to a
    tensor is accepted beside the tolerance, since one of few numbers may be rounding for the most part."""
    roundings = [tensor_differences(theirs, other, LEAST) for other in rounded]
    beyond: dict[str, tuple[float, str]] = {}
    for name, value in tensor_differences(ours, theirs, LEAST).items():
        if value <= tolerance + ROUNDINGS * max((rounding[name] for rounding in roundings), default=0.0):
            continue
        kind = name.partition("/")[0].split()[-1]
        seen = beyond.get(kind, (0.0, ""))
        beyond[kind] = max(seen, (value, name), key=lambda pair: (math.isnan(pair[0]), pair[0]))
    return [f"{name.replace('/', ' of ')} differs by {value:.1e}" for value, name in beyond.values()]


def _held_out_losses(seen: Seen) -> list[float | None]:
    return [*seen.between, seen.held_out]


def _held_out(losses: Sequence[float | None], reference: Seen) -> float:
    """Return the largest relative difference of held-out losses, infinity for one that is missing."""
    expected = _held_out_losses(reference)
    return max(map(_relative, losses, expected)) if len(losses) == len(expected) else math.inf


def _texts(first: Sequence[Seen], ranks: Sequence[Seen], reference: Seen, rounded: Sequence[Seen]) -> str:
    """Return what is wrong with the generated texts. Rounding may decide on a token: one process in other rounding
    then has another text, and in 16 bits any text is accepted."""
    if any(len({seen.texts for seen in some}) > 1 for some in (first, ranks)):
        return "ranks have different texts"
    texts = [text for some in (first, ranks) if some for text in some[0].texts]
    record = reference.record
    if len(texts) != len(reference.texts):
        return f"{counted(len(texts), 'text')}, one process {len(reference.texts)}"
    if record is None or record.dtype != "torch.float32" or any(seen.texts != reference.texts for seen in rounded):
        return ""
    apart = [step for step, pair in enumerate(zip(texts, reference.texts, strict=True), 1) if pair[0] != pair[1]]
    return f"text {apart[0]} of {len(texts)} differs" if apart else ""


def _relative(ours: float | None, theirs: float | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    away = abs(ours - theirs) / abs(theirs)
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

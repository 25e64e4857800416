"""The first tensor in which a run parts from its reference, and whether rounding explains it.

Both runs begin with the same weights and samples, so that the tensors of their first step are equal but for rounding.
What rounding does is measured, tensor by tensor: the same step is computed in float64, and the error of a run is its
distance from that. Errors of many independent roundings have nearly the same norm in every order of the sums, and the
largest of them is nearly the same, too. A run whose norm of the error, or largest error, is `RATIO` times that of the
reference has a fault. `RATIO` is well above what other orders of sums do (measured: 1.5 times in bf16, 1.05 in fp32),
and a fault moves a tensor by orders of magnitude more in fp32.

The tensors are judged in the order of the computation: activations; then, backward, their gradients and those of
parameters; the gradient's norm; the optimizer's state; weights. The optimizer's state and the weights are held
against what the differences of the gradients explain, since the rule is the same.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtgpt.compare.choices import Flip
from dtgpt.compare.finding import Finding, Located, Verdict, finding_of
from dtgpt.compare.own_check import OwnFault
from dtgpt.compare.pairing import Pairing, Piece, distance, norm, part_of
from dtgpt.compare.record import Record
from dtgpt.compare.trace import LOGITS, Cut, Key, Trace, file_of
from dtgpt.util.console import counted

RATIO = 8.0
SAME = 2.0  # times its difference in a micro-batch where it is float64's, a tensor may differ in others
FEW = 64  # elements below which the reference may be near float64 by chance
SURE = 1e-3  # relative error of an element of a gradient up to which its sign and size decide how its weight moves


class Reference:
    """The traces of one process and of float64, and the order of their tensors."""

    def __init__(self, file: Path, record: Record):
        self.record = record
        self.trace, self.exact = Trace(file_of(file, "0")), Trace(file_of(file, "float64"))
        self.tokens = next(iter(self.trace.names))
        self.order = {name: place for place, name in enumerate(self.trace.names)}
        self.known_as = {other: name for name, others in self.trace.names.items() for other in (name, *others)}

    def writer(self, name: str, value: Tensor) -> str:
        """Return the module that computes an activation: what it reads is computed around it, but for whole numbers."""
        module, way, _ = name.rsplit(" ", 2)
        return module if way in ("output", LOGITS) or not value.is_floating_point() else parent(module)

    def own_finding(self, fault: OwnFault) -> Finding:
        """Return a fault of the reference itself."""
        kind, name = fault.kind, fault.name
        if kind == "activation":
            key = next((key for key in self.trace.keys if key.name == name), None)  # None: computed another time alone
            module = name.rsplit(" ", 2)[0] if key is None else self.writer(name, self.trace[key])
        else:
            module = self.reader(name) if kind == "gradient" else name.rpartition(".")[0]
        kinds = {"gradient": "gradient of activation", "parameter": "gradient", "activation": kind, "weight": kind}
        tensor = name if kind in kinds else f"{kind} of {name}"
        facts = {"module": module, "tensor": tensor, "rank": 0, "micro_batch": fault.micro_batch}
        return finding_of(fault.difference, "fault", kind=kinds.get(kind, "state"), **facts)

    def reader(self, name: str) -> str:
        """Return the module whose backward pass computes the gradient of a tensor: the innermost that reads it, or what
        is around those that return it."""
        labels = [other.rsplit(" ", 2) for other in (name, *self.trace.names[name])]
        if labels[0][1] == LOGITS:
            return labels[0][0]
        readers = [module for module, way, _ in labels if way == "input"]
        if readers:
            return max(readers, key=lambda module: (module.count("."), readers.index(module)))
        return parent(min((module for module, _, _ in labels), key=lambda module: module.count(".")))

    def router_of(self, block: str) -> str:
        """Return the router of a block, given by its index."""
        label = f" {LOGITS} 0"
        return next(n.removesuffix(label) for n in self.known_as if n.endswith(label) and n.split(".")[1] == block)

    def backward_place(self, parameter: str) -> float:
        """Return the place of a parameter's gradient among those of activations: after that of the module's output. A
        module that is not called, such as a norm within a fused operation, has that of what is recorded around it."""
        module = parameter.rpartition(".")[0]
        while module:
            owners = [(name.rsplit(" ", 2)[0], place) for name, place in self.order.items()]
            own = [place for owner, place in owners if owner == module]
            within = [place for owner, place in owners if owner.startswith(f"{module}.")]
            if own or within:
                return -min(own or within) + 0.5
            module = module.rpartition(".")[0]
        return math.inf


def parent(module: str) -> str:
    return module.rpartition(".")[0] or module


def locate(reference: Reference, record: Record, file: Path, limit: float) -> Located:
    """Return where the run of `record` and of the traces at `file` parts from the reference. limit: largest relative
    difference where there is no float64."""
    ranks = sorted(file.parent.glob(f"{file.name}.[0-9]*"), key=lambda path: int(path.suffix[1:]))
    traces = [Trace(path) for path in ranks]
    wider = max(1.0, traces[0].eps / reference.trace.eps)
    judge = Judge(reference, record.eps, wider, limit)
    pairing = Pairing(traces, reference.trace, reference.exact)
    ours, theirs = pairing.counts()
    if ours != theirs:
        tensor = f"{counted(ours, 'sample')} in place of {theirs}"
        other = finding_of(math.inf, "fault", kind="tokens", module="(all)", tensor=tensor)
        return Located(other, other)
    steps: list[tuple[tuple[float, ...], str | Flip | tuple[Trace, Key, str]]] = []
    for trace in traces:
        for key in trace.keys:
            name = reference.known_as.get(key.name)
            if name is None:
                continue
            place = reference.order[name]
            at = (0, place) if key.kind == "activation" else (1, -place)
            steps.append(((*at, key.micro_batch, trace.rank), (trace, key, name)))
    for label in reference.record.tensors:
        kind, _, parameter = label.partition("/")
        if kind == "first gradient":
            steps.append(((1, reference.backward_place(parameter), 0, 0), parameter))
    for flip in record.flips:
        if flip.step == 1 and (name := reference.known_as.get(f"{flip.module} {LOGITS} 0")) is not None:
            steps.append(((0, reference.order[name] + 0.5, flip.sample, flip.rank), flip))
    found = Located()
    for _, what in sorted(steps, key=lambda step: step[0]):
        if isinstance(what, str):
            found.add(judge.parameter(record, what))
        elif isinstance(what, Flip):
            found.add(judge.choice(pairing, what))
        else:
            for piece in pairing.pieces(*what):
                found.add(judge.traced(*what, piece))
        if found.fault is not None:
            return found
    for finding in (*judge.loads(record), *judge.update(record)):
        found.add(finding)
    return found


def problem_of_reference(reference: Reference, tolerance: float | None) -> tuple[Finding, str] | None:
    """Return why nothing can be held against one process, with the tensor that shows it; None where it is fit."""
    record = reference.record
    if (fault := record.unrepeated) is not None:
        found = reference.own_finding(fault)
        return found, (
            f"one process does not repeat itself, so that no run can be held against it: {found.place()} differs by "
            f"{fault.difference:.1e} where step 1 is taken again from the same state; let random numbers follow from "
            "the samples' keys, as those of dtgpt's Dropout do"
        )
    if (fault := record.far) is not None and tolerance is None:
        found = reference.own_finding(fault)
        return found, (
            f"one process is further from float64 than {record.precision} explains, so that no run can be held against "
            f"it: {found.place()} is off by {fault.difference:.1e}, and rounding explains {fault.limit:.1e}"
        )
    return None


def problem_of_tokens(record: Record, reference: Record, found: Located) -> str:
    """Return where a run trains on other tokens than its reference, empty where it does not: then nothing else that
    differs says anything."""
    if found.fault is not None and found.fault.kind == "tokens":
        return str(found.fault)
    for step, (ours, theirs) in enumerate(zip(record.tokens, reference.tokens, strict=False), 1):
        if ours != theirs:
            samples = sorted({int(each.split()[0]) for each in {*ours} ^ {*theirs}})
            return (
                f"other tokens than one process has: {counted(len(samples), 'sample')} of step {step}, such as "
                f"{samples[0]}; nothing else can be compared"
            )
    return ""


class Judge:
    """The rule of `RATIO`, and what the differences of gradients explain. eps: of the activations of the run; wider: by
    how much its products round more than the reference's; limit: largest relative difference where there is no
    float64."""

    def __init__(self, reference: Reference, eps: float, wider: float, limit: float):
        self.reference, self.eps, self.wider, self.limit = reference, eps, wider, limit
        self._allowed: dict[tuple[str, str], float] = {}  # differences of tensors that are float64's, by kind and name

    def traced(self, trace: Trace, key: Key, name: str, piece: Piece) -> Finding | None:
        """Return how a piece of a tensor differs, None where it has the reference's bits."""
        reference, backward = self.reference, key.kind == "gradient"
        if backward and key.name in trace.fused and name not in reference.trace.fused:
            return None  # the run, of another precision, has a part of the gradient
        whole = piece.theirs
        if backward and piece.ours.dim() > 1 and len(whole) == 1 < len(piece.ours):
            return None  # one process looks positions up once for all samples; the parameter's gradient is their sum
        kind = "tokens" if name == reference.tokens else "gradient of activation" if backward else "activation"
        found = self._finding(
            piece.ours,
            whole,
            piece.exact,
            trace.cut,
            kind=kind,
            module=reference.reader(name) if backward else reference.writer(name, whole),
            tensor=name,
            rank=trace.rank,
            micro_batch=key.micro_batch,
        )
        if found is None or kind != "tokens":
            return found
        cut = part_of(whole, piece.ours.shape, trace.cut)
        rows = (
            []
            if cut is None
            else [row for row, pair in enumerate(zip(piece.ours, whole[cut], strict=False)) if not torch.equal(*pair)]
        )
        return replace(found, sample=piece.first + rows[0] if rows else None)

    def parameter(self, record: Record, name: str) -> Finding | None:
        """Return how the first gradient of a parameter differs."""
        own, key = f"first gradient/{name}", Key(0, "parameter", name)
        exact = self.reference.exact[key] if key in self.reference.exact.keys else None
        return self._finding(
            record.tensors[own],
            self.reference.record.tensors[own],
            exact,
            Cut(),
            kind="gradient",
            module=name.rpartition(".")[0],
            tensor=name,
        )

    def choice(self, pairing: Pairing, flip: Flip) -> Finding:
        """Return what a choice is that differs from the reference's: rounding, if the logits of the token differ by as
        much as the scores of the two experts are apart."""
        trace = next(trace for trace in pairing.traces if trace.rank == flip.rank)
        name = self.reference.known_as[f"{flip.module} {LOGITS} 0"]
        key = Key(flip.sample // trace.samples, "activation", name)
        apart, size = 0.0, math.inf  # of a token whose logits were not kept
        for piece in pairing.pieces(trace, key, key.name) if key in trace.keys else ():
            row, cut = flip.sample - piece.first, part_of(piece.theirs, piece.ours.shape, trace.cut)
            if 0 <= row < len(piece.theirs) and cut is not None:
                token = flip.token - (cut[1].start or 0)  # a rank may have a slice of the tokens
                ours, theirs = piece.ours[row, token].double(), piece.theirs[row, flip.token].double()
                apart, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
        explained = math.isinf(size) or (apart > 0 and flip.gap <= 2 * apart + 8 * 2.0**-23 * size)
        return finding_of(
            flip.gap,
            "rounding" if explained else "fault",
            kind="choice",
            module=flip.module,
            tensor=f"of expert {flip.ours} in place of {flip.theirs} by token {flip.token}",
            rank=flip.rank,
            sample=flip.sample,
        )

    def loads(self, record: Record) -> Iterator[Finding]:
        """Yield where the loads of experts differ, which are whole numbers of equal choices."""
        for step, (ours, theirs) in enumerate(zip(record.loads, self.reference.record.loads, strict=False), 1):
            for block in theirs:
                if block in ours and ours[block] != theirs[block]:
                    a, b = (torch.tensor(each[block]).double() for each in (ours, theirs))
                    facts = {"kind": "state", "tensor": "loads of experts", "step": step}
                    facts["module"] = self.reference.router_of(block)
                    yield finding_of(distance(a, b) / max(norm(b), 1e-300), "fault", **facts)

    def update(self, record: Record) -> Iterator[Finding | None]:
        """Yield how the norm, the state of the optimizer and the weights differ after the first step."""
        reference = self.reference.record
        ours, theirs = record.tensors, reference.tensors
        names = [key.partition("/")[2] for key in theirs if key.startswith("first gradient/")]
        apart = [(distance(ours[k], theirs[k]), norm(theirs[k])) for k in (f"first gradient/{n}" for n in names)]
        whole = math.sqrt(sum(d**2 for d, _ in apart)) / max(1e-300, math.sqrt(sum(n**2 for _, n in apart)))
        yield self._explained(
            torch.tensor(record.norms[:1]),
            torch.tensor(reference.norms[:1]),
            RATIO * (whole + 2.0**-23),
            kind="gradient norm",
            module="(all)",
            tensor="global norm",
        )
        updated = [k for k in theirs if k in ours and k.startswith("first ") and not k.startswith("first gradient/")]
        for key in sorted(updated, key=lambda key: (key.startswith("first update/"), key)):
            kind, _, name = key.partition("/")
            a, b = ours[key].double(), theirs[key].double()
            known, chance = self._known(record, name, b.shape)
            if known is not None:
                a, b = a[known], b[known]
            weights = kind == "first update"
            held = float(theirs[f"weight/{name}"].abs().max()) if weights else 0.0
            rounding = 2.0**-23 * held * math.sqrt(b.numel()) / max(norm(b), 1e-300)
            # A rule that makes more of a matrix than of its elements may compute in the activations' type.
            by_element = not weights or f"first exp_avg_sq/{name}" in ours
            allowed = RATIO * (chance + rounding + (2.0**-23 if by_element else self.eps))
            yield self._explained(
                a,
                b,
                allowed,
                kind="weight" if weights else "state",
                module=name.rpartition(".")[0],
                tensor=name if weights else f"{kind.removeprefix('first ')} of {name}",
            )
        for name in record.stale:
            facts = {"kind": "weight", "module": name.rpartition(".")[0], "tensor": f"16-bit copy of {name}"}
            yield finding_of(math.inf, "fault", **facts)

    def _known(self, record: Record, name: str, shape: torch.Size) -> tuple[Tensor | None, float]:
        """Return which elements have a gradient that both runs know to `SURE`, by which they move, where others move
        by chance; and how far apart these gradients are. None: all elements, where not all gradients were kept."""
        a, b = (r.tensors[f"first gradient/{name}"].double() for r in (record, self.reference.record))
        if b.shape != shape:
            return None, self.limit
        apart = (a - b).abs()
        known = apart.amax() <= SURE * b.abs()
        ratios = apart[known] / b[known].abs().clamp(min=1e-300)
        return known, math.sqrt(float(ratios.square().mean())) if ratios.numel() else 0.0

    def _explained(self, a: Tensor, b: Tensor, allowed: float, **facts: Any) -> Finding | None:
        if torch.equal(a, b):
            return None
        apart = distance(a, b) / max(norm(b), 1e-300)
        verdict: Verdict = "bits" if apart <= self.eps else "rounding" if apart <= allowed else "fault"
        return finding_of(apart, verdict, **facts)

    def _finding(self, piece: Tensor, whole: Tensor, exact: Tensor | None, place: Cut, **facts: Any) -> Finding | None:
        cut = part_of(whole, piece.shape, place)
        if cut is None:
            return finding_of(math.inf, "fault", **facts)
        rows = min(len(piece), len(whole[cut])) if piece.dim() > 1 else None
        if exact is not None and rows is not None:
            rows = min(rows, len(exact))
        piece, other = piece[:rows] if rows else piece, whole[cut][:rows] if rows else whole[cut]
        if torch.equal(piece, other):
            return None
        if not piece.is_floating_point():
            changed = float((piece != other).double().mean())
            return finding_of(changed, "fault", **facts)
        apart = distance(piece, other) / max(norm(other), 1e-300)
        if not math.isfinite(apart):
            return finding_of(apart, "fault", **facts)
        known = facts["kind"], facts["tensor"]
        if exact is None:
            # A fused operation and plain ones give a tensor that both return and read parts of its gradient elsewhere.
            # Float64 tells for one micro-batch that the run has the whole, where one process has a part.
            limit = max(self.limit, SAME * self._allowed.get(known, 0.0))
            verdict: Verdict = "bits" if apart <= self.eps else "rounding" if apart <= limit else "fault"
            return finding_of(apart, verdict, **facts)
        right = exact[cut][:rows] if rows else exact[cut]
        error, own = (distance(values, right) for values in (piece, other))
        largest, own_largest = (float((values.double() - right).abs().max()) for values in (piece, other))
        least = self.eps * (RATIO if right.numel() < FEW else 1)
        explained = error <= max(RATIO * self.wider * own, least * norm(right)) and largest <= max(
            RATIO * self.wider * own_largest, least * float(right.abs().max())
        )
        size = max(norm(right), 1e-300)
        verdict = "fault" if not explained else "bits" if apart <= self.eps else "rounding"
        if error <= self.limit * size:
            self._allowed[known] = max(apart, self._allowed.get(known, 0.0))
        return finding_of(apart, verdict, error=error / size, reference_error=own / size, **facts)

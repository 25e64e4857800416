"""What the comparison of two runs has found: a tensor in which they differ, and whether rounding explains it."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["bits", "rounding", "fault"]


@dataclass(frozen=True)
class Finding:
    """A tensor in which a run differs from its reference."""

    step: int
    kind: str  # "tokens", "activation", "gradient of activation", "gradient", "gradient norm", "state", "weight"
    module: str  # that computes it
    tensor: str  # its name, as in `dtgpt.compare.trace`, or that of a parameter
    rank: int | None  # None: the same for all ranks
    micro_batch: int | None  # in the global batch
    difference: float  # ||a - b|| / ||b||, b: the reference
    error: float | None  # of the run from float64, relative; None: not computed
    reference_error: float | None
    verdict: Verdict
    sample: int | None = None  # in the global batch: the first whose tokens differ

    def __str__(self) -> str:
        errors = ""
        if self.error is not None and self.reference_error is not None:
            errors = f", {self.error:.1e} from float64 (one process {self.reference_error:.1e})"
        if self.kind == "tokens":
            return f"other tokens than one process has in {self.place()}; nothing else can be compared"
        return f"{self.verdict} in {self.place()}, by {self.difference:.1e}{errors}"

    def place(self) -> str:
        """Return which tensor it is."""
        where = [] if self.sample is None else [f"sample {self.sample}"]
        where += [] if self.rank is None else [f"rank {self.rank}"]
        where += [] if self.micro_batch is None else [f"micro-batch {self.micro_batch}"]
        return ", ".join([f"{self.module}: {self.kind} {self.tensor}", *where, f"step {self.step}"])

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


@dataclass
class Located:
    """The first tensor that differs at all, and the first with a fault."""

    first: Finding | None = None
    fault: Finding | None = None

    def add(self, finding: Finding | None) -> None:
        if finding is not None:
            self.first = self.first or finding
            if finding.verdict == "fault":
                self.fault = self.fault or finding


def finding_of(difference: float, verdict: Verdict, **facts: Any) -> Finding:
    """Return a finding, of the first step unless `facts` has another; what else these do not have is None."""
    values = {"step": 1, "rank": None, "micro_batch": None, "error": None, "reference_error": None} | facts
    return Finding(difference=difference, verdict=verdict, **values)

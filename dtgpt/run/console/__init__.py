"""What the console shows of a run: a header, lines of progress with rates, and what to do next."""

from typing import Annotated

from dtgpt.util.field_types import Pattern
from dtgpt.util.seams import Capability


class LogFields:
    show: Annotated[
        str,
        "further parts of a progress line, separated by commas: time (of day), ms (of a step), ppl (perplexity), "
        "z (z-scores of loss and gradient norm)",
        Pattern("((time|ms|ppl|z)(,(time|ms|ppl|z))*)?", "is not known; use some of time,ms,ppl,z"),
    ] = ""


CAPABILITY = Capability(
    log_fields=("dtgpt.run.console:LogFields",),
    reports=("dtgpt.run.console.report:ConsoleReport",),
)

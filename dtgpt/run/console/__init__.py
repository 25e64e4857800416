"""What the console shows of a run: a header, lines of progress with rates, and what to do next."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(reports=("dtgpt.run.console.report:ConsoleReport",))

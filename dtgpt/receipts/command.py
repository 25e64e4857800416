"""`dtgpt audit`: check the receipts of a run, or compute steps again and compare them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dtgpt.commands.command import Command
from dtgpt.commands.model_options import RecipeFile
from dtgpt.tools.results import check_output, write_results
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds, Pattern, changed_fields

RECORDED, RECORDED_BEFORE = "recorded", "as it was"  # the latter up to 0.3.0
DEVICE = Pattern(f"{RECORDED}|cpu|cuda|{RECORDED_BEFORE}", "is not known; use recorded, cpu or cuda")


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Check the receipts of a run that was trained with --receipts.on. Without --step nothing is computed: the chain of
    receipts, the tensors of all checkpoints, metrics.jsonl and recipe.json must say the same.

    With --step, the steps from the checkpoint before it on are computed again, under another plan and on as many
    processes as it needs, and must have the bits of their receipts, or be within rounding where bits cannot be equal.
    The first thing that differs is named.

    The exit code is 1 if something differs.
    """

    step: Annotated[int | None, "first step to compute again; none: check the files alone", Bounds(1)] = None
    steps: Annotated[int, "number of steps to compute again", Bounds(1)] = 1
    plan: Annotated[str, "plan under which steps are computed again"] = "single"
    device: Annotated[str, "device for it: recorded, which is the kind of the run, cpu or cuda", DEVICE] = RECORDED
    recipe: RecipeFile = None
    json: Annotated[str | None, "file for the result as JSON"] = None


def work(run: Path, options: AuditOptions) -> int:
    if options.step is None and (given := changed_fields(options) & {"steps", "plan", "device"}):
        name = sorted(given)[0]
        raise UserError(f"--{name} is for steps that are computed again; add --step N, or leave it out")
    output = None if options.json is None else Path(options.json)
    if output is not None:
        check_output(output, "--json", "audit.json")
    from dtgpt.receipts.audit import audit

    device = None if options.device in (RECORDED, RECORDED_BEFORE) else options.device
    recipe = None if options.recipe is None else Path(options.recipe)
    found = audit(run, options.step, options.steps, options.plan, device, recipe)
    if output is not None:
        write_results(output, "--json", found)
    return found["status"]


def recompute(words: list[str]) -> int:
    """Compute steps again in one of the processes that `dtgpt audit` starts, and return the exit code."""
    from dtgpt.receipts.recompute import work as work_in_process

    return work_in_process(words)


command = Command("audit RUN", AuditOptions, work, "runs/gpt2_tiny-001 --step 120")

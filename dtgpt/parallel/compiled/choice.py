"""Whether blocks are compiled: what a recipe asks for, what a plan allows, and what this machine has."""

import importlib.util
import os
import shutil
from typing import Literal

import torch

from dtgpt.config.plan import Plan
from dtgpt.util.console import say
from dtgpt.util.errors import UserError
from dtgpt.util.rules import Given, Is, Rule, Rules

Switch = Literal["auto", "on", "off"]
PLAN_RULES: Rules = (  # of a recipe under a `plan`
    Rule(
        "compile=on, but the schedule {plan.schedule} cuts the backward pass of each block in two, which torch.compile "
        "cannot; use --compile off or another schedule",
        Is("compile", "==", "on"),
        Given("plan.splits_backward"),
    ),
)


def choose_compiler(wanted: Switch, device: torch.device, graphs: bool, plan: Plan, here: bool = True) -> bool:
    """Return whether to compile. A replayed step has nothing to gain: all operations between the matrices are fused
    already. `auto` leaves out cp, which gains nothing by it either (docs/long_context.md). Raises UserError where the
    recipe asks for it and it cannot work `here`; where it is only the default, say that training runs eagerly."""
    if wanted == "auto" and (device.type != "cuda" or plan.splits_backward or plan.asks_host or plan.cp > 1 or graphs):
        return False
    reason = why_no_compiler(device) if here and wanted != "off" else None
    if reason and wanted == "on":
        raise UserError(f"compile=on, but {reason}; install it, or use --compile off")
    if reason:
        say(f"{reason}: training runs without torch.compile, slower", warning=True)
    return wanted != "off" and reason is None


def why_no_compiler(device: torch.device) -> str | None:
    """Return what torch.compile lacks here, if anything: a C++ compiler for the CPU, a C compiler and Triton for
    CUDA."""
    variable, programs = ("CXX", ("g++", "clang++")) if device.type == "cpu" else ("CC", ("gcc", "clang"))
    if not any(shutil.which(p) for p in (*programs, os.environ.get(variable) or "")):
        return f"no compiler ({' or '.join(programs)}) was found"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton is missing"
    return None

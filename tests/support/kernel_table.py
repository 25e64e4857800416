"""The table of docs/kernels.md, as the lists of kernels have it.

python -m tests.support.kernel_table        # write it into the page
"""

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch.utils import cpp_extension

from dtgpt.ops.kernels import devices
from dtgpt.ops.kernels.attention import flash_launch
from dtgpt.ops.operation import OPERATIONS, Kernel, load_kernels
from dtgpt.util import seams

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- from the lists of kernels -->\n", "<!-- end -->\n"
CAPABILITIES = ((7, 0), (8, 0), (8, 9), (9, 0), (10, 0))


@contextmanager
def gpu_of(capability: tuple[int, int], triton: bool = True, nvcc: bool = True) -> Iterator[torch.device]:
    """A GPU that need not exist, with Triton 3.6, nvcc where wanted, and ninja."""
    with ExitStack() as stack:
        for place, name, value in (
            (torch.cuda, "get_device_capability", lambda device: capability),
            (devices, "TRITON", triton),
            (devices.shutil, "which", lambda name: name),
            (flash_launch, "has_gluon", lambda device: devices.serves_gluon("3.6.0", capability)),
            (cpp_extension, "CUDA_HOME", "/cuda" if nvcc else None),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield torch.device("cuda", 0)


def gpus_of(kernel: Kernel) -> str:
    """Return the compute capabilities on which a kernel serves, in words."""
    there = []
    for capability in CAPABILITIES:
        with gpu_of(capability) as device:
            there.append(kernel.why_not(device) is None)
    if not any(there):
        return "CPU"
    first, known = there.index(True), [".".join(map(str, capability)) for capability in CAPABILITIES]
    if all(there[first:]):
        return "all" if first == 0 else f"{known[first]} on"
    return ", ".join(name for name, on in zip(known, there, strict=True) if on)


def table() -> str:
    """Return a row for each kernel, operations by name."""
    for file in sorted((ROOT / "dtgpt" / "ops").rglob("*.py")):
        if not file.stem.endswith("kernels") and "kernels" not in file.parent.parts and file.stem != "__init__":
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    rows = ["| operation | kernel | GPUs | when |", "|---|---|---|---|"]
    for name, place in sorted(seams.added("kernels").items()):
        seams.load(place)
        load_kernels(name)
        formula = OPERATIONS[name].formula.replace("|", "\\|")
        for index, kernel in enumerate(OPERATIONS[name].kernels):
            what = f"`{name}`: {formula}" if index == 0 else ""
            rows.append(f"| {what} | {kernel.name} | {gpus_of(kernel)} | {kernel.when} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])

"""A file of the algorithms that searches have found, so that the next process needs no search.

What the file says is a proposal: whoever reads it verifies the result of an algorithm before it is used. The file is
replaced as a whole. Where two processes write at once, the entries of one are lost, which costs their searches, as does
a file that cannot be read or written.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dtgpt.ops.matmul.cublaslt import Algorithm, Operand, Problem, version
from dtgpt.util.errors import UserError
from dtgpt.util.storage import read_json, write_json

WORDS = 8  # of an algorithm
WORKSPACE = 32 << 20  # bytes that an algorithm may use


def identity(device: torch.device) -> str:
    """Return what must be equal for a search to hold on another device: GPU, cuBLASLt, PyTorch."""
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    chip = f"{properties.name}, {capability}, {properties.multi_processor_count} multiprocessors"
    return f"{chip}; cuBLASLt {version()}; torch {torch.__version__}"


def key_of(problem: Problem) -> str:
    """Return the name of a problem in the file."""

    def operand(own: Operand) -> str:
        return f"{_name(own.dtype)} {own.rows}x{own.columns}{'t' if own.transposed else ''}/{own.stride}"

    options = [name for name in ("bias", "scaled", "fast") if getattr(problem, name)]
    return " ".join([operand(problem.a), operand(problem.b), f"{problem.stride}", _name(problem.dtype), *options])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def file_for(folder: Path, name: str) -> Path:
    """Return the file of the devices of this `identity`."""
    return folder / f"products-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def read_choices(path: Path, name: str) -> dict[str, Algorithm | None]:
    """Return the algorithms by `key_of`; None: PyTorch's choice is as fast. Nothing where the file is missing, damaged
    or of another identity."""
    try:
        value = read_json(path, "")
    except UserError:
        return {}
    if not isinstance(value, dict) or value.get("identity") != name or not isinstance(value.get("products"), dict):
        return {}
    return {key: _algorithm(entry) for key, entry in value["products"].items() if _is_valid(entry)}


def write_choices(path: Path, name: str, found: Mapping[str, Algorithm | None]) -> None:
    """Add what was found to the file, where the file system lets this process write it."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"identity": name, "products": {**read_choices(path, name), **found}})


def _is_valid(entry: Any) -> bool:
    if entry is None:
        return True
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], list):
        return False
    words, workspace = entry
    fits = all(type(number) is int and 0 <= number < 1 << 64 for number in [*words, workspace])
    return fits and len(words) == WORDS and workspace <= WORKSPACE


def _algorithm(entry: Any) -> Algorithm | None:
    return None if entry is None else Algorithm(tuple(entry[0]), entry[1])

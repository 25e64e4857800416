"""Files of `torch.save` that other projects wrote, opened without running anything of theirs.

Such a file is a pickle, which may name any function to be called. Here torch's weights-only reader resolves a name on
an explicit list or refuses the file. But for `argparse.Namespace`, which only holds attributes, every name on the list
stands for a class made here that keeps its arguments and does nothing: foreign enums, classes of old loss scalers, and
also numpy's reconstruction of arrays (random states), whose dtypes can be forged to point into memory.
"""

import argparse
import re
import types
from pathlib import Path
from typing import Any

import torch

from dtgpt.errors import UserError

ZIP_MAGIC = b"PK\x03\x04"  # of every file of torch.save since torch 1.6, which can be mapped into memory
REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed global|whose module)")


class StandIn:
    """In place of a foreign class or function: keeps what it was made with in `args` and `state`, runs nothing."""

    foreign = "?"  # the dotted name it was written under
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> "StandIn":
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.foreign}>"


def _names() -> list[str]:
    """Dotted names that Megatron-LM's checkpoints of 2019 to 2026 are known to hold beside tensors and plain values."""
    modules = "megatron.enums", "megatron.model.enums", "megatron.legacy.model.enums", "megatron.core.enums"
    enums = (
        "ModelType", "LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType", "AttnBackend", "CudaGraphScope",
        "CudaGraphModule", "Fp8Recipe", "Fp4Recipe",
    )  # fmt: skip
    names = [f"{module}.{enum}" for module in (*modules, "megatron.core.transformer.enums") for enum in enums]
    for module in ("fp16", "megatron.fp16", "megatron.fp16_deprecated"):
        names += [f"{module}.loss_scaler.{scaler}" for scaler in ("LossScaler", "DynamicLossScaler")]
    names += [f"megatron.core.rerun_state_machine.{n}" for n in ("RerunMode", "RerunState", "RerunDiagnostic")]
    names += [f"transformer_engine.common.recipe.{n}" for n in ("DelayedScaling", "Format", "_FormatHelper")]
    for core in ("numpy.core", "numpy._core"):  # before and since numpy 2
        names += [f"{core}.multiarray._reconstruct", f"{core}.multiarray.scalar"]
    names += ["numpy.ndarray", "numpy.dtype", *(f"numpy.dtypes.{n}DType" for n in ("UInt32", "Int64", "Float64"))]
    # Signals that end a run, what Transformer Engine keeps as `_extra_state`, how some Pythons write an enum's member.
    return [*names, "signal.Signals", "_io.BytesIO", "builtins.getattr"]


STAND_INS = [(type("StandIn", (StandIn,), {"foreign": name}), name) for name in _names()]
ALLOWED = [argparse.Namespace, types.SimpleNamespace, *STAND_INS]


def open_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a file of torch.save, with tensors on the CPU: mapped, so that only what is used is read,
    unless the file is of the format before torch 1.6.

    Raises UserError for a file that is missing or broken, holds something else, or names what is not on the list.
    """
    try:
        with open(path, "rb") as file:
            mapped = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        with torch.serialization.safe_globals(ALLOWED):
            content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged or hostile pickle can make the reader raise anything
        raise _refusal(path, error) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a checkpoint's dictionary; give another file")
    return content


def _refusal(path: Path, error: Exception) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"{path} is missing; copy the whole checkpoint")
    if match := REFUSED.search(str(error)):
        return UserError(
            f"{path} holds the class or function {match[1]}, which is not opened because it could run code; save the "
            "checkpoint again with only its tensors, numbers and args"
        )
    reason = (str(error).strip().splitlines() or [""])[-1][:200]
    return UserError(f"{path} cannot be read ({type(error).__name__}: {reason}); copy it again, whole")

"""What training in fp8 needs of the hardware, and what a user should know of sizes and plans for which it is slow."""

import torch

from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.sections import Precision
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.models.roles import MATRICES, ROWS, Role
from dtgpt.util.errors import UserError
from dtgpt.util.shared.device_words import device_name

FP8 = "fp8"  # the precision of a recipe


class Fp8(Precision):
    """bf16, but for the matrix products of blocks."""

    dtype = torch.bfloat16

    def check_device(self, device: torch.device) -> None:
        check_fp8(device)

    def notes_on(
        self, model: ModelConfig, plan: ResolvedPlan, micro_batch_size: int, length: int, device: str
    ) -> list[str]:
        return fp8_notes(model, plan, micro_batch_size, length, device)


PRECISION = Fp8()


def check_fp8(device: torch.device) -> None:
    """Raise UserError where a GPU does not multiply 8-bit floats."""
    from dtgpt.util.shared.gpu_limits import has_float8  # here: recipes in all precisions read this file's help

    if device.type == "cuda" and not has_float8(device):
        raise no_float8(device_name(device))


def no_float8(gpu: str) -> UserError:
    """Return the error of a GPU, by its name, that does not multiply 8-bit floats."""
    return UserError(
        f"precision=fp8, but {gpu} does not multiply 8-bit floats, which needs compute capability 8.9 (Ada, Hopper or "
        "later); use --precision bf16"
    )


def fp8_notes(
    model: ModelConfig, plan: ResolvedPlan, micro_batch_size: int, seq_length: int, device_type: str
) -> list[str]:
    """Return why fp8 is slow here, though right; nothing where it is fast."""
    from dtgpt.ops.fp8.product import STEP  # here, since others read names of this file alone

    if inventory(model).has(Role.ROUTER):
        return ["precision=fp8 computes attention and shared MLPs with products of 8 bits, and experts in bf16"]
    slow = "is computed in 16 bits from 8-bit values, slower than bf16"
    if device_type == "cpu":
        return [f"precision=fp8 has no CPU kernel: every product {slow}"]
    if plan.splits_backward:
        return [f"the schedule {plan.schedule} splits backward, for which every product of fp8 {slow}"]
    if (micro_batch_size * seq_length // plan.cp) % STEP:
        samples = f"micro_batch_size={micro_batch_size} x {seq_length // plan.cp}"
        return [f"{samples} tokens are not a multiple of {STEP}: every product of fp8 {slow}"]
    found = []
    for name, rows, columns in _matrices(model, plan):
        if rows % STEP or columns % STEP:
            found.append(
                f"{name} has {rows} x {columns} elements on each rank, not multiples of {STEP}: its product {slow}"
            )
    return found


def _matrices(model: ModelConfig, plan: ResolvedPlan) -> list[tuple[str, int, int]]:
    """Return (name, rows, columns) of each matrix of a block, of every kind, as the default table of tensor parallelism
    cuts it."""
    found: dict[tuple[str, int, int], None] = {}  # in order, each once
    parts = inventory(model)
    for p in (p for index in parts.counts for p in parts.of_block(index)):
        if p.name.endswith(".weight") and p.role in MATRICES:
            rows, columns = p.shape
            by_rows = p.role in ROWS
            cut = rows if by_rows else rows // plan.tp, columns // plan.tp if by_rows else columns
            name = p.name.removesuffix(".weight").replace(f"blocks.{p.block}.", "blocks.*.", 1)
            found[name, *cut] = None
    return list(found)

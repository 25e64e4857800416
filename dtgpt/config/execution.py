"""What a model is built and run with: the choices of a recipe for this machine, resolved once.

A recipe says `auto` for what depends on the device, the plan or what is installed. If each user of such a value decided
for itself, a plan on a laptop and the run on a GPU could decide differently. So `Recipe.settings` decides once, and
whatever is built takes `Settings`; few functions see a recipe. `dtgpt plan` gets the same `Settings`, for a machine
that need not exist.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from dtgpt.config.plan import Plan, ResolvedPlan
from dtgpt.config.sections import Added, DataConfig, OptimizerConfig, Section, precision_of, section_of
from dtgpt.models.config import ModelConfig
from dtgpt.ops.attention.core import Backend
from dtgpt.util import seams
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by a recipe's names
if TYPE_CHECKING:  # type checkers do not see what capabilities add
    Recompute = str
else:
    Recompute = Literal[("none", *seams.added("recomputes"))]
Switch = Literal["auto", "on", "off"]
MOST_SLOTS = 512  # sequences that are generated at the same time


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Model, plan and execution of a run; no field is left to be decided."""

    model: ModelConfig
    plan: ResolvedPlan
    device: torch.device
    dtype: torch.dtype  # of activations, and of the weights that matmuls read; masters are fp32
    seq_length: int  # tokens of a training sample; the model may have more positions
    micro_batch_size: int  # samples
    global_batch_size: int  # samples of a step, after a ramp-up
    attention: Backend = "auto"
    recompute: Recompute = "none"
    recompute_blocks: int | None = None  # blocks of each stage that are computed again, its first; None: all
    reduce: str = "fast"  # how gradients are summed, or by a capability's name
    compile: bool = False
    graphs: bool = False  # replay steps as CUDA graphs
    products: str | None = None  # the precision of a capability, by which it computes products of blocks
    data: DataConfig | None = None  # None: nothing is trained
    optimizer: OptimizerConfig | None = None  # None: nothing is trained
    sections: tuple[Section, ...] = ()  # of capabilities; one that is missing has its defaults

    def section(self, kind: type[Added]) -> Added:
        """Return the section of this class, with its defaults where there is none."""
        return section_of(self.sections, kind)

    @property
    def freezes_weights(self) -> bool:
        """Whether other modules than the model's own are trained."""
        return any(section.freezes_weights for section in self.sections)

    @property
    def local_length(self) -> int:
        """Tokens of a sample on each context parallel rank."""
        return self.seq_length // self.plan.cp

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of each replica per optimizer step (gradient accumulation)."""
        return self.global_batch_size // (self.micro_batch_size * self.plan.dp)

    @property
    def precision(self) -> str:
        """The precision by a recipe's name."""
        return self.products or next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    @property
    def low_precision(self) -> bool:
        """Whether modules hold 16-bit weights beside fp32 masters."""
        return self.dtype.itemsize < 4 and self.plan.narrows_weights


def choose_device(wanted: str, local_rank: int = 0) -> torch.device:
    """Return the device of this process of its node. `wanted`: auto, cpu or cuda; raises UserError where CUDA is asked
    for and missing, or has fewer devices than the node has processes."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError(
            "device=cuda, but PyTorch sees no CUDA device; use --device cpu or install a CUDA build of torch"
        )
    if not available or wanted == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"{local_rank + 1} or more processes were started on this node, but PyTorch sees "
            f"{counted(count, 'CUDA device')}; use --nproc-per-node {count} or --device cpu"
        )
    return torch.device("cuda", local_rank)


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of activations. `precision`: auto, one of DTYPES or of a capability."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    added = precision_of(precision)
    return DTYPES[precision] if added is None else added.dtype


def choose_graphs(wanted: Switch, device: torch.device, plan: Plan) -> bool:
    """Return whether steps are replayed as CUDA graphs; raises UserError where that is asked for without CUDA."""
    if wanted == "on" and device.type != "cuda":
        raise UserError("graph=on, but CUDA graphs need a CUDA device; use --graph auto, or --device cuda on a GPU")
    return device.type == "cuda" and wanted != "off" and not plan.asks_host

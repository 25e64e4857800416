"""A base in 4 bits (QLoRA; Dettmers et al. 2023): the matrices of blocks beside adapters are held as NF4.

Two ready libraries do this, bitsandbytes and torchao, and neither is used. A base must be the same under every plan: a
scale that is quantised, too, depends on its whole matrix, and what makes 4 bits of a rank's part alone makes other
ones. So each rank reads whole matrices, one at a time, makes 4 bits of them (`dtgpt.ops.nf4`), a function of their
values alone, and keeps its part. Codes, scales and the bytes of the numbers above them are parameters of 8-bit integers
in place of the weight: tensor parallelism and ZeRO cut them as they cut weights.

A checkpoint has none of them. It names its base, as with weights of 16 bits, and the same 4 bits are made again.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dtgpt.models.binding import bind
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import fill_weight
from dtgpt.models.inventory import Shape, inventory
from dtgpt.models.source import Ranges, Source
from dtgpt.ops.local_tensors import local, on_local_tensors
from dtgpt.ops.nf4.form import BLOCK, Nf4, Place, shapes, whole
from dtgpt.ops.nf4.linear import nf4_linear
from dtgpt.ops.nf4.quantise import dequantise, quantise
from dtgpt.parallel.layout import Region, slices
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.util.errors import UserError
from dtgpt.util.torch_private import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PARTS = ("weight", *Nf4._fields[1:])  # parameters of a module, in the order of an `Nf4`


class FourBits:
    """The product of a linear map whose weight, at this place of the whole, is in 4 bits."""

    def __init__(self, module: nn.Module, place: Place):
        self.others = partial(_others, module)  # asked in each pass: ZeRO puts what it has gathered into the module
        self.place = place

    def __call__(self, x: Tensor, codes: Tensor, bias: Tensor | None) -> Tensor:
        return nf4_linear(x, Nf4(codes, *self.others()), self.place, bias)


def _others(module: nn.Module) -> tuple[Tensor, Tensor]:
    scales, groups = (local(module.get_parameter(name)) for name in PARTS[1:])
    return scales, groups


def hold(module: nn.Module, region: Region, shape: Shape) -> FourBits:
    """Put parameters for 4 bits in the place of the weight of a linear map on the meta device, let it compute with
    these, and return the product. region: of the weight on this rank, in a whole of this shape."""
    weight = module.get_parameter("weight")
    codes, scales, groups = (torch.empty(each, dtype=torch.uint8, device="meta") for each in shapes(*weight.shape))
    if is_dtensor(weight):
        from torch.distributed.tensor import distribute_tensor

        own = cast("DTensor", weight)
        codes, scales = (distribute_tensor(each, own.device_mesh, own.placements) for each in (codes, scales))
    for name, tensor in zip(PARTS, (codes, scales, groups), strict=True):
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    rows, columns = region
    product = FourBits(module, Place(rows.start, columns.start // BLOCK, shape[1] // BLOCK))
    bind(module, product=partial(on_local_tensors, product))
    return product


def held_bytes(parameter: Any, lora: LoraConfig, elements: float, width: int) -> float:
    """Return the bytes in which so many elements of a frozen parameter are held. parameter: one of planning, or of an
    inventory. width: bytes of an element of the others."""
    if not lora.quantises(parameter):
        return width * elements
    beside = math.prod(shapes(*parameter.shape)[2]) if elements == math.prod(parameter.shape) else 0
    return elements / 2 + elements / BLOCK + beside


class _Changed(Source):
    """A model whose matrices of blocks are read in another form."""

    def __init__(self, base: Source, lora: LoraConfig):
        self.config, self.notes, self.base = base.config, base.notes, base
        self.iteration, self.consumed_samples = base.iteration, base.consumed_samples
        self.names = {p.name for p in inventory(self.config).parameters() if lora.quantises(p)}
        self.last: tuple[str, Any] = ("", None)  # name and form of the matrix that was read last: in parts, maybe

    def form(self, name: str) -> Any:
        """Return the form of a matrix."""
        if self.last[0] != name:
            self.last = ("", None)  # of two matrices one is there
            self.last = (name, self.make(name))
        return self.last[1]

    def make(self, name: str) -> Any:
        """Make the form of a matrix."""
        raise NotImplementedError

    def quantised(self, name: str, device: torch.device) -> Nf4:
        """Return a matrix in 4 bits. Raise UserError where it has a value that is not finite."""
        try:
            return quantise(self.base.read(name).to(device))
        except ValueError as problem:
            raise UserError(
                f"{name} of the base cannot be held in 4 bits: {problem}; give a model that is whole"
            ) from None


class InFourBits(_Changed):
    """The parameters of a run with a base in 4 bits: codes, scales and groups in place of weights, made on `device`."""

    def __init__(self, base: Source, lora: LoraConfig, device: torch.device):
        super().__init__(base, lora)
        self.device = device

    def make(self, name: str) -> Nf4:
        return self.quantised(name, self.device)

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        module, _, kind = name.rpartition(".")
        weight = f"{module}.weight"
        if weight not in self.names or kind not in PARTS:
            return self.base.read(name, part)
        found: Tensor = self.form(weight)[PARTS.index(kind)]
        return found if part is None else found[slices(tuple(part))]


class OfFourBits(_Changed):
    """A model with the values that its matrices have in 4 bits: what adapters were trained beside."""

    def make(self, name: str) -> Tensor:
        matrix = self.quantised(name, torch.device("cpu"))
        return dequantise(matrix, whole(matrix), torch.float32)

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        if name not in self.names:
            return self.base.read(name, part)
        found: Tensor = self.form(name)
        return found if part is None else found[slices(tuple(part))]


class Drawn(Source):
    """A model of random weights, on a device."""

    def __init__(self, config: ModelConfig, key: Tensor, device: torch.device):
        self.config, self.key, self.device = config, key, device
        self.shapes = {p.name: p.shape for p in inventory(config).parameters()}

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        region = [range(size) for size in self.shapes[name]] if part is None else list(part)
        made = torch.empty([len(each) for each in region], device=self.device)
        fill_weight(made, name, region, self.config, self.key)
        return made


def adapted_to(base: Source, lora: LoraConfig) -> Source:
    """Return the model beside which adapters of these options were trained."""
    return OfFourBits(base, lora) if lora.bits else base

"""The scales of a run in fp8: powers of two that follow from the largest values of earlier steps, equal on all ranks.

This is delayed scaling (Micikevicius et al. 2022, section 3), with the maximum over the whole batch and all ranks, and
with powers of two. A value is therefore quantised to the same 8 bits wherever a plan cuts its tensor, and whatever the
size of a micro-batch. The amax of a step is m 2^e, 0.5 <= m < 1. Of it e alone is kept, for the last HISTORY steps; the
largest e leads to a scale that leaves room for values up to 1.75 times that amax, and more if m is small.

All state is on the device and changes by tensor operations in place: nothing waits, and a CUDA graph may capture it.
"""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from dtgpt.config.execution import Settings
from dtgpt.models.binding import bind
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.inventory import inventory
from dtgpt.models.layers import Linear
from dtgpt.models.roles import MATRICES
from dtgpt.ops.fp8.products import Fp8Product
from dtgpt.ops.fp8.sites import FORMATS, Calibration, Site, Sites
from dtgpt.optim.step_state import StepState
from dtgpt.parallel.mesh import Mesh

HISTORY = 16  # steps
HEADROOM = 1  # exponents left free above the largest amax of the history
UNKNOWN = -(1 << 15)  # in place of the exponent of a step in which a site saw zeros only
EXPONENTS = range(-160, 129)  # of what bf16 holds, and more
LARGEST_POWER = 126  # of a scale that is a normal number, as is its inverse
STATE = "fp8_exponents"  # in a checkpoint
CELL = 16  # bytes from one scale to the next: cuBLASLt wants their addresses to be multiples of 16
BLANK = "-"  # UNKNOWN, in a checkpoint


class Fp8Scales(StepState):
    """The sites of all blocks, in the order of blocks, of the matrices in a block, and of FORMATS. Every rank holds
    those of the whole model."""

    name = STATE

    def __init__(self, config: ModelConfig, mesh: Mesh):
        self.mesh, self.matrices, count = mesh, matrices(config), num_sites(config)
        self.calibration = Calibration(keeps_weights=not mesh.plan.zero)
        powers = [math.frexp(torch.finfo(dtype).max)[1] - HEADROOM for dtype in FORMATS.values()]
        device = mesh.device
        self._powers = torch.tensor(powers, dtype=torch.int32, device=device).repeat(count // len(FORMATS))
        self.history = torch.full((HISTORY, count), UNKNOWN, dtype=torch.int32, device=device)  # newest first
        self.amax = torch.zeros(count, device=device)
        self.scale, self.inverse = (torch.ones(count, CELL // 4, device=device)[:, 0] for _ in range(2))

    def attach(self, stages: Iterable[Decoder]) -> None:
        """Give the matrices of these stages their sites."""
        cells = zip(self.scale.unbind(), self.inverse.unbind(), self.amax.unbind(), strict=True)
        all_sites = [Site(*cell) for cell in cells]
        modules = {name: module for stage in stages for name, module in stage.named_modules()}
        for number, name in enumerate(self.matrices):
            module = modules.get(name)  # None: of a block on another rank
            if module is None:
                continue
            if not isinstance(module, Linear):
                raise TypeError(f"{name} is a {type(module).__name__}, which does not compute in fp8")
            of_input, of_weight, of_gradient = all_sites[number * len(FORMATS) : (number + 1) * len(FORMATS)]
            sites = Sites(of_input, of_weight, of_gradient, self.calibration)
            bind(module, quantised=Fp8Product(sites))

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Compute in 16 bits, and record nothing, while the context lasts."""
        self.calibration.enabled = False
        try:
            yield
        finally:
            self.calibration.enabled = True

    @torch.no_grad()
    def update(self, loss: Tensor, norm: Tensor, empty: Tensor | None = None) -> None:
        """Take the amaxes of a training step into the history, and set the scales of the next one."""
        self.mesh.all_reduce(self.amax, ReduceOp.MAX)
        seen = (self.amax > 0) & self.amax.isfinite()
        newest = torch.where(seen, torch.frexp(self.amax).exponent, UNKNOWN)
        self.history.copy_(torch.cat([newest[None], self.history[:-1]]))
        self.amax.zero_()
        self._set_scales()

    def _set_scales(self) -> None:
        largest = self.history.amax(0)
        powers = (self._powers - largest).clamp(-LARGEST_POWER, LARGEST_POWER)
        powers = torch.where(largest == UNKNOWN, 0, powers)
        self.scale.copy_(_power_of_two(powers))
        self.inverse.copy_(_power_of_two(-powers))
        self.calibration.known = True

    def state(self) -> list[str]:
        """Return the history for a checkpoint: a line of exponents for each step, the newest first; waits for the
        device."""
        steps = [row for row in self.history.tolist() if any(e != UNKNOWN for e in row)]
        return [" ".join(BLANK if e == UNKNOWN else str(e) for e in row) for row in steps]

    @torch.no_grad()
    def restore(self, lines: list[str] | None) -> None:
        """None: of a run in another precision. The next step observes the values."""
        self.history.fill_(UNKNOWN)
        if lines:
            self.history[: len(lines)] = torch.tensor(list(map(_exponents, lines)), dtype=torch.int32)
        self._set_scales()
        self.calibration.known = bool(lines)


def matrices(config: ModelConfig) -> list[str]:
    """Return the modules of all blocks whose products are of 8 bits, by name in the whole model."""
    parts = inventory(config)
    held = (p for index in range(config.num_layers) for p in parts.of_block(index) if p.role in MATRICES)
    return [p.name.removesuffix(".weight") for p in held if p.name.endswith(".weight")]


def num_sites(config: ModelConfig) -> int:
    """Return the number of sites of the whole model."""
    return len(matrices(config)) * len(FORMATS)


def check_state(lines: Any, config: ModelConfig) -> None:
    """Raise ValueError where `lines` is neither None nor the `state` of the scales of a model."""
    if lines is None:
        return
    if type(lines) is not list or len(lines) > HISTORY or not all(type(line) is str for line in lines):
        raise ValueError(f"{STATE} must be a list of at most {HISTORY} strings")
    count = num_sites(config)
    for line in lines:
        words = line.split()
        if len(words) != count or not all(word == BLANK or _is_exponent(word) for word in words):
            raise ValueError(f"each line of {STATE} must have {count} exponents, or {BLANK!r} in place of one")


def _is_exponent(word: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,3}", word) is not None and int(word) in EXPONENTS


def _exponents(line: str) -> list[int]:
    return [UNKNOWN if word == BLANK else int(word) for word in line.split()]


def _power_of_two(powers: Tensor) -> Tensor:
    """Return 2^powers, exactly, for int32 powers that a normal fp32 number has."""
    return ((powers + 127) << 23).view(torch.float32)


def make_scales(recipe: Any, settings: Settings, mesh: Mesh) -> Fp8Scales:
    """Return the scales of a run in fp8."""
    return Fp8Scales(settings.model, mesh)

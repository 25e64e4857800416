"""What the modules of every rank compute in one step: activations and their gradients.

Each rank writes a file. A tensor has the name of the module that returns it, as in `blocks.0 output 0`, or of the first
module that reads it, where it is made between modules. `dtgpt.compare.gate` compares the files of two runs.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtgpt.compare.torch_private import is_in_backward
from dtgpt.models.binding import BoundModule, bind
from dtgpt.models.decoder import Decoder
from dtgpt.models.moe.mixture import Experts, Router, routers
from dtgpt.models.roles import STACKS, Role, role_of
from dtgpt.optim.fp8.precision import FP8
from dtgpt.parallel.build import Building, build
from dtgpt.parallel.context_parallel.slices import mean_over_slices
from dtgpt.train.trainer import Trainer

ELEMENTS = 1 << 20  # of a tensor that are kept at most: those of the first samples of a micro-batch
FP8_EPS = 2.0**-3  # of the narrower products of a run in fp8
PARTS = (  # what tensor parallelism cuts within a branch, and what is behind it
    *((role, "output") for role in (Role.INNER_COLUMN, Role.COLUMN_STACK, Role.EXIT)),
    *((role, "input") for role in (Role.INNER_ROW, Role.ROW_STACK)),
)
LOGITS = "logits"  # of a router, in place of "input" or "output"
Seen = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of a `Router`


class Key(NamedTuple):
    """Which tensor of a step."""

    micro_batch: int  # in the global batch
    kind: str  # "activation" or "gradient"
    name: str


class Cut(NamedTuple):
    """Which part of activations a rank has."""

    tp: int = 0  # its tensor parallel coordinate
    cp: int = 0  # which slice of the tokens
    slices: int = 1  # of a sample


def spread_out(stage: nn.Module) -> tuple[str, ...]:
    """Return what the names of modules begin with that compute rows of other ranks."""
    named = stage.named_modules()
    return tuple(f"{name}." for name, module in named if isinstance(module, Experts) and module.bound.run is not None)


class Recorder:
    """Copies of what modules return and read, and of the gradients of both, in the order of the computation.

    `names` maps each tensor's name to all others that modules have for it. `first`: the global index of this rank's
    first micro-batch.
    """

    def __init__(self, first: int = 0):
        self.first = first
        self.tensors: dict[Key, Tensor] = {}
        self.names: dict[str, list[str]] = {}
        # Outputs of a fused operation that has more: autograd does not show what those add to the gradient of this one.
        self.fused: list[str] = []
        self.samples = 1  # of a micro-batch
        self.rows: dict[str, int] = {}  # sizes of first dimensions that are not samples
        self._passes: dict[str, int] = {}
        self._micro_batch = first
        self._present: dict[int, tuple[ref[Tensor], str]] = {}  # by identity; recomputation frees tensors of this pass

    @contextmanager
    def attached(self, stages: list[Decoder]) -> Iterator[None]:
        """Record passes through `stages` while the context lasts."""
        handles = []
        watched = [(module, module.seen) for stage in stages for module in routers(stage)]
        for index, stage in enumerate(stages):
            handles.append(stage.register_forward_pre_hook(partial(self._begin, str(index))))
            handles.append(stage.register_forward_hook(lambda *_: self._present.clear()))
            unseen = spread_out(stage)
            for name, module in stage.named_modules():
                if name and not name.startswith(unseen):
                    handles.append(module.register_forward_pre_hook(partial(self._before, name), prepend=True))
                    handles.append(module.register_forward_hook(partial(self._after, name)))
                if isinstance(module, Router):
                    module.seen = partial(self._choose, name, module.seen)
        try:
            yield
        finally:
            for router, seen in watched:
                router.seen = seen
            for handle in handles:
                handle.remove()

    def keep(self, kind: str, name: str, value: Tensor, micro_batch: int) -> None:
        """Keep a copy of a tensor, or of the part of its first samples, the first time that it is given."""
        key = Key(micro_batch, kind, name)
        if key not in self.tensors:
            some = value.detach()
            if some.dim() > 0 and len(some) != self.samples:
                self.rows[name] = len(some)
            if some.dim() > 1:
                some = some[: max(1, ELEMENTS * len(some) // max(1, some.numel()))]
            self.tensors[key] = some.to("cpu", copy=True).contiguous()

    def drop_scalars(self, *kinds: str) -> None:
        """Forget the tensors of these kinds that have no dimension, such as losses."""
        self.tensors = {key: value for key, value in self.tensors.items() if value.dim() or key.kind not in kinds}

    def _begin(self, stage: str, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():  # a pass before those of the step
            return
        done = self._passes.get(stage, 0)
        self._passes[stage] = done + 1
        self._micro_batch = self.first + done
        self.samples = len(inputs[0])

    def _choose(self, name: str, then: Seen | None, logits: Tensor, experts: Tensor, more: Tensor | None) -> Tensor:
        """Record the logits of a router. then: what else sees them."""
        self._see(f"{name} {LOGITS}", (logits,))
        return experts if then is None else then(logits, experts, more)

    def _before(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._see(f"{name} input", inputs)

    def _after(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._see(f"{name} output", output)

    def _see(self, label: str, values: Any) -> None:
        if is_in_backward() or not torch.is_grad_enabled():  # backward computes the pass again
            return
        last = {getattr(value, "grad_fn", None): index for index, value in enumerate(leaves(values))}
        for index, value in enumerate(leaves(values)):
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter | DTensor):
                continue
            name = f"{label} {index}"
            present, known = self._present.get(id(value), (None, ""))
            if present is not None and present() is value:
                names = self.names[known]
                if name not in names:
                    names.append(name)
                continue
            self._present[id(value)] = ref(value), name
            if name not in self.names and value.grad_fn is not None and last[value.grad_fn] > index:
                self.fused.append(name)
            self.names.setdefault(name, [])
            self.keep("activation", name, value, self._micro_batch)
            if value.requires_grad:
                value.register_hook(partial(self._gradient, name, self._micro_batch))

    def _gradient(self, name: str, micro_batch: int, gradient: Tensor) -> None:
        self.keep("gradient", name, gradient, micro_batch)


def leaves(values: Any) -> Iterator[Any]:
    """Yield what nested tuples hold, in order."""
    if isinstance(values, tuple | list):
        for value in values:
            yield from leaves(value)
    else:
        yield values


@contextmanager
def uncompiled(trainer: Trainer) -> Iterator[None]:
    """Run parts of the model without `torch.compile` while the context lasts, so that a recorder sees their modules."""
    stages, compiled = trainer.stages, trainer.settings.compile
    parts = [m for stage in stages for m in stage.modules() if isinstance(m, BoundModule)] if compiled else []
    bound = [(part, part.bound.run) for part in parts]
    for part in parts:
        bind(part, run=None)
    for stage in stages if parts else ():
        build(stage, Building(trainer.settings, trainer.mesh), again=True)
    try:
        yield
    finally:
        for part, run in bound:
            bind(part, run=run)


@contextmanager
def traced(trainer: Trainer, file: Path) -> Iterator[None]:
    """Write what this rank's modules compute while the context lasts, one step, to `file` and the rank's number."""
    mesh, settings = trainer.mesh, trainer.settings
    trainer.expect_batch()
    recorder = Recorder(mesh.place.dp * trainer.micro_batches)
    with uncompiled(trainer), recorder.attached(trainer.stages):
        yield
    for key in [key for key, value in recorder.tensors.items() if value.dim() == 0]:  # losses
        value = recorder.tensors[key].to(mesh.device, copy=True)
        recorder.tensors[key] = mean_over_slices(mesh, value).cpu()
    settle_branches(recorder, trainer)
    eps = FP8_EPS if settings.products == FP8 else torch.finfo(settings.dtype).eps
    save(
        recorder,
        file_of(file, str(mesh.rank)),
        rank=mesh.rank,
        tp=mesh.place.tp,
        cp=mesh.place.cp,
        slices=mesh.plan.cp,
        eps=eps,
    )


def settle_branches(recorder: Recorder, trainer: Trainer) -> None:
    """Make what lies within branches that a plan cuts comparable with one process: add up what ranks have addends of,
    and leave rows of experts out where ranks have slices of the tokens, since their order is another one. Ranks of
    tensor parallelism have tensors of the same names."""
    mesh, roles = trainer.mesh, trainer.settings.model.roles
    has_addends = mesh.tp_group is not None and not trainer.shards.sums.spans_tp  # which leave none in a branch
    names = [
        name for stage in trainer.stages for name, _ in stage.named_modules() if role_of(name, roles) is Role.ENTRY
    ]
    branches = tuple(name.removesuffix(name.rpartition(".")[2]) for name in names)
    for key in [key for key in recorder.tensors if key.name.startswith(branches)]:
        module, way, _ = key.name.rsplit(" ", 2)
        role, value = role_of(module, roles), recorder.tensors[key]
        if role in STACKS and mesh.plan.cp > 1:
            del recorder.tensors[key]
        elif has_addends and key.kind == kind_of_addends(role, way):
            whole = value.to(mesh.device, torch.float64)
            dist.all_reduce(whole, group=mesh.tp_group)
            recorder.tensors[key] = whole.to("cpu", value.dtype)


def kind_of_addends(role: Role | None, way: str) -> str | None:
    """Return what each tensor parallel rank has an addend of, of a tensor within a branch: of the "activation", or of
    the "gradient" where the activation is whole; None where ranks have parts. role: of the module whose input or output
    it is."""
    if (role, way) in PARTS:
        return None
    is_whole = role in (Role.ENTRY, Role.ROUTER) or (way == "input" and role is not Role.EXIT)
    return "gradient" if is_whole else "activation"


def file_of(file: Path, part: str) -> Path:
    """Return the file of a rank, or of float64."""
    return file.with_name(f"{file.name}.{part}")


def save(recorder: Recorder, file: Path, **facts: float) -> None:
    keys = list(recorder.tensors)
    tensors = {str(index): recorder.tensors[key] for index, key in enumerate(keys)}
    values = {"keys": keys, "names": recorder.names, "fused": recorder.fused, "rows": recorder.rows, **facts}
    values["samples"] = recorder.samples
    save_file(tensors, file, metadata={"trace": json.dumps(values)})


class Trace:
    """What one rank has recorded; a tensor is read when it is asked for."""

    def __init__(self, file: Path):
        self._file = safe_open(file, "pt")
        values = json.loads(self._file.metadata()["trace"])
        self.names: dict[str, list[str]] = values["names"]
        self.fused: list[str] = values.get("fused", [])  # older code has none
        self.rank, self.eps = values["rank"], values["eps"]
        self.cut = Cut(values["tp"], values.get("cp", 0), values.get("slices", 1))  # older code has no slices
        self.keys = {Key(*key): str(index) for index, key in enumerate(values["keys"])}
        self._rows: dict[str, int] | None = values.get("rows")
        first = next((shape for key in self.keys if len(shape := self.shape(key)) > 1), (1,))
        self.samples: int = values.get("samples", first[0])  # of a micro-batch; older code has none

    def __getitem__(self, key: Key) -> Tensor:
        return self._file.get_tensor(self.keys[key])

    def shape(self, key: Key) -> tuple[int, ...]:
        """Return the shape of what is kept."""
        return tuple(self._file.get_slice(self.keys[key]).get_shape())

    def part(self, key: Key, start: int, stop: int) -> Tensor:
        """Return these rows of a tensor."""
        return self._file.get_slice(self.keys[key])[start:stop]

    def rows_of_a_sample(self, key: Key) -> int | None:
        """Return how many rows of the first dimension each sample has; None: it does not count samples."""
        shape = self.shape(key)
        if not shape:
            return None
        rows = shape[0]
        if self._rows is not None:
            rows = self._rows.get(key.name, self.samples)
        elif len(shape) > 1 and rows == max(1, ELEMENTS // max(1, math.prod(shape[1:]))):
            rows = self.samples  # older code: of these the first were kept
        return None if rows % self.samples else rows // self.samples

"""Adapters in the folders of Hugging Face's peft: `adapter_config.json` and `adapter_model.safetensors`.

A fused weight of dtgpt that transformers has as several matrices is an adapter for each of these there. One that
transformers has fused, too (GPT-2's c_attn), is there one adapter whose rank is the sum.

Experts are stacks in transformers from 5 on, whose adapters peft has from 0.17 on (`target_parameters`): A `[E r, in]`
with the rows of expert 0 first, and B `[out, r E]` with a column of each expert, then the next ones. These are written.
Of older versions, in which each expert has modules of its own, plain adapters are read. peft takes the names of the
MLP's modules for experts' wherever a model has experts, so that other MLPs are written as parameters, too.
"""

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtgpt.interop.foreign import check_architecture
from dtgpt.interop.hf.architecture import Architecture
from dtgpt.interop.hf.experts import alternating, gates_first
from dtgpt.interop.hf.model import ARCHITECTURES, REMEDY, read_object, save_tensors, with_file
from dtgpt.interop.hf.peft_rows import INDICES, OUTER, Rows, are_indices, rows_for_peft, rows_of_peft
from dtgpt.interop.keys import Key, Keys, among, check_keys, just
from dtgpt.interop.marks import ADAPTER_CONFIG
from dtgpt.interop.new_folder import new_folder
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Parameter, inventory
from dtgpt.models.source import Ranges
from dtgpt.parallel.layout import slices
from dtgpt.posttrain.lora.adapters import matrix_of_rows, spread
from dtgpt.posttrain.lora.checkpoint import Addend, SavedAdapter
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.field_types import is_finite
from dtgpt.util.storage import write_json

WEIGHTS = "adapter_model.safetensors"
LARGEST_ALPHA = 1e15  # its products with weights have room in fp32
NAME = re.compile(r"[\w.]+")
ANY = ".*\\."  # before names of stacks, where peft made a pattern itself
GATES = "gate_up_proj"
STACKS = {".experts.gate_up.weight": GATES, ".experts.down.weight": "down_proj"}  # dtgpt's -> transformers'
INNER = ".base_layer"  # of the module whose other stack is adapted, too: down_proj's adapter is around gate_up_proj's
ABSENT: tuple[Any, ...] = (None, False, [], {}, "none")
KEEPS_BASE: tuple[Any, ...] = (None, True, False, "gaussian", "eva", "orthogonal")  # ways to begin an adapter
REFUSED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)


def _is_alpha(value: Any) -> bool:
    return is_finite(value) and abs(value) <= LARGEST_ALPHA


def _are_alphas(value: Any) -> bool:
    return not value or (isinstance(value, dict) and all(map(_is_alpha, value.values())))


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


KEYS: Keys = {
    "peft_type": Key(just("LORA"), "; dtgpt reads adapters of LORA"),
    **dict.fromkeys(REFUSED, Key(among(ABSENT), "; dtgpt reads adapters of LORA without it")),
    INDICES: Key(are_indices, f", which is no list of tokens, for all or by module; {REMEDY}"),
    "bias": Key(just("none"), "; dtgpt reads adapters of LORA without biases", "none"),
    "init_lora_weights": Key(
        among(KEEPS_BASE),
        ", by which peft changes the base; convert the adapter to plain LoRA: save_pretrained(..., "
        "path_initial_model_for_weight_conversion=...)",
    ),
    "lora_alpha": Key(_is_alpha, f", which is no number of at most {LARGEST_ALPHA:g}; {REMEDY}"),
    "target_parameters": Key(_are_names, f", which is no list of names of parameters; {REMEDY}"),
    "alpha_pattern": Key(_are_alphas, f", which is no number of at most {LARGEST_ALPHA:g}; {REMEDY}"),
}


class Peft(Addend):
    """A folder of peft: an `Addend` of a model of this shape. Raises UserError where it is none, is for another model,
    or has more than plain LoRA and rows of tokens."""

    def __init__(self, folder: Path, config: ModelConfig, kind: str | None = None):
        """kind: the model_type of the base, whose names count; None: that by which dtgpt writes such a model."""
        check_architecture(config, ARCHITECTURES, "adapter of peft")
        self._architecture = ARCHITECTURES[kind or config.architecture]
        self.config, self.folder, self.path = config, folder, folder / WEIGHTS
        self.settings = read_object(folder / ADAPTER_CONFIG)
        self._check_settings()
        self._tensors: dict[str, Tensor] = with_file(
            self.path,
            lambda file: {name: file.get_tensor(name) for name in file.keys()},  # noqa: SIM118
        )
        self._unknown = set(self._tensors)
        self._addends: dict[str, Callable[[Ranges | None], Tensor]] = {}
        for parameter in inventory(config).parameters():
            if parameter.block is not None and len(parameter.shape) > 1:
                self._find_stack(parameter)
                self._find_matrices(parameter)
        self._rows: dict[str, Rows] = {}
        for key, name, rows in rows_of_peft(self._tensors, self.settings, config, self._architecture, self.path):
            self._rows[name] = rows
            self._unknown.remove(key)
        if self._unknown or not (self._addends or self._rows):
            named = shown_name(min(self._unknown)) if self._unknown else "no adapter"
            raise self._for_another(f"it has {named}, which the model has not")

    def read(self, name: str, part: Ranges | None = None) -> Tensor | None:
        return self._addends[name](part) if name in self._addends else None

    def replaced(self, name: str, values: Tensor, part: Ranges | None = None) -> Tensor:
        return self._rows[name].put_into(values, part) if name in self._rows else values

    def _find_matrices(self, parameter: Parameter) -> None:
        """Take the adapters of the matrices that a parameter is in transformers' files, if there are some."""
        architecture, config = self._architecture, self.config
        stored = architecture.to_stored(torch.empty(parameter.shape, device="meta"), parameter.name, config)
        if any(t.dim() != 2 for t in stored):  # of experts, whose adapters have another form
            return
        plain = architecture.stored_names(parameter.name, config)
        found = [
            (f"{OUTER}{architecture.prefix}{name}".removesuffix(".weight"), tuple(t.shape))
            for name, t in zip(plain, stored, strict=True)
        ]
        if self._take(name for module, _ in found for name in _pair(module)):
            self._addends[parameter.name] = partial(self._of_matrices, parameter.name, found)
            for module, shape in found:
                self._check_shapes(module, shape)

    def _of_matrices(self, name: str, found: list[tuple[str, tuple[int, ...]]], part: Ranges | None) -> Tensor:
        addends = []
        for module, shape in found:
            a, b = (self._tensors.get(each) for each in _pair(module))
            if a is None or b is None:
                addends.append(torch.zeros(shape))
                continue
            addend = self._scale(module, len(a)) * b.float() @ a.float()
            addends.append(addend.T if self._architecture.transposed else addend)
        return self._architecture.from_stored(addends, name, self.config, part)

    def _find_stack(self, parameter: Parameter) -> None:
        """Take the adapter of a stack of experts, if there is one."""
        own, architecture = _stack(parameter.name), self._architecture
        if own is None or architecture.experts is None:
            return
        experts = f"{OUTER}{architecture.prefix}layers.{parameter.block}.{architecture.experts}"
        name, targets = f"{experts}.{own}", self.settings.get("target_parameters") or []
        adapted = {each for each in STACKS.values() if any(_ends(f"{experts}.{each}", end) for end in targets)}
        module = experts + INNER * (own == GATES and len(adapted) > 1)
        if own not in adapted or not self._take(_pair(module)):
            return
        count, rows, columns = parameter.shape
        a, b = (self._tensors.get(each, torch.empty(0)) for each in _pair(module))
        rank = len(a) // count
        if not rank or a.shape != (count * rank, columns) or b.shape != (rows, rank * count):
            raise self._for_another(
                f"the adapter of {shown_name(name)} is not for {count} matrices {shown((rows, columns))}"
            )
        a = self._scale(name, rank) * a.float().unflatten(0, (count, rank))
        b = b.float().unflatten(1, (rank, count)).permute(2, 0, 1)
        is_turned = own == GATES and not architecture.interleaved
        self._addends[parameter.name] = partial(_of_stack, a, alternating(b) if is_turned else b)

    def _take(self, names: Iterable[str]) -> bool:
        """Take the tensors of these names that are there, and return whether some are."""
        taken = self._unknown.intersection(names)
        self._unknown -= taken
        return bool(taken)

    def _check_settings(self) -> None:
        path, alphas = self.folder / ADAPTER_CONFIG, self.settings.get("alpha_pattern") or {}
        check_keys(self.settings, KEYS, path)
        if rule := next((name for name in alphas if not NAME.fullmatch(name.removeprefix(ANY))), None):
            raise UserError(
                f"{path} has alpha_pattern for {shown(rule)}; dtgpt reads names of modules there, and no expressions"
            )

    def _check_shapes(self, module: str, shape: tuple[int, ...]) -> None:
        a, b = (self._tensors.get(name) for name in _pair(module))
        if a is None and b is None:
            return
        rows, columns = shape[::-1] if self._architecture.transposed else shape
        if a is not None and not len(a):
            raise UserError(f"{self.path} has an adapter of rank 0 for {shown_name(module)}; {REMEDY}")
        if a is None or b is None or a.dim() != 2 or (len(b), a.shape[1], b.shape[1:]) != (rows, columns, a.shape[:1]):
            raise self._for_another(f"the adapter of {shown_name(module)} is not for a matrix {shown((rows, columns))}")

    def _for_another(self, reason: str) -> UserError:
        return UserError(
            f"{self.path} is an adapter for another model ({reason}); give the model for which it was trained"
        )

    def _scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's adapter, by the first pattern that is its name, or its end, as in peft."""
        alpha = float(self.settings["lora_alpha"])
        for pattern, value in (self.settings.get("alpha_pattern") or {}).items():
            if _ends(module, pattern.removeprefix(ANY)):
                alpha = float(value)
                break
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)


def _of_stack(a: Tensor, b: Tensor, part: Ranges | None) -> Tensor:
    """Return the elements `part` of B A, of each expert's."""
    experts, rows, columns = (slice(None),) * 3 if part is None else slices(tuple(part))
    return b[experts, rows] @ a[experts, :, columns]


def _stack(name: str) -> str | None:
    """Return what a stack of dtgpt's is called in transformers; None for another parameter."""
    return next((theirs for ours, theirs in STACKS.items() if name.endswith(ours)), None)


def _ends(name: str, end: str) -> bool:
    """Return whether a dotted name is, or ends with, another one."""
    return name == end or name.endswith(f".{end}")


def _pair(module: str) -> tuple[str, str]:
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _architecture_of(adapter: SavedAdapter) -> Architecture:
    """Return what names the modules of an adapter's base: a folder of transformers, if it is still there; else as dtgpt
    would write it."""
    path = Path(adapter.facts["base"]) / "config.json"
    own = ARCHITECTURES[adapter.config.architecture]
    found = ARCHITECTURES.get(str(read_object(path).get("model_type"))) if path.is_file() else None
    if found is None or type(found).write_config is not type(own).write_config:  # another model is there by now
        return own
    return found


class _Written:
    """What a folder of peft gets."""

    def __init__(self, architecture: Architecture, rank: int):
        self.architecture, self.rank = architecture, rank
        self.tensors: dict[str, Tensor] = {}
        self.targets: set[str] = set()
        self.parameters: set[str] = set()
        self.patterns: dict[str, int] = {}  # rank by the last part of a module's name

    def add_matrix(self, module: str, a: Tensor, b: Tensor) -> None:
        """Add the adapter of a matrix, whose B lies as the matrix does."""
        last = ".".join(module.split(".")[-2:])
        if self.architecture.experts is not None and ".mlp." in module:
            self.parameters.add(f"{last}.weight")
        else:
            self.targets.add(last)
        if len(a) != self.rank:
            self.patterns[last] = len(a)
        self._add(module, a, b.T if self.architecture.transposed else b)

    def add_stack(self, experts: str, name: str, a: Tensor, b: Tensor, inside: bool) -> None:
        """Add the adapters of a stack, A `[E, r, in]` and B `[E, out, r]`. inside: within that of another stack."""
        self.parameters.add(f"{self.architecture.experts}.{name}")
        self._add(experts + INNER * inside, a.flatten(0, 1), b.permute(1, 2, 0).flatten(1))

    def _add(self, module: str, *pair: Tensor) -> None:
        for key, tensor in zip(_pair(f"{OUTER}{self.architecture.prefix}{module}"), pair, strict=True):
            self.tensors[key] = tensor.contiguous().clone()


def save_peft(adapter: SavedAdapter, folder: Path) -> None:
    """Write adapters as a new folder that peft's `PeftModel.from_pretrained` takes. Raise UserError where the folder
    exists, or transformers does not have the architecture."""
    config, rank = adapter.config, adapter.lora.rank
    check_architecture(config, ARCHITECTURES, "adapter of peft")
    architecture = _architecture_of(adapter)
    written = _Written(architecture, rank)
    stacks = {_stack(name) for name in adapter.weights} - {None}
    for name, parameter in adapter.weights.items():
        a, b = adapter.factors(name)
        if (own := _stack(name)) is not None:
            is_first = own == GATES
            b = gates_first(b) if is_first and not architecture.interleaved else b
            experts = f"layers.{parameter.block}.{architecture.experts}"
            written.add_stack(experts, own, a, b, is_first and len(stacks) > 1)
            continue
        count, plain = len(a) // rank, architecture.stored_names(name, config)
        if len(plain) == 1:  # one matrix there, whose rank is the sum
            b = spread(b, matrix_of_rows(parameter, config), count)
        stored = architecture.to_stored(b, name, config)
        if any(t.dim() != 2 for t in stored):
            raise UserError(
                f"{adapter.checkpoint.folder} has an adapter of {name}, which transformers keeps in a stack of one "
                "expert, whose adapter dtgpt does not write for peft; write the merged model with --to hf"
            )
        for index, (module, part) in enumerate(zip(plain, stored, strict=True)):
            factor = a if len(plain) == 1 else a[index * rank : (index + 1) * rank]
            written.add_matrix(module.removesuffix(".weight"), factor, part)
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.facts["base"],
        "inference_mode": True,
        "r": rank,
        "lora_alpha": adapter.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(written.targets),
        "fan_in_fan_out": architecture.transposed,
        "rank_pattern": written.patterns,
        "alpha_pattern": {last: adapter.lora.scale * own for last, own in written.patterns.items()},
    }
    if written.parameters:  # a key that old versions of peft do not know
        settings["target_parameters"] = sorted(written.parameters)
    rows, of_rows = rows_for_peft(adapter, architecture)
    settings |= of_rows
    with new_folder(folder) as made:
        save_tensors(written.tensors | rows, made / WEIGHTS)
        write_json(made / ADAPTER_CONFIG, settings)

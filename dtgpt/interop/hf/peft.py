"""Adapters in the folders of Hugging Face's peft: `adapter_config.json` and `adapter_model.safetensors`.

A fused weight of dtgpt that transformers has as several matrices is an adapter for each of these there. One that
transformers has fused, too (GPT-2's c_attn), is there one adapter whose rank is the sum.
"""

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtgpt.interop.foreign import check_architecture
from dtgpt.interop.hf.architecture import Architecture
from dtgpt.interop.hf.model import ARCHITECTURES, REMEDY, read_object, save_tensors, with_file
from dtgpt.interop.keys import Key, Keys, among, check_keys, just
from dtgpt.interop.marks import ADAPTER_CONFIG
from dtgpt.interop.new_folder import new_folder
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import inventory
from dtgpt.models.source import Part
from dtgpt.posttrain.lora.adapters import matrix_of_rows, spread
from dtgpt.posttrain.lora.checkpoint import SavedAdapter
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.field_types import is_finite
from dtgpt.util.storage import write_json

WEIGHTS = "adapter_model.safetensors"
LARGEST_ALPHA = 1e15  # its products with weights have room in fp32
OUTER = "base_model.model."  # of all names in the file
NAME = re.compile(r"[\w.]+")
ABSENT: tuple[Any, ...] = (None, False, [], {}, "none")
KEEPS_BASE: tuple[Any, ...] = (None, True, False, "gaussian", "eva", "orthogonal")  # ways to begin an adapter
REFUSED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "trainable_token_indices",
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


KEYS: Keys = {
    "peft_type": Key(just("LORA"), "; dtgpt reads adapters of LORA"),
    **dict.fromkeys(REFUSED, Key(among(ABSENT), "; dtgpt reads adapters of LORA without it")),
    "bias": Key(just("none"), "; dtgpt reads adapters of LORA without biases", "none"),
    "init_lora_weights": Key(
        among(KEEPS_BASE),
        ", by which peft changes the base; convert the adapter to plain LoRA: save_pretrained(..., "
        "path_initial_model_for_weight_conversion=...)",
    ),
    "lora_alpha": Key(_is_alpha, f", which is no number of at most {LARGEST_ALPHA:g}; {REMEDY}"),
    "alpha_pattern": Key(_are_alphas, f", which is no number of at most {LARGEST_ALPHA:g}; {REMEDY}"),
}


class Peft:
    """A folder of peft: an `Addend` of a model of this shape. Raises UserError where it is none, is for another model,
    or has more than plain LoRA."""

    def __init__(self, folder: Path, config: ModelConfig, kind: str | None = None):
        """kind: the model_type of the base, whose names count; None: that by which dtgpt writes such a model."""
        check_architecture(config, ARCHITECTURES, "adapter of peft")
        self._architecture = architecture = ARCHITECTURES[kind or config.architecture]
        self.config, self.folder, self.path = config, folder, folder / WEIGHTS
        self.settings = read_object(folder / ADAPTER_CONFIG)
        self._check_settings()
        self._tensors: dict[str, Tensor] = with_file(
            self.path,
            lambda file: {name: file.get_tensor(name) for name in file.keys()},  # noqa: SIM118
        )
        self._used: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        unknown = set(self._tensors)
        for parameter in inventory(config).parameters():
            if parameter.block is None or len(parameter.shape) != 2:
                continue
            stored = architecture.to_stored(torch.empty(parameter.shape, device="meta"), parameter.name, config)
            if any(t.dim() != 2 for t in stored):  # of experts, whose adapters have another form
                continue
            plain = architecture.stored_names(parameter.name, config)
            found = [
                (f"{OUTER}{architecture.prefix}{name}".removesuffix(".weight"), tuple(t.shape))
                for name, t in zip(plain, stored, strict=True)
            ]
            pairs = {name for module, _ in found for name in _pair(module)} & unknown
            if pairs:
                self._used[parameter.name] = found
                unknown -= pairs
                for module, shape in found:
                    self._check_shapes(module, shape)
        if unknown or not self._used:
            named = shown_name(min(unknown)) if unknown else "no adapter"
            raise self._for_another(f"it has {named}, which the model has not")

    def read(self, name: str, part: Part | None = None) -> Tensor | None:
        if name not in self._used:
            return None
        addends = []
        for module, shape in self._used[name]:
            a, b = (self._tensors.get(each) for each in _pair(module))
            if a is None or b is None:
                addends.append(torch.zeros(shape))
                continue
            addend = self._scale(module, len(a)) * b.float() @ a.float()
            addends.append(addend.T if self._architecture.transposed else addend)
        return self._architecture.from_stored(addends, name, self.config, part)

    def _check_settings(self) -> None:
        path, alphas = self.folder / ADAPTER_CONFIG, self.settings.get("alpha_pattern") or {}
        check_keys(self.settings, KEYS, path)
        if rule := next((name for name in alphas if not NAME.fullmatch(name)), None):
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
            if re.fullmatch(rf"(.*\.)?({re.escape(pattern)})", module):
                alpha = float(value)
                break
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)


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


def save_peft(adapter: SavedAdapter, folder: Path) -> None:
    """Write adapters as a new folder that peft's `PeftModel.from_pretrained` takes. Raise UserError where the folder
    exists, or transformers does not have the architecture."""
    config, rank = adapter.config, adapter.lora.rank
    check_architecture(config, ARCHITECTURES, "adapter of peft")
    architecture = _architecture_of(adapter)
    tensors: dict[str, Tensor] = {}
    targets: set[str] = set()
    patterns: dict[str, int] = {}  # rank by the last part of a module's name
    for name, parameter in adapter.weights.items():
        a, b = adapter.factors(name)
        count, plain = len(a) // rank, architecture.stored_names(name, config)
        if len(plain) == 1:  # one matrix there, whose rank is the sum
            b = spread(b, matrix_of_rows(parameter, config), count)
        stored = architecture.to_stored(b, name, config)
        if any(t.dim() != 2 for t in stored):
            raise UserError(
                f"{adapter.checkpoint.folder} has an adapter of {name}, which transformers keeps in a stack of "
                "experts, whose adapters dtgpt does not write for peft; write the merged model with --to hf"
            )
        for index, (module, part) in enumerate(zip(plain, stored, strict=True)):
            module = module.removesuffix(".weight")
            own = a if len(plain) == 1 else a[index * rank : (index + 1) * rank]
            last = ".".join(module.split(".")[-2:])
            targets.add(last)
            if len(own) != rank:
                patterns[last] = len(own)
            pair = own, part.T if architecture.transposed else part
            for key, tensor in zip(_pair(f"{OUTER}{architecture.prefix}{module}"), pair, strict=True):
                tensors[key] = tensor.contiguous().clone()
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.facts["base"],
        "inference_mode": True,
        "r": rank,
        "lora_alpha": adapter.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(targets),
        "fan_in_fan_out": architecture.transposed,
        "rank_pattern": patterns,
        "alpha_pattern": {last: adapter.lora.scale * own for last, own in patterns.items()},
    }
    with new_folder(folder) as partial:
        save_tensors(tensors, partial / WEIGHTS)
        write_json(partial / ADAPTER_CONFIG, settings)

"""A run of Megatron-LM to go on with: master weights, AdamW's moments and counters of a checkpoint in `torch_dist`.

Tensors of the optimizer are named by their parameter after `optimizer.state.exp_avg.`, `exp_avg_sq.` and, where the
model computes in 16 bits, `fp32_param.` or (distributed optimizer, with --dist-ckpt-optim-fully-reshardable)
`param.`. Without that option the distributed optimizer stores its buckets, whose layout depends on the run.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtgpt.interop.foreign import check_stored
from dtgpt.interop.foreign_run import TrainingSource
from dtgpt.interop.keys import Key, Keys, check_keys, just, whole
from dtgpt.interop.megatron.config import shift_norm
from dtgpt.interop.megatron.experts import CORRECTION
from dtgpt.interop.megatron.flattened import check_shape
from dtgpt.interop.megatron.names import padded_rows
from dtgpt.interop.megatron.torch_dist import TorchDist
from dtgpt.interop.megatron.tree import LARGEST_COUNT, distributed_folder
from dtgpt.models.source import Ranges, parameter_shapes
from dtgpt.ops.optim.adamw import AdamW
from dtgpt.optim.fp16.loss_scale import check_state
from dtgpt.util.errors import UserError, shown
from dtgpt.util.rules import Given, Is, Rule, Rules, check_rules

STATE = re.compile(r"((?:chained_\d+\.)?optimizer\.state\.)exp_avg\.")
BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTERS = ("fp32_param", "param", "master_param")
DEEPEST = 4  # dictionaries around the state of one optimizer
WEIGHTS_ALONE = "begin a new run with its weights: --init_from {}"

# Field of a recipe -> name in args, where both count alike.
VALUES = {
    "global_batch_size": "global_batch_size",
    "seed": "seed",
    "optimizer.lr": "lr",
    "optimizer.min_lr": "min_lr",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_eps",
    "optimizer.clip": "clip_grad",
    "model.dropout": "hidden_dropout",
    "data.reset_position_ids": "reset_position_ids",
    "data.reset_attention_mask": "reset_attention_mask",
    "data.eod_mask_loss": "eod_mask_loss",
}
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
KEYS: Keys = {"consumed_train_samples": Key(whole(0), "; give a checkpoint of training")}


STATE_RULES: Rules = (  # of the states of optimizers that are found
    Rule(
        "{path} has the distributed optimizer's state in buckets, whose layout only its own run knows; save it with "
        "--dist-ckpt-optim-fully-reshardable, or {instead}",
        Is("states", "!=", 1),
        Given("in_buckets"),
    ),
    Rule("{path} has the states of {states} optimizers; {instead}", Is("states", ">", 1)),
    Rule("{path} has no moments of AdamW; {instead}", Is("states", "==", 0)),
)


def _optimizer(path: Path) -> Key:
    return Key(just("adam"), f", and dtgpt's is AdamW; {WEIGHTS_ALONE.format(path)}", "adam")


class MegatronTraining(TrainingSource):
    """The run whose checkpoint `folder` is. `vocab_size`: tokens of the recipe's model, taken where the table is padded
    from that. Raise UserError where weights, moments or counters are missing, or are not to be read."""

    optimizer = AdamW.kind

    def __init__(self, folder: Path, vocab_size: int):
        distributed = distributed_folder(folder)
        if distributed is None:
            raise UserError(
                f"{folder} is in Megatron-LM's format torch, of which dtgpt reads weights and not the optimizer; "
                f"convert it there with --ckpt-convert-format torch_dist, or {WEIGHTS_ALONE.format(folder)}"
            )
        self._weights, self.path = _open(distributed, vocab_size), folder
        self._args: Mapping[str, Any] = vars(self._weights.args) if self._weights.args is not None else {}
        self._prefix = self._find_prefix()
        master = next((kind for kind in MASTERS if self._has(kind)), None)
        self._master = "" if master is None else f"{self._prefix}{master}."
        self._check_tensors()
        self.notes = [*self._weights.notes, *self._master_notes()]
        length, self.config = self._args.get("seq_length"), self._weights.config
        if isinstance(length, int) and 1 <= length < self.config.seq_length:  # later positions were never trained
            self.config = replace(self.config, seq_length=length)
        self.state = self._read_state()
        self.order_samples, self.values = self._order_samples(), self._read_values()

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        part = part or tuple(map(range, parameter_shapes(self.config)[name]))
        master = "" if name.endswith(CORRECTION) else self._master
        return shift_norm(self._weights.read_as(name, part, master), name, self._weights.args, self.config)

    def read_moment(self, name: str, moment: str, part: Ranges) -> Tensor:
        if name.endswith(CORRECTION):  # which no optimizer moves
            return torch.zeros([len(r) for r in part])
        return self._weights.read_as(name, part, f"{self._prefix}{moment}.")

    def _find_prefix(self) -> str:
        """Return what stands before `exp_avg.`. Raise UserError where no moments are there, or in buckets."""
        folder = self._weights.folder
        found = {match[1] for match in map(STATE.match, folder.tensors) if match}
        values = {
            "path": self.path,
            "instead": WEIGHTS_ALONE.format(self.path),
            "states": len(found),
            "in_buckets": any(map(BUCKETS.match, (*folder.tensors, *folder.objects))),
        }
        check_rules(STATE_RULES, values)
        return found.pop()

    def _has(self, kind: str) -> bool:
        tensors = self._weights.folder.tensors
        return any(f"{self._prefix}{kind}.{key}" in tensors for key in self._weights.trained_shapes)

    def _check_tensors(self) -> None:
        """Raise UserError where a moment or a master weight is missing, or has another shape or type."""
        folder = self._weights.folder
        prefixes = [f"{self._prefix}{moment}." for moment in MOMENTS] + ([self._master] if self._master else [])
        for key, shape in self._weights.trained_shapes.items():
            for prefix in prefixes:
                check_shape(folder, prefix + key, shape)
                check_stored(prefix + key, folder.tensors[prefix + key].dtype, folder.path, "save it with moments in")

    def _master_notes(self) -> list[str]:
        tensors = self._weights.folder.tensors
        if self._master or all(tensors[key].dtype == torch.float32 for key in self._weights.trained_shapes):
            return []
        return [f"{self.path} has no fp32 master weights; the run goes on with weights rounded to 16 bits"]

    def _read_state(self) -> dict[str, Any]:
        step, seen = self._weights.iteration, self._args.get("consumed_train_samples")
        check_keys(self._args, {**KEYS, "optimizer": _optimizer(self.path)}, self.path)
        parts = list(_dictionaries(self._weights.common.get("optimizer")))
        updates = next((n for n in map(_updates, parts) if n is not None), None)
        if updates is None or updates > step:
            raise UserError(
                f"{self.path} has {shown(updates)} updates of AdamW in {step} iterations; give a checkpoint as "
                "Megatron-LM wrote it"
            )
        scales = (_loss_scale(part["grad_scaler"], step - updates) for part in parts if "grad_scaler" in part)
        scale = next((scale for scale in scales if scale is not None), None)
        state = {"step": step, "consumed_samples": seen, "updates": updates}
        return state if scale is None else state | {"loss_scale": scale}

    def _order_samples(self) -> int | None:
        """Return how many training samples the run asked its data for."""
        samples, steps, size = (self._args.get(n) for n in ("train_samples", "train_iters", "global_batch_size"))
        if type(samples) is int and samples > 0:
            return samples
        return steps * size if type(steps) is int and type(size) is int and steps * size > 0 else None

    def _read_values(self) -> dict[str, Any]:
        found = {field: self._args.get(name) for field, name in VALUES.items()}
        numbers = {field: value for field, value in found.items() if isinstance(value, int | float)}
        known = {field: value for field, value in numbers.items() if abs(value) < LARGEST_COUNT}  # no NaN either
        schedule = SCHEDULES.get(str(self._args.get("lr_decay_style")))
        return known if schedule is None else known | {"optimizer.schedule": schedule}


def _open(folder: Path, vocab_size: int) -> TorchDist:
    """Open the weights with `vocab_size` tokens where the table is padded from that."""
    source = TorchDist(folder)
    given = vars(source.args) if source.args is not None else {}
    tp, multiple = given.get("tensor_model_parallel_size", 1), given.get("make_vocab_size_divisible_by", 128)
    known = all(type(n) is int and n > 0 for n in (tp, multiple))
    fits = known and padded_rows(vocab_size, tp, multiple) == source.num_rows
    return TorchDist(folder, vocab_size) if fits and vocab_size != source.config.vocab_size else source


def _dictionaries(value: Any, depth: int = 0) -> Iterator[dict[Any, Any]]:
    """Yield a dictionary and those in it: the optimizer's own stands in that of its masters, or of several."""
    if isinstance(value, dict) and depth < DEEPEST:
        yield value
        for inner in value.values():
            yield from _dictionaries(inner, depth + 1)


def _updates(part: Mapping[Any, Any]) -> int | None:
    """Return AdamW's step, a number or a tensor, where `part` has it."""
    groups = part.get("param_groups")
    first = groups[0] if isinstance(groups, list) and groups and isinstance(groups[0], dict) else {}
    for found in (part.get("common_step"), first.get("step")):
        value = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
        if isinstance(value, int | float) and 0 <= value < LARGEST_COUNT and value == int(value):
            return int(value)
    return None


def _loss_scale(scaler: Any, skipped: int) -> dict[str, Any] | None:
    """Return the state of the loss scale, None where it is not dynamic."""
    if not isinstance(scaler, dict) or "growth_tracker" not in scaler:
        return None
    scale = scaler.get("scale")
    state = {name: scaler.get(name) for name in ("growth_tracker", "hysteresis_tracker")} | {"skipped": skipped}
    state["scale"] = scale.item() if isinstance(scale, Tensor) and scale.numel() == 1 else scale
    try:
        check_state(state)
    except (ValueError, TypeError):
        return None
    return state

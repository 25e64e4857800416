"""Rotary positions in config.json: `rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of 5."""

from pathlib import Path
from typing import Any

from dtgpt.models.llama import LlamaConfig
from dtgpt.util.errors import UserError, shown

PLACES = ("rope_scaling", "rope_parameters")  # transformers 5 takes the first of these that is there
OUTER = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")  # stored next to these objects
LLAMA3 = {  # keys of Llama 3.1's scaling -> fields
    "factor": "rope_factor", "low_freq_factor": "rope_low_frequency", "high_freq_factor": "rope_high_frequency",
    "original_max_position_embeddings": "rope_original_length",
}  # fmt: skip
KINDS = ("default", "llama3")
LARGEST = 1e12  # of any of these numbers


def read_rope(settings: dict[str, Any], positions: int, path: Path) -> dict[str, Any]:
    """Return the fields of `LlamaConfig` for rotary positions. Raise UserError for a kind of scaling that dtgpt does
    not have, and for values that are missing, impossible or contradict each other."""
    first, second = (_collect(settings.get(place), place, path) for place in PLACES)
    rope = {**second, **first}
    outer = {name: settings[name] for name in OUTER if settings.get(name) is not None}
    for given in (second, outer):
        for name in given.keys() & rope.keys():
            if given[name] != rope[name]:
                raise UserError(
                    f"{path} has both {name}={shown(given[name])} and {name}={shown(rope[name])}; leave out the one "
                    "that is not the model's"
                )
    alone = min(second.keys() - first.keys() - outer.keys(), default=None) if first else None
    if alone is not None:
        raise UserError(
            f"{path} has {alone}={shown(second[alone])} in {PLACES[1]} and no {alone} in {PLACES[0]}, which "
            f"transformers takes alone; leave out the one of the two that is not the model's"
        )
    rope = {**outer, **rope}
    kind = rope.get("rope_type", "default")
    if kind not in KINDS:
        raise UserError(f"{path} has rope_type={shown(kind)}; dtgpt has {' and '.join(KINDS)}: give another model")
    fraction = rope.get("partial_rotary_factor", 1)
    if type(fraction) not in (int, float) or fraction != 1:
        raise UserError(
            f"{path} has partial_rotary_factor={shown(fraction)}; dtgpt rotates all columns of a head: "
            "give another model"
        )
    fields: dict[str, Any] = {"rope_theta": _number(rope, "rope_theta", path) if "rope_theta" in rope else 10000.0}
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", positions)
        for name, field in LLAMA3.items():
            if name not in rope:
                raise UserError(f"{path} has rope_type='llama3' without {name}; copy config.json again, whole")
            fields[field] = _number(rope, name, path)
        length = fields["rope_original_length"]
        if length != int(length):
            raise UserError(
                f"{path} has original_max_position_embeddings={length}, which is not a whole number; give the file as "
                "it was written"
            )
        fields["rope_original_length"] = int(length)
    return fields


def write_rope(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys that transformers 4 reads, and those of 5 with the same values."""
    theta, scaling = float(config.rope_theta), None
    if config.rope_factor != 1:
        numbers = {name: float(getattr(config, field)) for name, field in LLAMA3.items()}
        original = {"original_max_position_embeddings": config.rope_original_length}
        scaling = {"rope_type": "llama3", **numbers, **original}
    return {
        "rope_theta": theta, "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
    }  # fmt: skip


def _collect(value: Any, place: str, path: Path) -> dict[str, Any]:
    """Return what an object of config.json says, without nulls. The kind has two names, of which transformers looks at
    `rope_type` first."""
    if value is None:
        return {}
    if not isinstance(value, dict) or any(isinstance(inner, dict) for inner in value.values()):
        raise UserError(
            f"{path} has {place}={shown(value)}; dtgpt has one rotation for all layers, which is one object of names "
            "and numbers: give another model"
        )
    said = {name: inner for name, inner in value.items() if inner is not None}
    kind = said.pop("type", "default")
    return {"rope_type": kind, **said} if value else {}


def _number(rope: dict[str, Any], name: str, path: Path) -> float:
    value = rope[name]
    if type(value) not in (int, float) or not 0 < value < LARGEST:
        raise UserError(
            f"{path} has {name}={shown(value)}, which is not a number between 0 and {LARGEST:g}; give the file as it "
            "was written"
        )
    return float(value)

"""Rotary positions in config.json: `rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of 5."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtgpt.interop.keys import FLAG, NUMBER, Key, Keys, among, check_keys, not_here, read_key
from dtgpt.models.rotary import RotaryConfig
from dtgpt.util.errors import UserError, shown
from dtgpt.util.rules import Given, Is, Missing, Rule, Rules, check_rules

PLACES = ("rope_scaling", "rope_parameters")  # transformers 5 takes the first of these that is there
OUTER = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")  # stored next to these objects
LENGTH = "original_max_position_embeddings"
FIELDS: dict[str, dict[str, str]] = {  # by the kind of scaling: its keys that must be there -> fields
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_frequency",
        "high_freq_factor": "rope_high_frequency",
        LENGTH: "rope_original_length",
    },
    "yarn": {"factor": "rope_factor", LENGTH: "rope_original_length"},
}
BETAS = {"beta_fast": "rope_beta_fast", "beta_slow": "rope_beta_slow"}
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers


def _is_length(value: Any) -> bool:
    return not NUMBER.fits(value) or value == int(value)


def _is_one_rotation(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and not any(isinstance(inner, dict) for inner in value.values()))


def _is_of_kinds(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(kind in (FULL, SLIDING) and isinstance(own, dict | None) for kind, own in value.items())
    )


KEYS: Keys = {
    "rope_type": Key(among(FIELDS), not_here(f"dtgpt has {', '.join(FIELDS)}"), "default"),
    "partial_rotary_factor": Key(among([1]), not_here("dtgpt rotates all columns of a head"), 1),
}
OF_LENGTH: Keys = {LENGTH: Key(_is_length, ", which is not a whole number; give the file as it was written")}
OF_YARN: Keys = {"truncate": FLAG._replace(default=True)}
OBJECTS: Keys = dict.fromkeys(
    PLACES,
    Key(
        _is_one_rotation,
        not_here("dtgpt has one rotation for all layers, which is one object of names and numbers"),
    ),
)
OBJECTS_OF_KINDS: Keys = {
    "rope_parameters": Key(
        _is_of_kinds,
        f", which is not an object for {FULL} and one for {SLIDING}; give the file as it was written",
    )
}


SLIDING_RULES: Rules = (
    Rule(
        f"{{path}} has rope_type={{rope_scaling!r}} of {SLIDING}; dtgpt scales positions of {FULL} alone: give another "
        "model",
        Given("rope_scaling"),
    ),
)
FULL_RULES: Rules = (  # transformers looks for the key beside these objects, and takes true
    Rule(
        f"{{path}} has truncate=False of {FULL}, which transformers does not read; leave it out",
        Is("rope_truncate", "==", False),
    ),
)
WRITTEN_RULES: Rules = (
    Rule(
        "this model has model.rope_truncate={rope_truncate}, which transformers does not read where layers have "
        "positions of two kinds; keep it as a checkpoint of dtgpt",
        Is("rope_scaling", "==", "yarn"),
        Missing("rope_truncate"),
    ),
)


def read_rope(settings: Mapping[str, Any], positions: int, path: Path, theta: float = 10000.0) -> dict[str, Any]:
    """Return the fields of `RotaryConfig` for rotary positions. theta: the default of the family. Raise UserError for a
    kind of scaling that dtgpt does not have, and for values that are missing, impossible or contradict each other."""
    rope = _merged(settings, path)
    check_keys(rope, KEYS, path)
    kind = rope.get("rope_type", "default")
    fields: dict[str, Any] = {"rope_theta": float(read_key(rope, ("rope_theta",), NUMBER, path, theta))}
    if kind == "default":
        return fields
    if LENGTH in FIELDS[kind]:
        rope.setdefault(LENGTH, positions)
    fields["rope_scaling"] = kind
    for name, field in FIELDS[kind].items():
        if name not in rope:
            raise UserError(f"{path} has rope_type={shown(kind)} without {name}; copy config.json again, whole")
        fields[field] = float(read_key(rope, (name,), NUMBER, path))
    if "rope_original_length" in fields:
        check_keys(rope, OF_LENGTH, path)
        fields["rope_original_length"] = int(fields["rope_original_length"])
    fields |= _read_yarn(rope, fields["rope_factor"], path) if kind == "yarn" else {}
    without = kind != "llama3" and fields["rope_factor"] == 1 and not fields.get("rope_attention_factor")
    return {"rope_theta": fields["rope_theta"]} if without else fields


def _merged(settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return what both objects and the keys next to them say together. Raise UserError where they say different
    things."""
    check_keys(settings, OBJECTS, path)
    first, second = (_without_nulls(settings.get(place)) for place in PLACES)
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
    return {**outer, **rope}


def _without_nulls(value: dict[str, Any] | None) -> dict[str, Any]:
    """Return what an object of config.json says, without nulls. The kind has two names, of which transformers looks at
    `rope_type` first."""
    if not value:
        return {}
    said = {name: inner for name, inner in value.items() if inner is not None}
    kind = said.pop("type", "default")
    return {"rope_type": kind, **said}


def _read_yarn(rope: dict[str, Any], factor: float, path: Path) -> dict[str, Any]:
    """Return what YaRN has beside its factor, with the defaults of transformers."""

    def number(name: str) -> float:
        return float(read_key(rope, (name,), NUMBER, path))

    check_keys(rope, OF_YARN, path)
    fields: dict[str, Any] = {field: number(name) for name, field in BETAS.items() if name in rope}
    fields["rope_truncate"] = rope.get("truncate", True)
    scales = [number(name) for name in ("mscale", "mscale_all_dim") if rope.get(name)]
    if "attention_factor" in rope:
        fields["rope_attention_factor"] = number("attention_factor")
    elif len(scales) == 2:
        over, under = (0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0 for scale in scales)
        fields["rope_attention_factor"] = over / under
    return fields


def read_rope_of_kinds(
    settings: dict[str, Any], positions: int, path: Path, theta: Mapping[str, float], local_theta: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of layers of full attention, and of those with a window, whose base transformers 4 stored as
    `local_theta`. theta: the defaults of the family by kind. Errors as of `read_rope`."""
    check_keys(settings, OBJECTS_OF_KINDS, path)
    given = settings.get("rope_parameters") or {}
    scaling = settings.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") is None and scaling.get("type", "default") != "default":
        raise UserError(
            f"{path} has type={shown(scaling['type'])} in rope_scaling, which transformers 5 does not read where "
            "layers have positions of two kinds; write rope_type instead"
        )
    outer = {name: settings.get(name) for name in ("rope_scaling", "rope_theta", "partial_rotary_factor")}
    full = read_rope({"rope_parameters": given.get(FULL), **outer}, positions, path, theta[FULL])
    local = {"rope_parameters": given.get(SLIDING), "rope_theta": settings.get(local_theta)}
    sliding = read_rope(local, positions, path, theta[SLIDING])
    check_rules(SLIDING_RULES, sliding, path=path)
    check_rules(FULL_RULES, full, path=path)
    return full, sliding


def write_rope(config: RotaryConfig) -> dict[str, Any]:
    """Return the keys that transformers 4 reads, and those of 5 with the same values."""
    theta, scaling = float(config.rope_theta), scaling_of(config)
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
    }


def write_rope_of_kinds(config: RotaryConfig, theta: float, local_theta: str) -> dict[str, Any]:
    """Return the keys for layers of two kinds. theta: the base of those with a window. Raise UserError for a scaling
    that transformers would not read there."""
    made = write_rope(config)
    if made["rope_scaling"]:
        check_rules(WRITTEN_RULES, config)
    kinds = {FULL: made["rope_parameters"], SLIDING: {"rope_theta": float(theta), "rope_type": "default"}}
    return {**made, local_theta: float(theta), "rope_parameters": kinds}


def scaling_of(config: RotaryConfig) -> dict[str, Any] | None:
    """Return the object `rope_scaling`; None: there is none."""
    kind = config.rope_scaling
    if config.rope_factor == 1 and not (kind == "yarn" and config.rope_attention_factor):
        return None
    names = FIELDS[kind] | (BETAS if kind == "yarn" else {})
    made: dict[str, Any] = {name: float(getattr(config, field)) for name, field in names.items()}
    if LENGTH in made:
        made[LENGTH] = config.rope_original_length
    if kind == "yarn":
        made["truncate"] = config.rope_truncate
        if config.rope_attention_factor:
            made["attention_factor"] = config.rope_attention_factor
    return {"rope_type": kind, **made}

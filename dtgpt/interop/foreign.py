"""What readers and writers of other libraries' models share: checks of their values and tensors, and dtypes."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dtgpt.models.config import ModelConfig, class_of, is_own
from dtgpt.models.inventory import Shape
from dtgpt.models.rotary import GLOBAL, LOCAL, MOST_KINDS
from dtgpt.models.source import Part, Source, cut, has_vocabulary, is_finite, without_padding
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown, shown_name

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of weights
MOST_NAMED = 10  # tensors in a sentence

Config = TypeVar("Config", bound=ModelConfig)
Rules = Mapping[str, tuple[Any, Callable[[Any], bool], str]]  # by option: its default, what fits, why others do not


def whole_number(settings: Mapping[str, Any], names: Sequence[str], default: int | None, place: Path) -> int:
    """Return the whole number under the first of `names` that is there. Raise UserError for another value."""
    value = next((settings[n] for n in names if settings.get(n) is not None), default)
    if type(value) is not int:
        raise UserError(
            f"{place} has {names[0]}={shown(value)}, which is not a whole number; give the file as it was written"
        )
    return value


def check_names(settings: Mapping[str, Any], names: Mapping[str, str], place: Path) -> None:
    """Raise UserError where two names of one number say different ones, of which libraries take either. names: one by
    the other."""
    for one, other in names.items():
        said = [settings.get(name) for name in (one, other)]
        if None not in said and said[0] != said[1]:
            raise UserError(
                f"{place} has both {one}={shown(said[0])} and {other}={shown(said[1])}, which are two names of one "
                "number; leave out the one that is not the model's"
            )


def epsilon(settings: Mapping[str, Any], names: Sequence[str], default: float, place: Path) -> float:
    """Return the epsilon of a norm under the first of `names` that is there. Raise UserError for an impossible one."""
    value = next((settings[n] for n in names if settings.get(n) is not None), default)
    if not isinstance(value, float) or not 0 < value < 1:
        raise UserError(f"{place} has {names[0]}={shown(value)}; it must be more than 0 and less than 1")
    return value


def check_rules(settings: Mapping[str, Any], rules: Rules, place: Path) -> None:
    """Raise UserError for the first option that breaks its rule."""
    for name, (default, fits, reason) in rules.items():
        value = settings.get(name, default)
        if not fits(value):
            text = json.dumps(value) if value is None or isinstance(value, bool) else shown(value)
            raise UserError(f"{place} has {name}={text}; {reason}: give another model")


def checked(config: Config, place: Path) -> Config:
    """Return `config`. Raise UserError, with the place, where no model has this shape."""
    try:
        config.validate()
    except UserError as error:
        raise UserError(f"{place} is not a model that dtgpt can hold: {error}") from None
    return config


def check_tensors(found: Mapping[str, Shape], expected: Iterable[tuple[str, Shape]], place: Path) -> None:
    """Raise UserError for a tensor that is missing, has another shape or is unknown. Both have the file's names."""
    unknown = set(found)
    for name, shape in expected:
        if name not in found:
            raise UserError(f"{place} has no tensor {name}, which must be {list(shape)}; give a complete model")
        if found[name] != shape:
            raise UserError(
                f"{place} has {name} of shape {shown(list(found[name]))} where its configuration asks for "
                f"{list(shape)}; give weights and configuration of the same model"
            )
        unknown.remove(name)
    if unknown:
        raise UserError(
            f"{place} holds {shown_name(min(unknown))}, which a model of its configuration does not have; give one "
            "without it"
        )


def plain_names(names: Iterable[str], prefix: str, buffers: re.Pattern[str], place: Path) -> dict[str, str]:
    """Return the name in the file by the name without `prefix` and the one of torch.compile, except for `buffers`.
    Raise UserError where one tensor has two names."""
    plain: dict[str, str] = {}
    for there in names:
        name = there.removeprefix("_orig_mod.").removeprefix(prefix)
        if buffers.fullmatch(name):
            continue
        if name in plain:
            both = f"{shown_name(plain[name])} and {shown_name(there)}"
            raise UserError(f"{place} holds {shown_name(name)} twice, as {both}; give a model as it was saved")
        plain[name] = there
    return plain


def untied(place: Path) -> UserError:
    return UserError(
        f"{place} has an output projection (lm_head.weight) of its own, while its architecture has one table for "
        "embedding and output; give a model with tied embeddings"
    )


def as_parameter(stored: Tensor, name: str, config: ModelConfig, part: Part | None) -> Tensor:
    """Return dtgpt's parameter `name`, or a part of it, in fp32 and memory of its own: `stored` may be mapped from a
    file, and a table has any number of rows of padding."""
    if not has_vocabulary(name, config):
        return cut(stored, part).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    rows, columns = part or (range(config.padded_vocab_size), range(stored.shape[1]))
    table = torch.zeros(len(rows), len(columns), device=stored.device)  # the padding, which never enters a softmax
    known = stored[rows.start : min(rows.stop, config.vocab_size), columns.start : columns.stop]
    table[: len(known)] = known
    return table


def is_of_same_weights(config: ModelConfig) -> bool:
    """Return whether a class of a user's own is derived from dtgpt's of the same architecture, with its fields alone,
    as one with another loss is."""
    theirs = class_of(config.architecture)
    return (
        theirs is not None
        and isinstance(config, theirs)
        and {f.name for f in fields(config)} == {f.name for f in fields(theirs)}
    )


def check_architecture(config: ModelConfig, known: Collection[str], kind: str) -> None:
    """Raise UserError where a model cannot be written as `kind`, a folder or tree of another library."""
    if config.architecture in known and is_own(type(config)) and not is_of_same_weights(config):
        raise UserError(
            f"the model is a {type(config).__name__}, which is not dtgpt's {config.architecture}, and a {kind} holds "
            "no other; keep it as a checkpoint of dtgpt"
        )
    if config.architecture not in known:
        raise UserError(
            f"the model is of the architecture {config.architecture}, and a {kind} holds one of {', '.join(known)}; "
            "keep it as a checkpoint of dtgpt, or add the architecture to dtgpt/interop"
        )


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype} is not one of weights; use one of {', '.join(map(str, DTYPES))}")


def cast(piece: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return weights as they are written, in memory of their own. Raise UserError where fp16 cannot hold one."""
    out = piece.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if dtype == torch.float16 and bool((out.isinf() & piece.isfinite()).any()):
        raise UserError(f"{name} has weights beyond the range of {dtype}; use torch.bfloat16 or torch.float32")
    return out


def shortest_pattern(local: list[bool]) -> str:
    """Return the shortest `window_pattern` by which these blocks have a window."""
    letters = "".join(LOCAL if each else GLOBAL for each in local)
    if len(letters) > MOST_KINDS:
        return letters
    sizes = (size for size in range(1, len(letters) + 1) if letters[size:] == letters[: len(letters) - size])
    return letters[: next(sizes, 0)] or LOCAL


class Watched(Source):
    """A source that notes which of the tensors that are read of it are not finite, rows of padding aside."""

    def __init__(self, source: Source):
        self.config, self.notes, self._source = source.config, source.notes, source
        self._broken: dict[str, None] = {}  # names in order

    def read(self, name: str, part: Part | None = None) -> Tensor:
        values = self._source.read(name, part)
        if not is_finite(without_padding(values, name, self.config, part[0].start if part else 0)):
            self._broken[name] = None
        return values

    @property
    def problem(self) -> str | None:
        """A sentence that names the tensors which are not finite; None: all that were read are."""
        if not self._broken:
            return None
        names = list(self._broken)
        rest = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return f"NaN or infinite values in {counted(len(names), 'tensor')}: {', '.join(names[:MOST_NAMED])}{rest}"

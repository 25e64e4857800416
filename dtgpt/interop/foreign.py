"""What readers and writers of other libraries' models share: checks of their tensors, and dtypes. Those of values are
tables of keys (`keys.py`)."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dtgpt.models.config import ModelConfig, class_of, is_users
from dtgpt.models.inventory import Shape
from dtgpt.models.rotary import GLOBAL, LOCAL, MOST_KINDS
from dtgpt.models.shared.foreign import cut, has_vocabulary, is_finite, without_padding
from dtgpt.models.source import Ranges, Source
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown_name
from dtgpt.util.rules import Given, Is, Missing, Other, Rule, Rules, check_rules

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of weights
MOST_NAMED = 10  # tensors in a sentence

Config = TypeVar("Config", bound=ModelConfig)


TENSOR_RULES: Rules = (  # of the shape in a file, and that of the configuration
    Rule("{place} has no tensor {name}, which must be {shape}; give a complete model", Missing("there")),
    Rule(
        "{place} has {name} of shape {there!r} where its configuration asks for {shape}; give weights and "
        "configuration of the same model",
        Is("there", "!=", Other("shape")),
    ),
)
WRITTEN_RULES: Rules = (  # of models that other libraries have
    Rule(
        "the model is a {name}, which is not dtgpt's {architecture}, and a {kind} holds no other; keep it as a "
        "checkpoint of dtgpt",
        Given("architecture"),
        Given("is_other"),
    ),
    Rule(
        "the model is of the architecture {model.architecture}, and a {kind} holds one of {known}; keep it as a "
        "checkpoint of dtgpt, or add the architecture to dtgpt/interop",
        Missing("architecture"),
    ),
)


def checked(config: Config, place: Path) -> Config:
    """Return `config`. Raise UserError, with the place, where no model has this shape."""
    try:
        config.validate()
    except UserError as error:
        raise UserError(f"{place} is not a model that dtgpt can hold: {error}") from None
    return config


@contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Raise any error that a file causes, but a UserError, as one about `path`: a damaged or hostile file can make a
    reader raise anything."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[-1][:200]
        raise UserError(f"{path} cannot be read ({reason}); {remedy}") from None


def check_tensors(found: Mapping[str, Shape], expected: Iterable[tuple[str, Shape]], place: Path) -> None:
    """Raise UserError for a tensor that is missing, has another shape or is unknown. Both have the file's names."""
    unknown = set(found)
    for name, shape in expected:
        there = list(found[name]) if name in found else None
        check_rules(TENSOR_RULES, {"place": place, "name": name, "there": there, "shape": list(shape)})
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


def as_parameter(stored: Tensor, name: str, config: ModelConfig, part: Ranges | None) -> Tensor:
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
    values = {
        "name": type(config).__name__,
        "architecture": config.architecture if config.architecture in known else None,
        "is_other": is_users(type(config)) and not is_of_same_weights(config),
        "kind": kind,
        "known": ", ".join(known),
    }
    check_rules(WRITTEN_RULES, values, model=config)


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype} is not one of weights; use one of {', '.join(map(str, DTYPES))}")


def check_stored(name: str, dtype: torch.dtype, place: Path, remedy: str = "give plain weights in") -> None:
    """Raise UserError for a tensor of a file that is in another type than weights are."""
    if dtype not in DTYPES:
        raise UserError(f"{place} has {shown_name(name)} in {dtype}; {remedy} fp32, fp16 or bf16")


def cast(piece: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return weights as they are written, in memory of their own. Raise UserError where fp16 cannot hold one."""
    out = piece.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if dtype == torch.float16 and bool((out.isinf() & piece.isfinite()).any()):
        raise UserError(f"{name} has weights beyond the range of {dtype}; use torch.bfloat16 or torch.float32")
    return out


def shortest_pattern(kinds: list[bool], names: str = LOCAL + GLOBAL) -> str:
    """Return the shortest text that, repeated, has the first letter of `names` for blocks of a kind and the second for
    others: the `window_pattern` of blocks with a window."""
    letters = "".join(names[0] if each else names[1] for each in kinds)
    if len(letters) > MOST_KINDS:
        return letters
    sizes = (size for size in range(1, len(letters) + 1) if letters[size:] == letters[: len(letters) - size])
    return letters[: next(sizes, 0)] or names[0]


class Watched(Source):
    """A source that notes which of the tensors that are read of it are not finite, rows of padding aside."""

    def __init__(self, source: Source):
        self.config, self.notes, self._source = source.config, source.notes, source
        self._broken: dict[str, None] = {}  # names in order

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
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

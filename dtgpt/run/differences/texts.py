"""What a run that goes on says of values: those in which its recipe file differs, those that change now, and a path
of data that leads nowhere from here."""

import os
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.load import FREE
from dtgpt.checkpoint.manifest import as_tuple
from dtgpt.data.open import format_of, formats
from dtgpt.run.saved_recipe import ABSENT, OF_ONE_START, read_recipe, saved_value
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown_name
from dtgpt.util.shared.option_words import value_text
from dtgpt.util.shared.words import hanging
from dtgpt.util.storage import parse_json, read_regular

# What a recipe file leaves to the run: the tokenizer of its data, or of the model that it began with.
TAKEN = (("data.tokenizer", "auto"), ("data.tokenizer_file", None))


def changes_since(folder: Path, values: Mapping[str, Any]) -> list[str]:
    """Return lines such as "steps: 10 -> 20", one for each value in which the saved recipe of a run differs from
    `values`, those with which it resumes. A recipe.json that cannot be read differs in nothing."""
    try:
        saved = read_recipe(folder)
    except UserError:
        return []
    changes = []
    for name, value in values.items():
        before = as_tuple(saved_value(saved, name))
        if name == "optimizer.decay_steps" and before is None and not saved_value(saved, "optimizer.decay_samples"):
            before = saved_value(saved, "steps")
        if before not in (value, ABSENT) and name not in OF_ONE_START:  # an older run lacks newer fields
            changes.append(f"{name}: {shown_name(value_text(before))} -> {value_text(value)}")
    return changes + _note_on_min_lr(saved, values)


def _note_on_min_lr(saved: dict[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return what to do where the run goes on with a lower learning rate, but with the same one at the end."""
    before, former_least = saved_value(saved, "optimizer.lr"), saved_value(saved, "optimizer.min_lr")
    rate, least = values.get("optimizer.lr", 0.0), values.get("optimizer.min_lr", 0.0)
    if type(before) is not float or rate >= before or not least or least != former_least:
        return []
    scaled = f"{least * rate / before:.3g}"
    return [f"optimizer.min_lr stays {least:g}; to lower it like optimizer.lr, give --optimizer.min_lr {scaled}"]


def say_kept(asked: dict[str, Any], kept: dict[str, Any], fixed: Collection[str]) -> None:
    """Say, in a line for each, which values the recipe file `asked` for that the run has not `kept`. fixed:
    sections of which a run keeps all values."""
    differing = [n for n, value in asked.items() if kept[n] != value and (n, value) not in TAKEN]
    if not differing:
        return
    lines = ["the recipe file says otherwise than the run, which keeps its values (recipe -> run):"]
    for name in differing:
        end = "" if _can_change(name, fixed) else " (cannot change)"
        lines.append(f"  {name}: {value_text(asked[name])} -> {value_text(kept[name])}{end}")
    options = [f"--{name} {shlex.quote(value_text(asked[name]))}" for name in differing if _can_change(name, fixed)]
    if options:
        lines.append(hanging(f"to change {'them' if options[1:] else 'it'}, give {' '.join(options)}", 2))
    say("\n".join(lines))


def _can_change(name: str, fixed: Collection[str]) -> bool:
    """Whether a run can go on with another value of a field: not another model, nor samples or tokens of another
    meaning. fixed: sections of which it keeps all values."""
    section, _, last = name.rpartition(".")
    if section in fixed:
        return False
    return (
        last in FREE
        if section == "model"
        else name not in ("name", "seq_length", "data.tokenizer", "data.bpe_vocab_size")
    )


def check_data(run: Path, path: str | None) -> None:
    """Raise UserError where a run goes on with data that are not here, and say where it was started: a path counts from
    there."""
    if path is None or os.path.exists(path):
        return
    form = format_of(path)
    here = (form is not None and form.is_here(path)) or any(form.is_name(path) for form in formats())
    if here or path != saved_value(read_recipe(run), "data.path"):
        return
    try:
        start = parse_json(read_regular(run / "environment.json"))
        where = f"{start['folder']} on {start['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # of an older version
        where = "another folder"
    raise UserError(
        f"data.path={path}, which {run} was trained on, is not here; the run was started in {shown_name(where)}: go on "
        "from there, or give --data.path"
    )

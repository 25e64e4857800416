"""Recipe, data, code and machine of a run at each of its starts, read from its folder."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dtgpt.checkpoint.manifest import STATE
from dtgpt.config.overrides import value_text
from dtgpt.run.curves import Curves, read_curves
from dtgpt.run.folder import EXAMPLE, read_recipe
from dtgpt.run.starts import flat, read_starts
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, did_you_mean, shown_name
from dtgpt.util.storage import read_json

SHOWN_DIGEST = 12  # digits of the digest of data, as many as those of code have
Facts = dict[str, str]  # text by name


class Piece(NamedTuple):
    """A part of a run: from the step after `begin` on, until the next piece begins.

    facts: "recipe/..." are fields of the recipe, "start/..." what the start decided for its machine.
    """

    begin: int
    facts: Facts


@dataclass
class Run:
    """A run folder, or a metrics.jsonl alone."""

    path: Path
    metrics: Path
    curves: Curves
    recipe: dict[str, Any] = field(default_factory=dict)  # of the last start, flat; empty where it is not recorded
    environment: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int | None:
        """The number of steps that the run was to take, None where that is not recorded."""
        steps = self.recipe.get("steps")
        return steps if type(steps) is int and steps > 0 else None

    @property
    def interval(self) -> int | None:
        """`log.interval`, None where it is not recorded or a resume changed it."""
        interval = self.recipe.get("log.interval")
        changed = any("log.interval" in _group(start, "before") for start in self.starts)
        return interval if type(interval) is int and interval > 0 and not changed else None

    @property
    def code_files(self) -> dict[str, Any]:
        """The digests of dtgpt's source files in the last start."""
        return _group(self.environment, "code")

    def pieces(self) -> list[Piece]:
        """Return what was recorded of each part of the run that its curves show, in the order of steps."""
        found: list[tuple[int, int]] = []  # begin, and the number of the start
        for number, start in enumerate(self.starts):
            found = [piece for piece in found if piece[0] < start["step"]] + [(start["step"], number)]
        shown = [piece for piece in found if piece[0] < self.curves.last] or found[-1:]
        before, *recipes = self._recipes()
        pieces = [Piece(begin, _of_recipe(recipes[n]) | _of_start(self.starts[n])) for begin, n in shown]
        first = next(iter(self.curves.losses()), 0)
        if not pieces:  # written by an older version
            pieces = [Piece(0, _of_recipe(self.recipe) | self._of_environment())]
        elif 0 < first <= pieces[0].begin < self.curves.last:  # begun by one
            pieces.insert(0, Piece(0, _of_recipe(before)))
        return pieces

    def _recipes(self) -> list[dict[str, Any]]:
        """Return the recipe before the first start, then that of each start: that of the last one, with what each start
        changed undone."""
        found = [self.recipe]
        for start in reversed(self.starts):
            found.append(found[-1] | _group(start, "before"))
        return found[::-1]

    def _of_environment(self) -> Facts:
        """Return what a run of an older version has recorded of its last start."""
        data, packages = _group(self.environment, "data"), _group(self.environment, "packages")
        own = {name: self.environment.get(name) for name in ("plan", "world", "device", "git")}
        return _of_start(
            own | {"torch": packages.get("torch"), "data": data.get("digest"), "tokenizer": data.get("tokenizer")}
        )


def _of_recipe(recipe: dict[str, Any]) -> Facts:
    return {f"recipe/{name}": shown_name(value_text(value)) for name, value in recipe.items()}


def _of_start(start: dict[str, Any]) -> Facts:
    if isinstance(digest := start.get("data"), str):
        start = start | {"data": digest[:SHOWN_DIGEST]}
    return {f"start/{name}": shown_name(value_text(value)) for name, value in start.items() if value is not None}


def _group(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object in values from JSON; an empty one where there is none."""
    group = values.get(name)
    return group if isinstance(group, dict) else {}


def open_run_or_metrics(path: Path) -> Run:
    """Return the run at `path`, a run folder or a metrics.jsonl. Raise UserError for anything else, and for a run
    without a loss."""
    folder, metrics = _places(path)
    run = Run(path, metrics, read_curves(metrics))
    if not (run.curves.losses() or run.curves.of.get("validation_loss")):
        unread = run.curves.unread
        has = f"{counted(unread, 'line')} that hold no record" if unread else "no losses yet"
        raise UserError(f"{path} has {has}, so that there is nothing to compare; {EXAMPLE}")
    if folder is not None:
        run.recipe = flat(_read_or_note(run, folder / "recipe.json", lambda: read_recipe(folder)))
        run.environment = _read_or_note(
            run, folder / "environment.json", lambda: read_json(folder / "environment.json", "")
        )
        run.starts = read_starts(folder)
        if not run.starts and (kept := sorted(p.name for p in folder.glob("recipe-step-*.json"))):
            run.problems.append(
                f"{path} was resumed by an older version, which kept no list of starts: what changed is in {kept[-1]}"
            )
    return run


def _read_or_note(run: Run, file: Path, read: Callable[[], Any]) -> dict[str, Any]:
    """Return what `read` reads from a file of the run; nothing, and a problem of the run, where it cannot."""
    if not file.exists():
        run.problems.append(f"{file} does not exist")
        return {}
    try:
        found = read()
    except UserError as error:
        run.problems.append(str(error).partition(";")[0])
        return {}
    return found if isinstance(found, dict) else {}


def _places(path: Path) -> tuple[Path | None, Path]:
    """Return the run folder, None where there is none, and its metrics.jsonl."""
    if path.is_dir():
        if (path / "metrics.jsonl").is_file() or (path / "recipe.json").is_file():
            return path, path / "metrics.jsonl"
        if (path / STATE).is_file():
            raise UserError(f"{path} is a checkpoint; give its run, {path.absolute().parents[1]}")
        if names := sorted(p.parent.name for p in path.glob("*/metrics.jsonl")):
            raise UserError(f"{path} holds {len(names)} run folders; give two of them, such as {path / names[0]}")
        raise UserError(f"{path} is not a run folder (it has no metrics.jsonl); {EXAMPLE}")
    if path.suffix == ".py":
        raise UserError(
            f"{path} is a recipe, which dtgpt compare takes alone, with --plans; to compare two runs, {EXAMPLE}"
        )
    if path.is_file():
        is_in_run = path.name == "metrics.jsonl" and (path.parent / "recipe.json").is_file()
        return path.parent if is_in_run else None, path
    if path.exists():
        raise UserError(f"{path} is neither a folder nor a file; {EXAMPLE}")
    raise UserError(f"{path} does not exist; {did_you_mean(path, EXAMPLE)}")

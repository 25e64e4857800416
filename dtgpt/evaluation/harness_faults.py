"""What may go wrong within lm-evaluation-harness, as one sentence: before anything is computed, where that can be."""

import logging
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lm_eval.config.evaluate_config import EvaluatorConfig

import dtgpt
from dtgpt.util.errors import UserError, shown_name
from dtgpt.util.storage import try_to_write

OURS = str(Path(dtgpt.__file__).parent)
PLAIN = (ValueError, FileNotFoundError, ConnectionError)  # whose text says what is wrong
SAVING = "lm_eval.loggers.evaluation_tracker"  # the logger that reports what could not be saved


def checked(from_cli: Callable[[Any], EvaluatorConfig]) -> Callable[[Any], EvaluatorConfig]:
    """Return a function that reads the harness's options as `from_cli` does, and checks them."""

    def read(namespace: Any) -> EvaluatorConfig:
        options = from_cli(namespace)
        check_options(options)
        return options

    return read


def check_options(options: EvaluatorConfig) -> None:
    """Raise UserError for values that the harness would take to compute nothing, or what it cannot write."""
    limit, shots = options.limit, options.num_fewshot
    if limit is not None and not (limit > 0 and math.isfinite(limit)):
        raise UserError(f"--limit {limit:g} is not a number of samples; use 1 or more, a part below 1, or leave it out")
    if shots is not None and shots < 0:
        raise UserError(f"--num_fewshot {shots} is not a number of examples; use 0 or more")
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise UserError(f"--include_path {shown_name(options.include_path)} is not a folder; give one with tasks")
    if options.output_path:
        path = Path(options.output_path)
        check_folder("--output_path", path.parent if path.suffix == ".json" else path)
    if options.use_cache:
        check_folder("--use_cache", Path(options.use_cache).parent)


def check_folder(option: str, folder: Path) -> None:
    """Raise UserError where nothing can be written in a folder, or in the one that it would be made in."""
    folder = folder.absolute()
    try:
        there = next(one for one in (folder, *folder.parents) if one.exists())
        try_to_write(there / "results")
    except OSError as error:
        reason = f"nothing can be written there ({error.strerror or error})"
        raise UserError(f"{option} {shown_name(str(folder))}: {reason}; give a folder of your own") from None


@contextmanager
def harness_errors_as_user_errors() -> Iterator[None]:
    """Raise UserError for what the harness refuses, for what fails within it or a task, and, at the end, for results
    that it did not save, of which it only logs a line. Errors that come out of dtgpt stay as they are."""
    unsaved = _Unsaved()
    logging.getLogger(SAVING).addHandler(unsaved)
    try:
        yield
    except UserError:
        raise
    except PLAIN as error:
        raise UserError(f"lm-evaluation-harness refuses: {str(error).strip() or repr(error)}") from error
    except Exception as error:
        # This file and `run_harness` called the harness; further frames of dtgpt are what the harness called.
        frames = traceback.extract_tb(error.__traceback__)
        if any(f.filename.startswith(OURS) and f.filename != __file__ and f.name != "run_harness" for f in frames):
            raise
        raise UserError(f"lm-evaluation-harness fails: {said(error)}; check the task and the options") from error
    finally:
        logging.getLogger(SAVING).removeHandler(unsaved)
    if unsaved.lines:
        raise UserError(
            f"{': '.join(unsaved.lines[:2])}; the table above is complete; check --output_path and the disk"
        )


def said(error: BaseException) -> str:
    """Return the name and the first line of an error, and of what caused it."""
    line = next(iter(str(error).strip().splitlines()), "")
    text = type(error).__name__ + (f": {shown_name(line)}" if line else "")
    return f"{text} ({said(error.__cause__)})" if error.__cause__ is not None else text


class _Unsaved(logging.Handler):
    """Keeps the line that says what could not be saved, and the next one, which says why."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self.lines or text.startswith("Could not save"):
            self.lines.append(text)

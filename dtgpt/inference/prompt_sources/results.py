"""Texts of all prompts of a file, as JSON lines."""

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from dtgpt.commands.generate import make_job
from dtgpt.inference.engine import Engine
from dtgpt.inference.library.jobs import run_jobs
from dtgpt.inference.model import Model, Need, need_of
from dtgpt.inference.prompt_sources.files import Line, read_prompts_file
from dtgpt.inference.request import Completion, PromptJob
from dtgpt.tools.progress import ProgressLines
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, remedy
from dtgpt.util.shared.words import duration


def write_results(model: Model, base: dict[str, Any], options: Any) -> None:
    """Generate texts for the prompts of a file, or for that of the command line, and write them. base: options of all
    prompts."""
    results = ResultFile(Path(options.output) if options.output else None)

    def prepare() -> tuple[Need, list[tuple[Line, PromptJob]]]:
        results.check()
        path, found = options.prompts_file, []
        for index, line in enumerate(read_prompts_file(Path(path)) if path else [Line(1, options.prompt, {})]):
            own = {name: value for name, value in line.options.items() if value is not None}
            try:
                found.append((line, make_job(model, line.prompt, base | own, index)))
            except UserError as error:
                raise UserError(f"{path}, line {line.number}: {error}" if path else str(error)) from None
        return need_of([job for _, job in found]), found

    def work(engine: Engine, asked: list[tuple[Line, PromptJob]]) -> None:
        model.describe()
        results.write([line for line, _ in asked], run_jobs(engine, (job for _, job in asked)))

    model.run(prepare, work)


class ResultFile:
    """Results as JSON lines, one a text: in a new file, or on stdout. What is complete is written at once, so that a
    run that is interrupted leaves all that was done."""

    def __init__(self, path: Path | None):
        self._path = path

    def check(self) -> None:
        """Raise UserError, before anything is generated, where the file cannot be made."""
        if self._path is not None and os.path.lexists(self._path):
            raise UserError(f"{self._path} exists already; give another path")
        if self._path is not None and not self._path.absolute().parent.is_dir():
            raise UserError(f"{self._path.parent} is not a folder; make it, or give another path")

    def write(self, lines: list[Line], results: Iterator[list[Completion]]) -> None:
        """Write the texts of each line in the order of the lines, and progress to stderr. Raise UserError where the
        file cannot be written; it keeps all complete lines. Where nobody reads stdout on, end."""
        progress, done, tokens = ProgressLines(), 0, 0

        def state() -> str:
            count = f"{done}/{counted(len(lines), 'prompt')}, {counted(tokens, 'token')}"
            return f"{count} in {duration(progress.seconds)}, {tokens / progress.seconds:,.0f} tokens/s"

        with self._open() as file:
            for line, completions in zip(lines, results, strict=True):
                for choice, found in enumerate(completions):
                    text = f"{_result(line, choice, found)}\n"
                    if file is not None:
                        self._append(file, text)
                    elif not self._print(text):
                        return
                done += 1
                tokens += sum(len(found.ids) for found in completions)
                progress.say_at_times(state)
        progress.say(state(), f" -> {self._path}\n" if self._path else "\n")

    def _open(self) -> AbstractContextManager[FileIO | None]:
        """Open the new file, without a buffer; no path: stdout, which is None."""
        if self._path is None:
            return nullcontext()
        try:
            return FileIO(self._path, "x")
        except OSError as error:
            raise self._refusal(error) from None

    def _append(self, file: FileIO, text: str) -> None:
        end, rest = file.tell(), memoryview(text.encode())
        try:
            while rest:  # a write may stop before the end, as where a disk becomes full
                rest = rest[file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                file.truncate(end)
            raise self._refusal(error) from None

    def _print(self, text: str) -> bool:
        """Write to stdout; return whether anybody reads it."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:  # as after `| head`
            return False
        except OSError as error:
            raise self._refusal(error) from None
        return True

    def _refusal(self, error: OSError) -> UserError:
        advice = remedy(error, "check the disk")
        return UserError(
            f"{self._path or 'stdout'} cannot be written ({error.strerror or error}); {advice}, or give another path"
        )


def _result(line: Line, choice: int, found: Completion) -> str:
    """Return a text as JSON."""
    result = {"line": line.number, "id": line.id, "choice": choice, "prompt": line.prompt, "text": found.text}
    result |= {"finish_reason": found.finish_reason, "tokens": len(found.ids)}
    if line.id is None:
        del result["id"]
    if found.score is not None:  # of a beam; minus infinity, which JSON does not have, where rules ban every token
        result["score"] = found.score if math.isfinite(found.score) else None
    text = json.dumps(result, ensure_ascii=False)
    # Halves of surrogate pairs, which an id may have, can only be escaped.
    return text if _is_unicode(text) else json.dumps(result)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

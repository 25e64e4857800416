"""Answers and rewards of a step that makes its own samples: kept, since the code that rewards may not repeat itself,
and given back where such a step is computed again.

Rank 0 writes them before their step is taken, so that what a killed run leaves has those of every step that it did.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtgpt.util.errors import UserError
from dtgpt.util.storage import open_regular, parse_json

FILE = "answers.jsonl"


class Answers:
    """The answers of the steps of a run, by what the objective draws."""

    def __init__(self, rollouts: Any, rank: int):
        self.digests: dict[int, str] = {}  # by step, until their lines are made
        self.folder: Path | None = None  # of the run, once it is there
        self._draw, self._rank, self._rollouts = rollouts.draw, rank, rollouts
        self._kept: dict[int, list[Any]] | None = None
        rollouts.draw = self.draw

    def draw(self, step: int) -> list[Any]:
        """Return the answers of the step after `step`, drawn, or those that were kept."""
        if self._kept is None:
            found = self._draw(step)
        elif step + 1 in self._kept:
            from dtgpt.posttrain.grpo.answers import Answer

            found = [Answer(*values) for values in self._kept[step + 1]]
        else:
            raise UserError(f"{FILE} has no answers of step {step + 1}; choose another step")
        values = [list(answer) for answer in found]
        self.digests[step + 1] = digest_of(values)
        if self._rank == 0 and self._kept is None and self.folder is not None:
            with (self.folder / FILE).open("a") as file:
                file.write(json.dumps({"step": step + 1, "answers": values}) + "\n")
        return found

    def give_back(self, folder: Path) -> None:
        """Draw nothing from now on: give the answers that a run has kept."""
        self._kept = {line["step"]: line["answers"] for line in read_answers(folder)}
        self._rollouts.check_prompt = lambda step: None  # of the recipe's own code


def with_kept_answers(recipe: Any) -> Any:
    """Return a recipe whose own code, which asks and rewards, is not here and not needed."""
    from dtgpt.posttrain.grpo.config import GrpoConfig

    class Kept(GrpoConfig):
        def prompt(self, index: int) -> str:
            raise UserError(
                f"prompt {index} is not among the answers that were kept; give the recipe file: --recipe FILE"
            )

        def reward(self, index: int, answer: str) -> float:
            raise UserError(f"an answer to prompt {index} has no reward; give the recipe file: --recipe FILE")

    return replace(recipe, grpo=Kept())


def digest_of(answers: list[Any]) -> str:
    return hashlib.sha256(json.dumps(answers).encode()).hexdigest()


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of kept answers, but for one that a killed process left half written; none without a file."""
    if not (folder / FILE).is_file():
        return []
    found = []
    with open_regular(folder / FILE) as file:
        for line in file:
            try:
                found.append(parse_json(line))
            except ValueError:
                break
    return found


def cut_answers(folder: Path, step: int) -> None:
    """Drop the answers of later steps than `step`, from which a run goes on."""
    if (folder / FILE).is_file():
        kept = [line for line in read_answers(folder) if line["step"] <= step]
        (folder / FILE).write_text("".join(json.dumps(line) + "\n" for line in kept))


def keep_answers(objective: Any, rank: int) -> Answers | None:
    """Let the answers of an objective that draws some be kept, and return them."""
    rollouts = getattr(objective, "rollouts", None)
    return None if rollouts is None else Answers(rollouts, rank)

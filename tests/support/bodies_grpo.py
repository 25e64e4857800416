"""What ranks do in tests/posttrain/test_rollouts.py."""

import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import torch

from dtgpt.config.recipe import Recipe
from dtgpt.inference.engine import Engine
from dtgpt.optim.update import Update
from dtgpt.posttrain.grpo.config import GrpoConfig
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer


@dataclass(frozen=True, kw_only=True)
class Low(GrpoConfig):
    """Short texts as prompts; the reward is about the fraction of characters below 100, and differs in most groups."""

    def prompt(self, index: int) -> str:
        return "ab"[: 1 + index % 2] + str(index)

    def reward(self, index: int, answer: str) -> float:
        return sum(ord(character) < 100 for character in answer) / (1 + len(answer))


@dataclass(frozen=True, kw_only=True)
class Fatal(Low):
    """A reward that ends the process at a prompt of the fourth step."""

    def reward(self, index: int, answer: str) -> float:
        if index == 7:
            die()
        return super().reward(index, answer)


@dataclass(frozen=True, kw_only=True)
class Slow(Low):
    """A reward that takes long for one prompt."""

    def reward(self, index: int, answer: str) -> float:
        time.sleep(1.5 * (index == 1))
        return super().reward(index, answer)


def return_in_a_fork() -> None:
    """Return in a forked process, too, in which training must not go on."""
    if child := os.fork():
        raise RuntimeError(f"the child ended with {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


def raised(error: BaseException) -> None:
    raise error


ENDS = {
    "exits at once": lambda: os._exit(0),
    "generator": lambda: raised(GeneratorExit("over")),
    "interrupt": lambda: raised(KeyboardInterrupt()),
    "hangs": lambda: time.sleep(60),
    "forks": return_in_a_fork,
}


@dataclass(frozen=True, kw_only=True)
class Failing(Low):
    """A reward or a prompt that is wrong from a prompt on."""

    how: str = "raises"
    at: int = 7

    def prompt(self, index: int) -> str:
        wrong = {"long": "a" * 12, "prompt of bytes": b"a", "chat without roles": [{"content": "a"}]}
        return wrong[self.how] if index == self.at and self.how in wrong else super().prompt(index)

    def reward(self, index: int, answer: str) -> float:
        if index == self.at and self.how == "raises":
            raise KeyError("no answer known")
        if index == self.at and self.how == "memory":
            raise MemoryError("too many")
        if index == self.at and self.how == "exits":
            sys.exit(0)
        if index == self.at and self.how in ENDS:
            ENDS[self.how]()
        wrong = {"nan": float("nan"), "none": None, "large": 1e39, "array": torch.ones(2), "integer": 10**400}
        return wrong[self.how] if index == self.at and self.how in wrong else super().reward(index, answer)


def die(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(recipe: Recipe, moment: str) -> None:
    """Train until the process kills itself in the fourth step: while the engine draws, in the reward, or in the
    update."""
    plain, calls = {"rollout": Engine.step, "update": Update.apply}.get(moment), []

    def draw(engine):
        """Die in the second round of the prompts of the fourth step."""
        calls.extend(active.job.prompt_index for active in engine._active.values())
        return die() if calls.count(7) == 2 else plain(engine)

    def apply(*arguments):
        calls.append(0)
        return die() if len(calls) == 4 else plain(*arguments)

    patches = {"rollout": (Engine, "step", draw), "update": (Update, "apply", apply)}
    with mock.patch.object(*patches[moment]) if moment in patches else nullcontext():
        train(recipe)


def train_answers(recipe: Recipe, steps: int) -> tuple[list[float], list[list[int]], list[float]]:
    """Return the losses of steps, the ids of all answers, and the norms of gradients."""
    with open_trainer(recipe) as trainer:
        ids, draw = [], trainer.objective.rollouts.draw

        def kept(step):
            found = draw(step)
            ids.extend(answer.ids for answer in found)
            return found

        with mock.patch.object(trainer.objective.rollouts, "draw", kept):
            results = [trainer.train_step() for _ in range(steps)]
        return [trainer.mean_loss(result) for result in results], ids, [result.norm.item() for result in results]


def failure_of(recipe: Recipe) -> tuple[str, str]:
    """Return the class of the error with which a run ends on this rank, or of its cause, and its text."""
    try:
        train(recipe)
    except Exception as error:
        return type(error.__cause__ or error).__name__, str(error)
    return "", ""

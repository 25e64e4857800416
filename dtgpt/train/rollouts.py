"""Answers of the model that is trained, their rewards, and the batches that are made of them (GRPO; Shao et al. 2024;
without its biases, Liu et al. 2025).

The engine draws with the trainer's own weights. A draw is a function of (seed, number of the prompt, number of the
answer, weights): a run that goes on has the answers of one that was not stopped. Rank 0 leads the engine and computes
rewards; every rank gets the answers, and takes its part of them.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.grpo import GrpoConfig
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.broadcast import broadcast_json
from dtgpt.inference.engine import Engine
from dtgpt.inference.finite import NotFinite
from dtgpt.inference.memory import MOST_SLOTS
from dtgpt.inference.options import Options
from dtgpt.inference.prompts import encode, special_ids
from dtgpt.inference.session import PromptJob, Session
from dtgpt.models.batch import Batch
from dtgpt.models.decoder import Decoder
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.errors import UserError

STD_EPS = 1e-4  # added to the standard deviation of a group, as in TRL


class RolloutsFailed(UserError):
    """Answers or rewards could not be made. `cause`: the error of the reward function, on rank 0."""

    cause: BaseException | None = None


class Answer(NamedTuple):
    """An answer, as JSON keeps it."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]  # with the token that ends it
    text: str
    entropy: float  # sum of the negative log-probabilities of `ids`
    ended: bool  # not by the number of tokens
    reward: float


@dataclass(kw_only=True)
class Rollouts:
    """The answers of each step. `metrics`: of the last step."""

    grpo: GrpoConfig
    stages: list[Decoder]
    mesh: Mesh
    settings: Settings
    tokenizer: Tokenizer
    seed: int

    def __post_init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.best_and_worst: tuple[Answer, Answer] | None = None

    def batch(self, step: int) -> Batch:
        """Return this rank's part of the batch of a step, `[B, T]`, whose loss weights are advantages. Raises
        RolloutsFailed on every rank."""
        begin = time.perf_counter()
        answers = self.draw(step)
        seconds = time.perf_counter() - begin
        advantages = advantages_of(torch.tensor([a.reward for a in answers], dtype=torch.float64), self.grpo)
        self._measure(answers, seconds)
        length, count = self.settings.seq_length, sum(len(answer.ids) for answer in answers)
        own = len(answers) // self.mesh.plan.dp
        part = slice(self.mesh.place.dp * own, (self.mesh.place.dp + 1) * own)
        tokens = torch.zeros(own, length + 1, dtype=torch.int64)
        weights = torch.zeros(own, length)
        for row, (answer, advantage) in enumerate(zip(answers[part], advantages[part].tolist(), strict=True)):
            ids, first = [*answer.prompt_ids, *answer.ids], len(answer.prompt_ids)
            tokens[row, : len(ids)] = torch.tensor(ids)
            divisor = {"dr_grpo": self.grpo.max_new_tokens, "grpo": len(answer.ids), "dapo": count / len(answers)}
            weights[row, first - 1 : len(ids) - 1] = advantage * length / divisor[self.grpo.loss]
        device = self.mesh.device
        tokens = tokens.to(device)
        return Batch(tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), loss_weights=weights.to(device))

    @torch.no_grad()
    def draw(self, step: int) -> list[Answer]:
        """Return the answers of a step with their rewards, group by group, the same on every rank."""
        count = self.settings.global_batch_size
        prompts = range(step * (count // self.grpo.group), (step + 1) * (count // self.grpo.group))
        config = self.settings.model
        vocab_size = min(self.tokenizer.vocab_size, config.vocab_size)
        with torch.compiler.set_stance("force_eager"):  # single tokens would be compiled anew
            slots = max(min(count, MOST_SLOTS), self.grpo.group)
            engine = Engine(self.stages, self.mesh, config, self.settings.dtype, slots=slots, vocab_size=vocab_size)
            if self.mesh.rank:
                engine.follow()
                return self._received(broadcast_json(self.mesh))
            session, cause = Session(engine, self.tokenizer, special_ids(self.tokenizer)), None
            try:
                found: dict[str, Any] = {"answers": self._answers(session, prompts)}
            except NotFinite as error:
                found = {"failed": f"answers cannot be drawn ({error}); go on from an earlier checkpoint, with a lower "
                         "optimizer.lr"}  # fmt: skip
            except UserError as error:
                found = {"failed": str(error)}
            except Exception as error:
                found, cause = {"failed": f"the reward function failed: {type(error).__name__}: {error}"}, error
            session.close()
            return self._received(broadcast_json(self.mesh, found), cause)

    def _received(self, found: dict[str, Any], cause: BaseException | None = None) -> list[Answer]:
        if "failed" in found:
            failure = RolloutsFailed(found["failed"])
            failure.cause = cause
            raise failure
        return [Answer(*values) for values in found["answers"]]

    def _answers(self, session: Session, prompts: range) -> list[Answer]:
        """Return the answers to prompts, on rank 0."""
        grpo = self.grpo
        texts = [grpo.prompt(index) for index in prompts]
        stops = (grpo.stop,) if grpo.stop else ()
        options = Options(
            max_new_tokens=grpo.max_new_tokens, num_return_sequences=grpo.group, seed=self.seed, stop_strings=stops
        )
        all_ids = [self._encoded(text) for text in texts]
        jobs = [PromptJob(ids, options, index) for ids, index in zip(all_ids, prompts, strict=True)]
        answers = []
        for index, text, ids, completions in zip(prompts, texts, all_ids, session.run(jobs), strict=True):
            for found in completions:
                reward = self._reward(index, found.text or "")
                ended = found.finish_reason == "stop"
                entropy = -math.fsum(found.logprobs)
                answers.append(Answer(text, ids, found.ids, found.text or "", entropy, ended, reward))
        return answers

    def _encoded(self, text: str) -> list[int]:
        ids, new = encode(text, self.tokenizer, self.settings.model), self.grpo.max_new_tokens
        if len(ids) + new > self.settings.seq_length:
            raise UserError(
                f"a prompt of {len(ids)} tokens and grpo.max_new_tokens={new} are longer than a sample of "
                f"{self.settings.seq_length}; use shorter prompts, a smaller --grpo.max_new_tokens or a larger "
                "--seq_length"
            )
        return ids

    def _reward(self, index: int, text: str) -> float:
        reward = self.grpo.reward(index, text)
        if not math.isfinite(reward):
            raise UserError(f"the reward of answer {text[:80]!r} to prompt {index} is {reward}; return a finite number")
        return float(reward)

    def _measure(self, answers: Sequence[Answer], seconds: float) -> None:
        rewards = torch.tensor([answer.reward for answer in answers], dtype=torch.float64)
        groups, count = rewards.view(-1, self.grpo.group), sum(len(answer.ids) for answer in answers)
        self.best_and_worst = answers[int(rewards.argmax())], answers[int(rewards.argmin())]
        self.metrics = {
            "reward": rewards.mean().item(),
            "answer_tokens": count / len(answers),
            "answers_ended": sum(answer.ended for answer in answers) / len(answers),
            "entropy": math.fsum(answer.entropy for answer in answers) / count,
            "groups_without_signal": (groups == groups[:, :1]).all(1).double().mean().item(),
            "rollout_tokens_per_second": count / seconds,
            "rollout_seconds": seconds,
        }


def advantages_of(rewards: Tensor, grpo: GrpoConfig) -> Tensor:
    """Return the advantages of answers from their rewards, both fp64 `[B]`, group by group."""
    groups = rewards.view(-1, grpo.group)
    relative = groups - groups.mean(1, keepdim=True)
    if grpo.loss != "dr_grpo":
        relative = relative / (groups.std(1, keepdim=True) + STD_EPS)
    return relative.flatten()


def describe(answer: Answer) -> str:
    """Return an answer as a text for the run folder."""
    return f"reward {answer.reward:g}\n{answer.prompt}{answer.text}\n"

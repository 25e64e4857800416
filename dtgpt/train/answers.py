"""Answers with their rewards, and what GRPO makes of them (Shao et al. 2024; without its biases, Liu et al. 2025)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.config.grpo import GrpoConfig

STD_EPS = 1e-4  # added to the standard deviation of a group, as in TRL


class Answer(NamedTuple):
    """An answer, as JSON keeps it."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]  # with the token that ends it, at least one
    logprobs: list[float]  # of each of `ids`, as the engine drew it
    text: str
    ended: bool  # not by the number of tokens
    reward: float


def weighted_rows(answers: Sequence[Answer], part: slice, grpo: GrpoConfig, length: int) -> tuple[Tensor, Tensor]:
    """Return tokens int64 `[B, T + 1]` and weights fp32 `[B, T]` of a part of all answers of a step, T = `length`: the
    mean over its tokens of -log p times weight is its part of the loss."""
    advantages = advantages_of(torch.tensor([answer.reward for answer in answers], dtype=torch.float64), grpo)
    mean_length = sum(len(answer.ids) for answer in answers) / len(answers)
    own = answers[part]
    tokens = torch.zeros(len(own), length + 1, dtype=torch.int64)
    weights = torch.zeros(len(own), length)
    for row, (answer, advantage) in enumerate(zip(own, advantages[part].tolist(), strict=True)):
        ids, first = [*answer.prompt_ids, *answer.ids], len(answer.prompt_ids)
        tokens[row, : len(ids)] = torch.tensor(ids)
        divisor = {"dr_grpo": grpo.max_new_tokens, "grpo": len(answer.ids), "dapo": mean_length}
        weights[row, first - 1 : len(ids) - 1] = advantage * length / divisor[grpo.loss]
    return tokens, weights


def advantages_of(rewards: Tensor, grpo: GrpoConfig) -> Tensor:
    """Return the advantages of answers from their rewards, both fp64 `[B]`, group by group."""
    groups = rewards.view(-1, grpo.group)
    relative = groups - groups.mean(1, keepdim=True)
    if grpo.loss != "dr_grpo":
        relative = relative / (groups.std(1, keepdim=True) + STD_EPS)
    return relative.flatten()


def figures_of(answers: Sequence[Answer], group: int) -> dict[str, float]:
    """Return what a record says of the answers of a step, in groups of so many."""
    rewards = torch.tensor([answer.reward for answer in answers], dtype=torch.float64)
    groups, count = rewards.view(-1, group), sum(len(answer.ids) for answer in answers)
    return {
        "reward": rewards.mean().item(),
        "answer_tokens": count / len(answers),
        "answers_ended": sum(answer.ended for answer in answers) / len(answers),
        "entropy": -math.fsum(logprob for answer in answers for logprob in answer.logprobs) / count,
        "groups_without_signal": (groups == groups[:, :1]).all(1).double().mean().item(),
    }


def describe(answer: Answer) -> str:
    """Return an answer as a text for the run folder."""
    return f"reward {answer.reward:g}\n{answer.prompt}{answer.text}\n"

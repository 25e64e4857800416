"""Answers with their rewards, and what GRPO makes of them (Shao et al. 2024; without its biases, Liu et al. 2025)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.models.batch import Batch
from dtgpt.posttrain.grpo.config import GrpoConfig, shared_length

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


def weighted_rows(answers: Sequence[Answer], part: slice, grpo: GrpoConfig, length: int) -> Batch:
    """Return a part of all answers of a step as samples of `length` tokens T. The mean over tokens of -log p times
    weight is its part of the loss."""
    factors, own = weighed(answers, grpo, length)[part], answers[part]
    tokens, weights = torch.zeros(len(own), length + 1, dtype=torch.int64), torch.zeros(len(own), length)
    for row, (answer, factor) in enumerate(zip(own, factors, strict=True)):
        ids, first = [*answer.prompt_ids, *answer.ids], len(answer.prompt_ids)
        tokens[row, : len(ids)] = torch.tensor(ids)
        weights[row, first - 1 : len(ids) - 1] = factor
    return Batch(tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), loss_weights=weights)


def shared_rows(answers: Sequence[Answer], part: slice, grpo: GrpoConfig, length: int) -> Batch:
    """Return what `weighted_rows` does, a row for each group: the prompt without its last token, once, and then that
    token and an answer, for each answer. Each place has one target so."""
    group, each = grpo.group, grpo.max_new_tokens + 1
    size, shared = shared_length(grpo, length), length - each
    factors = weighed(answers, grpo, length)[part]
    own, count = answers[part], len(factors) // group
    tokens, targets = torch.zeros(2, count, size, dtype=torch.int64)
    places, weights = torch.arange(size).repeat(count, 1), torch.zeros(count, size)
    copies = torch.empty(count, group, length, dtype=torch.int64)
    step, first_of = torch.arange(length), shared + each * torch.arange(group)
    for row in range(count):
        prompt = own[row * group].prompt_ids
        before = len(prompt) - 1
        tokens[row, :before] = torch.tensor(prompt[:-1], dtype=torch.int64)
        after = first_of[:, None] + (step - before).clamp(0, each - 1)
        copies[row] = torch.where(step < before, step, after)
        for index in range(group):
            answer, first = own[row * group + index], shared + each * index
            end = first + len(answer.ids)
            ids = torch.tensor([prompt[-1], *answer.ids])
            tokens[row, first : end + 1], targets[row, first:end] = ids, ids[1:]
            weights[row, first:end] = factors[row * group + index] * size / (group * length)  # of a mean over places
            places[row, first : first + each] = before + torch.arange(each)
    return Batch(tokens, targets=targets, positions=places, loss_weights=weights, copies=copies)


def weighed(answers: Sequence[Answer], grpo: GrpoConfig, length: int) -> list[float]:
    """Return the factor of -log p of each token of an answer, whose mean over all tokens of the samples, of `length`
    each, is the loss."""
    advantages = advantages_of(torch.tensor([answer.reward for answer in answers], dtype=torch.float64), grpo)
    mean_length = sum(len(answer.ids) for answer in answers) / len(answers)
    found = []
    for answer, advantage in zip(answers, advantages.tolist(), strict=True):
        divisor = {"dr_grpo": grpo.max_new_tokens, "grpo": len(answer.ids), "dapo": mean_length}
        found.append(advantage * length / divisor[grpo.loss])
    return found


def advantages_of(rewards: Tensor, grpo: GrpoConfig) -> Tensor:
    """Return the advantages of answers from their rewards, both fp64 `[B]`, group by group."""
    groups = rewards.view(-1, grpo.group)
    # Exactly 0 in a group of equal rewards, whose mean may be another number than they.
    relative = torch.where((groups == groups[:, :1]).all(1, keepdim=True), 0.0, groups - groups.mean(1, keepdim=True))
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

"""What the tests of inference do as the ranks of a plan: importable by name."""

import torch
from torch import Tensor

import dtgpt
from dtgpt.config.recipe import Recipe
from dtgpt.train.startup import open_trainer
from dtgpt.util.errors import UserError
from tests.support.bodies_checkpoint import gather


def load(path, plan, **settings):
    return dtgpt.load(path, plan=plan, **{"device": "cpu", **settings})


def sentence(action) -> str:
    """What is said where it is refused; empty where it works."""
    try:
        action()
    except UserError as error:
        return str(error)
    return ""


def logits_and_samples(path, plan, inputs: list[Tensor], asked: list[dict]) -> tuple[list[Tensor], list[list[int]]]:
    """Logits of each input, and the ids of each `generate(**asked)`."""
    model = load(path, plan)
    return [model(tokens) for tokens in inputs], [model.generate(**words) for words in asked]


def logits(path, plan, tokens: Tensor, **settings) -> Tensor:
    return load(path, plan, **settings)(tokens)


def held(path, plan, precision, tokens: Tensor) -> tuple[Tensor, set[torch.dtype], bool, int]:
    """Logits, dtypes of the weights, whether there are masters beside them, and how many elements this rank holds."""
    model = load(path, plan, precision=precision)
    shards = list(model._engine.shards)
    dtypes = {dtype for s in shards for dtype in (s.parameter.dtype, s.local.dtype)}
    return model(tokens), dtypes, any(s.low_precision is not None for s in shards), sum(s.local.numel() for s in shards)


def refusal(path, plan) -> str:
    return sentence(lambda: load(path, plan))


def refused_inputs(path, plan, inputs: list[Tensor], asked: list[dict]) -> list[str]:
    model = load(path, plan)
    said = [sentence(lambda tokens=tokens: model(tokens)) for tokens in inputs]
    return said + [sentence(lambda words=words: model.generate(**words)) for words in asked]


def weights_at_the_start(recipe: Recipe) -> dict[str, Tensor]:
    """Whole weights and moments of a run before its first step, on rank 0."""
    with open_trainer(recipe) as run:
        return gather(run)

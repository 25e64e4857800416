"""What the tests of inference do as the ranks of a plan: importable by name."""

import torch
from torch import Tensor

import dtgpt
from dtgpt.config.recipe import Recipe
from dtgpt.inference.model import Need
from dtgpt.serve.weights import has_finite_weights
from dtgpt.train.setup import open_trainer
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


def logits_and_samples(path, plan, inputs: list[Tensor], asked: list[dict]) -> tuple[list[Tensor], list, list, int]:
    """Logits of each input, what each `generate(**asked)` returns, scores, and how many elements this rank holds."""
    model = load(path, plan)
    logits, samples = [model(tokens) for tokens in inputs], [model.generate(**words) for words in asked]
    assert torch.equal(model(inputs[1]), logits[1])  # the cache is out of the way
    parameters = {p for stage in model.stages for p in stage.parameters()}
    assert all(type(p) is torch.nn.Parameter for p in parameters)
    return logits, samples, model.score(inputs[1].tolist()), sum(p.numel() for p in parameters)


def streamed(path, plan, prompt, options: dict, most: int) -> tuple[list, list]:
    """The pieces of a stream, and of one that rank 0 leaves after `most` pieces."""
    model = load(path, plan)
    whole = list(model.generate(prompt, stream=True, **options))
    pieces = model.generate(prompt, stream=True, **options)
    part = [next(pieces) for _ in range(most)] if model.mesh.rank == 0 else list(pieces)
    pieces.close()
    assert model.generate(prompt, **options) == whole
    other = model.generate(prompt, stream=True, **options)
    assert next(other) == whole[0]  # a stream that no rank reads further
    assert model.generate(prompt, **options) == whole
    return whole, part


def after_a_failure(path, plan, prompt) -> list[str]:
    """The sentences of a call in whose midst rank 0 fails, and of the next call."""
    model = load(path, plan)

    def work(session, _) -> None:
        raise UserError("the disk is full")

    calls = lambda: model.run(lambda: (Need(1, 1), None), work), lambda: model.generate(prompt)
    return [sentence(call) for call in calls]


def not_finite(path, plan) -> list:
    """The sentences of three calls that meet logits which are not finite at the sixth position, and the number of
    tokens of one that does not."""
    model = load(path, plan)
    calls = (
        lambda: model.generate([1, 2], max_new_tokens=9), lambda: model.score([1] * 9),
        lambda: list(model.generate([1, 2], max_new_tokens=9, stream=True)),
    )  # fmt: skip
    return [*map(sentence, calls), len(model.generate([1, 2], max_new_tokens=3))]


def finite_weights(paths, plan) -> list[bool]:
    """Whether this rank's weights are finite, of each model."""
    return [has_finite_weights(m.stages, m.mesh, m.config) for m in (load(path, plan) for path in paths)]


def logits(paths: list, plan, tokens: Tensor, **settings) -> list[Tensor]:
    """Of each model."""
    return [load(path, plan, **settings)(tokens) for path in paths]


def held(path, plan, tokens: Tensor) -> tuple[Tensor, set[torch.dtype]]:
    """Logits in bf16 and dtypes of the weights."""
    model = load(path, plan, precision="bf16")
    return model(tokens), {p.dtype for stage in model.stages for p in stage.parameters()}


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

"""What is generated and what training makes of it, in tests/inference/test_exact.py and on its ranks: they do not load
what that file compares with, which takes longer than what they do."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.inference.engine import Engine
from dtgpt.inference.options import Options
from dtgpt.models.batch import Batch
from dtgpt.models.decoder import Decoder
from dtgpt.models.moe.config import ExpertsConfig
from tests.support.bodies_engine import inference_stages, poison, training_stages
from tests.support.bodies_exact import all_by_rows, losses_kept
from tests.support.requests import make_request

FEW_LENGTHS = (1, 3, 8, 15)  # of prompts, where a cache has 16 places


def trained(model: Decoder, tokens: Tensor) -> Tensor:
    """Return the log-probabilities `[B, T - 1]` of tokens `[B, T]` after the first, by a forward pass of training."""
    missing = 1 - tokens.shape[1] % 2  # so that two ranks have as many tokens each
    tokens = F.pad(tokens, (0, missing))
    with losses_kept() as kept:
        model(*Batch(tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous()))
    return -kept[0].view(len(tokens), -1)[:, : tokens.shape[1] - 1 - missing]


def generated(engine: Engine, lengths: Sequence[int]) -> list[tuple[list[int], list[float], int]]:
    """Return (ids, log-probabilities, first position of these) of sequences that fill the cache, drawn together: half
    of the prompts are scored, in cuts or whole."""
    config = engine.config
    poison(engine._rank_step.cache)
    generator, found = torch.Generator().manual_seed(0), {}
    for index, length in enumerate(lengths):
        ids = torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()
        sampling = Options(
            max_new_tokens=config.seq_length - length, temperature=(0.0, 1.0, 0.7)[index % 3],
            top_p=0.9 if index % 4 == 3 else 1.0, ends=False, seed=index,
        )  # fmt: skip
        request = make_request(
            ids=ids, sampling=sampling, prompt_index=index, score_prompt=index % 2 == 1, alternatives=2 * (index % 2)
        )
        found[engine.submit(request)] = (list(ids), [], length)
    scored = {}
    while engine.busy:
        for event in engine.step():
            if event.prompt is not None:
                scored[event.job] = event.prompt.logprobs
            found[event.job][0].extend(event.ids)
            found[event.job][1].extend(event.logprobs)
            for token, logprob, top in zip(event.ids, event.logprobs, event.alternatives, strict=False):
                assert dict(top).get(token, logprob) == logprob  # the same token has the same bits among these
    engine.release()
    return [
        (ids, scored.get(handle, []) + logprobs, 1 if handle in scored else first)
        for handle, (ids, logprobs, first) in found.items()
    ]


def check_trained(model: Decoder, drawn: list[tuple[list[int], list[float], int]]) -> None:
    device = next(model.parameters()).device
    for rows in {min(rows, len(drawn)) for rows in (1, 5, 12)}:  # of a micro-batch: few and many rows of products
        for first in range(0, len(drawn), rows):
            some = drawn[first : first + rows]
            found = trained(model, torch.tensor([ids for ids, _, _ in some], device=device)).cpu()
            for row, (_, logprobs, begin) in enumerate(some):
                assert torch.equal(found[row, begin - 1 :], torch.tensor(logprobs)), (rows, first + row)
    short = drawn[0][0][: min(78, len(drawn[0][0]) // 2)]  # fewer positions than a sample of training
    found = trained(model, torch.tensor([short], device=device))[0].cpu()
    assert torch.equal(found, torch.tensor(drawn[0][1][: len(short) - 1]))


def check_pieces(config: ExpertsConfig, plan: str) -> list[tuple[list[int], list[float], int]]:
    """Check what ranks generate as they do after a training with pieces, and return it."""
    choices: dict[str, Any] = {"attention": "explicit", "reduce": "exact_tp"}
    stages, drawing = inference_stages(config, plan.removesuffix("_sp"), **choices)
    (stage,), mesh = training_stages(config, plan, **choices)
    with all_by_rows():
        engine = Engine(stages, drawing, config, torch.float32, 3, graphs=False, exact=True)
        drawn = mesh.gather(generated(engine, FEW_LENGTHS) if mesh.rank == 0 else engine.follow())[0]
        check_trained(stage, drawn)
    return drawn

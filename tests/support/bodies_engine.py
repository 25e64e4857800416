"""What ranks do in the tests of the inference engine."""

import gc

import torch
import torch.distributed as dist
from torch import Tensor

from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.inference.cache import Cache
from dtgpt.inference.commands import read
from dtgpt.inference.engine import Engine
from dtgpt.inference.options import Options
from dtgpt.inference.request import PromptJob, SequenceUpdate
from dtgpt.inference.step import Step
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel import inference
from dtgpt.parallel.build import build_stages
from dtgpt.parallel.mesh import Mesh
from tests.support.engines import CPU, drain
from tests.support.requests import make_request

KEY = root_key(5)


def resolve(plan: str, world: int) -> ResolvedPlan:
    return parse_plan(plan, {}).for_world(world)


def settings_of(config: ModelConfig, plan: str, **choices) -> Settings:
    resolved = resolve(plan, dist.get_world_size() if dist.is_initialized() else 1)
    batch = resolved.dp * 2 * resolved.pp
    return Settings(
        model=config, plan=resolved, device=CPU, dtype=torch.float32, seq_length=config.seq_length, micro_batch_size=1,
        global_batch_size=batch,
        **choices,
    )  # fmt: skip


def inference_stages(config: ModelConfig, plan: str, **choices) -> tuple[list[Decoder], Mesh]:
    """Stages as `dtgpt.load` makes them."""
    settings = settings_of(config, plan, **choices)
    mesh = Mesh(settings.plan, CPU)
    return inference.inference_stages(settings, mesh, lambda shards: shards.initialize(config, KEY)), mesh


def training_stages(config: ModelConfig, plan: str, **choices) -> tuple[list[Decoder], Mesh]:
    """Stages as training makes them."""
    settings = settings_of(config, plan, **choices)
    mesh = Mesh(settings.plan, CPU)
    return build_stages(settings, mesh, KEY)[0], mesh


def poison(cache: Cache) -> None:
    """Fill all of a cache with NaN, which no result may show."""
    for layer in cache.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)


def serve(engine: Engine, requests: list[PromptJob]) -> list[SequenceUpdate]:
    """Return all events of requests that arrive at once, on rank 0."""
    poison(engine._rank_step.cache)
    if engine.mesh.rank > 0:
        engine.follow()
        return []
    for request in requests:
        engine.submit(request)
    events = drain(engine)
    engine.release()
    return events


def generate(
    config: ModelConfig, plan: str, requests: list[PromptJob], slots: int, training: bool
) -> list[SequenceUpdate]:
    stages, mesh = (training_stages if training else inference_stages)(config, plan)
    return serve(Engine(stages, mesh, config, torch.float32, slots), requests)


def bytes_of_slots(config: ModelConfig, plan: str, slots: int = 3) -> int:
    """Return what this rank allocates for a slot."""
    stages, mesh = inference_stages(config, plan)
    runner = Step(stages, mesh, config, torch.float32, slots)
    kept = [kept for layer in runner.cache.layers for kept in (layer.keys, layer.values)]
    kept += [value for value in vars(runner.cache.state).values() if isinstance(value, Tensor)]
    assert all(len(tensor) == slots + 1 for tensor in kept)
    return sum(tensor[0].nbytes for tensor in kept)


def texts(events: list[SequenceUpdate]) -> dict[tuple[int, int], list[int]]:
    """Return the new tokens of each (job, choice)."""
    found: dict[tuple[int, int], list[int]] = {}
    for event in events:
        found.setdefault(event[:2], []).extend(event.ids)
    return found


def whole_logits(model: Decoder, ids: list[int]) -> Tensor:
    """Return the logits `[T, V]` of a sequence, computed anew."""
    with torch.no_grad():
        return model(torch.tensor([ids]))[0, :, : model.config.vocab_size]


def failing(config: ModelConfig, plan: str, rank: int) -> str:
    """Return how this rank ends where one of the ranks fails in its second decode step."""
    said = _serve_with_failure(config, plan, rank)
    dist.destroy_process_group()  # as at the end of a process: all connections close
    gc.collect()
    return said


def _serve_with_failure(config: ModelConfig, plan: str, rank: int) -> str:
    stages, mesh = inference_stages(config, plan)
    engine = Engine(stages, mesh, config, torch.float32, 1)
    decode, calls = engine._rank_step.decode, []

    def fail(*arguments):
        calls.append(arguments)
        if mesh.rank == rank and len(calls) == 2:
            raise ValueError("the device is on fire")
        return decode(*arguments)

    engine._rank_step.decode = fail  # type: ignore[method-assign]
    try:
        serve(engine, [make_request(ids=[5, 6], sampling=Options(max_new_tokens=8))])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def read_prompts(config: ModelConfig, plan: str, prompts: list[list[int]], batch_tokens: int) -> list[Tensor]:
    """Return this rank's keys and values `[layers, 2, N_kv, P, D]` of each prompt, read by the commands of rank 0: in
    one pass, or one after the other where batch_tokens is 0."""
    from tests.support.eager_graphs import with_prompts_together

    stages, mesh = inference_stages(config, plan)
    engine = Engine(stages, mesh, config, torch.float32, len(prompts))
    with_prompts_together(engine, batch_tokens)
    poison(engine._rank_step.cache)
    if mesh.rank > 0:
        engine.follow()
    else:
        if batch_tokens:
            engine.command(read, range(len(prompts)), prompts, 0)
        else:
            for slot, ids in enumerate(prompts):
                engine.command(read, [slot], [ids], 0)
        engine.release()
    return [kept_of(engine._rank_step.cache, slot)[:, :, :, : len(ids)] for slot, ids in enumerate(prompts)]


def kept_of(cache: Cache, slot: int) -> Tensor:
    """Return a copy of the keys and values `[layers, 2, N_kv, P, D]` of a slot."""
    return torch.stack([torch.stack([layer.keys[slot], layer.values[slot]]) for layer in cache.layers])


def count_batches(config: ModelConfig, plan: str, requests: list[PromptJob]) -> tuple[list[SequenceUpdate], list[int]]:
    """Return the events of requests that arrive at once, and the number of prompts of each pass over several."""
    from tests.support.eager_graphs import with_prompts_together

    stages, mesh = inference_stages(config, plan)
    engine = Engine(stages, mesh, config, torch.float32, len(requests))
    with_prompts_together(engine, 256)
    read, counts = engine._rank_step.read, []

    def counted(slots, prompts, first):
        counts.extend([len(slots)] * (len(slots) > 1))
        read(slots, prompts, first)

    engine._rank_step.read = counted  # type: ignore[method-assign]
    return serve(engine, requests), counts

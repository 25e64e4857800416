"""What `dtgpt plan` says that generation needs is what it takes."""

import gc
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from dtgpt.cli import main
from dtgpt.config.plan_choice import parse_plan
from dtgpt.inference.engine import Engine
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.parallel.cache_sizes import slot_bytes
from dtgpt.planning.generation import weight_bytes
from tests.support import bodies_engine
from tests.support.ranks import pool
from tests.support.runs import change

CONFIG = GPT2Config(num_layers=4, hidden_size=64, num_heads=4, seq_length=64, vocab_size=700)
SLOTS = 5
RECIPE = Path(__file__).parents[2] / "recipes" / "gpt2_345m.py"
PLANS = {"single": 1, "tp2": 2, "pp2": 2, "pp2_interleaved": 2, "tp2_pp2": 4}


def allocated() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            with suppress(RuntimeError):  # a tensor without memory, such as a fake one
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def taken(config, plan) -> tuple[int, int]:
    """Bytes of weights, and of the engine, on this rank."""
    before = allocated()
    stages, mesh = bodies_engine.inference_stages(config, plan)
    weights = allocated()
    engine = Engine(stages, mesh, config, torch.float32, SLOTS)
    whole = allocated()
    assert engine.slots == SLOTS  # it lives until here
    return weights - before, whole - weights


@pytest.mark.slow(3)
@pytest.mark.parametrize("plan", PLANS)
def test_weights_and_slots_take_what_is_planned(recipe, plan):
    recipe = change(recipe, model=vars(CONFIG), plan=plan, micro_batch_size=2)
    settings = recipe.settings(parse_plan(plan).for_world(PLANS[plan]), torch.device("cpu"))
    for rank, (weights, slots) in enumerate(pool().run(PLANS[plan], taken, CONFIG, plan)):
        assert weights == pytest.approx(weight_bytes(settings, rank), rel=0.05)
        planned = (SLOTS + 1) * slot_bytes(CONFIG, settings.plan, torch.float32, rank)
        assert slots == pytest.approx(planned, rel=0.05)


def test_the_command_tells_whether_generation_fits(capsys):
    for plan, gpu, words in (
        ("dp1", "H200", ["rank 0: 676.9 MiB of weights + 65 slots of 96.0 MiB = 6.76 GiB", "\nfits: 6.76 GiB"]),
        ("dp1", "2", ["DOES NOT FIT: 6.76 GiB"]),
        ("tp2_pp2", "H200", ["ranks 0-1: ", "ranks 2-3: ", " of weights + 65 slots of 2"]),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["plan", str(RECIPE), "--plan", plan, "--gpu", gpu, "--inference-slots", "64", "--device", "cuda"])
        said = capsys.readouterr().out
        assert stop.value.code == 0 and "generation of 64 sequences of up to 1024 tokens" in said
        assert all(word in said for word in words), said

"""Mixtures of experts on a GPU: steps as CUDA graphs, recomputation, equal bits, memory, and generation."""

from dataclasses import replace

import pytest
import torch

from dtgpt.config.plan import Plan
from dtgpt.config.recipe import Recipe
from dtgpt.inference.engine import Engine
from dtgpt.inference.options import Options
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.mesh import Mesh
from tests.models.moe.test_plans import ADAMW, OLMOE
from tests.support.bodies_engine import poison, texts
from tests.support.engines import drain
from tests.support.requests import make_request
from tests.support.runs import training
from tests.support.whole_model import build_model

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
WIDE = replace(OLMOE, hidden_size=128, head_dim=32, ffn_hidden_size=64, num_experts=16, experts_per_token=4)
STEPS = 8  # some of which are replayed


@pytest.fixture(autouse=True)
def own_stream():
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.synchronize()


@pytest.fixture
def moe(recipe) -> Recipe:
    return replace(
        recipe, model=WIDE, optimizer=ADAMW, steps=STEPS, micro_batch_size=4, global_batch_size=8, device="cuda"
    )


def bits(recipe: Recipe) -> list[torch.Tensor]:
    trainer = training(recipe)
    losses = torch.stack([trainer.train_step().loss.clone().float().view(()) for _ in range(STEPS)])
    return [losses, *(shard.local.clone() for shard in trainer.shards)]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_replayed_steps_and_those_that_run_again_have_the_bits_of_eager_ones(moe, precision):
    moe = replace(moe, precision=precision, attention="flash" if precision != "fp32" else "explicit")
    eager = bits(replace(moe, graph="off", compile="off"))
    assert eager[0].isfinite().all() and len(set(eager[0].tolist())) == STEPS
    for changes in ({"graph": "off"}, {"graph": "on"}, {"graph": "on", "recompute": "full"}):
        found = bits(replace(moe, compile="off", **changes))
        assert all(map(torch.equal, eager, found)), changes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_captured_decode_steps_have_the_texts_of_eager_ones(dtype):
    config = replace(WIDE, seq_length=64, dropout=0.0, init_std=0.3)
    asked = [
        make_request(ids=ids, sampling=Options(max_new_tokens=12, temperature=0, ends=False))
        for ids in ([5], list(range(30)), [3, 4, 5], [9] * 7)
    ]
    found = []
    for graphs, slots in ((False, 1), (False, 4), (True, 4)):
        model = build_model(config, CUDA, dtype, root_key(0, CUDA)).to(dtype)
        engine = Engine([model], Mesh(Plan().for_world(1), CUDA), config, dtype, slots, graphs=graphs)
        poison(engine._rank_step.cache)
        for request in asked:
            engine.submit(request)
        found.append(texts(drain(engine)))
        engine.release()
    assert found[0] == found[1] == found[2] and len(found[0]) == 4

"""The engine on a GPU: graphs, fused blocks, texts bit for bit, and a host that runs ahead."""

import math
from dataclasses import replace

import pytest
import torch

from dtgpt.config.plan import Plan
from dtgpt.inference.engine import Engine
from dtgpt.inference.request import NO_SPECIAL_IDS, Request
from dtgpt.inference.sampling import Sampling
from dtgpt.models.decoder import build_model
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.ops.sampling.sequences import Variant
from dtgpt.parallel.mesh import Mesh
from tests.support.bodies_engine import poison, texts
from tests.support.engines import drain
from tests.support.other_architecture import OtherConfig

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
CONFIG = GPT2Config(num_layers=3, hidden_size=256, num_heads=4, seq_length=512, vocab_size=1000, init_std=0.1)
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "plain": Sampling(seed=1),
    "top_k": Sampling(top_k=20, temperature=0.8, seed=2),
    "top_p": Sampling(top_p=0.9, top_p_decay=0.99, top_p_bound=0.3, seed=3),
    "edits": Sampling(frequency_penalty=0.5, no_repeat_ngram_size=2, logit_bias={7: 2.0}, min_new_tokens=5, seed=4),
}


def make(config, dtype: torch.dtype, slots: int = 16, graphs: bool = True) -> Engine:
    model = build_model(config, CUDA, dtype, root_key(0, CUDA)).to(dtype)
    engine = Engine([model], Mesh(Plan().for_world(1), CUDA), config, dtype, slots, graphs=graphs)
    poison(engine._runner.cache)
    return engine


def requests(sampling: Sampling, count: int = 12) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 2, 16, 17, 40, 128, 129, 200, 400, 470, 3, 64][:count]
    prompts = [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in lengths]
    sampling = replace(sampling, max_new_tokens=30)
    return [Request(ids=ids, sampling=sampling, prompt_index=i) for i, ids in enumerate(prompts)]


def serve(engine: Engine, asked: list[Request]) -> list[list[int]]:
    handles = [engine.submit(request) for request in asked]
    found = texts(drain(engine))
    return [found[handle, 0] for handle in handles]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_is_the_same_alone_and_in_company(name):
    engine, asked = make(CONFIG, torch.bfloat16), requests(SAMPLINGS[name])
    together = serve(engine, asked)
    assert [serve(engine, [request])[0] for request in reversed(asked)][::-1] == together
    assert serve(make(CONFIG, torch.bfloat16, slots=3), asked) == together
    assert len(set(map(tuple, together))) > 6


def test_graphs_change_nothing():
    asked = requests(SAMPLINGS["top_k"])
    assert serve(make(CONFIG, torch.bfloat16, graphs=False), asked) == serve(make(CONFIG, torch.bfloat16), asked)


OTHER = OtherConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=512, vocab_size=1000)


@pytest.mark.parametrize(
    ("config", "dtype", "bound"),
    [(CONFIG, torch.float32, 2e-5), (CONFIG, torch.bfloat16, 0.1), (OTHER, torch.float32, 2e-5)],
    ids=["gpt2-fp32", "gpt2-bf16", "other-fp32"],
)
def test_log_probabilities_are_those_of_the_whole_window(config, dtype, bound):
    engine = make(config, dtype)
    model = engine._runner.stages[0]
    asked = [request for request in requests(SAMPLINGS["plain"]) if len(request.ids) < 480]
    handles = [engine.submit(request) for request in asked]
    events = drain(engine)
    engine.release()
    for handle, request in zip(handles, asked, strict=True):
        mine = [event for event in events if event.request == handle]
        new, logprobs = [i for event in mine for i in event.ids], [x for event in mine for x in event.logprobs]
        ids = torch.tensor([request.ids + new], device=CUDA)
        with torch.no_grad():
            logits = model(ids[:, :-1])[0, len(request.ids) - 1 :, :1000].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(new, device=CUDA)[:, None])[:, 0].cpu()
        assert (torch.tensor(logprobs) - expected).abs().max() < bound


def test_the_host_never_waits_in_a_round():
    engine = make(CONFIG, torch.bfloat16)
    runner, slots = engine._runner, [0, 1, 2]
    for slot in slots:
        runner.prefill(slot, [1, 2, 3])
        runner.start(slot, runner.state.encode([1, 2, 3, 4], Sampling(), NO_SPECIAL_IDS, slot, 0))
    runner.decode(slots, 8, Variant())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [runner.decode(slots, 8, Variant()) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(math.isfinite(value) for value in pending[-1].wait().logprobs.flatten().tolist())

"""The engine on a GPU: graphs, fused blocks, texts bit for bit, and a host that runs ahead."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dtgpt
from dtgpt.config.plan import Plan
from dtgpt.inference.cache import SlotState
from dtgpt.inference.captured.step import CapturedStep
from dtgpt.inference.engine import Engine
from dtgpt.inference.options import Options
from dtgpt.inference.request import NO_SPECIAL_IDS, PromptJob
from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.random.philox import root_key
from dtgpt.ops.sampling.sequences import Variant
from dtgpt.parallel.mesh import Mesh
from tests.support.bodies_engine import kept_of, poison, texts
from tests.support.engines import drain
from tests.support.guides import STEP, GuidedOptions
from tests.support.other_architecture import OtherConfig
from tests.support.requests import make_request
from tests.support.whole_model import build_model

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
CONFIG = GPT2Config(num_layers=3, hidden_size=256, num_heads=4, seq_length=512, vocab_size=1000, init_std=0.1)
LLAMA = LlamaConfig(
    num_layers=3, hidden_size=256, num_heads=6, num_kv_heads=2, head_dim=64, ffn_hidden_size=704, seq_length=512,
    vocab_size=1000, init_std=0.1, rope_factor=8.0, rope_original_length=64,
)  # fmt: skip
QWEN = replace(LLAMA, head_dim=128, qk_norm=True, norm_eps=1e-6, tied=True)
OLMOE = OlmoeConfig(
    num_layers=3, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn_hidden_size=128, seq_length=512,
    vocab_size=1000, init_std=0.1, num_experts=16, experts_per_token=4,
)  # fmt: skip
SAMPLINGS = {
    "greedy": Options(temperature=0.0),
    "plain": Options(seed=1),
    "top_k": Options(top_k=20, temperature=0.8, seed=2),
    "top_p": Options(top_p=0.9, top_p_decay=0.99, top_p_bound=0.3, seed=3),
    "edits": Options(
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        no_repeat_ngram_size=2,
        logit_bias={7: 2.0},
        min_new_tokens=5,
        seed=4,
    ),
}


def make(config, dtype: torch.dtype, slots: int = 16, graphs: bool = True) -> Engine:
    model = build_model(config, CUDA, dtype, root_key(0, CUDA)).to(dtype)
    engine = Engine([model], Mesh(Plan().for_world(1), CUDA), config, dtype, slots, graphs=graphs)
    poison(engine._rank_step.cache)
    return engine


def requests(sampling: Options, count: int = 12) -> list[PromptJob]:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 2, 16, 17, 40, 128, 129, 200, 400, 470, 3, 64][:count]
    prompts = [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in lengths]
    sampling = replace(sampling, max_new_tokens=30)
    return [make_request(ids=ids, sampling=sampling, prompt_index=i) for i, ids in enumerate(prompts)]


def serve(engine: Engine, asked: list[PromptJob]) -> list[list[int]]:
    handles = [engine.submit(request) for request in asked]
    found = texts(drain(engine))
    return [found[handle, 0] for handle in handles]


@pytest.mark.parametrize(
    ("config", "name"),
    [*((CONFIG, name) for name in SAMPLINGS), (LLAMA, "greedy"), (LLAMA, "top_k"), (QWEN, "plain"), (OLMOE, "plain")],
    ids=lambda value: value if isinstance(value, str) else value.architecture,
)
def test_the_text_is_the_same_alone_and_in_company(config, name):
    engine, asked = make(config, torch.bfloat16), requests(SAMPLINGS[name])
    assert isinstance(engine._rank_step, CapturedStep) and engine._rank_step.fused is not None
    together = serve(engine, asked)
    assert [serve(engine, [request])[0] for request in reversed(asked)][::-1] == together
    assert serve(make(config, torch.bfloat16, slots=3), asked) == together
    assert len(set(map(tuple, together))) > 6


WIDE = GPT2Config(num_layers=2, hidden_size=1024, num_heads=16, seq_length=2048, vocab_size=1000, init_std=0.05)
BATCHES = {16: (2, 16, 64), 60: (4, 30), 200: (2, 8, 20), 512: (5, 16), 1023: (2, 4, 8), 2048: (2, 4)}  # by tokens


@pytest.mark.parametrize("config", [CONFIG, WIDE, LLAMA, QWEN], ids=["256", "1024", "llama", "qwen"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_cache_of_a_prompt_has_the_same_bits_alone_and_in_batches(config, dtype):
    """Both in the pass that checks a shape and in later replays. A shape that had other bits would be read one prompt
    at a time: then the cache is right, but the last line fails, and nothing is gained."""
    engine = make(config, dtype, slots=64)
    step, generator = engine._rank_step, torch.Generator().manual_seed(3)
    for tokens, counts in BATCHES.items():
        if tokens > config.seq_length:
            continue
        prompts = torch.randint(0, 1000, (max(counts), tokens), generator=generator).tolist()
        alone = []
        for ids in prompts:
            step.read([0], [ids])
            alone.append(kept_of(step.cache, 0)[:, :, :, :tokens])
        for count in counts:
            for first in (0, 0, max(counts) - count):  # the same batch again, and one of other prompts
                poison(step.cache)
                slots = torch.randperm(64, generator=generator)[:count].tolist()
                step.read(slots, prompts[first : first + count])
                for slot, wanted in zip(slots, alone[first : first + count], strict=True):
                    assert torch.equal(kept_of(step.cache, slot)[:, :, :, :tokens], wanted), (tokens, count)
    assert all(step._equal.values()), step._equal
    assert step._equal.keys() >= {(64, 16), (4, 64), (8, 256), (16, 512)}


def test_products_of_training_are_as_before():
    before = torch.backends.cuda.preferred_blas_library()
    step = make(CONFIG, torch.bfloat16)._rank_step
    step.read([0, 1], [[1] * 150] * 2)
    assert torch.backends.cuda.preferred_blas_library() == before
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k


def test_graphs_change_nothing():
    asked = requests(SAMPLINGS["top_k"])
    assert serve(make(CONFIG, torch.bfloat16, graphs=False), asked) == serve(make(CONFIG, torch.bfloat16), asked)


OTHER = OtherConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=512, vocab_size=1000)


@pytest.mark.parametrize(
    ("config", "dtype", "bound"),
    [
        (CONFIG, torch.float32, 2e-5), (CONFIG, torch.bfloat16, 0.1), (OTHER, torch.float32, 2e-5),
        (LLAMA, torch.float32, 5e-5), (LLAMA, torch.bfloat16, 0.4), (QWEN, torch.bfloat16, 0.2),
    ],
    ids=["gpt2-fp32", "gpt2-bf16", "other-fp32", "llama-fp32", "llama-bf16", "qwen-bf16"],
)  # fmt: skip
def test_log_probabilities_are_those_of_the_whole_window(config, dtype, bound):
    engine = make(config, dtype)
    model = engine._rank_step.stages[0]
    asked = [request for request in requests(SAMPLINGS["plain"]) if len(request.ids) < 480]
    handles = [engine.submit(request) for request in asked]
    events = drain(engine)
    engine.release()
    for handle, request in zip(handles, asked, strict=True):
        mine = [event for event in events if event.job == handle]
        new, logprobs = [i for event in mine for i in event.ids], [x for event in mine for x in event.logprobs]
        ids = torch.tensor([request.ids + new], device=CUDA)
        with torch.no_grad():
            logits = model(ids[:, :-1])[0, len(request.ids) - 1 :, :1000].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(new, device=CUDA)[:, None])[:, 0].cpu()
        assert (torch.tensor(logprobs) - expected).abs().max() < bound


def test_the_host_never_waits_in_a_round():
    engine = make(CONFIG, torch.bfloat16)
    step, slots = engine._rank_step, [0, 1, 2]
    for slot in slots:
        step.read([slot], [[1, 2, 3]])
        step.cache.state.set(slot, SlotState.encode([1, 2, 3, 4], Options(), NO_SPECIAL_IDS, slot, 0))
    step.decode(slots, 8, Variant())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [step.decode(slots, 8, Variant()) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(math.isfinite(value) for value in pending[-1].wait().logprobs.flatten().tolist())


PROMPTS = [[1, 2, 3], list(range(40)), [7] * 130, [9]]
WAYS: list[dict] = [{"do_sample": False}, {"top_k": 30}, {"num_beams": 3}]
PROGRAM = """
import json, sys
from tests.inference.test_engine_cuda import answers
found = {plan + precision: answers(sys.argv[1], plan, precision) for plan, precision in json.loads(sys.argv[2])}
print("FOUND" + json.dumps(found), flush=True)
"""


def answers(path: str, plan: str, precision: str) -> tuple[list, list, list]:
    """Return (ids of each way and prompt, log-probabilities of the sampled ones, log-probabilities of the prompts)."""
    model = dtgpt.load(path, plan=plan, precision=precision)
    found = [model.generate(PROMPTS, max_new_tokens=24, seed=5, details=True, **words) for words in WAYS]
    logprobs = [[one.logprobs for one in batch] for batch in found[:2]]
    return [[one.ids for one in batch] for batch in found], logprobs, [s.logprobs for s in model.score(PROMPTS[:3])]


def write_model(path: Path) -> None:
    from transformers import GPT2Config as TheirConfig
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 256, "vocab_size": 1000}
    GPT2LMHeadModel(TheirConfig(**shape, initializer_range=0.2)).save_pretrained(path)


def on_two_gpus(path: Path, plans: list[tuple[str, str]], **environment: str) -> dict:
    """Return the `answers` of each plan and precision, by their names."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (path / "program.py").write_text(PROGRAM)
    words = [*torchrun, "program.py", str(path), json.dumps(plans)]
    environment = os.environ | {"PYTHONFAULTHANDLER": "1"} | environment
    done = subprocess.run(words, cwd=path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("FOUND")[1].splitlines()[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_ranks_that_write_to_each_others_memory_give_the_text_of_nccl(tmp_path):
    write_model(tmp_path)
    found, expected = (on_two_gpus(tmp_path, [("tp2", "bf16")], DTGPT_EXCHANGE=switch) for switch in "10")
    assert found == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_plans_on_two_gpus_give_the_text_of_one(tmp_path):
    write_model(tmp_path)
    plans = [(plan, precision) for plan in ("tp2", "pp2") for precision in ("fp32", "bf16")]
    found = on_two_gpus(tmp_path, plans)
    texts, logprobs, _ = answers(str(tmp_path), "single", "fp32")
    for plan in ("tp2fp32", "pp2fp32"):
        assert found[plan][0] == texts, plan
        torch.testing.assert_close(torch.tensor(found[plan][1]), torch.tensor(logprobs), atol=1e-3, rtol=1e-4)
    texts, _, scores = answers(str(tmp_path), "single", "bf16")
    assert found["pp2bf16"][0] == texts  # stages in turn compute what one stage does
    for few, many in zip(found["tp2bf16"][2], scores, strict=True):
        assert max(abs(a - b) for a, b in zip(few, many, strict=True)) < 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_guided_texts_are_the_same_alone_and_beside_others_under_graphs(dtype):
    """Bit for bit, as those beside them, whose graphs have no masks where nothing is guided."""
    options = [GuidedOptions(max_new_tokens=30, guided_length=25, guided_vocabulary=1000, seed=i) for i in range(4)]
    options[1], options[2] = replace(options[1], top_k=50), replace(options[2], temperature=0.0)
    guided = [make_request(ids=[7, i, 9], sampling=one, prompt_index=i) for i, one in enumerate(options)]
    free, engine = requests(SAMPLINGS["top_p"], 6), make(CONFIG, dtype)
    wanted = [serve(engine, [request])[0] for request in (*guided, *free)]
    for ids in wanted[: len(guided)]:
        assert [token % STEP for token in ids] == [t % STEP for t in range(25)]
    assert serve(engine, [*guided, *free]) == serve(engine, [*free, *guided])[6:] + wanted[4:] == wanted
    assert serve(make(CONFIG, dtype, graphs=False), guided) == wanted[: len(guided)]
    variants = {name[3] for name in engine._rank_step._graphs._captured if name[0] == "decode"}
    assert {variant.masks for variant in variants} == {False, True}

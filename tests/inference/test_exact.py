"""Generation with the bits of training's forward pass: equal log-probabilities on a GPU, of mixtures of experts also on
a CPU where sums are made row by row; and what is refused."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dtgpt
from dtgpt.config.execution import Settings
from dtgpt.config.plan import Plan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.inference.engine import Engine
from dtgpt.inference.kernels import serve
from dtgpt.inference.kernels.serve import BITS
from dtgpt.inference.open import sums_of
from dtgpt.interop.hf.model import save_huggingface
from dtgpt.models.binding import bind
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.families.glm4_moe import Glm4MoeConfig
from dtgpt.models.families.granitemoe import GraniteMoeConfig
from dtgpt.models.families.mixtral import MixtralConfig
from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.models.families.qwen2_moe import Qwen2MoeConfig
from dtgpt.models.families.qwen3_moe import Qwen3MoeConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.layers import AttentionCore
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.ops.attention.core import Backend
from dtgpt.ops.experts.products import grouped_linear
from dtgpt.ops.experts.routing import router_logits
from dtgpt.ops.kernels.linear import FEW
from dtgpt.ops.linear import linear, split_sums
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel import inference
from dtgpt.parallel.build import build_stages
from dtgpt.parallel.compiled.blocks import compile_forward
from dtgpt.parallel.exact_tp.config import PiecesConfig
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.errors import UserError
from dtgpt.util.peers import Process
from tests.interop.test_interop_huggingface import InMemory
from tests.support.bodies_exact import all_by_rows, gradients_by_rows, trained_and_scored
from tests.support.bodies_generated import FEW_LENGTHS, check_pieces, check_trained, generated, trained
from tests.support.families import OURS
from tests.support.gpus import run_on_two_gpus
from tests.support.other_architecture import OtherConfig
from tests.support.ranks import pool
from tests.support.whole_model import build_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GPT2 = GPT2Config(num_layers=3, hidden_size=256, num_heads=4, seq_length=256, vocab_size=1000, init_std=0.1)
LLAMA = LlamaConfig(
    num_layers=3, hidden_size=256, num_heads=6, num_kv_heads=2, head_dim=64, ffn_hidden_size=704, seq_length=256,
    vocab_size=1000, init_std=0.1, rope_factor=8.0, rope_original_length=64,
)  # fmt: skip
SHAPE = {
    "num_layers": 3, "hidden_size": 256, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "seq_length": 256,
    "vocab_size": 1000, "init_std": 0.1, "num_experts": 16, "experts_per_token": 4,
}  # fmt: skip
LITTLE = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "seq_length": 16,
    "vocab_size": 250, "init_std": 0.1, "num_experts": 8, "experts_per_token": 3,
}  # fmt: skip


def mixtures(shape: dict[str, Any], width: int) -> dict[str, ExpertsConfig]:
    """Return mixtures of experts of some sizes, by family; width: of an expert."""
    return {
        "olmoe": OlmoeConfig(**shape, ffn_hidden_size=width, clip_qkv=2.0, corrects_choice=True),
        "granitemoe": GraniteMoeConfig(**shape, ffn_hidden_size=width, attention_scale=0.2),
        "qwen3_moe": Qwen3MoeConfig(**shape, ffn_hidden_size=2 * width, expert_size=width, expert_pattern="ED"),
        "mixtral": MixtralConfig(**shape, ffn_hidden_size=width),
        "qwen2_moe": Qwen2MoeConfig(**shape, ffn_hidden_size=width, expert_size=width, shared_size=2 * width),
        "glm4_moe": Glm4MoeConfig(
            **shape, ffn_hidden_size=2 * width, expert_size=width, shared_size=width, expert_groups=4, open_groups=2,
            qk_norm=True,
        ),
    }  # fmt: skip


SMALL = replace(GPT2, num_layers=1, hidden_size=64, num_heads=2)
TINY = [
    GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257, init_std=0.1),
    LlamaConfig(
        num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_hidden_size=44, seq_length=16, vocab_size=257,
        init_std=0.1, qk_norm=True,
    ),
]  # fmt: skip
CONFIGS = {
    "gpt2": GPT2,
    "gpt2 whose rows fill no warp": replace(GPT2, hidden_size=128, num_heads=2),
    "gpt2 whose MLP is wide": replace(GPT2, hidden_size=1024, num_heads=16),  # cuBLAS splits its last product
    "llama": LLAMA,
    "qwen3": replace(LLAMA, head_dim=128, qk_norm=True, norm_eps=1e-6, tied=True),
    "qwen2.5": replace(LLAMA, attention_bias="qkv"),
    "yarn": replace(LLAMA, rope_scaling="yarn"),
    "heads that share nothing": replace(LLAMA, num_heads=2, head_dim=128),
    **mixtures(SHAPE, width=192),
}
IN_PIECES = mixtures({**SHAPE, "num_heads": 8, "num_kv_heads": 4}, width=256)  # of 64 k columns, and 32 k of experts
LENGTHS = (1, 2, 16, 17, 40, 64, 65, 127, 128, 129, 200, 255)  # of prompts


def model_of(config, dtype: torch.dtype) -> Decoder:
    return scattered(build_model(config, CUDA, dtype, root_key(0, CUDA)).to(dtype), "flash")


def scattered(model: Decoder, backend: Backend) -> Decoder:
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases are not 0, nor gains 1, once a model is trained
            noise = torch.randn(parameter.shape, generator=generator, device=device, dtype=parameter.dtype)
            parameter.data += 0.1 * noise
    for core in (module for module in model.modules() if isinstance(module, AttentionCore)):
        bind(core, backend=backend)
    return model


def engine_of(model: Decoder, dtype: torch.dtype, slots: int) -> Engine:
    return Engine([model], Mesh(Plan().for_world(1), CUDA), model.config, dtype, slots, graphs=True, exact=True)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", CONFIGS)
def test_log_probabilities_are_those_of_training(kind: str):
    check(kind, torch.bfloat16)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "olmoe", "granitemoe"])
def test_so_they_are_in_other_precisions(kind: str, dtype: torch.dtype):
    check(kind, dtype)


def check(kind: str, dtype: torch.dtype) -> None:
    model = model_of(CONFIGS[kind], dtype)
    check_trained(model, generated(engine_of(model, dtype, slots=5), LENGTHS))


@pytest.mark.slow(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", mixtures(LITTLE, 32))
def test_log_probabilities_of_mixtures_are_those_of_training(kind, dtype):
    """Where no sum of a product or of attention depends on the other rows, nothing else does either."""
    config = mixtures(LITTLE, width=32)[kind]
    BITS.check_blocks(config)
    model = scattered(build_model(config, CPU, dtype, root_key(0)).to(dtype), "explicit")
    with all_by_rows():
        engine = Engine([model], Mesh(Plan().for_world(1), CPU), config, dtype, 3, graphs=False, exact=True)
        check_trained(model, generated(engine, FEW_LENGTHS))


@pytest.mark.slow(6)
@pytest.mark.parametrize(("kind", "plan"), [*((kind, "tp2_sp") for kind in mixtures(LITTLE, 32)), ("olmoe", "single")])
def test_so_they_are_under_tensor_parallelism_where_training_sums_in_pieces(kind, plan):
    config = mixtures(LITTLE, width=32)[kind]
    drawn = pool().run(parse_plan(plan, {}).world, check_pieces, config, plan)
    assert all(each == drawn[0] for each in drawn) and len(drawn[0]) == len(FEW_LENGTHS)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("size", "columns"), [(2048, 2048), (1024, 2048), (1536, 1024)])
def test_products_of_few_rows_of_experts_have_the_bits_of_many(dtype, size, columns):
    """Of the routers too, which have few columns."""
    experts, rows = 32, 8192
    x, router = (torch.randn(n, size, device=CUDA) for n in (rows, experts))
    weight = (torch.randn(experts, columns, size, device=CUDA) / math.sqrt(size)).to(dtype)
    chosen = torch.randint(0, experts, (rows,), device=CUDA).sort().values
    x = x.to(dtype)
    whole, logits = grouped_linear(x, weight, None, ends_of(chosen, experts)), router_logits(x, router.to(dtype), None)
    for count in (1, 2, 3, 8, 16, 63, 64, 65, 128, 200, 512):
        some = torch.randperm(rows, device=CUDA)[:count].sort().values
        assert torch.equal(grouped_linear(x[some], weight, None, ends_of(chosen[some], experts)), whole[some])
        assert torch.equal(router_logits(x[some], router.to(dtype), None), logits[some])


def ends_of(chosen: Tensor, experts: int) -> Tensor:
    return torch.searchsorted(chosen, torch.arange(experts, device=CUDA), right=True, out_int32=True)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_log_probabilities_are_those_of_training_on_two_tensor_parallel_gpus(tmp_path):
    run_on_two_gpus(tmp_path, "from tests.inference.test_exact import check_ranks; check_ranks()")


def check_ranks() -> None:
    """Run all checks, as one of two ranks."""
    device = torch.device("cuda", Process.from_environment().local_rank)
    start_process_group(device, 120.0)
    for config, plan, dtype, reduce in (
        (GPT2, "tp2", torch.bfloat16, "fast"), (LLAMA, "tp2_sp", torch.bfloat16, "fast"),
        (CONFIGS["qwen3"], "tp2", torch.float16, "fast"), (GPT2, "tp2", torch.bfloat16, "exact_tp"),
        (LLAMA, "tp2_sp", torch.bfloat16, "exact_tp"),
        *((IN_PIECES[kind], "tp2_sp", torch.bfloat16, "exact_tp") for kind in ("olmoe", "glm4_moe")),
        (IN_PIECES["qwen2_moe"], "tp2", torch.float16, "exact_tp"),
    ):  # fmt: skip
        check_plan(config, plan, dtype, reduce, device)
    end_process_group()


@pytest.mark.cuda
@pytest.mark.parametrize("kind", IN_PIECES)
def test_log_probabilities_of_mixtures_are_those_of_a_training_in_pieces(kind):
    check_plan(IN_PIECES[kind], "single", torch.bfloat16, "exact_tp", CUDA)


def check_plan(config: ModelConfig, plan: str, dtype: torch.dtype, reduce: str, device: torch.device) -> None:
    resolved = parse_plan(plan, {}).for_world(parse_plan(plan, {}).world)
    settings = Settings(
        model=config, plan=resolved, device=device, dtype=dtype, attention="flash", seq_length=256,
        micro_batch_size=12, global_batch_size=12, reduce=reduce,
    )  # fmt: skip
    one = replace(settings, plan=resolved.for_inference())
    mesh, drawing, key = Mesh(resolved, device), Mesh(one.plan, device), root_key(0, device)
    stages = inference.inference_stages(one, drawing, lambda shards: shards.initialize(config, key))
    engine = Engine(stages, drawing, config, dtype, 5, graphs=True, exact=True)
    drawn = mesh.gather(generated(engine, LENGTHS) if mesh.rank == 0 else engine.follow())[0]
    check_trained(build_stages(settings, mesh, key)[0][0], drawn)
    for close in (*drawing.before_end, *mesh.before_end):
        close()


@pytest.mark.cuda
def test_log_probabilities_are_those_of_a_compiled_forward_pass():
    model = model_of(GPT2, torch.bfloat16)
    drawn = generated(engine_of(model, torch.bfloat16, slots=12), LENGTHS)
    compile_forward(model, whole=True)
    found = trained(model, torch.tensor([ids for ids, _, _ in drawn], device=CUDA)).cpu()
    for row, (_, logprobs, begin) in enumerate(drawn):
        assert torch.equal(found[row, begin - 1 :], torch.tensor(logprobs)), row


@pytest.mark.cuda
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_few_rows_have_the_bits_and_gradients_of_many(bias: bool):
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)

    x, weight = random(4 * FEW, 4096), (random(768, 4096) / 64).requires_grad_()
    shift = random(768).requires_grad_() if bias else None
    whole = linear(x, weight, shift)
    for rows in (1, 3, 64, 200, FEW):
        assert torch.equal(linear(x[:rows], weight, shift), whole[:rows])
    with split_sums():
        assert not torch.equal(linear(x[:64], weight, shift), whole[:64])  # the premise: cuBLAS splits K here
    few = x[:64].clone().requires_grad_()
    gradient = random(64, 768)
    wanted = [few, weight, *([shift] if bias else [])]
    found = torch.autograd.grad(linear(few, weight, shift), wanted, gradient)
    with split_sums():
        expected = torch.autograd.grad(linear(few, weight, shift), wanted, gradient)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_device_without_kernels_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"exact=True cannot hold on device=cpu.*use a GPU"):
        dtgpt.load(tmp_path, device="cpu", exact=True)


WITHOUT = {
    "other": OtherConfig(num_layers=2, hidden_size=64, num_heads=2), "heads of 256": replace(GPT2, num_heads=1),
    "relu": replace(GPT2, activation="relu"), "relu2": replace(LLAMA, activation="relu2"),
    "window": replace(LLAMA, window=64), **OURS,
}  # fmt: skip


@pytest.mark.parametrize("config", WITHOUT.values(), ids=WITHOUT)
def test_a_model_without_decode_kernels_is_refused(config):
    BITS.check_blocks(GPT2)
    BITS.check_blocks(replace(LLAMA, attention_bias="all", rope_scaling="yarn", window=LLAMA.seq_length))
    with pytest.raises(UserError, match=r"exact=True serves blocks of GPT-2 and LLaMA.*leave exact out"):
        BITS.check_blocks(config)


def test_beams_are_refused(tmp_path):
    save_huggingface(InMemory(build_model(SMALL, CPU, torch.float32, root_key(0))), tmp_path / "model")
    model = dtgpt.load(tmp_path / "model", device="cpu")
    model.exact = True
    with pytest.raises(UserError, match=r"num_beams=2 searches.*use num_beams=1"):
        model.generate([1, 2], num_beams=2)


@pytest.mark.slow(2)
@pytest.mark.parametrize("plan", ["tp2", "tp2_sp"])
@pytest.mark.parametrize("config", TINY)
def test_products_of_rows_have_the_gradients_of_others_where_tensor_parallelism_cuts_them(config, plan):
    for difference in pool().run(2, gradients_by_rows, config, plan):
        assert difference < 1e-4


def test_more_tensor_parallel_ranks_than_two_and_two_in_fp32_are_refused(monkeypatch):
    monkeypatch.setattr(serve, "has_triton", lambda x: True)
    BITS.check_exact(CPU, Plan(pp=2, tp=2).for_world(4), torch.bfloat16)
    settings = Settings(
        model=GPT2, plan=Plan(tp=4).for_world(4), device=CPU, dtype=torch.bfloat16, seq_length=256, micro_batch_size=1,
        global_batch_size=1, reduce="exact",
    )  # fmt: skip
    with pytest.raises(UserError, match=r"exact=True cannot hold under tp=4: .*with reduce=exact; use tp=2"):
        BITS.check_sums(settings)
    BITS.check_sums(replace(settings, plan=Plan(tp=2).for_world(2)))
    BITS.check_sums(replace(settings, reduce="exact_tp"))
    with pytest.raises(UserError, match=r"exact=True cannot hold in fp32 for a run with reduce=exact_tp.*bf16 or fp16"):
        BITS.check_sums(replace(settings, reduce="exact_tp", dtype=torch.float32))
    BITS.check_sums(replace(settings, model=mixtures(LITTLE, 64)["olmoe"], reduce="exact_tp"))
    BITS.check_exact(CPU, Plan(pp=2).for_world(2), torch.float32)
    with pytest.raises(UserError, match=r"exact=True cannot hold in fp32 under tp=2.*use precision bf16"):
        BITS.check_exact(CPU, Plan(tp=2).for_world(2), torch.float32)


def test_a_model_is_read_with_the_sums_of_its_training():
    assert sums_of({"reduce": "exact_tp", "exact_tp": {"pieces": 4}}) == ("exact_tp", (PiecesConfig(pieces=4),))
    assert sums_of({"reduce": "exact"}) == ("exact", ())
    assert sums_of({}) == sums_of({"reduce": "unknown"}) == ("fast", ())


@pytest.mark.slow(1)
@pytest.mark.parametrize("plan", ["tp2", "tp2_sp"])
@pytest.mark.parametrize("config", TINY)
def test_two_tensor_parallel_ranks_score_with_the_bits_of_their_training(config, plan):
    """Where the sums of a product's row do not depend on the other rows."""
    for ours, scored in pool().run(2, trained_and_scored, config, plan):
        assert torch.equal(ours, scored)

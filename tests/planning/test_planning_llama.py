"""Planning for models with grouped queries, heads of their own size and a large vocabulary."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from dtgpt.config.plan_choice import parse_plan
from dtgpt.models.config import ModelConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LLAMA3_8B, LLAMA31_405B, LLAMA32_1B, QWEN3_0_6B, LlamaConfig
from dtgpt.models.shared.flops import flops_per_token
from dtgpt.parallel.balanced_stages.cut import balanced_cut
from dtgpt.planning.activations import block_activations
from dtgpt.planning.memory import fullest, memory_by_rank
from dtgpt.planning.parameters import parameters_of
from dtgpt.planning.traffic import collectives_of
from dtgpt.train.start import load_recipe
from dtgpt.util.errors import UserError

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = LlamaConfig(
    num_layers=2, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=12, ffn_hidden_size=44, seq_length=16,
    vocab_size=257, qk_norm=True,
)  # fmt: skip
PUBLISHED = {  # parameters, of the models' own files
    "Llama 3 8B": (LLAMA3_8B, 8_030_261_248),
    "Llama 3.1 405B": (LLAMA31_405B, 405_853_388_800),
    "Llama 3.2 1B": (LLAMA32_1B, 1_235_814_400),
    "Qwen3 0.6B": (QWEN3_0_6B, 596_049_920),
}


def settings_of(recipe, model: ModelConfig, plan: str, **changes):
    known = parse_plan(plan)
    recipe = replace(recipe, model=model, plan=plan, **changes)
    return recipe.planned(known.world)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_flops_are_those_of_the_published_model(name):
    """FLOPs: 6 for each weight that is multiplied, and 12 T for each element of q in each block (PaLM, appendix B)."""
    config, parameters = PUBLISHED[name]
    assert config.num_parameters == parameters
    looked_up = 0 if config.tied else config.padded_vocab_size * config.hidden_size
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * config.seq_length
    assert flops_per_token(config, config.seq_length) == 6 * (parameters - looked_up) + attention


@pytest.mark.parametrize("config", [LLAMA3_8B, LLAMA32_1B, QWEN3_0_6B])
@pytest.mark.parametrize("plan", ["single", "tp2", "tp2_sp"])
def test_activations_of_a_block_are_those_of_its_operations(recipe, config, plan):
    """Elements for each token: the input, the sum in the middle and both norms; q, k, v, the output of attention; gate,
    up and their product; where heads are normalised, the packed projection. Norms and attention keep a number of fp32
    for each row beside. Sequence parallelism cuts what lies between the matrices, but not their gathered input."""
    known = parse_plan(plan)
    settings = settings_of(recipe, config, plan, micro_batch_size=2, global_batch_size=4, precision="bf16")
    stream, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    packed = q + 2 * kv if config.qk_norm else 0
    cut = (q + 2 * kv + q + 3 * config.ffn_hidden_size + packed) / known.tp
    residuals = 2 * stream / (known.tp if known.sequence_parallel else 1)
    expected = 2 * 2 * config.seq_length * (residuals + 2 * stream + cut)
    assert block_activations(settings, 0) == pytest.approx(expected, rel=0.01)


LONG = "--micro_batch_size 1 --global_batch_size 1"
MEASURED = [  # GiB of PyTorch's allocator on the fullest rank, H200, torch 2.11; with and without graphs
    ("llama32_1b", "--global_batch_size 4", 1, 32.54),
    ("llama32_1b", "--global_batch_size 4 --recompute full", 1, 23.77),
    ("llama32_1b", "--global_batch_size 8 --micro_batch_size 4 --model.tied off", 1, 47.28),
    ("llama32_1b", "--global_batch_size 4 --data.reset_attention_mask on", 1, 32.54),
    ("qwen3_0_6b", "--global_batch_size 4", 1, 22.16),
    ("qwen3_0_6b", "--global_batch_size 4 --recompute full", 1, 12.52),
    ("llama3_8b", "--global_batch_size 1 --plan tp2_sp", 2, 73.11),
    ("llama32_1b", f"{LONG} --model.seq_length 131072 --recompute around_attention", 1, 45.74),
    ("llama32_1b", f"{LONG} --model.seq_length 131072 --recompute around_attention --plan cp2_zero3", 2, 23.24),
    ("llama32_1b", f"{LONG} --model.seq_length 1000000 --recompute full --plan cp2_zero3", 2, 91.73),
    ("llama3_8b", f"{LONG} --model.seq_length 32768 --recompute around_attention --plan cp2_zero3", 2, 66.17),
    ("llama3_8b", f"{LONG} --model.seq_length 65536 --recompute around_attention --plan cp2_zero3", 2, 71.81),
    ("llama3_8b", f"{LONG} --model.seq_length 65536 --recompute full --plan cp2_zero3", 2, 68.88),
    ("llama3_8b", f"{LONG} --model.seq_length 131072 --recompute full --plan cp4_zero3", 4, 41.65),
]


@pytest.mark.parametrize("name, options, world, gib", MEASURED)
def test_the_memory_is_what_gpus_used(name, options, world, gib):
    settings = load_recipe(RECIPES / f"{name}.py", options.split()).planned(world)
    assert fullest(memory_by_rank(settings)).total / 2**30 == pytest.approx(gib, rel=0.004)


def costs(config: ModelConfig, cut: tuple[int, ...]) -> list[float]:
    """FLOPs of a token in each stage, by hand: matrices, attention and the output projection."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = config.hidden_size * (2 * q + 2 * kv + 3 * config.ffn_hidden_size)
    block = 6 * matrices + 12 * q * config.seq_length
    stages = [blocks * block for blocks in cut]
    stages[-1] += 6 * config.hidden_size * config.padded_vocab_size
    return [stage / block for stage in stages]


@pytest.mark.parametrize(
    "config, stages, cut",
    [
        (LLAMA3_8B, 4, (8, 8, 9, 7)),
        (LLAMA3_8B, 8, (4, 4, 4, 4, 4, 4, 5, 3)),
        (LLAMA32_1B, 4, (5, 5, 5, 1)),
        (QWEN3_0_6B, 4, (8, 8, 8, 4)),
    ],
)
def test_the_cut_into_stages_sees_a_vocabulary_of_128k(config, stages, cut):
    """The output projection weighs 1.8 (8B) to 4.8 (0.6B) blocks: the last stage has as many fewer."""
    assert balanced_cut(config, stages) == cut
    most = max(costs(config, cut))
    for source, target in permutations(range(stages), 2):
        moved = list(cut)
        moved[source], moved[target] = moved[source] - 1, moved[target] + 1
        if moved[source]:
            assert max(costs(config, tuple(moved))) > most - 0.05  # what the embedding is taken to cost


def test_an_output_projection_of_its_own_is_on_the_last_stage_with_its_state(recipe):
    tables = {}
    for tied in (False, True):
        settings = settings_of(recipe, replace(SMALL, tied=tied), "pp2", precision="bf16", micro_batch_size=2)
        names = [{p.name for p in parameters_of(settings.model, settings.plan, rank)} for rank in (0, 1)]
        assert ("head.output.weight" in names[1]) == (not tied) and "head.output.weight" not in names[0]
        assert ("embedding.tokens.weight" in names[1]) == tied
        tables[tied] = [memory.weights + memory.optimizer for memory in memory_by_rank(settings).values()]
        kinds = [c.what for c in collectives_of(settings, 0)]
        assert ("gradient of the tied table" in kinds) == tied
    assert tables[False] == tables[True]  # a copy of the table weighs as much


def test_norms_of_heads_are_named_among_the_messages(recipe):
    def gradients(model: ModelConfig, plan: str) -> list[tuple[str, int]]:
        found = collectives_of(settings_of(recipe, model, plan), 0)
        return [(c.what, c.bytes) for c in found if c.what.startswith("gradients of ") and c.over == "tp"]

    assert gradients(SMALL, "tp2") == [("gradients of the norms of heads, fp32", 4 * 2 * 2 * 12)]
    assert gradients(SMALL, "tp2_sp") == [("gradients of norms, fp32", 4 * (2 * 2 * 12 + 5 * 32))]
    assert gradients(replace(SMALL, qk_norm=False), "tp2") == []
    assert [what for what, _ in gradients(recipe.model, "tp2_sp")] == ["gradients of norms, biases and positions, fp32"]


GPT2 = GPT2Config(num_layers=2, hidden_size=32, num_heads=1, seq_length=16, vocab_size=257)


@pytest.mark.parametrize(
    "model, plan, words",
    [
        (SMALL, "tp3", "model.num_kv_heads=4 cannot be split over tp=3; use tp=1, 2 or 4"),
        (SMALL, "tp8_sp", "model.num_kv_heads=4 cannot be split over tp=8; use tp=2 or 4"),
        (replace(SMALL, ffn_hidden_size=46), "tp4", "model.ffn_hidden_size=46 cannot be split over tp=4; use tp=1 or"),
        (replace(SMALL, num_kv_heads=1), "tp2", "model.num_kv_heads=1 cannot be split over tp=2; use tp=1"),
        (replace(SMALL, num_kv_heads=1), "tp2_sp", "model.num_kv_heads=1 cannot be split over tp=2; leave tp and sp"),
        (GPT2, "tp2_sp", "model.num_heads=1 cannot be split over tp=2; leave tp and sp out"),
        (replace(SMALL, seq_length=15), "tp2_sp", "model.seq_length=15 cannot be split over tp=2 under sequence"),
        (SMALL, "pp4", "model.num_layers=2 cannot fill pp=4 x 1 = 4 stages"),
    ],
)
def test_a_model_that_a_plan_cannot_cut_is_refused_in_a_sentence(recipe, model, plan, words):
    with pytest.raises(UserError) as error:
        settings_of(recipe, model, plan)
    assert str(error.value).startswith(words) and "\n" not in str(error.value)

"""Plans: their names, and the sentence that answers each one that cannot be run."""

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)

from dtgpt.config.overrides import apply_overrides
from dtgpt.config.plan import SCHEDULES, Plan, ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.recipe import Recipe
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.parallel.tensor import make_table, style_of
from dtgpt.util.errors import UserError
from tests.support.bodies_mesh import CPU, refusal_of_build
from tests.support.ranks import pool

MODEL = GPT2Config(num_layers=4, hidden_size=48, num_heads=4, seq_length=16, vocab_size=257)
LLAMA = LlamaConfig(num_layers=2, hidden_size=48, num_heads=6, num_kv_heads=2, ffn_hidden_size=64, seq_length=16)
OWN = {
    "two-stages": Plan(pp=2, stages_per_rank=2),
    "deep-zbv": Plan(pp=2, schedule="ZBVZeroBubble", stages_per_rank=4),
    "short-cut": Plan(pp=2, blocks_per_stage=(1, 2)),
    "empty-stage": Plan(pp=2, blocks_per_stage=(4, 0)),
    "even-cut": Plan(pp=2, blocks_per_stage=(2, 2)),
    "cut-of-one": Plan(blocks_per_stage=(4,)),
}


@pytest.fixture
def recipe(recipe) -> Recipe:
    return replace(recipe, model=MODEL, micro_batch_size=2, global_batch_size=24, plans=OWN)


def test_a_name_says_each_part_once_in_any_order():
    assert parse_plan("dp4") == Plan(dp=4) and parse_plan("dp") == Plan()
    assert parse_plan("single") == Plan(dp=1)
    assert parse_plan("zero3") == Plan(zero=3)
    assert parse_plan("tp2_sp") == parse_plan("sp_tp2") == Plan(tp=2, sequence_parallel=True)
    assert parse_plan("pp4_interleaved3") == Plan(pp=4, schedule="Interleaved1F1B", stages_per_rank=3)
    assert parse_plan("1f1b_pp2") == Plan(pp=2) and parse_plan("pp2_gpipe") == Plan(pp=2, schedule="GPipe")
    assert parse_plan("mine", {"mine": Plan(tp=8)}) == Plan(tp=8)


def test_every_name_that_is_printed_parses_to_the_same_plan():
    degrees = itertools.product((1, 2, 6), (1, 2), (1, 4), (0, 1, 3), (False, True), SCHEDULES.values(), (None, 3))
    for dp, tp, pp, zero, sequence, schedule, stages in degrees:
        if pp == 1:
            schedule, stages = "1F1B", None
        elif schedule != "Interleaved1F1B":
            stages = None
        plan = ResolvedPlan(
            dp=dp, tp=tp, pp=pp, zero=zero, sequence_parallel=sequence, schedule=schedule, stages_per_rank=stages
        )
        assert parse_plan(plan.name).for_world(plan.world) == plan, plan.name


def test_a_free_dp_fills_the_processes():
    assert parse_plan("tp2_pp2").for_world(12) == ResolvedPlan(dp=3, tp=2, pp=2)
    assert parse_plan("dp").for_world(1) == ResolvedPlan(dp=1)
    plan = parse_plan("zero2_tp2").for_world(8)
    assert (plan.world, plan.replicate, plan.shard) == (8, 1, 4)
    plan = parse_plan("tp2").for_world(8)
    assert (plan.world, plan.replicate, plan.shard) == (8, 4, 1)


class Wrong(NamedTuple):
    """A plan that `world` processes cannot run, the words of the sentence, and its remedies: (the words that give it,
    the plan or the option that it means, the processes to start)."""

    plan: str
    world: int
    words: list[str]
    cures: list[tuple[str, str, int]]
    options: str = ""


WRONG = [
    Wrong("tp0", 1, ["tp=0 is out of range"], [("use 1 or more", "tp1", 1)]),
    Wrong("pp0_tp2", 2, ["pp=0 is out of range"], [("use 1 or more", "pp1_tp2", 2)]),
    Wrong("dp0", 1, ["dp=0 is out of range"], [("use 1 or more", "dp1", 1)]),
    Wrong("pp2_interleaved0", 2, ["stages_per_rank=0"], [("use 1 or more", "pp2_interleaved2", 2)]),
    Wrong("dp2", 3, ["needs dp=2", "3 were started"], [("start 2 ", "dp2", 2), ("use dp3 with 3", "dp3", 3)]),
    Wrong("single", 4, ["single", "4 were started"], [("start 1 ", "single", 1), ("use dp4 with 4", "dp4", 4)]),
    Wrong("dp2_tp2", 1, ["dp=2 x tp=2 = 4", "1 was"], [("start 4 ", "dp2_tp2", 4), ("use dp1 with 2", "dp1_tp2", 2)]),
    Wrong("dp2_tp2", 7, ["= 4 processes"], [("start 4 ", "dp2_tp2", 4), ("use dp4 with 8", "dp4_tp2", 8)]),
    Wrong("tp2_pp2", 7, ["tp=2 x pp=2 = 4", "7 were"], [("start 4 or 8 ", "tp2_pp2", n) for n in (4, 8)]),
    Wrong("tp2", 1, ["tp=2", "1 was started"], [("start 2 ", "tp2", 2)]),
    Wrong("tp3", 3, ["num_heads=4", "tp=3"], [("use tp=1, 2 or 4", f"tp{n}", n) for n in (1, 2, 4)]),
    Wrong(
        "tp48", 48, ["vocabulary of 128", "model.vocab_size=100", "tp=48"], [("use tp=16 or less", "tp16", 16)],
        "--model.vocab_size 100 --model.num_heads 48",
    ),
    Wrong("sp", 2, ["sp", "tp=1"], [("add tp2", "tp2_sp", 2), ("leave sp out", "dp", 2)]),
    Wrong(
        "tp4_sp", 4, ["seq_length=18", "tp=4", "2 left over"],
        [(f"{n}, or" if n == 20 else "--model.seq_length 16 ", f"--model.seq_length {n}", 4) for n in (16, 20)]
        + [("leave sp out", "tp4", 4)],
        "--model.seq_length 18",
    ),
    Wrong(
        "tp4_sp", 4, ["seq_length=3"], [("--model.seq_length 4,", "--model.seq_length 4", 4)], "--model.seq_length 3"
    ),
    Wrong(
        "dp3", 3, ["global_batch_size=16", "micro_batch_size=2", "dp=3"],
        [("--global_batch_size 12 or 18", f"--global_batch_size {n}", 3) for n in (12, 18)],
        "--global_batch_size 16",
    ),
    Wrong(
        "dp", 16, ["global_batch_size=24", "dp=16"], [("--global_batch_size 32", "--global_batch_size 32", 16)]
    ),
    Wrong("zbv", 1, ["ZBVZeroBubble", "pp=1"], [("add pp2", "pp2_zbv", 2)]),
    Wrong("cut-of-one", 1, ["need a pipeline"], [("add pp2", "pp2", 2)]),
    Wrong("two-stages", 2, ["1F1B", "not 2"], [("use interleaved2", "pp2_interleaved2", 2)]),
    Wrong(
        "pp2_interleaved1", 2, ["2 stages a rank or more"],
        [("use interleaved2", "pp2_interleaved2", 2), ("or 1f1b", "pp2_1f1b", 2)],
    ),
    Wrong("deep-zbv", 2, ["2 stages a rank, not 4"], [("leave stages_per_rank out", "pp2_zbv", 2)]),
    Wrong(
        "pp4_zbv", 4, ["num_layers=4", "pp=4 x 2 = 8 stages"],
        [("use pp2,", "pp2_zbv", 2), ("or --model.num_layers 8", "--model.num_layers 8", 4)],
    ),
    Wrong(
        "pp2_interleaved", 2, ["num_layers=2", "= 4 stages"],
        [("--model.num_layers 4 or more", "--model.num_layers 4", 2)], "--model.num_layers 2",
    ),
    Wrong(
        "pp5", 5, ["num_layers=4", "5 stages"],
        [("use pp4,", "pp4", 4), ("--model.num_layers 5", "--model.num_layers 5 --global_batch_size 10", 5)],
    ),
    Wrong("short-cut", 2, ["blocks_per_stage=(1, 2)", "num_layers=4"], [("2 positive numbers", "even-cut", 2)]),
    Wrong("empty-stage", 2, ["blocks_per_stage=(4, 0)"], [("whose sum is 4", "even-cut", 2)]),
    Wrong(
        "pp4", 4, ["1F1B", "pp=4 micro-batches", "= 2"],
        [("--micro_batch_size 1 (the curve stays", "--micro_batch_size 1", 4), ("or gpipe", "pp4_gpipe", 4)],
        "--global_batch_size 4",
    ),
    Wrong(
        "pp4", 4, ["1F1B", "pp=4 micro-batches", "= 2"],
        [("--global_batch_size 4,", "--global_batch_size 4", 4), ("or gpipe", "pp4_gpipe", 4)],
        "--micro_batch_size 1 --global_batch_size 2",
    ),
    Wrong(
        "pp2_interleaved", 2, ["Interleaved1F1B", "pp=2 micro-batches", "= 1"],
        [("--micro_batch_size 1", "--micro_batch_size 1", 2)], "--global_batch_size 2",
    ),
    Wrong(
        "pp2_interleaved", 2, ["equal rounds of pp=2", "= 5"],
        [("--global_batch_size 6", "--global_batch_size 6", 2)], "--micro_batch_size 1 --global_batch_size 5",
    ),
    Wrong("tp2_zreo3", 2, ["'zreo3' is not part"], [("did you mean zero3?", "tp2_zero3", 2)]),
    Wrong("dp2-tp2", 4, ["'dp2-tp2' is not part"], []),
    Wrong("pp2_interleved", 2, ["'interleved'"], [("did you mean interleaved?", "pp2_interleaved", 2)]),
    Wrong("evencut", 2, ["'evencut'"], [("did you mean even-cut?", "even-cut", 2)]),
    Wrong("?", 2, ["'?' is not part", "zbv"], [("tp2", "tp2", 2), ("joined by '_'", "tp2_sp", 2)]),
    Wrong("", 2, ["a part is empty"], [("write single", "single", 1), ("tp2_pp2", "tp2_pp2", 4)]),
    Wrong("tp2_single", 2, ["'single'", "whole plan"], [("alone", "single", 1)]),
    Wrong("tp2_even-cut", 4, ["'even-cut'", "whole plan"], [("alone", "even-cut", 2)]),
    Wrong("tp2_tp4", 4, ["says 'tp4' and something else"], [("say one of them", "tp4", 4)]),
    Wrong("pp2_gpipe_zbv", 2, ["says 'zbv' and something else"], [("say one of them", "pp2_zbv", 2)]),
]  # fmt: skip


def with_words(recipe: Recipe, plan: str, options: str) -> Recipe:
    return apply_overrides(replace(recipe, plan=plan), options.split())


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: f"{w.plan or 'empty'}-{w.world}")
def test_a_plan_that_cannot_be_run_is_one_sentence_whose_remedies_work(recipe, wrong):
    with pytest.raises(UserError) as error:
        with_words(recipe, wrong.plan, wrong.options).plan_for(wrong.world)
    sentence = str(error.value)
    rule, _, remedy = sentence.partition("; ")
    assert "\n" not in sentence and ". " not in sentence and not sentence.endswith("."), sentence
    assert all(word in rule + remedy for word in wrong.words), sentence
    assert remedy and (wrong.plan in sentence or any(word in rule for word in wrong.words)), sentence
    for words, change, world in wrong.cures:
        assert words in remedy, sentence
        plan, more = (wrong.plan, f"{wrong.options} {change}") if "--" in change else (change, wrong.options)
        with_words(recipe, plan, more).plan_for(world)


def test_dp_counts_in_the_micro_batches_of_a_pipeline(recipe):
    recipe = replace(recipe, global_batch_size=8, plan="dp2_pp2")
    assert recipe.settings(recipe.plan_for(4), CPU).micro_batches == 2
    with pytest.raises(UserError, match="= 1; use --micro_batch_size 1"):
        replace(recipe, global_batch_size=4).plan_for(4)


def test_a_table_that_names_no_matrix_is_refused_with_those_that_are():
    for pattern in ("blocks.*.attn.qvk", "blocks.9.mlp.fc", "mlp.fc", "blocks.*.mlp", "blocks.0", "blocks", ""):
        with pytest.raises(UserError) as error:
            make_table(MODEL, Plan(tp=2, table={pattern: ColwiseParallel()}))
        rule, _, remedy = str(error.value).partition("; ")
        assert repr(pattern) in rule
        names = remedy.removeprefix("use one of ").split(", ")
        assert sorted(names) == [f"blocks.*.{name}" for name in ("attn.proj", "attn.qkv", "mlp.fc", "mlp.proj")]
        for name in names:
            make_table(MODEL, Plan(tp=2, table={name: ColwiseParallel()}))


def test_a_plans_own_entry_takes_the_place_of_the_default():
    style = ColwiseParallel()
    table = make_table(MODEL, Plan(tp=2, table={"blocks.*.mlp.fc": style, "blocks.*.mlp.proj": None}))
    assert style_of("blocks.1.mlp.fc", table) is style and style_of("blocks.1.mlp.proj", table) is None
    assert table.keys() == make_table(MODEL, Plan(tp=2)).keys()


def test_a_plans_entry_for_one_block_counts_there_alone():
    table = make_table(MODEL, Plan(tp=2, table={"blocks.0.attn.qkv": None}))
    assert style_of("blocks.0.attn.qkv", table) is None and style_of("blocks.0.attn.dropout", table) is None
    assert isinstance(style_of("blocks.1.attn.qkv", table), ColwiseParallel)
    assert style_of("blocks.1.attn.dropout", table) is not None


@pytest.mark.parametrize("patterns", [("blocks.*.mlp.fc", "blocks.1.mlp.fc"), ("blocks.1.mlp.fc", "blocks.*.mlp.fc")])
def test_of_two_entries_the_more_specific_one_counts_wherever_it_stands(patterns):
    style = ColwiseParallel()
    entries = {"blocks.*.mlp.fc": style, "blocks.1.mlp.fc": None}
    table = make_table(MODEL, Plan(tp=2, table={pattern: entries[pattern] for pattern in patterns}))
    assert [style_of(f"blocks.{i}.mlp.fc", table) for i in range(2)] == [style, None]


@pytest.mark.parametrize("other", ["blocks.[01].mlp.*", "blocks.?.mlp.fc"])
def test_two_entries_for_one_module_of_which_neither_is_more_specific_are_refused(other):
    pair = {"blocks.*.mlp.fc": ColwiseParallel(), other: None}
    if other.endswith("*"):
        pair = {"blocks.*.*.proj": ColwiseParallel(), other: None}
    with pytest.raises(UserError, match=r"both match 'blocks.0.mlp.(fc|proj)', and neither"):
        make_table(MODEL, Plan(tp=2, table=pair))
    make_table(MODEL, Plan(tp=2, table=dict.fromkeys(pair)))  # which ask for the same


FIXED = [
    "embedding.wte", "head.lm_head", "*.wte", "blocks.*.attn.dropout", "blocks.0.drop_1", "blocks.*.ln_1",
    "embedding.wpe", "head.ln_f",
]  # fmt: skip


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", FIXED)
def test_entries_that_follow_from_others_are_refused(name, sequence_parallel):
    for style in (None, ColwiseParallel()):
        with pytest.raises(UserError, match="leave this entry out"):
            make_table(MODEL, Plan(tp=2, sequence_parallel=sequence_parallel, table={name: style}))


def test_zbv_is_not_compiled(recipe):
    zbv = replace(recipe, plan="pp2_zbv", model=replace(recipe.model, num_layers=4))
    assert zbv.plan_for(2).splits_backward
    with pytest.raises(UserError, match="use --compile off"):
        replace(zbv, compile="on").plan_for(2)


@pytest.mark.slow(3)
@pytest.mark.parametrize("module", ["blocks.*.attn.qkv", "blocks.*.mlp.proj"])
def test_a_parameter_without_a_style_is_refused_under_sequence_parallelism(module):
    plan = ResolvedPlan(dp=1, tp=2, sequence_parallel=True, table={module: None})
    first, second = pool().run(2, refusal_of_build, MODEL, plan)
    assert first == second
    rule, _, remedy = first.partition("; ")
    assert repr(module.replace("*", "0")) in rule and remedy == "leave its entry out of the plan's table"
    cured = replace(plan, table={})
    assert pool().run(2, refusal_of_build, MODEL, cured) == [None, None]


@pytest.mark.parametrize(
    "values",
    [
        {"tp": "2"}, {"tp": 2.0}, {"tp": True}, {"tp": None}, {"pp": -1}, {"dp": 0}, {"zero": 5}, {"zero": True},
        {"schedule": "1f1b"}, {"sequence_parallel": 1}, {"blocks_per_stage": (3.0, 1.0)}, {"blocks_per_stage": "31"},
        {"table": None}, {"table": ["mlp"]}, {"table": {1: None}}, {"stages_per_rank": 10**7},
    ],
)  # fmt: skip
def test_a_value_that_no_plan_has_is_refused_when_the_plan_is_made(values):
    (name,) = values
    with pytest.raises(UserError, match=rf"^{name}=.*; use "):
        Plan(**values)


@pytest.mark.parametrize("own", [["wide"], {"single": Plan(dp=2)}, {"tp2": Plan(pp=2)}, {"": Plan()}, {"wide": "tp2"}])
def test_own_plans_that_are_none_or_hide_a_standard_one_are_refused(own):
    with pytest.raises(UserError, match=r"^plans"):
        parse_plan("tp4", own)


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel(use_local_output=False),
        RowwiseParallel(use_local_output=False),
        SequenceParallel(),
        PrepareModuleInput(),
        PrepareModuleInputOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
    ],
    ids=lambda style: type(style).__name__,
)
def test_a_style_that_makes_dtensors_of_activations_is_refused(style):
    with pytest.raises(
        UserError, match=r"'blocks.\*.attn.qkv' a style that makes DTensors.*; set use_local_output=True"
    ):
        Plan(tp=2, table={"blocks.*.attn.qkv": style})


def test_a_pattern_that_names_no_matrix_is_refused_before_a_process_is_started(recipe):
    wrong = replace(recipe, plan="own", plans={"own": Plan(tp=2, table={"blocks.*.mlp.cf": None})})
    with pytest.raises(UserError, match=r"'blocks\.\*\.mlp\.cf', which is not a matrix of the model"):
        wrong.plan_for(2)


def test_a_table_needs_tensor_parallelism_and_styles(recipe):
    with pytest.raises(UserError, match="but tp=1"):
        replace(recipe, plan="own", plans={"own": Plan(dp=1, table={"head.ln_f": None})}).plan_for(1)
    for style in ("colwise", ColwiseParallel):
        with pytest.raises(UserError, match="is not a style"):
            make_table(MODEL, Plan(tp=2, table={"blocks.*.mlp.fc": style}))


@pytest.mark.parametrize(
    "model, remedy",
    [
        (replace(MODEL, num_heads=5), "num_heads=5; use model.num_heads=2, 3, 4 or 6, or another width"),
        (replace(LLAMA, num_kv_heads=4), "num_heads=6; use model.num_kv_heads=1, 2, 3 or 6"),
    ],
    ids=["heads", "heads of keys and values"],
)
def test_a_sentence_on_two_sizes_names_what_the_number_of_its_remedy_is(model, remedy):
    with pytest.raises(UserError) as error:
        model.validate()
    assert remedy in str(error.value)

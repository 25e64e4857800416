"""`Layout`: its parts tile every parameter under every plan, and are those of the finished model; stacks of matrices,
and parameters with an axis of their own."""

import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.decoder import unique_parameters
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.inventory import inventory
from dtgpt.models.layers import Context
from dtgpt.ops.random.philox import root_key
from dtgpt.optim.muon import MuonConfig
from dtgpt.optim.muon.normuon import NorMuonConfig
from dtgpt.parallel.build import build_stages
from dtgpt.parallel.layout import ParameterLayout, axes_of, slices
from dtgpt.parallel.local_weights.localize import inference_table
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.shards import layout_of
from dtgpt.planning.activations import block_activations
from dtgpt.planning.gpus import known_gpu
from dtgpt.planning.layout import Layout
from dtgpt.planning.report import describe_plan
from dtgpt.posttrain.lora.config import LoraConfig
from tests.support import bodies_architecture, bodies_checkpoint, bodies_layout, bodies_lora, bodies_optimizer
from tests.support.bodies_shards import CPU, KEY, settings_of, whole_gradient
from tests.support.example_stack import StackConfig
from tests.support.families import OURS
from tests.support.mixed_blocks import MixedConfig
from tests.support.one_rank import build_rank, differences, open_one_rank
from tests.support.other_architecture import OtherConfig
from tests.support.ranks import pool
from tests.support.whole_model import build_model

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 257}
STACK = StackConfig(**SHAPE, dropout=0.1)
MODELS = {"gpt2": GPT2Config(**SHAPE), "stack": STACK, "other": OtherConfig(**SHAPE), "mixed": MixedConfig(**SHAPE)}
MODELS |= OURS
PLANS = [
    "single", "dp2", "dp3_zero1", "dp4_zero3", "tp2", "tp2_sp", "pp2", "pp2_interleaved", "dp2_tp2_zero2", "cp2",
    "dp2_cp2_tp2_sp_zero1", "dp2_tp2_pp2_zero3",
]  # fmt: skip
STACK_PLANS = ["dp2", "dp2_zero1", "dp2_zero3", "tp2", "tp2_sp", "pp2", "dp2_tp2_sp_zero2", "cp2"]
CURVES = [
    *((plan, "adamw") for plan in ("dp2_zero3", "pp2", "dp2_tp2_sp_zero2", "cp2")),
    ("dp2_zero3", "muon"), ("dp2_zero1", "normuon"),
]  # fmt: skip
TABLES = {
    "replicated": {"blocks.*.mlp.fc": None, "blocks.*.mlp.proj": None},
    "one block": {"blocks.1.attn.qkv": None, "blocks.1.attn.proj": None},
    "torch's": {
        "blocks.*.mlp.fc": ColwiseParallel(),
        "blocks.*.mlp.proj": RowwiseParallel(output_layouts=Replicate()),
    },
    "parts of the sequence": {
        "blocks.*.mlp.fc": ColwiseParallel(input_layouts=Sharded(1)),
        "blocks.*.mlp.proj": RowwiseParallel(output_layouts=Sharded(1)),
    },
}
STEPS = 2


def plan_of(name: str) -> ResolvedPlan:
    plan = parse_plan(name)
    return plan.for_world(plan.world)


def count_of(layout: ParameterLayout, ranks: int) -> torch.Tensor:
    counts = torch.zeros(layout.shape, dtype=torch.int)
    for rank in range(ranks):
        counts[slices(layout.region(rank))] += 1
    return counts


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PLANS)
def test_parts_tile_a_parameter_as_often_as_it_has_replicas(name, model):
    plan, found = plan_of(name), Layout(MODELS[model], plan_of(name))
    layouts = {id(layout): layout for layout in layouts_of(found).values()}  # one for all blocks of a kind
    for layout in layouts.values():
        assert math.prod(layout.axes.values()) == plan.ranks_of_stage
        assert (count_of(layout, plan.ranks_of_stage) == layout.replicas).all()
        holders = {}
        for rank in range(plan.ranks_of_stage):
            holders.setdefault(layout.region(rank), []).append(layout.replica(rank))
        for region, replicas in holders.items():
            if all(map(len, region)):
                assert sorted(replicas) == list(range(layout.replicas))


FINISHED = ["dp2_zero3", "tp2_sp", "tp2_pp2", "tp2"]  # by turns


@pytest.mark.slow(4)
@pytest.mark.parametrize("name, model", [
    *((FINISHED[turn % 4], model) for turn, model in enumerate(MODELS)),
    *(("dp2_cp2_tp2_sp_zero1", model) for model in ("gpt2", "stack", "mixed", "gpt_oss")),
])  # fmt: skip
def test_the_finished_model_is_as_the_layout_says(name, model):
    assert_as_laid_out(MODELS[model], plan_of(name))


@pytest.mark.parametrize("table", TABLES)
def test_styles_of_a_plans_own_are_described(table):
    plan = replace(plan_of("tp2"), table=TABLES[table], sequence_parallel=table == "parts of the sequence")
    assert_as_laid_out(MODELS["gpt2"], plan)


def layouts_of(layout: Layout) -> dict[str, ParameterLayout]:
    return {p.name: layout.of(p) for p in inventory(layout.config).parameters()}


def assert_as_laid_out(config, plan: ResolvedPlan) -> None:
    layouts = layouts_of(Layout(config, plan))
    # Of 8 ranks those in which every two coordinates on two axes meet.
    for rank in range(plan.world) if plan.world < 8 else (0, 3, 5, 6):
        with open_one_rank(plan, rank) as mesh:
            for shard in build_stages(settings_of(config, plan), mesh, key=None)[1]:
                layout = layouts[shard.name]
                if shard.is_tied_copy:  # has the style of the output layer, which cuts it alike
                    assert layout.sums_over == ()
                assert layout_of(shard.parameter, plan) == replace(layout, sums_over=()), shard.name
                assert tuple(shard.local.shape) == tuple(
                    map(len, layout.region(rank))
                ) and shard.region == layout.region(rank)
                assert shard.partial == ("tp" in layout.sums_over), shard.name


@pytest.mark.parametrize("model", MODELS)
def test_inference_cuts_as_training_does(model):
    config, plan = MODELS[model], plan_of("tp2")
    assert layouts_of(Layout(config, plan, inference_table(config, plan))) == {
        name: replace(layout, sums_over=()) for name, layout in layouts_of(Layout(config, plan)).items()
    }


def test_stacks_are_cut_within_each_matrix():
    layouts = layouts_of(Layout(STACK, plan_of("dp2_tp2_zero1")))
    first, second = (layouts[f"blocks.3.mlp.{name}.weight"] for name in ("first", "second"))
    assert first.cuts == {"shard": 0, "tp": 1} and second.cuts == {"shard": 0, "tp": 2}
    assert first.region(3) == (range(1, 2), range(64, 128), range(32))
    assert second.region(1) == (range(1), range(32), range(64, 128))
    assert second.region(1, without="shard") == (range(2), range(32), range(64, 128))


@pytest.fixture
def stack(recipe):
    return replace(recipe, model=replace(STACK, num_layers=2), micro_batch_size=2, global_batch_size=8, plan="single")


@pytest.fixture(scope="module")
def alone():
    """Losses and weights of one process, by optimizer and adapters."""
    return bodies_architecture.one_process(STEPS, "optimizer", "lora")


@pytest.mark.slow(4)
@pytest.mark.parametrize("plan, kind", CURVES)
def test_a_stack_has_the_curve_of_one_process(stack, alone, plan, kind):
    rules = {"adamw": stack.optimizer, "muon": MuonConfig(lr=5e-3), "normuon": NorMuonConfig(lr=5e-3)}
    recipe = replace(stack, optimizer=rules[kind])
    expected, whole = alone(recipe)
    results = pool().run(parse_plan(plan).world, bodies_architecture.train_other, replace(recipe, plan=plan), STEPS)
    losses, weights = results[0][:2]
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, whole[name], rtol=1e-4, atol=1e-5)
    assert all(sorted(held) == sorted(planned) for _, _, held, planned in results)


@pytest.mark.slow(4)
def test_stacks_go_from_plan_to_plan_bit_for_bit(stack, tmp_path):
    """Each reader holds the weights and moments that every plan wrote; parts are small, so that replicas share them."""
    recipe, folders = stack, []
    for plan in ("single", "dp2_tp2_sp_zero2"):
        folders.append(tmp_path / plan)
        folders[-1].mkdir()
        run = replace(recipe, plan=plan)
        pool().run(parse_plan(plan).world, bodies_checkpoint.train_and_save, run, folders[-1], 1, 100)
    for plan in ("tp2_sp", "dp2_zero3"):
        world = parse_plan(plan).world
        wrong = pool().run(world, bodies_checkpoint.load_each, replace(recipe, plan=plan), folders)
        assert wrong == [{}] * world


@pytest.mark.slow(4)
@pytest.mark.parametrize("rule", [MuonConfig(lr=5e-3), NorMuonConfig(lr=5e-3)], ids=["muon", "normuon"])
def test_states_of_whole_matrices_of_a_stack_go_on_under_other_plans(stack, alone, tmp_path, rule):
    """Also the mean squares of rows, `[E out]`, which lie on the owner of a stack."""
    recipe = replace(stack, optimizer=rule)
    (expected, whole), found = alone(recipe), []
    for last, plan in enumerate(("tp2_sp", "dp2_zero3"), 1):
        losses, weights, *_ = pool().run(2, bodies_optimizer.train_part, replace(recipe, plan=plan), tmp_path, last)[0]
        found += losses
    assert found == pytest.approx(expected, rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow(4)
def test_adapters_of_a_stack_have_the_curve_of_one_process(stack, tmp_path):
    bodies_lora.train_and_save(stack, tmp_path / "base", 2)
    recipe = replace(
        stack,
        init_from=str(max((tmp_path / "base" / "checkpoints").glob("step_*"))),
        lora=LoraConfig(rank=4, alpha=16.0),
        optimizer=OptimizerConfig(lr=1e-2, warmup=0, schedule="constant"),
    )
    expected, whole = bodies_lora.train_and_save(recipe, tmp_path / "single", 2)
    assert whole["blocks.0.mlp.first.lora.a"].shape == (2, 4, 32) and whole["blocks.0.mlp.first.lora.b"].any()
    assert whole["blocks.0.mlp.second.lora.b"].shape == (2, 32, 4)
    for plan in ("dp2_zero3", "tp2_sp", "pp2", "cp2"):
        run, world = tmp_path / plan, parse_plan(plan).world
        losses, weights = pool().run(world, bodies_lora.train_and_save, replace(recipe, plan=plan), run, 2)[0]
        assert losses == pytest.approx(expected, rel=1e-6), plan
        for name, weight in weights.items():
            torch.testing.assert_close(weight, whole[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow(3)
@pytest.mark.parametrize("plan", ["single", *STACK_PLANS])
def test_the_planner_knows_the_bytes_of_a_stack(stack, plan):
    for kind in (stack.optimizer, MuonConfig(lr=5e-3)):
        settings = replace(stack, plan=plan, optimizer=kind).settings(plan_of(plan), CPU)
        for rank in range(settings.plan.world):
            assert differences(build_rank(settings, kind, rank), settings) == []
    for change in ({}, {"optimizer": MuonConfig(lr=5e-3)}, {"lora": LoraConfig(rank=4)}):
        settings = replace(stack, plan=plan, **change).planned(None)
        assert "fits" in describe_plan(settings, "stack", [], known_gpu("H100"))


def test_the_memory_of_a_block_with_stacks_is_what_autograd_keeps(stack):
    model = replace(STACK, hidden_size=64, seq_length=128, dropout=0.0)
    settings = replace(stack, model=model, micro_batch_size=4, seq_length=None).settings(ResolvedPlan(dp=1), CPU)
    block = build_stages(settings, Mesh(settings.plan, CPU), root_key(1))[0][0].blocks["0"]
    weights, kept = {p.untyped_storage().data_ptr() for p in block.parameters()}, {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(torch.randn(4, 128, 64, requires_grad=True), Context())
    held = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in weights)
    assert held == pytest.approx(block_activations(settings, 0), rel=0.06)


OWN_AXIS = [(name, ep) for name in ("dp4", "dp4_zero1", "dp2_tp2", "dp2_cp2_tp2_zero3") for ep in (2, 4)
            if plan_of(name).data_ranks % ep == 0]  # fmt: skip


@pytest.mark.parametrize("name, ep", OWN_AXIS)
@pytest.mark.parametrize("cut", [{}, {"tp": 1}, {"tp": 2}])
def test_parts_of_a_parameter_with_an_axis_of_its_own_tile_it(name, ep, cut):
    """As experts will lie: their axis divides the ranks of data, and ZeRO and replicas have the rest of them."""
    plan = plan_of(name)
    layout = ParameterLayout((8, 6, 4), axes_of(plan, {"ep": ep}), {"shard": 0, "ep": 0, **cut})
    assert math.prod(layout.axes.values()) == plan.world
    assert (count_of(layout, plan.world) == layout.replicas).all()
    others = plan.data_ranks // ep if plan.zero == 0 else 1
    assert layout.replicas == others * (1 if cut else plan.tp)
    for rank in range(plan.world):  # neighbours among the ranks of data have other experts
        first = rank // plan.tp % ep * (8 // ep)
        assert layout.region(rank, without="shard")[0] == range(first, first + 8 // ep)
    assert {layout.replica(rank) for rank in range(plan.world)} == set(range(layout.replicas))


STACKS = [f"blocks.{block}.mlp.{name}.weight" for block in range(4) for name in ("first", "second")]


@pytest.mark.parametrize("plan", ["dp2", "dp4"])
def test_shards_count_and_write_a_parameter_with_an_axis_of_its_own_once(plan):
    config, world = STACK, parse_plan(plan).world
    answers = pool().run(world, bodies_layout.shards_with_own_axis, config, plan_of(plan), STACKS, 2)
    weights = unique_parameters(build_model(config, CPU, torch.float32, KEY))
    written = {name: torch.zeros(weight.shape, dtype=torch.int) for name, weight in weights.items()}
    for held, _, _ in answers:
        for name, region, local, replicas, own in held:
            assert torch.equal(local, weights[name][slices(region)])
            assert replicas == (world // 2 if name in STACKS else world)
            written[name][slices(own)] += 1
    assert all((count == 1).all() for count in written.values())
    gradient = torch.cat([whole_gradient(name, tuple(w.shape)).flatten().double() for name, w in weights.items()])
    assert [norm for _, norm, _ in answers] == pytest.approx([gradient.norm().item()] * world, rel=1e-6)
    whole = answers[0][2]
    assert all(torch.equal(whole[name], weight) for name, weight in weights.items())

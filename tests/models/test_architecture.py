"""The seam: counts, memory and texts of an architecture in a file of its own, also of one whose blocks differ, follow
from its modules. `tests/promises/test_pairs.py` trains them under plans."""

from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
import torch
from torch import nn

from dtgpt.config.plan import Plan, ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.inference.options import Options
from dtgpt.models.binding import BoundModule, on_meta
from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.models.families.track3 import Track3Config
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.inventory import Core, _cores, inventory
from dtgpt.models.layers import AttentionCore, Context
from dtgpt.models.measured_cores.measure import measure
from dtgpt.models.shared.flops import flops_per_token
from dtgpt.models.source import iterate_shapes
from dtgpt.ops.random.philox import root_key
from dtgpt.optim.fp8.scales import matrices as fp8_matrices
from dtgpt.parallel.balanced_stages.cut import block_flops
from dtgpt.parallel.build import build_stages
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.activations import block_activations
from dtgpt.planning.gpus import known_gpu
from dtgpt.planning.report import describe_plan
from tests.support import bodies_engine
from tests.support.families import OURS, OURS_WITH_EXPERTS
from tests.support.mixed_blocks import MixedConfig
from tests.support.other_architecture import OtherConfig
from tests.support.ranks import pool
from tests.support.requests import make_request
from tests.support.whole_model import build_model
from tests.support.windowed_blocks import WindowedConfig

CPU = torch.device("cpu")
SHAPE = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 257}
MODELS = {
    "other": OtherConfig(**SHAPE),
    "mixed": MixedConfig(**SHAPE | {"num_layers": 5}, dropout=0.1),
    "windowed": WindowedConfig(**SHAPE | {"num_layers": 4}, dropout=0.1),
}
TEXTS = [  # model, plan, whether it trains, too
    ("mixed", "pp2_zbv", False), ("windowed", "dp2_zero3", True), ("mixed", "tp2_pp2", False),
    ("windowed", "tp2_pp2", False), *((family, "tp2", False) for family in OURS),
]  # fmt: skip


@pytest.fixture
def other(recipe):
    return replace(recipe, model=MODELS["other"], micro_batch_size=2, global_batch_size=8, plan="single")


def test_counts_follow_from_the_modules(other):
    with torch.device("meta"):
        parameters = unique_parameters(Decoder(other.model))
    config, sizes = other.model, {name: p.numel() for name, p in parameters.items()}
    assert config.num_parameters == sum(sizes.values()) and config.num_sites == 0
    multiplied = sum(sizes.values()) - sizes["embedding.tokens.weight"]
    assert flops_per_token(config, 16) == 6 * multiplied + 12 * 4 * 32 * 16
    settings = replace(other, plan="tp2_pp2").planned(None)
    assert "4 blocks of 32" in describe_plan(settings, "other", [], known_gpu("H100"))


def test_counts_of_blocks_that_differ_follow_from_the_modules():
    config = MODELS["mixed"]
    with torch.device("meta"):
        parameters = unique_parameters(Decoder(config))
    assert config.num_parameters == sum(p.numel() for p in parameters.values())
    assert dict(iterate_shapes(config)) == {name: tuple(p.shape) for name, p in parameters.items()}
    assert config.num_sites == 1 + 3 + 1 + 1 + 3 + 1  # of the embedding, then of each block
    parts = inventory(config)
    assert [list(parts.sites(block)) for block in range(5)] == [[1, 2, 3], [4], [5], [6, 7, 8], [9]]
    assert [len(parts.cores(block)) for block in range(5)] == [1, 0, 1, 1, 0]
    assert parts.cores(2) == (Core(2, 8),) and parts.cores(3) == (Core(4, 8),)
    looked_up = 16 * 32
    assert flops_per_token(config, 16) == 6 * (config.num_parameters - looked_up) + 3 * 12 * 32 * 16
    matrices = [name for name, p in parameters.items() if name.startswith("blocks") and p.dim() == 2]
    assert [f"{name}.weight" for name in fp8_matrices(config)] == matrices


def test_the_sizes_that_cores_of_families_say_are_those_that_they_are_given():
    own = {"gpt2": GPT2Config(**SHAPE), "track3": Track3Config(**SHAPE)}
    for name, config in (own | OURS | OURS_WITH_EXPERTS).items():
        parts = inventory(config)
        for block in range(config.num_layers):
            with on_meta():
                made = config.make_block(block)
            assert all(module.heads for module in made.modules() if isinstance(module, AttentionCore)), name
            assert parts.cores(block) == measure(config, block, made), (name, block)


@pytest.mark.parametrize("name", ["gpt2", "mixed", "windowed", *OURS])
def test_blocks_that_say_what_their_cores_get_say_what_is_measured(name, monkeypatch):
    config = GPT2Config(**SHAPE) if name == "gpt2" else (MODELS | OURS)[name]
    said = [_cores.__wrapped__(config, index) for index in range(config.num_layers)]
    plain = AttentionCore.__init__
    monkeypatch.setattr(AttentionCore, "__init__", lambda core, *rule, heads=None, **more: plain(core, *rule, **more))
    assert said == [_cores.__wrapped__(config, index) for index in range(config.num_layers)]


def test_a_pipeline_is_cut_by_the_cost_of_each_block():
    config = MixedConfig(**SHAPE | {"num_layers": 9, "hidden_size": 64, "seq_length": 1024, "vocab_size": 1})
    parts = inventory(config)
    cost = [block_flops(parts, block, 1024) for block in range(9)]
    assert cost[1] < cost[0] < cost[2]
    for stages in (2, 3, 4):
        sizes = [len(blocks) for blocks in block_ranges(config, Plan(pp=stages))]
        ends = list(accumulate(sizes))
        largest = max(sum(cost[end - size : end]) for size, end in zip(sizes, ends, strict=True))
        best = min(
            max(sum(cost[a:b]) for a, b in pairwise((0, *cut, 9))) for cut in combinations(range(1, 9), stages - 1)
        )
        assert largest <= best + 0.06 * cost[0] + 6 * 64 * 128  # the ends of the model count, too


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_memory_of_each_kind_of_block_is_what_autograd_keeps(other, recompute):
    model = MixedConfig(**SHAPE | {"num_layers": 3, "hidden_size": 64, "seq_length": 128})
    recipe = replace(other, model=model, micro_batch_size=4, recompute=recompute)
    plan = ResolvedPlan(dp=1)
    settings = recipe.settings(plan, CPU)
    blocks = build_stages(settings, Mesh(plan, CPU), root_key(1))[0][0].blocks
    seen = []
    for index, block in blocks.items():
        shapes, kept = {shape for p in block.parameters() for shape in (p.shape, p.t().shape)}, {}
        x = torch.randn(4, 128, 64, requires_grad=True)

        def keep(tensor, shapes=shapes, kept=kept):
            if tensor.shape not in shapes:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            block(x, Context())
        seen.append(sum(storage.nbytes() for storage in kept.values()))
        assert seen[-1] == pytest.approx(block_activations(settings, int(index)), rel=0.06)
    assert len(set(seen)) == (1 if recompute == "full" else 3)


@pytest.mark.slow(5)
@pytest.mark.parametrize("model, plan, training", TEXTS)
def test_texts_of_blocks_that_differ_are_those_without_a_cache(plan, training, model):
    config = replace((MODELS | OURS)[model], num_layers=5, vocab_size=61, dropout=0.0, init_std=0.3)
    model, prompts = build_model(config, CPU, torch.float32, bodies_engine.KEY), [[5], [3, 4, 5, 6, 7, 8], [9, 2]]
    sampling = Options(max_new_tokens=4, temperature=0, ends=False)
    asked = [make_request(ids=ids, sampling=sampling, choices=1 + (len(ids) > 2)) for ids in prompts]
    world = parse_plan(plan).world
    events = pool().run(world, bodies_engine.generate, config, plan, asked, 2, training)[0]
    for (request, _), text in bodies_engine.texts(events).items():
        ids = list(prompts[request])
        for _ in range(4):
            ids.append(int(bodies_engine.whole_logits(model, ids)[-1].argmax()))
        assert text == ids[len(prompts[request]) :]


def test_a_kind_that_hides_a_difference_is_an_error():
    class Careless(OtherConfig):
        def make_block(self, index: int) -> BoundModule:
            return OtherConfig(**SHAPE | {"hidden_size": 32 * (index + 1)}).make_block(index)

    with pytest.raises(ValueError, match="block 1 differs from block 0 in parameters, dropout sites or rules"):
        Decoder(Careless(**SHAPE))


def test_a_block_that_no_plan_can_wrap_is_an_error():
    class Plain(OtherConfig):
        def make_block(self, index: int) -> nn.Module:
            return nn.Linear(2, 2)

    with pytest.raises(TypeError, match=r"Linear of other is not a BoundModule; derive it from .*"):
        Decoder(Plain(**SHAPE))

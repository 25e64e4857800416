"""A run of Megatron-LM goes on: `--resume` of a checkpoint in the format torch_dist."""

import shutil
import struct
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dtgpt.checkpoint.load import Saved, read_part
from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import CheckpointConfig, DataConfig, LogConfig, OptimizerConfig
from dtgpt.data.library_tokenizers.characters import Char
from dtgpt.interop.megatron.training import MegatronTraining
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.source import parameter_shapes
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.train.start import checked
from dtgpt.train.start import override as settle
from dtgpt.util.errors import UserError
from tests.support.archives import unpack
from tests.support.megatron_trees import pad_rows
from tests.support.ranks import pool
from tests.support.runs import change, losses, newest_run
from tests.support.torch_dist import common_of, training, write

pytestmark = pytest.mark.slow(7)

DATA = Path(__file__).parents[1] / "fixtures" / "megatron"
EXPECTED = {  # what Megatron-LM itself printed of the steps after the checkpoint: loss, norm of the gradient
    "llama_tp2": [(3.499578, 1.870), (3.508156, 2.536)],
    "gpt2_dp2": [(3.475982, 2.259), (3.464786, 2.893)],
    "llama_2025": [(4.212950, 1.814), (4.349837, 2.204)],
}
SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "seq_length": 8, "vocab_size": 32}
LLAMA = LlamaConfig(**SIZES, num_kv_heads=2, head_dim=4, ffn_hidden_size=24, qk_norm=True)
MODELS = {"llama_tp2": LLAMA, "gpt2_dp2": GPT2Config(**SIZES), "llama_2025": replace(LLAMA, vocab_size=64)}


@pytest.fixture(scope="module")
def own_trees(tmp_path_factory):
    """Checkpoints that Megatron-LM's own code wrote, and the data of their runs."""
    root = tmp_path_factory.mktemp("own")
    for name in EXPECTED:
        unpack(DATA / f"torch_dist_{name}.tar.xz", root)
    rng = np.random.default_rng(3)
    documents = [np.append(rng.integers(0, 8, int(n)), 29).astype("<u2") for n in rng.integers(5, 30, 20)]
    (root / "f.bin").write_bytes(b"".join(d.tobytes() for d in documents))
    lengths, ends = [np.cumsum([0, *map(len, documents)]) * scale for scale in (1, 2)]
    (root / "f.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 20, 21) + np.diff(lengths).astype("<i4").tobytes()
        + ends[:-1].astype("<i8").tobytes() + np.arange(21, dtype="<i8").tobytes()
    )  # fmt: skip
    return root


def recipe_for(name, root, runs):
    return Recipe(
        name="on", model=MODELS[name], steps=5, micro_batch_size=2, global_batch_size=4, device="cpu", runs=str(runs),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup=2), checkpoint=CheckpointConfig(interval=1),
        data=DataConfig(path=str(root / "f"), split="100,0,0", tokenizer="ids"),
        log=LogConfig(interval=1, sample_tokens=0),
    )  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_losses_are_those_with_which_megatron_itself_goes_on(name, own_trees, tmp_path):
    """In fp32 to the digits that it prints; where it computes in bf16, to what that rounds."""
    recipe = replace(
        recipe_for(name, own_trees, tmp_path / "runs"), resume=str(own_trees / f"torch_dist_{name}"), plan="single"
    )
    assert train(settle(recipe, [])) == 0
    run = newest_run(recipe)
    records = [r for r in read_records(run / "metrics.jsonl") if "step_loss" in r]
    loss, norm = (1e-6, 1e-3) if name != "gpt2_dp2" else (1e-3, 1e-2)
    assert [r["step"] for r in records] == [4, 5] and [r["tokens"] for r in records] == [16 * 8, 20 * 8]
    for record, (its_loss, its_norm) in zip(records, EXPECTED[name], strict=True):
        assert record["step_loss"] == pytest.approx(its_loss, abs=loss)
        assert record["grad_norm"] == pytest.approx(its_norm, abs=norm)
    # The new run is one like others.
    assert train(settle(recipe, ["--resume", str(run / "checkpoints" / "step_00000004")])) == 0
    again = [r["step_loss"] for r in read_records(run / "metrics.jsonl") if "step_loss" in r]
    assert again == [r["step_loss"] for r in records]


def tensors_of(checkpoint):
    """Weights and moments of a checkpoint of dtgpt, whole, by its names."""
    source, found = Saved(checkpoint), {}
    for name, shape in parameter_shapes(source.config).items():
        for suffix in ("", ".exp_avg", ".exp_avg_sq"):
            found[name + suffix] = torch.empty(shape)
            read_part(checkpoint, name + suffix, shape, tuple(map(range, shape)), found[name + suffix])
    return source.config, found


@pytest.fixture
def parted(recipe, tmp_path):
    """A function that trains a recipe, and returns it with --resume of a tree that is written of its second step."""

    def run(recipe, **options):
        recipe = change(recipe, steps=4, checkpoint={"interval": 2})
        train(recipe)
        folder = newest_run(recipe) / "checkpoints" / "step_00000002"
        config, tensors = tensors_of(Checkpoint(folder))
        counters = {"optimizer": {"state": {"common_step": torch.tensor(2.0)}, "param_groups": [{"lr": 1.0}]}}
        common = common_of(config, step=2, optimizer=counters, consumed_train_samples=16)
        tree = write(tmp_path / "tree", training(tensors, config=config, **options), common)
        return replace(recipe, runs=str(tmp_path / "on"), resume=str(tree)), losses(newest_run(recipe))

    return run


def expect(recipe, whole):
    found = losses(newest_run(recipe))
    assert set(found) == {3, 4} and found == pytest.approx({step: whole[step] for step in found}, rel=2e-6)


def test_a_run_goes_on_under_every_plan(parted, recipe):
    """GPT-2 with dropout: as the run does that was not parted."""
    on, whole = parted(recipe, masters="fp32_param")
    assert train(replace(on, plan="single")) == 0
    expect(on, whole)
    for plan in ("tp2", "zero3"):
        assert pool().run(2, train, replace(on, plan=plan)) == [0, 0]
        expect(on, whole)


def test_a_llama_goes_on(parted, recipe):
    model = LlamaConfig(
        num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, ffn_hidden_size=24, seq_length=16,
        vocab_size=257, dropout=0.1,
    )  # fmt: skip
    on, whole = parted(replace(recipe, model=model), stacked=False, family="local")
    assert pool().run(2, train, replace(on, plan="tp2_sp")) == [0, 0]
    expect(on, whole)


GPT2 = GPT2Config(num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=257)


@pytest.fixture(scope="module")
def state():
    """Random weights and moments."""
    generator = torch.Generator().manual_seed(3)
    shapes = parameter_shapes(GPT2).items()
    found = {
        n + s: torch.rand(shape, generator=generator) for n, shape in shapes for s in ("", ".exp_avg", ".exp_avg_sq")
    }
    return found | {n: pad_rows(t, GPT2) for n, t in found.items() if n.startswith(GPT2.table_name)}


def counted(step=3.0, **more):
    return {"param_groups": [{"step": step, "lr": 1e-3}], **more}


def written(root, state, optimizer=None, edit=None, masters=None, objects=None, step=5, **changes):
    tensors = training(state, config=GPT2, masters=masters)
    tensors = edit(tensors) if edit else tensors
    changes = {"consumed_train_samples": 40} | changes
    common = common_of(GPT2, step=step, optimizer=counted() if optimizer is None else optimizer, **changes)
    return str(write(root, tensors, common, objects=objects))


def check_state(path, state, **expected):
    run = MegatronTraining(Path(path), GPT2.vocab_size)
    assert run.config == GPT2 and run.state == {"step": 5, "consumed_samples": 40, "updates": 3} | expected
    for name, shape in parameter_shapes(GPT2).items():
        part = tuple(range(n // 3, n) for n in shape)
        cut = tuple(slice(r.start, r.stop) for r in part)
        assert torch.equal(run.read(name), state[name])
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(run.read_moment(name, moment, part), state[f"{name}.{moment}"][cut])
    return run


def flattened(tensors):
    """Moments as blocks `[x, y]` in rows: of stacked ones a layer's half, of others a half of the last dimension."""
    found = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer.") and tensor.dim() > 1:
            halves = tensor.unflatten(-1, (2, -1)).movedim(-2, 1)  # [X, 2, ..., y]
            first = 1 if ".layers." in key else tensor.shape[0] // 2
            blocks = halves.unflatten(0, (-1, first)).movedim(2, 1)  # [X / x, 2, x, ..., y]
            grid = [len(blocks), *[1] * (tensor.dim() - 2), 2]
            tensor = blocks.reshape(*grid, -1)
        found[key] = tensor
    return found


def test_counters_scales_and_blocks(state, tmp_path):
    scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 7, "hysteresis_tracker": 1}
    nested = {0: {"optimizer": counted(3), "grad_scaler": scaler}}
    scale = {"scale": 1024.0, "growth_tracker": 7, "hysteresis_tracker": 1, "skipped": 2}
    check_state(written(tmp_path / "fp16", state, nested, masters="param"), state, loss_scale=scale)
    run = check_state(written(tmp_path / "blocks", state, edit=flattened, train_iters=9, global_batch_size=8), state)
    assert run.order_samples == 72 and run.values == {"global_batch_size": 8} and not run.notes
    strange = {"lr": "1\n2", "min_lr": float("nan"), "seed": 10**400, "lr_decay_style": "cosine", "clip_grad": 1.0}
    run = check_state(written(tmp_path / "strange", state, **strange), state)
    assert run.values == {"optimizer.schedule": "cosine", "optimizer.clip": 1.0}
    chained = {"edit": lambda ts: {k.replace("optimizer.", "chained_0.optimizer."): t for k, t in ts.items()}}
    check_state(written(tmp_path / "chained", state, **chained), state)


def without(part):
    return {"edit": lambda tensors: {key: t for key, t in tensors.items() if part not in key}}


BUCKETS = {"optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1": [1]}


@pytest.mark.parametrize("options, message", [
    (without("optimizer"), "no moments of AdamW"),
    (without("optimizer") | {"objects": BUCKETS}, "--dist-ckpt-optim-fully-reshardable"),
    (without("exp_avg_sq.decoder.layers.mlp.linear_fc1.bias"), "no tensor optimizer.state.exp_avg_sq"),
    ({"edit": lambda ts: {k: t[..., :1] if "exp_avg_sq." in k else t for k, t in ts.items()}}, "of shape"),
    ({"edit": lambda ts: {k: t.int() if "exp_avg_sq." in k else t for k, t in ts.items()}}, "torch.int32"),
    ({"optimizer": {}}, "None updates of AdamW"), ({"optimizer": counted(6)}, "6 updates of AdamW in 5 iterations"),
    ({"optimizer": counted(float("nan"))}, "None updates of AdamW"),
    ({"consumed_train_samples": -1}, "consumed_train_samples=-1"),
    ({"consumed_train_samples": None}, "consumed_train_samples=None"),
    ({"step": "x"}, "3 updates of AdamW in 0 iterations")
])  # fmt: skip
def test_what_is_not_to_be_read(state, tmp_path, options, message):
    path = written(tmp_path / "tree", state, **options)
    with pytest.raises(UserError, match=message) as caught:
        MegatronTraining(Path(path), GPT2.vocab_size)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_the_recipe_and_the_run(state, tmp_path, recipe, capsys):
    tree = written(tmp_path / "tree", state, lr=1e-4, global_batch_size=8, seed=7, train_iters=9)
    smaller = change(recipe, model={"hidden_size": 16})
    settled = settle(smaller, ["--resume", tree, "--seed", "9"])
    assert {**asdict(settled.model), "dropout": 0.0} == asdict(GPT2) and settled.seed == 9
    out = capsys.readouterr().out
    assert "hidden_size: 16 -> 32\n" in out and "to keep them, give --optimizer.lr 0.0001" in out
    by_samples = ["--steps", "none", "--optimizer.warmup", "0.1", "--train_samples"]
    samples = settle(recipe, ["--resume", tree, *by_samples, "72"])
    assert samples.steps == 9 and samples.train_samples is None  # 40 samples took 5 steps
    for words, message in (
        (["--model.hidden_size", "16"], "cannot be begun with --model.hidden_size 16"),
        (["--model.seq_length", "8"], "cannot be begun with --model.seq_length 8"),
        ([*by_samples, "32"], "already seen 40 samples"),
        (["--init_from", tree], "leave one out"),
    ):
        with pytest.raises(UserError, match=message):
            settle(recipe, ["--resume", tree, *words])
    with pytest.raises(UserError, match="already done 5 steps; raise --steps"):
        train(settle(recipe, ["--resume", tree, "--steps", "5"]))
    with pytest.raises(UserError, match="holds another model: hidden_size 32 there, 16 here"):
        train(replace(smaller, resume=tree))
    llama = replace(recipe, model=MODELS["llama_tp2"])
    with pytest.raises(UserError, match="holds a gpt2, and the recipe's model is a llama"):
        settle(llama, ["--resume", tree])
    assert not Path(recipe.runs).exists()


def test_a_run_of_megatron_takes_a_text_by_its_own_tokenizer_alone(own_trees, tmp_path):
    name = next(name for name in EXPECTED if name.startswith("gpt2"))
    tree, text = tmp_path / name, tmp_path / "raw.txt"
    shutil.copytree(own_trees / f"torch_dist_{name}", tree)
    text.write_text("".join(f"number {i} " for i in range(3000)))
    recipe = change(recipe_for(name, own_trees, tmp_path / "runs"), data={"path": str(text), "tokenizer": "auto"})
    words = ["--resume", str(tree)]
    with pytest.raises(UserError, match=rf"{tree} has no tokenizer by which data\.path=.*raw\.txt becomes tokens"):
        settle(recipe, words)
    Char([chr(97 + i) for i in range(min(26, recipe.model.vocab_size))]).save(tree / "tokenizer.json")
    assert checked(settle(recipe, words)).data.tokenizer_file == str(tree)
    with pytest.raises(UserError, match="was trained with another tokenizer"):
        train(settle(change(recipe, data={"tokenizer": "char"}), words))


def test_trees_of_the_other_format_are_refused(tmp_path, recipe):
    folder = tmp_path / "iter_0000003" / "mp_rank_00"
    folder.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(UserError, match="--ckpt-convert-format torch_dist"):
        settle(recipe, ["--resume", str(tmp_path)])

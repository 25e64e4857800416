"""Writing Megatron-LM's checkpoints."""

from argparse import Namespace

import pytest
import torch

from dtgpt.interop.megatron.export import save_megatron
from dtgpt.interop.megatron.model import Megatron
from dtgpt.interop.pickles import open_pickle
from dtgpt.models.gpt2 import TABLE, GPT2Config
from dtgpt.models.source import parameter_shapes
from dtgpt.util.errors import UserError
from tests.support.megatron_trees import (
    CONFIG,
    LAYERS,
    PLANS,
    H,
    InMemory,
    assert_same,
    check,
    make_weights,
    pad_rows,
    padded,
    write_tree,
)


@pytest.fixture(scope="module")
def weights():
    return make_weights()


def expected_numel(tp, pp, p):
    """Elements that one rank owns, counted from FORMATS.md."""
    table, layers = padded(131, tp) // tp * H, LAYERS // pp
    total = layers * (12 * H * H // tp + 7 * H // tp + 6 * H)
    total += (table + 16 * H) if p == 0 else 0
    total += 2 * H if p == pp - 1 else 0
    return total + (table if pp > 1 and p == pp - 1 else 0)


@pytest.mark.parametrize(("tp", "pp"), PLANS)
def test_what_is_exported_is_read_back_bitwise(tmp_path, weights, tp, pp):
    root = tmp_path / "new" / "out"
    save_megatron(InMemory(CONFIG, weights), root, tp, pp, iteration=12, consumed_samples=77)
    source = Megatron(root, true_vocab_size=131)
    check(source, weights)
    assert (source.iteration, source.notes) == (12, [])
    assert source._ranks[0, 0, 0].args.consumed_train_samples == 77
    assert [p.name for p in root.parent.iterdir()] == ["out"]
    files = sorted(root.glob("iter_0000012/mp_rank_*/model_optim_rng.pt"))
    assert len(files) == tp * pp and files[0].parent.name == ("mp_rank_00" if pp == 1 else "mp_rank_00_000")
    for index, path in enumerate(files):
        size = 4 * expected_numel(tp, pp, index % pp)
        assert size < path.stat().st_size < size + 40_000, "a file holds more than its rank owns"
        with torch.serialization.safe_globals([Namespace]):
            content = torch.load(path, weights_only=True)
        assert content["checkpoint_version"] == 3.0 and content["args"].padded_vocab_size == padded(131, tp)


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (4, 1)])
def test_what_is_exported_is_what_megatron_writes(tmp_path, weights, tp, pp):
    """Key by key and bit by bit as the independent writer has it, rows of padding and tied copies among them."""
    save_megatron(InMemory(CONFIG, weights), tmp_path / "ours", tp, pp, consumed_samples=4321)
    theirs = write_tree(tmp_path / "theirs", weights, tp, pp) / "iter_0000030"
    for path in theirs.rglob("*.pt"):
        ours, expected = open_pickle(tmp_path / "ours" / "release" / path.relative_to(theirs)), open_pickle(path)
        assert_same(ours["model"], expected["model"])
        assert vars(ours["args"]).items() >= vars(expected["args"]).items()
    assert (tmp_path / "ours" / "latest_checkpointed_iteration.txt").read_text() == "release"
    for path in theirs.rglob("*.pt"):
        ours = open_pickle(tmp_path / "ours" / "release" / path.relative_to(theirs))["args"]
        assert (
            vars(ours).items()
            >= {k: v for k, v in vars(open_pickle(path)["args"]).items() if "consumed" not in k}.items()
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_export_and_gpt2s_vocabulary(tmp_path, dtype):
    config = GPT2Config(num_layers=1, hidden_size=8, num_heads=4, seq_length=4)
    tensors = {n: torch.randn(s) for n, s in parameter_shapes(config).items()}
    tensors[TABLE] = pad_rows(tensors[TABLE], config)
    save_megatron(InMemory(config, tensors), tmp_path / "out", 4, dtype=dtype)
    check(Megatron(tmp_path / "out"), {n: t.to(dtype).float() for n, t in tensors.items()}, config)
    content = open_pickle(tmp_path / "out/release/mp_rank_03/model_optim_rng.pt")
    args, table = content["args"], content["model"]["language_model"]["embedding"]["word_embeddings"]["weight"]
    assert args.params_dtype == table.dtype == dtype and args.fp16 == (dtype == torch.float16)
    assert args.padded_vocab_size == 50688 and args.tokenizer_type == "GPT2BPETokenizer"
    assert torch.equal(table[-431:], tensors[TABLE][50256].to(dtype).expand(431, 8)) and len(table) == 12672


def test_ranks_of_padding_alone_are_written(tmp_path):
    config = GPT2Config(num_layers=1, hidden_size=8, num_heads=8, seq_length=4, vocab_size=9)
    tensors = {n: torch.randn(s) for n, s in parameter_shapes(config).items()}
    tensors[TABLE] = pad_rows(tensors[TABLE], config)
    save_megatron(InMemory(config, tensors), tmp_path / "out", 8)
    check(Megatron(tmp_path / "out", true_vocab_size=9), tensors, config)


@pytest.mark.parametrize(("changes", "words"), [
    ({"tensor_parallel_size": 3}, "num_heads=4 .* over tensor_parallel_size=3; use tensor_parallel_size=1, 2 or 4"),
    ({"pipeline_parallel_size": 3}, "num_layers=4 .* pipeline_parallel_size=3; use pipeline_parallel_size=1, 2"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"), ({"dtype": torch.float64}, "dtype=torch.float64")
])  # fmt: skip
def test_exports_that_cannot_be_are_refused_before_anything_is_written(tmp_path, weights, changes, words):
    with pytest.raises(UserError, match=words):
        save_megatron(InMemory(CONFIG, weights), tmp_path / "out", **changes)
    assert not list(tmp_path.iterdir())


def test_a_failed_export_leaves_nothing_and_harms_nothing(tmp_path, weights):
    class Failing(InMemory):
        def read(self, name, part=None):
            if name == "blocks.3.ln_1.bias":
                raise RuntimeError("gone")
            return super().read(name, part)

    with pytest.raises(RuntimeError, match="gone"):
        save_megatron(Failing(CONFIG, weights), tmp_path / "out", 2, 2)
    large = {**weights, "blocks.2.mlp.fc.bias": torch.full((128,), 7e4)}
    with pytest.raises(UserError, match=r"blocks.2.mlp.fc.bias has weights beyond the range"):
        save_megatron(InMemory(CONFIG, large), tmp_path / "out", dtype=torch.float16)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(UserError, match="exists already"):
        save_megatron(InMemory(CONFIG, weights), tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        save_megatron(InMemory(CONFIG, weights), tmp_path / "file" / "out")
    assert (tmp_path / "out" / "precious").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "out"]

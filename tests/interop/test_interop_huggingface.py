"""Folders of Hugging Face's GPT-2, read and written; the other side is transformers itself."""

import json
import pickle
import weakref

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from dtgpt.interop.hf import model as huggingface
from dtgpt.interop.hf.architecture import ACTIVATIONS as NAMES
from dtgpt.interop.hf.model import HuggingFace, save_huggingface
from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.models.gpt2 import TABLE, GPT2Config
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import Source, parameter_shapes
from dtgpt.ops.random.philox import root_key
from tests.support.sources import TOLERANCE, check_parts, filled, refused
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(4)

CPU = torch.device("cpu")


class InMemory(Source):
    """A dtgpt model as a source that counts its `reads`."""

    def __init__(self, model: Decoder, fail_at: int = -1):
        self.config, self.parameters = model.config, unique_parameters(model)
        self.fail_at, self.reads = fail_at, 0

    def read(self, name, part=None) -> Tensor:
        self.reads += 1
        if self.reads == self.fail_at:
            raise RuntimeError("reading failed")
        return cut(self.parameters[name].detach(), part).clone()


def scatter(model, seed=0):
    """Move every parameter away from its initial value, so that each of them matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def their_model(vocab_size=131, **settings) -> GPT2LMHeadModel:
    sizes = {"vocab_size": vocab_size, "n_positions": 24, "n_embd": 48, "n_layer": 3, "n_head": 4}
    return scatter(GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, **settings)))


def our_model(vocab_size=131) -> Decoder:
    config = GPT2Config(
        num_layers=3, hidden_size=48, num_heads=4, seq_length=24, vocab_size=vocab_size, layer_norm_eps=1e-3
    )
    model = scatter(build_model(config, CPU, torch.float32, root_key(3)))
    with torch.no_grad():
        model.embedding.wte.weight[vocab_size:] = 1e4  # must not get out
    return model


@torch.no_grad()
def same_logits(ours: Decoder, theirs) -> bool:
    size = ours.config.vocab_size
    tokens = torch.randint(size, (3, ours.config.seq_length), generator=torch.Generator().manual_seed(7))
    expected = theirs(tokens).logits
    assert expected.shape[-1] == size and expected.std() > 0.5
    return (ours(tokens)[..., :size] - expected).abs().max() < TOLERANCE * expected.abs().max()


@pytest.fixture
def folder(tmp_path):
    """A model as transformers saves it."""
    their_model().save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def edit(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def edit_weights(folder, change):
    """`change(tensors)` on the file's tensors; what it returns is written, or the same dict."""
    path = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    tensors = change(tensors) or tensors
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("vocab_size", [131, 256])
def test_logits_of_an_imported_model_are_those_of_transformers(tmp_path, vocab_size):
    theirs = their_model(vocab_size, layer_norm_epsilon=1e-3)
    theirs.save_pretrained(tmp_path / "gpt2")
    source = HuggingFace(tmp_path / "gpt2")
    assert source.config == GPT2Config(
        num_layers=3, hidden_size=48, num_heads=4, seq_length=24, vocab_size=vocab_size, layer_norm_eps=1e-3
    )
    assert same_logits(filled(source), theirs)
    assert not source.read(TABLE)[vocab_size:].any()


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_every_accepted_activation_is_that_of_transformers(tmp_path, name):
    theirs = their_model(activation_function=name)
    theirs.save_pretrained(tmp_path / "gpt2")
    source = HuggingFace(tmp_path / "gpt2")
    assert same_logits(filled(source), theirs)
    save_huggingface(source, tmp_path / "again")
    assert HuggingFace(tmp_path / "again").config == source.config


@pytest.mark.parametrize("vocab_size", [131, 256])
def test_transformers_loads_an_exported_model_with_the_same_logits(tmp_path, vocab_size):
    ours = our_model(vocab_size)
    save_huggingface(InMemory(ours), tmp_path / "new" / "gpt2")
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "gpt2", output_loading_info=True)
    assert isinstance(theirs, GPT2LMHeadModel) and not any(info.values()), info
    assert theirs.dtype == torch.float32 and theirs.config.tie_word_embeddings
    assert same_logits(ours, theirs.eval())
    assert theirs.generate(torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=False).shape == (1, 6)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["gpt2"]


def test_only_gpt2s_vocabulary_has_an_end_of_text(tmp_path):
    config = GPT2Config(num_layers=1, hidden_size=4, num_heads=1, seq_length=4)
    save_huggingface(InMemory(build_model(config, CPU, torch.float32, root_key(0))), tmp_path / "a")
    save_huggingface(InMemory(our_model()), tmp_path / "b")
    for file in ("config.json", "generation_config.json"):
        assert [json.loads((tmp_path / d / file).read_text())["eos_token_id"] for d in "ab"] == [50256, None]


def test_round_trips_are_bitwise(tmp_path, folder):
    save_huggingface(HuggingFace(folder), tmp_path / "again")
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(t.view(torch.int32), after[n].view(torch.int32)) for n, t in before.items())

    ours = our_model()
    save_huggingface(InMemory(ours), tmp_path / "ours")
    source = HuggingFace(tmp_path / "ours")
    for name, parameter in unique_parameters(ours).items():
        rows = ours.config.vocab_size if name == TABLE else None
        assert torch.equal(source.read(name)[:rows], parameter[:rows]), name


def test_a_part_is_what_the_whole_has_there_and_memory_of_its_own(folder):
    check_parts(pickle.loads(pickle.dumps(HuggingFace(folder))))  # as it goes to another process


def test_sharded_folders_are_read(tmp_path):
    theirs = their_model()
    theirs.save_pretrained(tmp_path / "gpt2", max_shard_size="60KB")
    assert len(list((tmp_path / "gpt2").glob("*.safetensors"))) > 3
    assert same_logits(filled(HuggingFace(tmp_path / "gpt2")), theirs)


def test_shards_are_written_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 60_000)
    convert, written, alive = huggingface.cast, [], []

    def watched(*args):
        tensor = convert(*args)
        written.append(weakref.ref(tensor.untyped_storage()))
        alive.append(sum(s.nbytes() for ref in written if (s := ref()) is not None))
        return tensor

    monkeypatch.setattr(huggingface, "cast", watched)
    ours = our_model()
    save_huggingface(InMemory(ours), tmp_path / "gpt2")
    assert 30_000 < max(alive) <= 60_000
    files = sorted((tmp_path / "gpt2").glob("*.safetensors"))
    total = sum(t.nbytes for f in files for t in load_file(f).values())
    index = json.loads((tmp_path / "gpt2" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total > 5 * 60_000
    assert set(index["weight_map"].values()) == {f.name for f in files}
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2", output_loading_info=True)
    assert not any(info.values()) and same_logits(ours, theirs.eval())
    assert same_logits(filled(HuggingFace(tmp_path / "gpt2")), theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_and_written(tmp_path, dtype):
    theirs = their_model().to(dtype)
    theirs.save_pretrained(tmp_path / "half")
    source = HuggingFace(tmp_path / "half")
    assert all(source.read(name).dtype == torch.float32 for name in parameter_shapes(source.config))
    assert same_logits(filled(source), theirs.float())

    save_huggingface(source, tmp_path / "again", dtype)
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("half", "again"))
    assert all(after[n].dtype == dtype and torch.equal(t, after[n]) for n, t in before.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto").dtype == dtype


def test_sizes_that_are_missing_are_those_of_transformers(tmp_path, folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refused(lambda: HuggingFace(folder), "wte.weight", "[50257, 768]")
    sizes = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "n_ctx": 24, "vocab_size": 131}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    assert HuggingFace(folder).config.layer_norm_eps == 1e-5


OTHER_MODELS = {
    "model_type": ["gptj", None], "n_inner": [100], "activation_function": ["tanh", "quick_gelu", ["gelu_new"]],
    "tie_word_embeddings": [False], "scale_attn_weights": [False], "scale_attn_by_inverse_layer_idx": [True],
    "add_cross_attention": [True], "layer_norm_epsilon": [-1.0, float("nan"), "1e-5"], "n_layer": ["3"],
    "n_embd": [48.0], "vocab_size": [True], "n_head": [{}], "num_attention_heads": [2], "hidden_size": [96],
    "is_causal": [False, None], "transformers_weights": ["other.safetensors"],
    "configuration_files": [["config.json", "config.5.0.0.json"]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OTHER_MODELS.items() for value in values]
)
def test_a_configuration_that_dtgpt_cannot_express_is_refused(folder, name, value):
    refused(lambda: HuggingFace(edit(folder, **{name: value})), "config.json", name)


@pytest.mark.parametrize("settings", [{"n_head": 5}, {"n_layer": 0}, {"vocab_size": 10**30}, {"n_embd": -48}])
def test_sizes_of_no_model_are_refused(folder, settings):
    refused(lambda: HuggingFace(edit(folder, **settings)), "config.json")


def test_an_adapter_beside_the_model_is_not_left_out(folder):
    (folder / "adapter_config.json").write_text("{}")
    refused(lambda: HuggingFace(folder), "holds an adapter (adapter_config.json) beside the model", "--adapter")


def test_a_configuration_of_more_blocks_than_there_are_is_refused_without_building_them(folder):
    refused(lambda: HuggingFace(edit(folder, n_layer=1_000_000)), "no tensor h.3.ln_1.weight")


@pytest.mark.parametrize("settings", [
    {"n_inner": 192}, {"reorder_and_upcast_attn": True}, {"num_attention_heads": 4, "n_ctx": 7},
    {"is_causal": True, "configuration_files": [], "transformers_weights": None}
])  # fmt: skip
def test_settings_that_change_nothing_are_accepted(folder, settings):
    HuggingFace(edit(folder, **settings))


NAME = "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: {n: x for n, x in t.items() if n != NAME}, ["h.1.mlp.c_fc.weight", "[48, 192]"]),
    (lambda t: t | {NAME: t[NAME].T}, ["h.1.mlp.c_fc.weight", "[192, 48]", "[48, 192]"]),
    (lambda t: t | {NAME: t[NAME].int()}, ["h.1.mlp.c_fc.weight", "I32"]),
    (lambda t: t | {"wte.weight": t["transformer.wte.weight"] + 1}, ["wte.weight", "twice"]),
    (lambda t: t | {"score.weight": torch.ones(2, 48)}, ["score.weight"]),
    (lambda t: t | {"lm_head.weight": torch.ones(2, 48)}, ["lm_head.weight", "tied"]),
    (lambda t: t | {"transformer.wte.weight": torch.ones(()), "lm_head.weight": torch.ones(())}, ["wte", "[]"]),
    (lambda t: t | {"transformer.wpe.weight": torch.ones(25, 48)}, ["wpe.weight", "[25, 48]", "[24, 48]"])
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(folder, change, words):
    edit_weights(folder, change)
    refused(lambda: HuggingFace(folder), str(folder), *words)


def test_untied_rows_far_down_the_table_are_found(folder, monkeypatch):
    monkeypatch.setattr(huggingface, "ROWS", 50)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1

    refused(lambda: HuggingFace(edit_weights(folder, change)), "lm_head.weight")


def test_files_that_are_missing_or_broken_are_refused(folder):
    path, config = folder / "model.safetensors", folder / "config.json"
    whole, settings = path.read_bytes(), config.read_bytes()
    for content in (whole[:-1], whole[:1000], whole[:5], b"", b"\xff" * 64, whole + b"\0"):
        path.write_bytes(content)
        refused(lambda: HuggingFace(folder), str(path), "cannot be read")
    path.unlink()
    refused(lambda: HuggingFace(folder), str(folder), "safe_serialization")
    path.mkdir()
    refused(lambda: HuggingFace(folder), str(path), "cannot be read")
    path.rmdir()
    path.write_bytes(whole)
    for content in (settings[:50], b"[]", b"\xff\xfe", b"[" * 100_000):
        config.write_bytes(content)
        refused(lambda: HuggingFace(folder), str(config), "cannot be read")
    config.unlink()
    refused(lambda: HuggingFace(folder), str(config), "cannot be read")
    refused(lambda: HuggingFace(path), "cannot be read")


def test_a_file_that_vanished_since_is_refused(folder):
    source = HuggingFace(folder)
    (folder / "model.safetensors").unlink()
    refused(lambda: source.read(TABLE), "model.safetensors", "cannot be read")


HOSTILE = ["../gpt2/other.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 3, None, "model.bin"]


@pytest.mark.parametrize("file", [*HOSTILE, "x\\y.safetensors", "a\0.safetensors"])
def test_an_index_that_leaves_the_folder_is_refused(folder, file):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    names = dict.fromkeys(load_file(folder / "other.safetensors"), "other.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    HuggingFace(folder)
    index.write_text(json.dumps({"weight_map": names | {"transformer.wpe.weight": file}}))
    refused(lambda: HuggingFace(folder), str(index), "same folder")


def test_an_index_that_does_not_tell_the_truth_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    names = dict.fromkeys(load_file(folder / "other.safetensors"), "other.safetensors")
    index = folder / "model.safetensors.index.json"
    for content, words in (
        ({}, ["weight_map"]),
        ({"weight_map": ["a"]}, ["weight_map"]),
        ({"weight_map": names | {"transformer.wpe.weight": "gone.safetensors"}}, ["gone.safetensors"]),
        ({"weight_map": names | {"transformer.wpx.weight": "other.safetensors"}}, ["wpx", "index"]),
        ({"weight_map": {}}, ["no tensor wte.weight"]),
    ):
        index.write_text(json.dumps(content))
        refused(lambda: HuggingFace(folder), *words)


def test_an_existing_target_is_refused_before_anything_is_read(tmp_path):
    source = InMemory(our_model())
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    for target in (tmp_path, tmp_path / "link", tmp_path / "file"):
        refused(lambda target=target: save_huggingface(source, target), str(target), "exists already")
    refused(lambda: save_huggingface(source, tmp_path / "new", torch.int8), "torch.int8")
    assert source.reads == 0 and sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 60_000)
    with pytest.raises(RuntimeError, match="reading failed"):
        save_huggingface(InMemory(our_model(), fail_at=20), tmp_path / "gpt2")
    (tmp_path / "file").touch()
    refused(lambda: save_huggingface(InMemory(our_model()), tmp_path / "file" / "gpt2"), "cannot be written")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_weights_beyond_fp16_are_refused(tmp_path):
    ours = our_model()
    with torch.no_grad():
        ours.blocks["1"].mlp.fc.bias[3] = 7e4
    refused(lambda: save_huggingface(InMemory(ours), tmp_path / "gpt2", torch.float16), "blocks.1.mlp.fc.bias")
    assert not list(tmp_path.iterdir())

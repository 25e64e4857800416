"""Folders of Hugging Face's LLaMA, Mistral and Qwen3, read and written; the other side is transformers itself."""

import json
from dataclasses import asdict, replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dtgpt.checkpoint.load import Saved, check_same_model
from dtgpt.checkpoint.open import open_source
from dtgpt.config.overrides import read_words
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.inference.library.load import load
from dtgpt.interop.convert import ConvertOptions, convert
from dtgpt.interop.hf import model as huggingface
from dtgpt.interop.hf.llama import LLAMA
from dtgpt.interop.hf.model import HuggingFace, save_huggingface
from dtgpt.interop.hf.origin import Origin
from dtgpt.interop.inspect import inspect, model_digest
from dtgpt.models.decoder import unique_parameters
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.source import parameter_shapes
from dtgpt.ops import rotary_positions as rotary
from dtgpt.ops.random.philox import root_key
from dtgpt.train.init_from.begin import model_values
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import settle
from tests.interop.test_interop_huggingface import InMemory, edit, edit_weights, same_logits
from tests.support.bodies_inference import weights_at_the_start
from tests.support.huggingface_llamas import MODELS, our_model, their_model
from tests.support.other_architecture import OtherConfig
from tests.support.ranks import pool
from tests.support.sources import TOLERANCE, check_parts, filled, refused
from tests.support.vocabularies import cut_by_pattern
from tests.support.whole_model import build_model


@pytest.fixture
def folder(tmp_path):
    their_model().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.slow(2)
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers_there_and_back(tmp_path, kind):
    theirs = their_model(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    source = HuggingFace(tmp_path / "theirs")
    ours = filled(source)
    assert same_logits(ours, theirs)
    assert source.config.tied == theirs.config.tie_word_embeddings
    check_parts(source)
    tokens = torch.randint(131, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = ours(tokens[:, :-1], targets=tokens[:, 1:])
        assert abs(loss - theirs(tokens, labels=tokens).loss) < TOLERANCE * loss

    save_huggingface(source, tmp_path / "again")
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("theirs", "again"))
    assert before.keys() == after.keys() and ("lm_head.weight" in after) is not source.config.tied
    assert all(torch.equal(t.view(torch.int32), after[n].view(torch.int32)) for n, t in before.items())
    assert HuggingFace(tmp_path / "again").config == source.config
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values()), info
    assert same_logits(ours, back.eval())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_makes_the_round_trip_bitwise_in_shards(tmp_path, monkeypatch, dtype):
    their_model("qwen3").to(dtype).save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 60_000)
    save_huggingface(HuggingFace(tmp_path / "theirs"), tmp_path / "again", dtype)
    before, after = (
        {name: tensor for path in (tmp_path / f).glob("*.safetensors") for name, tensor in load_file(path).items()}
        for f in ("theirs", "again")
    )
    assert before.keys() == after.keys() and len(list((tmp_path / "again").glob("*.safetensors"))) > 2
    assert all(torch.equal(t.view(torch.int16), after[n].view(torch.int16)) for n, t in before.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto").dtype == dtype


@pytest.mark.parametrize("settings", [
    {}, {"tied": True, "num_kv_heads": 4, "head_dim": 12}, {"qk_norm": True, "norm_eps": 1e-6, "dropout": 0.1},
    {"hidden_size": 50, "init_std": 3.0}, {"hidden_size": 50, "rope_factor": 32.0, "rope_original_length": 16},
    {"rope_theta": 500000, "rope_factor": 8, "rope_low_frequency": 2, "rope_high_frequency": 3}
], ids=str)  # fmt: skip
def test_every_model_of_dtgpt_is_one_of_transformers(tmp_path, settings):
    ours = our_model(**settings)
    save_huggingface(InMemory(ours), tmp_path / "out")
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and same_logits(ours, theirs.eval())
    assert theirs.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (1, 5)
    source = HuggingFace(tmp_path / "out")
    assert source.config == replace(ours.config, dropout=0.0, init_std=0.02)
    for name, parameter in unique_parameters(ours).items():
        rows = 131 if name in (source.config.table_name, source.config.output_name) else None
        assert torch.equal(source.read(name)[:rows], parameter[:rows]), name


def test_a_part_of_a_packed_matrix_is_made_of_the_groups_that_it_touches():
    config = our_model(num_kv_heads=4, num_heads=8, head_dim=8).config
    stored = [torch.randn(n, 48) for n in (64, 32, 32)]
    whole = LLAMA.from_stored(stored, "blocks.0.attn.qkv.weight", config, None)
    for rows in (range(35, 61), range(32), range(96, 128), range(7, 7), range(128)):
        part = LLAMA.from_stored(stored, "blocks.0.attn.qkv.weight", config, [rows, range(5, 20)])
        assert torch.equal(part, whole[rows.start : rows.stop, 5:20])
        groups = {row // 32 for row in rows} or {0}
        assert part.untyped_storage().nbytes() <= 4 * 15 * 32 * len(groups)


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t | {f"{Q}.bias": torch.ones(48)}, ["layers.1.self_attn.q_proj.bias"]),
    (lambda t: {n: x for n, x in t.items() if n != f"{Q}.weight"}, ["q_proj.weight", "[48, 48]"]),
    (lambda t: t | {f"{Q}.weight": t[f"{Q}.weight"][:12]}, ["q_proj.weight", "[12, 48]", "[48, 48]"]),
    (lambda t: t | {"model.layers.0.mlp.gate.weight": torch.ones(2, 48)}, ["layers.0.mlp.gate.weight"]),
    (lambda t: t | {f"{Q}.weight": t[f"{Q}.weight"].to(torch.int8)}, ["q_proj.weight", "I8"])
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(folder, change, words):
    edit_weights(folder, change)
    refused(lambda: HuggingFace(folder), str(folder), *words)


def test_an_untied_model_needs_its_projection(folder):
    refused(lambda: HuggingFace(edit(folder, tie_word_embeddings=False)), "no tensor lm_head.weight", "[131, 48]")


def test_commands_make_no_table_of_all_positions(folder, tmp_path, monkeypatch, capsys):
    def table(*_):
        raise AssertionError("a table of all positions is made")

    monkeypatch.setattr(rotary, "angle_table", table)
    edit(folder, max_position_embeddings=131072)
    text = inspect(folder, tensors=True)
    assert "seq_length 131072" in text and "rope_factor 8.0" in text and "blocks.2.mlp.gate_up.weight [176, 48]" in text
    convert(folder, tmp_path / "ours", ConvertOptions())
    convert(tmp_path / "ours", tmp_path / "hf", ConvertOptions(to="hf", dtype="bf16"))
    assert "bf16" in capsys.readouterr().out
    (tmp_path / "ours" / "hugging_face.json").unlink()
    convert(tmp_path / "ours", tmp_path / "own", ConvertOptions(to="hf"))
    assert json.loads((tmp_path / "own" / "generation_config.json").read_text())["max_length"] == 4096
    saved = open_source(tmp_path / "ours")
    assert isinstance(saved, Saved) and saved.config == HuggingFace(folder).config
    assert model_digest(saved) == model_digest(HuggingFace(folder))
    refused(lambda: convert(folder, tmp_path / "hf", ConvertOptions(to="hf")), "exists already")


def test_a_recipe_takes_the_dimensions_of_a_model_and_keeps_its_samples(folder):
    held = HuggingFace(folder).config
    other = our_model().config
    taken = model_values(folder, other, set())
    assert replace(other, **{k.removeprefix("model."): v for k, v in taken.items()}) == replace(
        held, seq_length=24, init_std=0.3
    )
    assert model_values(folder, replace(held, seq_length=7), {"model.seq_length", "model.num_kv_heads"}) == {}
    refused(lambda: model_values(folder, other, {"model.num_kv_heads", "model.tied"}), "--model.tied False")
    gpt2 = GPT2Config(num_layers=1, hidden_size=8, num_heads=2)
    refused(lambda: model_values(folder, gpt2, set()), "holds a llama", "a gpt2", "LlamaConfig")
    assert asdict(held).keys() == asdict(other).keys() and len(parameter_shapes(held)) == 2 + 6 * 3


def test_a_model_is_continued_at_more_positions(recipe, tmp_path, capsys):
    """By YaRN, as transformers computes it with these settings; the exported model says so."""
    their_model("llama 3", vocab_size=257).save_pretrained(tmp_path / "theirs")
    options = ["--init_from", str(tmp_path / "theirs"), "--model.seq_length", "96", "--seq_length", "24"]
    options += ["--model.rope_scaling", "yarn", "--model.rope_factor", "4", "--model.rope_original_length", "24"]
    recipe = replace(recipe, model=our_model().config)
    config = settle(recipe, read_words(options, recipe)[1])
    with open_trainer(config) as trainer:
        held = trainer.stages[0].config
        assert (held.rope_scaling, held.rope_factor, held.seq_length) == ("yarn", 4.0, 96)
        save_huggingface(InMemory(trainer.stages[0]), tmp_path / "longer")
        scaling = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 24}
        edit(tmp_path / "theirs", max_position_embeddings=96, rope_parameters=scaling)
        for folder in ("theirs", "longer"):
            assert same_logits(trainer.stages[0], AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval())
    assert "go on with other positions: model.rope_factor 1.0 -> 4.0" in capsys.readouterr().out
    options = ["--init_from", str(tmp_path / "theirs"), "--model.rope_theta", "7"]
    refused(
        lambda: settle(config, read_words(options, config)[1]), "--model.rope_theta 7.0, where the model has 500000"
    )


def test_a_window_that_hides_nothing_is_kept_for_more_positions(recipe, tmp_path):
    their_model("odd width", vocab_size=257, max_position_embeddings=20, sliding_window=20).save_pretrained(
        tmp_path / "theirs"
    )
    options = ["--init_from", str(tmp_path / "theirs"), "--model.seq_length", "48", "--seq_length", "24"]
    recipe = replace(recipe, model=our_model().config)
    with open_trainer(settle(recipe, read_words(options, recipe)[1])) as trainer:
        save_huggingface(InMemory(trainer.stages[0]), tmp_path / "longer")
        edit(tmp_path / "theirs", max_position_embeddings=48)
        for folder in ("theirs", "longer"):
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
            assert theirs.config.sliding_window == 20 and same_logits(trainer.stages[0], theirs)


def test_a_window_that_hides_nothing_is_no_other_model(tmp_path):
    """Runs of older versions have none, where the folder that they began with has one."""
    their_model("odd width").save_pretrained(tmp_path)  # a window of all 64 positions
    held = HuggingFace(tmp_path).config
    older, settings = replace(held, window=0), json.loads((tmp_path / "config.json").read_text())
    made = {"config.json": LLAMA.write_config(older) | {"torch_dtype": "float32"}}
    assert Origin({"config.json": settings}).settings(older, made)["config.json"]["sliding_window"] == 64
    check_same_model(tmp_path, held, older)
    refused(lambda: check_same_model(tmp_path, replace(held, window=63), older), "window 63 there, 0 here")
    refused(lambda: check_same_model(tmp_path, *(replace(c, seq_length=65) for c in (held, older))), "window 64 there")


@pytest.mark.slow(3)
@pytest.mark.parametrize("plan", ["tp2", "dp2_zero3"])
def test_a_run_begins_with_a_folder_under_any_plan(recipe, tmp_path, plan):
    their_model("qwen3", vocab_size=257, num_key_value_heads=2, hidden_size=40).save_pretrained(tmp_path / "qwen3")
    source = HuggingFace(tmp_path / "qwen3")
    model = replace(source.config, seq_length=16)
    target = replace(recipe, model=model, init_from=str(tmp_path / "qwen3"), plan=plan)
    whole = pool().run(2, weights_at_the_start, target)[0]
    for name in parameter_shapes(model):
        assert torch.equal(whole[name], source.read(name)), name


def test_greedy_texts_of_transformers_and_dtgpt_agree(tmp_path, capsys):
    """With a begin of text before the prompt, in a folder of transformers and in one that dtgpt wrote."""
    torch.manual_seed(3)
    (tmp_path / "theirs").mkdir()
    size = open_tokenizer(str(cut_by_pattern(tmp_path / "theirs", "llama3"))).vocab_size
    their_model("qwen3 tied", vocab_size=size).save_pretrained(tmp_path / "theirs")
    capsys.readouterr()
    convert(tmp_path / "theirs", tmp_path / "ours", ConvertOptions())
    convert(tmp_path / "ours", tmp_path / "again", ConvertOptions(to="hf"))
    assert capsys.readouterr().err == ""
    greedy = {"max_new_tokens": 12, "do_sample": False}
    pipeline = transformers.pipeline("text-generation", str(tmp_path / "again"))
    (theirs,) = pipeline("the quick", **greedy)
    for name in ("theirs", "ours", "again"):
        text = load(tmp_path / name).generate("the quick", return_full_text=True, **greedy)
        assert text == theirs["generated_text"], name
    settings, theirs = (
        json.loads((tmp_path / name / "generation_config.json").read_text()) for name in ("again", "theirs")
    )
    assert settings == theirs


def test_an_architecture_that_transformers_does_not_have_is_refused(tmp_path):
    other = OtherConfig(num_layers=1, hidden_size=8, num_heads=2, seq_length=8, vocab_size=131)
    model = build_model(other, torch.device("cpu"), torch.float32, root_key(3))
    refused(lambda: save_huggingface(InMemory(model), tmp_path / "out"), "architecture other", "Hugging Face folder")
    assert not list(tmp_path.iterdir())

"""Mixtures of experts in Hugging Face's folders: read whole and in part, written for transformers, and refused."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dtgpt.interop.hf.model import HuggingFace, save_huggingface
from dtgpt.models.shared.foreign import without_padding
from dtgpt.ops.random.philox import root_key
from dtgpt.util.errors import UserError
from tests.interop.test_interop_huggingface import InMemory, same_logits, scatter
from tests.models.moe.test_plans import OLMOE
from tests.support.families import their_model
from tests.support.sources import check_parts
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(3)


@pytest.fixture
def folder(tmp_path):
    their_model("olmoe", num_hidden_layers=2).save_pretrained(tmp_path / "olmoe")
    return tmp_path / "olmoe"


def change(folder, **settings) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize(("clip", "normalises"), [(0.0, False), (0.7, True)])
def test_a_model_of_dtgpt_is_one_of_transformers(tmp_path, clip, normalises):
    config = replace(OLMOE, clip_qkv=clip, normalise_weights=normalises)
    ours = scatter(build_model(config, torch.device("cpu"), torch.float32, root_key(3)))
    save_huggingface(InMemory(ours), tmp_path / "out")
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and same_logits(ours, theirs.eval())
    again = HuggingFace(tmp_path / "out")
    assert again.config == replace(config, dropout=0.0)
    for name, parameter in ours.named_parameters():
        assert torch.equal(*(without_padding(each, name, config) for each in (again.read(name), parameter)))


def test_parts_of_stacks_are_those_of_the_whole(folder):
    source = HuggingFace(folder)
    check_parts(source)
    name = "blocks.1.mlp.experts.gate_up.weight"
    whole = source.read(name)
    for part in (
        (range(3, 5), range(7, 20), range(48)),
        (range(0), range(176), range(48)),
        (range(8), range(1), range(2)),
    ):
        expected = whole[tuple(slice(r.start, r.stop) for r in part)]
        assert torch.equal(source.read(name, part), expected) and expected.shape == tuple(map(len, part))


def test_gates_and_ups_alternate_within_each_expert(folder):
    source, stored = HuggingFace(folder), load_file(folder / "model.safetensors")
    for expert, matrix in enumerate(source.read("blocks.0.mlp.experts.gate_up.weight")):
        at = f"model.layers.0.mlp.experts.{expert}."
        assert torch.equal(matrix[0::2], stored[f"{at}gate_proj.weight"])
        assert torch.equal(matrix[1::2], stored[f"{at}up_proj.weight"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention_bias": True}, "attention_bias=true"),
        ({"num_experts": 9}, "layers.0.mlp.gate.weight of shape [8, 48] where its configuration asks for [9, 48]"),
        ({"num_experts": 7}, "asks for [7, 48]"),
        ({"num_experts_per_tok": 9}, "experts_per_token=9"),
        ({"num_experts_per_tok": 0}, "experts_per_token=0"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"clip_qkv": -1}, "clip_qkv=-1"),
        ({"clip_qkv": True}, "clip_qkv=true"),
        ({"hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_what_dtgpt_does_not_compute_is_refused(folder, settings, words):
    change(folder, **settings)
    with pytest.raises(UserError, match=re.escape(words)):
        HuggingFace(folder)


def test_an_expert_of_another_size_is_refused(folder):
    path = folder / "model.safetensors"
    stored, name = load_file(path), "model.layers.1.mlp.experts.5.down_proj.weight"
    save_file(stored | {name: stored[name][:, 1:].contiguous()}, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=re.escape("mlp.experts.5.down_proj.weight")):
        HuggingFace(folder)

"""Folders of GPT-Neo, OLMo 3, Gemma 3, Phi-3 and Qwen2.5, read and written; the other side is transformers itself."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dtgpt.interop.hf.model import ARCHITECTURES, HuggingFace, save_huggingface
from dtgpt.models.decoder import build_model
from dtgpt.ops.random.philox import root_key
from tests.interop.test_interop_huggingface import InMemory, same_logits, scatter
from tests.support.families import MODELS, OURS, their_config, their_model
from tests.support.sources import check_parts, filled, refused

pytestmark = pytest.mark.slow(6)


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_transformers_there_and_back(tmp_path, family):
    theirs = their_model(family)
    theirs.save_pretrained(tmp_path / "theirs")
    source = HuggingFace(tmp_path / "theirs")
    ours = filled(source)
    assert same_logits(ours, theirs)
    check_parts(source)
    save_huggingface(source, tmp_path / "again")
    if family != "phi3":  # which is written as a Mistral
        before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("theirs", "again"))
        assert before.keys() == after.keys()
        assert all(torch.equal(t.view(torch.int32), after[n].view(torch.int32)) for n, t in before.items())
    assert HuggingFace(tmp_path / "again").config == source.config
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values()) and same_logits(ours, back.eval())


@pytest.mark.parametrize("family", ["gpt_neo", "olmo3", "gemma3"])
def test_a_model_of_dtgpt_is_one_of_transformers(tmp_path, family):
    ours = scatter(build_model(OURS[family], torch.device("cpu"), torch.float32, root_key(3)))
    save_huggingface(InMemory(ours), tmp_path / "out")
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and same_logits(ours, theirs.eval())


def older(family, settings):
    """config.json as transformers 4 wrote it."""
    kinds = settings.pop("rope_parameters")
    full, sliding = kinds["full_attention"], kinds["sliding_attention"]
    settings["rope_theta"] = full.pop("rope_theta")
    settings["rope_scaling"] = None if full["rope_type"] == "default" else full
    return settings | ({"rope_local_base_freq": sliding["rope_theta"]} if family == "gemma3" else {})


@pytest.mark.parametrize("family", ["olmo3", "gemma3"])
def test_configurations_of_both_generations_are_one_model(tmp_path, family):
    new = their_config(family).to_dict()
    read = ARCHITECTURES[new["model_type"]].read_config
    expected = read(json.loads(json.dumps(new)), tmp_path)
    assert read(older(family, json.loads(json.dumps(new))), tmp_path) == expected
    assert (
        read(json.loads(json.dumps(new)) | {"layer_types": None, "sliding_window_pattern": 4}, tmp_path).num_layers == 4
    )


LINEAR = {"rope_type": "linear", "factor": 8.0}


def test_a_scaling_of_gemma_is_that_of_its_global_layers(tmp_path):
    config = ARCHITECTURES["gemma3_text"].read_config({"rope_scaling": LINEAR, "rope_theta": 1e6}, tmp_path)
    assert (config.rope_scaling, config.rope_factor, config.rope_local_theta) == ("linear", 8.0, 10000.0)
    local, full = config.make_block(0).attn.rotation, config.make_block(5).attn.rotation
    assert (local.theta, local.factor, full.theta, full.factor, full.scaling) == (1e4, 1.0, 1e6, 8.0, "linear")


OTHERS = [
    ("gpt_neo", {"attention_types": [[["global", "sparse"], 2]]}, "attention_types="),
    ("gpt_neo", {"attention_types": [[["global"], 3]]}, "attention_types of 3 layers and num_layers=4"),
    ("gpt_neo", {"attention_types": [[["local"], 10**12]]}, "attention_types="),
    ("gpt_neo", {"window_size": 0}, "window_size=0"), ("gpt_neo", {"attention_types": 3}, "attention_types=3"),
    ("gpt_neo", {"intermediate_size": 100}, "intermediate_size=100"),
    ("gpt_neo", {"activation_function": "tanh"}, "activation_function='tanh'"),
    ("gpt_neo", {"tie_word_embeddings": False}, "tie_word_embeddings=false"),
    ("olmo3", {"attention_bias": True}, "attention_bias=true"),
    ("olmo3", {"sliding_window": None}, "sliding_window=None"),
    ("olmo3", {"rope_theta": 1e4, "rope_parameters": None}, "rope_theta=10000.0 of full_attention"),
    ("olmo3", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_parameters="),
    ("olmo3", {"rope_parameters": {"sliding_attention": LINEAR}}, "rope_type='linear' of sliding_attention"),
    ("olmo3", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}, "rope_parameters": None}, "rope_type='longr"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
    ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "layer_types="),
    ("gemma3", {"model_type": "gemma3", "text_config": {}, "vision_config": {}}, "model_type='gemma3'"),
    ("gemma3", {"hidden_activation": "tanh"}, "hidden_activation='tanh'"),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern=0"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}}, "longrope for Phi-3"),
    ("phi3", {"partial_rotary_factor": 0.75, "rope_parameters": None}, "partial_rotary_factor=0.75"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "settings", "words"), OTHERS)
def test_a_model_that_dtgpt_does_not_have_is_refused_by_its_key(tmp_path, family, settings, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(their_config(family).to_dict() | settings))
    refused(lambda: HuggingFace(tmp_path), str(path), words)


HOSTILE = ["4", "", -1, 0, 2.5, True, [], {}, 10**30, float("nan"), -1e999]
NUMBERS = {
    "gpt_neo": ("num_layers", "hidden_size", "num_heads", "window_size", "vocab_size", "layer_norm_epsilon"),
    "olmo3": ("num_hidden_layers", "hidden_size", "num_key_value_heads", "sliding_window", "rms_norm_eps"),
    "gemma3": ("num_hidden_layers", "head_dim", "query_pre_attn_scalar", "sliding_window", "num_attention_heads"),
}


@pytest.mark.parametrize("family", NUMBERS)
def test_hostile_numbers_are_one_sentence(tmp_path, family):
    path, settings = tmp_path / "config.json", their_config(family).to_dict()
    for name in NUMBERS[family]:
        for value in HOSTILE:
            path.write_text(json.dumps(settings | {name: value}))
            refused(lambda: HuggingFace(tmp_path), str(path))

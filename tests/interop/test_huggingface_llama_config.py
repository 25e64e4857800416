"""config.json of Hugging Face's LLaMA, Mistral and Qwen3: of transformers 4 and 5, of other models, hostile."""

import json
import math
from dataclasses import replace

import pytest
import transformers

from dtgpt.interop.hf.llama import LLAMA
from dtgpt.interop.hf.model import ARCHITECTURES, HuggingFace
from dtgpt.interop.hf.rope import FULL, SLIDING
from tests.support.huggingface_llamas import LLAMA31, SIZES, our_model, their_model
from tests.support.sources import refused


def older(settings):
    """config.json as transformers 4 wrote it."""
    rope = dict(settings.pop("rope_parameters"))
    settings |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": settings.pop("dtype")}
    return settings | {"rope_scaling": None if rope["rope_type"] == "default" else rope}


def oldest(settings):
    """The same with the first name of the kind of scaling, and without what early versions did not have."""
    settings = older(settings)
    if settings["rope_scaling"]:
        settings["rope_scaling"]["type"] = settings["rope_scaling"].pop("rope_type")
    return {k: v for k, v in settings.items() if k not in ("attention_bias", "mlp_bias", "layer_types")}


def both(settings):
    return older(dict(settings)) | settings


@pytest.mark.parametrize("rewrite", [older, oldest, both])
@pytest.mark.parametrize("kind", ["llama 3", "llama 3.1", "mistral", "qwen3"])
def test_configurations_of_both_generations_are_one_model(tmp_path, kind, rewrite):
    their_model(kind).save_pretrained(tmp_path / "new")
    expected, path = HuggingFace(tmp_path / "new").config, tmp_path / "new" / "config.json"
    path.write_text(json.dumps(rewrite(json.loads(path.read_text()))))
    assert HuggingFace(tmp_path / "new").config == expected


def test_the_written_configuration_has_the_keys_of_both_generations(tmp_path):
    config = our_model(rope_factor=8.0, rope_theta=5e5).config
    written = LLAMA.write_config(config)
    assert written["rope_theta"] == 5e5 and written["rope_scaling"]["rope_type"] == "llama3"
    assert written["rope_parameters"] == {"rope_theta": 5e5, **written["rope_scaling"]}
    plain = LLAMA.write_config(replace(config, rope_factor=1.0))
    assert plain["rope_scaling"] is None and plain["rope_parameters"] == {"rope_theta": 5e5, "rope_type": "default"}
    read = transformers.LlamaConfig(**written)
    assert read.rope_parameters == written["rope_parameters"]


@pytest.mark.parametrize(
    ("name", "null"), [("Llama", False), ("Llama", True), ("Mistral", False), ("Qwen3", False), ("Qwen3", True)]
)
def test_what_is_missing_is_what_transformers_takes(tmp_path, name, null):
    absent = {"num_key_value_heads": None, "rope_scaling": None, "rope_parameters": None} if null else {}
    given = {"sliding_window": None, "num_attention_heads": 64} | absent
    theirs = getattr(transformers, f"{name}Config")(**given)
    ours = LLAMA.read_config({"model_type": theirs.model_type, **given}, tmp_path)
    assert ours == LLAMA.read_config(theirs.to_dict(), tmp_path)
    found = ours.num_heads, ours.num_kv_heads, ours.head_dim, ours.ffn_hidden_size, ours.seq_length, ours.vocab_size
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings")
    assert found == tuple(getattr(theirs, key) for key in (*names, "vocab_size"))


OTHER_MODELS = [
    ("llama", {"model_type": "phimoe"}, "phimoe"), ("llama", {"model_type": "deepseek_v3"}, "deepseek_v3"),
    ("mistral", {"attention_bias": True}, "attention_bias=true"), ("llama", {"mlp_bias": True}, "mlp_bias=true"),
    ("llama", {"attention_bias": "qkv"}, "attention_bias='qkv'"), ("llama", {"hidden_act": "relu"}, "_act='relu'"),
    ("llama", {"hidden_act": "tanh"}, "hidden_act='tanh'"), ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
    ("llama", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config={'0': {'head_dim': 8}}"),
    ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
    *(
        ("llama", {place: {"rope_type": kind, "factor": 2.0}}, f"rope_type='{kind}'")
        for kind in ("dynamic", "longrope", "su", "mrope", "proportional")
        for place in ("rope_scaling", "rope_parameters")
    ),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    *(
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0} | own}, words)
        for own, words in (
            ({"attention_factor": 0}, "attention_factor=0"), ({"beta_fast": "32"}, "beta_fast='32'"),
            ({"mscale": -1.0}, "mscale=-1.0"), ({"truncate": 1}, "truncate=1"), ({"factor": None}, "without factor"),
            ({"beta_fast": 1.0, "beta_slow": 2.0}, "rope_beta_slow=2.0 is not below"),
        )
    ),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_type='linear' without factor"),
    ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "transformers has longrope for Phi-3"),
    ("llama", {"rope_scaling": [8.0]}, "rope_scaling=[8.0]"), ("llama", {"rope_scaling": 8.0}, "rope_scaling=8.0"),
    ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters={'full_attention'"),
    ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "both rope_theta=10000.0 and"),
    ("llama", {"rope_scaling": LLAMA31, "rope_parameters": LLAMA31 | {"factor": 4.0}}, "both factor=4.0 and factor=8"),
    ("llama", {"rope_scaling": LLAMA31 | {"rope_theta": None}, "rope_parameters": LLAMA31}, "no rope_theta in rope"),
    ("llama", {"rope_scaling": {"factor": 8.0}, "rope_parameters": LLAMA31}, "both rope_type='llama3' and rope_type='"),
    ("llama", {"rope_scaling": LLAMA31, "original_max_position_embeddings": 5}, "both original_max_position_embed"),
    (
        "llama", {"rope_scaling": {"type": "llama3", "factor": 8.0}, "rope_parameters": {"rope_type": "default"}},
        "both rope_type='default' and rope_type='llama3'",
    ),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "low_freq_factor"),
    ("llama", {"rope_scaling": LLAMA31 | {"low_freq_factor": 4.0}}, "rope_low_frequency=4.0 is not below"),
    ("llama", {"rope_scaling": LLAMA31 | {"factor": 0.5}}, "rope_factor=0.5"),
    ("mistral", {"sliding_window": 0}, "sliding_window=0"),
    ("mistral", {"sliding_window": math.nan}, "sliding_window=nan, which is not a whole number"),
    ("qwen3", {"use_sliding_window": True, "layer_types": [SLIDING] * 2}, "layer_types of 2 layers and num_hid"),
    ("llama", dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 10**6), "is more than 1000000"),
    ("qwen3", {"use_sliding_window": "yes"}, "use_sliding_window='yes'"),
    # transformers fails with these, too
    ("qwen3", {"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]}, "use_sliding_window is not true"),
    ("qwen2", {"use_sliding_window": False, "layer_types": [SLIDING, FULL, FULL]}, "use_sliding_window is not true"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": None, "layer_types": [SLIDING] * 3}, "window is null"),
    ("ministral", {"sliding_window": None, "layer_types": [FULL, FULL, SLIDING]}, "sliding_window is null"),
    ("mistral", {"sliding_window": None, "layer_types": [FULL, FULL, SLIDING]}, "sliding_window is null"),
    ("phi3", {"layer_types": [SLIDING] * 3}, "sliding_window is null"),
    ("llama", {"sliding_window": 8, "layer_types": [SLIDING] * 3}, "model_type=llama has none"),
    ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types"), ("llama", {"layer_types": 3}, "layer_types=3"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "words"), OTHER_MODELS)
def test_a_model_that_dtgpt_does_not_have_is_refused_by_its_key(tmp_path, kind, settings, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES | {"model_type": kind} | settings))
    refused(lambda: HuggingFace(tmp_path), str(path), words)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"hidden_act": "swish", "pretraining_tp": 2, "attention_dropout": 0.1, "use_cache": False}),
        ("llama", {"rope_scaling": {}, "rope_parameters": None, "partial_rotary_factor": 1.0, "rope_theta": 10000}),
        ("llama", {"rope_scaling": {"rope_type": "default", "type": "linear"}, "attention_bias": None}),
        ("llama", {"layer_types": ["full_attention"] * 3, "sliding_window": None, "quantization_config": None}),
        ("llama", {"sliding_window": 8}),  # which transformers' Llama does not read
        ("mistral", {}), ("mistral", {"layer_types": None}),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 3}),
    ],
)  # fmt: skip
def test_settings_that_change_nothing_are_accepted(tmp_path, kind, settings):
    plain = LLAMA.read_config(SIZES | {"model_type": kind}, tmp_path)
    assert LLAMA.read_config(SIZES | {"model_type": kind} | settings, tmp_path) == plain


@pytest.mark.parametrize(
    ("kind", "settings", "window", "pattern"),
    [
        ("mistral", {"sliding_window": 63}, 63, "L"), ("mistral", {"max_position_embeddings": 4097}, 4096, "L"),
        ("mistral", {"sliding_window": 64}, 64, "L"), ("mistral", {}, 4096, "L"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "layer_types": [SLIDING] * 3}, 64, "L"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}, 32, "GGL"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 32, "layer_types": [SLIDING] * 3}, 32, "L"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING]}, 5, "LG"),
        ("mistral", {"sliding_window": 5, "layer_types": [FULL, SLIDING, FULL]}, 5, "GL"),  # Ministral there
        ("phi3", {"sliding_window": 7, "layer_types": [FULL] * 3}, 7, "L"),  # which is no key of Phi-3
    ],
)  # fmt: skip
def test_layers_with_a_window_are_those_of_the_configuration(tmp_path, kind, settings, window, pattern):
    config = ARCHITECTURES[kind].read_config(SIZES | {"model_type": kind} | settings, tmp_path)
    assert (config.window, config.window_pattern) == (window, pattern)
    for one in (config, replace(config, seq_length=5000)):
        hides = window < one.seq_length
        expected = [window if hides and (pattern * 3)[i] == "L" else None for i in range(3)]
        assert [one.window_of(i) for i in range(3)] == expected
    written = ARCHITECTURES[kind].write_config(config)
    again = ARCHITECTURES[written["model_type"]].read_config(written, tmp_path)
    assert (again.window, again.window_pattern) == (window, pattern)


NUMBERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "sliding_window",
)  # fmt: skip
HOSTILE = ["4", "", -1, 0, 2.5, True, [], [4], {}, {"a": 1}, 10**30, 10**400, float("nan"), float("inf"), -1e999]


@pytest.mark.parametrize("name", NUMBERS)
def test_hostile_numbers_are_one_sentence(tmp_path, name):
    path = tmp_path / "config.json"
    for value in HOSTILE:
        if (name, value) in (("rope_theta", 2.5), *(("sliding_window", n) for n in (4, 10**30, 10**400))):
            continue
        path.write_text(json.dumps(SIZES | {"model_type": "mistral", name: value}))
        refused(lambda: HuggingFace(tmp_path), str(path))


@pytest.mark.parametrize("name", LLAMA31)
def test_hostile_numbers_of_a_scaling_are_one_sentence(tmp_path, name):
    path = tmp_path / "config.json"
    for value in HOSTILE:
        if value != 2.5 or name == "original_max_position_embeddings":
            path.write_text(json.dumps(SIZES | {"model_type": "llama", "rope_scaling": LLAMA31 | {name: value}}))
            refused(lambda: HuggingFace(tmp_path), str(path))


def test_scaling_without_its_length_takes_that_of_the_model(tmp_path):
    scaling = {k: v for k, v in LLAMA31.items() if k != "original_max_position_embeddings"}
    config = LLAMA.read_config(SIZES | {"model_type": "llama", "rope_scaling": scaling}, tmp_path)
    assert config.rope_original_length == 64
    theirs = transformers.LlamaConfig(**SIZES, rope_scaling=dict(scaling))
    assert theirs.rope_parameters["original_max_position_embeddings"] == 64

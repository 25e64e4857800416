"""Folders of families whose layers differ, and of those with experts, read and written; the other side is transformers
itself."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dtgpt.checkpoint.load import differing
from dtgpt.interop.hf.model import ARCHITECTURES, HuggingFace, save_huggingface
from dtgpt.interop.hf.mxfp4 import from_mxfp4
from dtgpt.interop.inspect import model_digest
from dtgpt.ops.random.philox import root_key
from dtgpt.util.errors import UserError
from tests.commands.test_cli import in_process
from tests.interop.test_interop_huggingface import InMemory, edit_weights, same_logits, scatter
from tests.interop.test_interop_huggingface import their_model as gpt2
from tests.support.families import MODELS, OURS, OURS_WITH_EXPERTS, their_config, their_model
from tests.support.huggingface_llamas import their_model as llama
from tests.support.sources import check_parts, filled, refused
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(2)


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
        kept = {name for name in before if family != "gpt_oss" or ".router." not in name}
        assert all(torch.equal(before[n].view(torch.int32), after[n].view(torch.int32)) for n in kept)
        assert not any(t.any() for name, t in after.items() if name not in kept)  # routers of one expert
    assert HuggingFace(tmp_path / "again").config == source.config
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values()) and same_logits(ours, back.eval())


OLD = {  # buffers that older versions stored
    "gpt2": {"transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.bool).tril(),
             "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)},
    "llama": {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(6) for i in range(3)},
}  # fmt: skip
TIED = {
    "gpt2": (gpt2, "transformer.", "wte", "tied"),
    "llama": (llama, "model.", "embed_tokens", "tie_word_embeddings=true"),
    "gpt_neo": (lambda: their_model("gpt_neo"), "transformer.", "wte", "its architecture has one table"),
    "gemma3": (lambda: their_model("gemma3"), "model.", "embed_tokens", "_word_embe"),
}  # fmt: skip


@pytest.mark.parametrize("way", ["plain names", "old buffers", "output too", "output alone", "another output"])
@pytest.mark.parametrize("kind", TIED)
def test_other_ways_to_write_the_same_model(tmp_path, kind, way):
    """A tied output may be stored too, or alone, as long as it is the table."""
    make, prefix, table, words = TIED[kind]
    make().save_pretrained(tmp_path)
    expected, name = model_digest(HuggingFace(tmp_path)), f"{prefix}{table}.weight"

    def change(tensors):
        if way == "plain names":
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        if way == "old buffers":
            return tensors | OLD.get(kind, {})
        tensors["lm_head.weight"] = tensors[name] + (way == "another output")
        return {own: tensor for own, tensor in tensors.items() if way != "output alone" or own != name}

    edit_weights(tmp_path, change)
    if way == "another output":
        refused(lambda: HuggingFace(tmp_path), str(tmp_path), words)
    else:
        assert model_digest(HuggingFace(tmp_path)) == expected


OWN = {**OURS, **OURS_WITH_EXPERTS}
WITHOUT_WINDOWS = ["olmoe", "granitemoe", "glm4_moe"]  # in transformers
WINDOWS = [
    (family, window)
    for family in ("gpt_neo", "olmo3", "gemma3", "gpt_oss", *OURS_WITH_EXPERTS)
    for window in ((0,) if family in WITHOUT_WINDOWS else (0, 5))
]


@pytest.mark.parametrize(("family", "window"), WINDOWS)
def test_a_model_of_dtgpt_is_one_of_transformers(tmp_path, family, window):
    ours = scatter(build_model(replace(OWN[family], window=window), torch.device("cpu"), torch.float32, root_key(3)))
    save_huggingface(InMemory(ours), tmp_path / "out")
    assert not differing(HuggingFace(tmp_path / "out").config, ours.config)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and same_logits(ours, theirs.eval())


def older(family, settings):
    """config.json as transformers 4 wrote it."""
    kinds = settings.pop("rope_parameters")
    full, sliding = kinds["full_attention"], kinds["sliding_attention"]
    settings["rope_theta"] = full.pop("rope_theta")
    settings["rope_scaling"] = None if full["rope_type"] == "default" else full
    return settings | ({"rope_local_base_freq": sliding["rope_theta"]} if family == "gemma3" else {})


def test_layers_of_gpt_neo_count_rather_than_their_short_form(tmp_path):
    settings = their_config("gpt_neo").to_dict() | {"attention_types": [[["local"], 4]]}
    read = ARCHITECTURES["gpt_neo"].read_config
    assert read(settings, tmp_path).window_pattern == "GL"
    assert read(settings | {"attention_layers": None}, tmp_path).window_pattern == "L"


@pytest.mark.parametrize("family", ["olmo3", "gemma3"])
def test_configurations_of_both_generations_are_one_model(tmp_path, family):
    new = their_config(family).to_dict()
    read = ARCHITECTURES[new["model_type"]].read_config
    expected = read(json.loads(json.dumps(new)), tmp_path)
    assert read(older(family, json.loads(json.dumps(new))), tmp_path) == expected
    assert (
        read(json.loads(json.dumps(new)) | {"layer_types": None, "sliding_window_pattern": 4}, tmp_path).num_layers == 4
    )


@pytest.mark.parametrize("family", MODELS)
def test_keys_that_are_missing_mean_what_they_mean_in_transformers(tmp_path, family):
    whole, found = their_config(family).to_dict(), {}

    def read(settings):
        with suppress(UserError):
            return ARCHITECTURES[whole["model_type"]].read_config(json.loads(json.dumps(settings)), tmp_path)

    for name in whole.keys() - {"model_type"}:
        given = {key: value for key, value in whole.items() if key != name}
        with suppress(ValueError, StrictDataclassClassValidationError):  # lists of another length
            theirs = type(their_config(family)).from_dict(json.loads(json.dumps(given))).to_dict()
            found[name] = read(given) == read(theirs)
    assert all(found.values()) and len(found) > 15, found


def test_an_empty_scaling_of_gpt_oss_is_none(tmp_path):
    given = {k: v for k, v in their_config("gpt_oss").to_dict().items() if k != "rope_parameters"} | {
        "rope_scaling": {}
    }
    theirs = type(their_config("gpt_oss")).from_dict(json.loads(json.dumps(given))).to_dict()
    read = ARCHITECTURES["gpt_oss"].read_config
    assert theirs["rope_parameters"]["rope_type"] == "yarn"
    assert read(given, tmp_path) == read(theirs, tmp_path)


@pytest.mark.parametrize("family", ["olmo3", "gemma3"])
@pytest.mark.parametrize(("settings", "words"), [
    ({"activation": "clamped_swiglu"}, "model.activation=clamped_swiglu"),
    ({"rope_scaling": "yarn", "rope_factor": 4.0, "rope_truncate": False}, "model.rope_truncate=False")
])  # fmt: skip
def test_what_transformers_does_not_compute_is_not_written(family, settings, words):
    config = replace(OURS[family], **settings)
    refused(lambda: ARCHITECTURES[config.architecture].write_config(config), words)


NOT_WRITTEN = [
    *((family, {"window": 5}, "model.window=5") for family in WITHOUT_WINDOWS),
    ("qwen3_moe", {"window": 5, "window_pattern": "LG"}, "model.window_pattern=LG"),
    ("gpt_oss_moe", {"activation": "silu"}, "model.activation=silu"),
    ("glm4_moe", {"attention_bias": "all"}, "model.attention_bias=all"),
    ("glm4_moe", {"shared_size": 25}, "model.shared_size=25"),
    ("mixtral", {"window": 5, "window_pattern": "LG"}, "model.window_pattern=LG"),
    ("qwen2_moe", {"attention_bias": "all"}, "model.attention_bias=all"),
    ("qwen3_moe", {"attention_bias": "qkv"}, "model.attention_bias=qkv"),
    ("qwen3_moe", {"activation": "clamped_swiglu"}, "model.activation=clamped_swiglu"),
]


@pytest.mark.parametrize(("family", "settings", "words"), NOT_WRITTEN)
def test_what_a_family_with_experts_has_not_there_is_not_written(family, settings, words):
    config = replace(OURS_WITH_EXPERTS[family], **settings)
    refused(lambda: ARCHITECTURES[config.architecture].write_config(config), words, "keep it as a checkpoint")


LINEAR = {"rope_type": "linear", "factor": 8.0}


def test_a_scaling_of_gemma_is_that_of_its_global_layers(tmp_path):
    config = ARCHITECTURES["gemma3_text"].read_config({"rope_scaling": LINEAR, "rope_theta": 1e6}, tmp_path)
    assert (config.rope_scaling, config.rope_factor, config.rope_local_theta) == ("linear", 8.0, 10000.0)
    local, full = config.make_block(0).attn.rotation, config.make_block(5).attn.rotation
    assert (local.theta, local.factor, full.theta, full.factor, full.scaling) == (1e4, 1.0, 1e6, 8.0, "linear")


SHORT = {"attention_layers": None}  # so that attention_types count
OTHERS = [
    ("gpt_neo", {**SHORT, "attention_types": [[["global", "sparse"], 2]]}, "attention_types="),
    ("gpt_neo", {**SHORT, "attention_types": [[["global"], 3]]}, "attention_types of 3 layers and num_layers=4"),
    ("gpt_neo", {**SHORT, "attention_types": [[["local"], 10**12]]}, "attention_types="),
    ("gpt_neo", {"attention_layers": ["local"] * 3}, "attention_layers of 3 layers and num_layers=4"),
    ("gpt_neo", {"attention_layers": ["sparse"] * 4}, "attention_layers=['sparse', "),
    ("gpt_neo", {"window_size": 0}, "window_size=0"), ("gpt_neo", {**SHORT, "attention_types": 3}, "attention_types=3"),
    ("gpt_neo", {"intermediate_size": 100}, "intermediate_size=100"),
    ("gpt_neo", {"activation_function": "tanh"}, "activation_function='tanh'"),
    ("gpt_neo", {"tie_word_embeddings": False}, "tie_word_embeddings=false"),
    ("gpt_neo", {"num_attention_heads": 2}, "both num_heads=4 and num_attention_heads=2"),
    ("gemma3", {"is_causal": False}, "is_causal=false"),
    ("olmo3", {"attention_bias": True}, "attention_bias=true"),
    ("olmo3", {"sliding_window": None}, "sliding_window=null"),
    ("olmo3", {"rope_theta": 1e4, "rope_parameters": None}, "rope_theta=10000.0 of full_attention"),
    ("olmo3", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_parameters="),
    ("olmo3", {"rope_parameters": {"sliding_attention": LINEAR}}, "rope_type='linear' of sliding_attention"),
    ("olmo3", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}, "rope_parameters": None}, "rope_type='longr"),
    ("olmo3", {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": None}, "write rope_type instead"),
    ("gemma3", {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_parameters": None}, "write rope_type instead"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
    ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "layer_types="),
    ("gemma3", {"model_type": "gemma3", "text_config": {}, "vision_config": {}}, "model_type='gemma3'"),
    ("gemma3", {"hidden_activation": "tanh"}, "hidden_activation='tanh'"),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern=0"),
    ("gemma3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("olmo3", {"rope_parameters": {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}},
     "partial_rotary_factor=0.5"),
    ("gpt_oss", {"num_local_experts": 32, "num_experts": 16}, "both num_experts=16 and num_local_experts=32"),
    ("gpt_oss", {"num_local_experts": True}, "num_experts=true"),
    ("gpt_oss", {"num_experts_per_tok": 2}, "model.experts_per_token=2 is more than model.num_experts=1"),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config={'quant_method': 'mxfp4'}"),
    ("gpt_oss_moe", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method': 'fp8'}"),
    ("gpt_oss_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "hidden_size=48, which is no multiple"),
    ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config={'quant_method': 'mxfp4'}"),
    ("qwen3_moe", {"num_key_value_heads": 3}, "model.num_kv_heads=3 does not divide model.num_heads=4"),
    ("gpt_neo", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config={'quant_method': 'gptq'}"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=false"), ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act="),
    ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit=null"), ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
    ("gpt_oss", {"rope_parameters": {"full_attention": {}}}, "rope_parameters="),
    ("granitemoe", {"residual_multiplier": -1}, "residual_multiplier=-1"),
    ("granitemoe", {"logits_scaling": 0}, "logits_scaling=0"),
    ("granitemoe", {"attention_multiplier": "1"}, "attention_multiplier='1'"),
    ("granitemoe", {"num_local_experts": 2}, "model.experts_per_token=3 is more than model.num_experts=2"),
    ("granitemoe", {"attention_bias": 1}, "attention_bias=1"),
    ("glm4_moe", {"n_group": 3}, "model.expert_groups=3 does not divide model.num_experts=8"),
    ("glm4_moe", {"topk_group": 5}, "model.open_groups=5 is more than model.expert_groups=4"),
    ("glm4_moe", {"topk_group": 1}, "model.open_groups=1 have 2 experts, fewer than model.experts_per_token=3"),
    ("glm4_moe", {"partial_rotary_factor": 0.9}, "both partial_rotary_factor"),
    ("glm4_moe", {"n_shared_experts": "1"}, "n_shared_experts='1'"),
    ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor=0"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1; in training that multiplies"),
    ("mixtral", {"sliding_window": 0}, "sliding_window=0"),
    ("mixtral", {"num_experts_per_tok": 0}, "model.experts_per_token=0"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "model.shared_size=0"),
    ("qwen2_moe", {"qkv_bias": None}, "qkv_bias=null"),
    ("qwen2_moe", {"layer_types": None, "max_window_layers": "2"}, "max_window_layers='2'"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ("qwen3_moe", {"decoder_sparse_step": 2.0}, "decoder_sparse_step=2.0"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers=1"),
    ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers=['1']"),
    ("qwen3_moe", {"num_hidden_layers": 10**6}, "num_hidden_layers=1000000, some of them without experts"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "model.experts_per_token=9 is more than model.num_experts=8"),
    ("qwen3_moe", {"num_experts": 16, "num_local_experts": 8}, "both num_experts=16 and num_local_experts=8"),
    ("qwen3_moe", {"num_experts": 0, "num_local_experts": 0}, "model.num_experts=0"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob=1"),
    ("qwen3_moe", {"use_sliding_window": "yes"}, "use_sliding_window='yes'"),
    ("qwen3_moe", {"attention_bias": None}, "attention_bias=null"),
    ("qwen3_moe", {"model_type": "deepseek_v3"}, "model_type='deepseek_v3'; its attention compresses keys and values"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}}, "longrope for Phi-3"),
    ("phi3", {"partial_rotary_factor": 0.75, "rope_parameters": None}, "partial_rotary_factor=0.75"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "settings", "words"), OTHERS)
def test_a_model_that_dtgpt_does_not_have_is_refused_by_its_key(tmp_path, family, settings, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(their_config(family).to_dict() | settings))
    refused(lambda: HuggingFace(tmp_path), str(path), words)


def test_more_experts_than_the_file_has_are_one_sentence(tmp_path):
    their_model("qwen3_moe").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    name = next(key for key in ("num_experts", "num_local_experts") if key in settings)
    (tmp_path / "config.json").write_text(json.dumps(settings | {name: 9}))
    refused(lambda: HuggingFace(tmp_path), "layers.0.mlp.gate.weight of shape [8, 48]", "asks for [9, 48]")
    (tmp_path / "config.json").write_text(json.dumps(settings | {name: 7}))
    refused(lambda: HuggingFace(tmp_path), "layers.0.mlp.gate.weight of shape [8, 48]", "asks for [7, 48]")


def test_the_block_of_further_tokens_is_left_out_and_a_correction_stays_in_fp32(tmp_path):
    """Published GLM-4.5s have a block behind the last one, which transformers leaves out, too."""
    twin = their_model("glm4_moe")
    twin.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(3, 3)}, file, metadata={"format": "pt"})
    source = HuggingFace(tmp_path / "theirs")
    assert same_logits(filled(source), twin)
    save_huggingface(source, tmp_path / "out", torch.bfloat16)
    written = load_file(tmp_path / "out" / "model.safetensors")
    corrections = {name for name in written if name.endswith("e_score_correction_bias")}
    assert len(corrections) == 3 and all(torch.equal(written[name], tensors[name]) for name in corrections)
    assert {written[name].dtype for name in written.keys() - corrections} == {torch.bfloat16}
    save_file(tensors | {"model.layers.5.eh_proj.weight": torch.ones(3, 3)}, file)
    refused(lambda: HuggingFace(tmp_path / "theirs"), "layers.5.eh_proj.weight")


SETTINGS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}  # multiples of 32


@pytest.fixture
def packed(tmp_path):
    """A GPT-OSS as the Hub has it, and the folder: experts with 4 bits a value, all else in bf16."""
    twin, generator = their_model("gpt_oss_moe", **SETTINGS), torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        parameter.data = parameter.data.bfloat16().float()
    twin.save_pretrained(tmp_path / "packed")
    file, path = tmp_path / "packed" / "model.safetensors", tmp_path / "packed" / "config.json"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = experts, rows, columns // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
        dense = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        twin.get_parameter(name).data = dense.float()
    save_file(tensors, file, metadata={"format": "pt"})
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"quantization_config": {"quant_method": "mxfp4"}}))
    return twin, tmp_path / "packed"


def test_experts_of_4_bits_are_read_and_written_in_bf16(packed, tmp_path, capsys):
    twin, folder = packed
    source = HuggingFace(folder)
    assert same_logits(filled(source), twin)
    check_parts(source)
    ours, again = tmp_path / "ours", tmp_path / "again"
    for words in ([folder, ours], [ours, again, "--to", "hf", "--dtype", "bf16"]):
        code, _, errors = in_process(["convert", *map(str, words)], capsys)
        assert code == 0, errors
    assert "quantization_config" not in json.loads((again / "config.json").read_text())
    back, info = AutoModelForCausalLM.from_pretrained(again, output_loading_info=True)
    assert back.dtype == torch.bfloat16 and not any(info.values())
    for name, weight in back.state_dict().items():
        assert torch.equal(weight.float(), twin.state_dict()[name]), name


def test_every_code_of_4_bits_and_every_scale_is_exact():
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).expand(255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16)
    found = from_mxfp4(blocks, scales).double()
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    known = torch.tensor([*values, *(-value for value in values)], dtype=torch.float64)
    codes = torch.arange(256)
    pairs = torch.stack([known[codes % 16], known[codes // 16]], -1).flatten()
    expected = pairs * 2.0 ** (torch.arange(255, dtype=torch.float64)[:, None] - 127)  # the largest are beyond fp32
    assert torch.equal(found, expected.float().double())


def test_a_file_of_4_bits_that_does_not_fit_is_one_sentence(packed):
    _, folder = packed
    tensors, file = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name].float()}, file)
    refused(lambda: HuggingFace(folder), str(file), "layers.0.mlp.experts.down_proj_scales in F32")
    save_file(tensors | {name: tensors[name][:, :-1].clone()}, file)
    refused(lambda: HuggingFace(folder), "down_proj_scales of shape [6, 63, 3]", "asks for [6, 64, 3]")
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, file)
    refused(lambda: HuggingFace(folder), "has no tensor layers.0.mlp.experts.down_proj_scales")


HOSTILE = ["4", "", -1, 0, 2.5, True, [], {}, 10**30, float("nan"), -1e999]
NUMBERS = {
    "gpt_neo": ("num_layers", "hidden_size", "num_heads", "window_size", "vocab_size", "layer_norm_epsilon"),
    "olmo3": ("num_hidden_layers", "hidden_size", "num_key_value_heads", "sliding_window", "rms_norm_eps"),
    "gemma3": ("num_hidden_layers", "head_dim", "query_pre_attn_scalar", "sliding_window", "num_attention_heads"),
    "qwen3_moe": (
        "num_hidden_layers",
        "moe_intermediate_size",
        "decoder_sparse_step",
        "num_experts_per_tok",
        "head_dim",
    ),
    "gpt_oss": ("num_hidden_layers", "intermediate_size", "num_key_value_heads", "swiglu_limit", "num_experts_per_tok"),
}


@pytest.mark.parametrize("family", NUMBERS)
def test_hostile_numbers_are_one_sentence(tmp_path, family):
    path, settings = tmp_path / "config.json", their_config(family).to_dict()
    for name in NUMBERS[family]:
        for value in HOSTILE:
            path.write_text(json.dumps(settings | {name: value}))
            refused(lambda: HuggingFace(tmp_path), str(path))

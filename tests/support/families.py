"""Small models of transformers by family, and names of parameters there. Used by tests only."""

import re
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from dtgpt.interop.hf.model import ARCHITECTURES, save_huggingface
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.families.gemma3 import Gemma3Config
from dtgpt.models.families.glm4_moe import Glm4MoeConfig
from dtgpt.models.families.gpt_neo import GPTNeoConfig
from dtgpt.models.families.gpt_oss import GptOssConfig
from dtgpt.models.families.granitemoe import GraniteMoeConfig
from dtgpt.models.families.mixtral import MixtralConfig
from dtgpt.models.families.olmo3 import Olmo3Config
from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.models.families.qwen2_moe import Qwen2MoeConfig
from dtgpt.models.families.qwen3_moe import Qwen3MoeConfig
from dtgpt.models.llama import LlamaConfig
from tests.interop.test_interop_huggingface import InMemory, scatter

SIZES = {
    "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "bos_token_id": None,
    "max_position_embeddings": 128, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GROUPED = {**SIZES, "intermediate_size": 88, "num_key_value_heads": 2}
YARN = {
    "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0,
    "attention_factor": 1.2,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
CORRECTION = "e_score_correction_bias"  # a buffer in transformers
MODELS = {
    "gpt_neo": ("GPTNeo", "GPTNeo", {**SIZES, "attention_types": [[["global", "local"], 2]], "window_size": 5}),
    "olmo3": ("Olmo3", "Olmo3", {**GROUPED, "sliding_window": 7,
                                 "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}}),
    "gemma3": ("Gemma3Text", "Gemma3", {**GROUPED, "head_dim": 16, "sliding_window": 7, "sliding_window_pattern": 3,
                                        "query_pre_attn_scalar": 20}),
    "phi3": ("Phi3", "Phi3", {**GROUPED, "sliding_window": 9}),
    "olmoe": ("Olmoe", "Olmoe", {**GROUPED, "num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 2.0,
                                 "rope_parameters": PLAIN}),
    "granitemoe": ("GraniteMoe", "GraniteMoe", {**GROUPED, "num_local_experts": 6, "num_experts_per_tok": 3,
                                                "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                                                "attention_multiplier": 0.2, "logits_scaling": 0.6}),
    "glm4_moe": ("Glm4Moe", "Glm4Moe", {**GROUPED, "head_dim": 16, "moe_intermediate_size": 40, "n_routed_experts": 8,
                                        "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
                                        "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True}),
    "mixtral": ("Mixtral", "Mixtral", {**GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2,
                                       "sliding_window": 7}),
    "qwen2_moe": ("Qwen2Moe", "Qwen2Moe", {**GROUPED, "moe_intermediate_size": 40, "num_experts": 8,
                                           "num_experts_per_tok": 3, "shared_expert_intermediate_size": 56,
                                           "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 7,
                                           "max_window_layers": 1}),
    "qwen3_moe": ("Qwen3Moe", "Qwen3Moe", {**GROUPED, "head_dim": 16, "moe_intermediate_size": 40, "num_experts": 8,
                                           "num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [1],
                                           "use_sliding_window": True, "sliding_window": 7}),
    "gpt_oss": ("GptOss", "GptOss", {**GROUPED, "head_dim": 16, "sliding_window": 7, "num_local_experts": 1,
                                     "num_experts_per_tok": 1, "rope_parameters": {**YARN, "truncate": False}}),
    "gpt_oss_moe": ("GptOss", "GptOss", {**GROUPED, "head_dim": 16, "sliding_window": 7, "num_local_experts": 6,
                                         "num_experts_per_tok": 3, "rope_parameters": {**YARN, "truncate": False}}),
    "qwen2": ("Qwen2", "Qwen2", {**GROUPED, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "ministral": ("Ministral", "Ministral", {**GROUPED, "head_dim": 16, "sliding_window": 7,
                                             "layer_types": ["full_attention", *["sliding_attention"] * 3]}),
}  # fmt: skip


def their_config(family: str, **settings):
    name, _, own = MODELS[family]
    return getattr(transformers, f"{name}Config")(**{**own, **settings})


def their_model(family: str, **settings):
    """Return a model of transformers whose parameters are all away from their initial values."""
    model = scatter(initial_model(family, seed=0, **settings))
    for name, buffer in model.named_buffers():
        if name.endswith(CORRECTION):
            buffer += 0.2 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1))
    return model


def initial_model(family: str, seed: int, **settings):
    """Return a model of transformers with its initial values."""
    torch.manual_seed(seed)
    config = their_config(family, **settings)
    config._attn_implementation = "eager"
    return getattr(transformers, f"{MODELS[family][1]}ForCausalLM")(config)


def theirs_of(twin: nn.Module, config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights, or gradients, by dtgpt's names under those of a model of transformers."""
    architecture, out = ARCHITECTURES[twin.config.model_type], {}
    for name, tensor in tensors.items():
        whole = tensor[: config.vocab_size] if name in (config.table_name, config.output_name) else tensor
        prefix = "" if name == config.output_name else architecture.prefix
        parts = architecture.to_stored(whole, name, config)
        out |= {prefix + plain: t for plain, t in zip(architecture.stored_names(name, config), parts, strict=True)}
    return stacked_experts(out)


RENAMED = {  # in files -> in memory: Mixtral's, then Granite's
    "block_sparse_moe.gate": "mlp.gate",
    "block_sparse_moe.experts.": "mlp.experts.",
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer": "block_sparse_moe.router",
}
MATRICES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names in files under those of transformers' modules, whose experts are stacks: gate above
    up, and down."""
    out, experts = {}, defaultdict[str, dict[int, dict[str, Tensor]]](lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        for there, inside in RENAMED.items():
            name = name.replace(there, inside)
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts[found[1]][int(found[2])][MATRICES.get(found[3], found[3])] = tensor
        else:
            out[name] = tensor
    for name, own in experts.items():
        each = [own[n] for n in range(len(own))]
        out[f"{name}.gate_up_proj"] = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in each])
        out[f"{name}.down_proj"] = torch.stack([e["down_proj"] for e in each])
    return out


def twin_of(model: Decoder) -> nn.Module:
    """Return transformers' model of the same weights, without dropout."""
    with tempfile.TemporaryDirectory() as folder:
        save_huggingface(InMemory(model), Path(folder) / "twin")
        return transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "twin", attn_implementation="eager")


EXPERTS = ("olmoe", "granitemoe", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss_moe", "glm4_moe")  # families of MODELS
SHAPE = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 257}
SMALL = {**SHAPE, "num_kv_heads": 4, "head_dim": 8, "ffn_hidden_size": 48, "window": 5}
OURS: dict[str, ModelConfig] = {  # for plans
    "gpt_neo": GPTNeoConfig(**SHAPE, window=5, dropout=0.1),
    "olmo3": Olmo3Config(**SMALL, window_pattern="LLG", rope_scaling="yarn", rope_factor=4.0, rope_original_length=8),
    "gemma3": Gemma3Config(**SMALL, window_pattern="LLG", attention_scalar=10, dropout=0.1),
    "gpt_oss": GptOssConfig(**SMALL | {"num_kv_heads": 2}, rope_factor=4.0, rope_original_length=8, dropout=0.1),
    "qwen2": LlamaConfig(**SMALL, window_pattern="GL", attention_bias="all", activation="relu2"),
}
SPARSE: dict = {**SMALL, "num_kv_heads": 2, "num_experts": 6, "experts_per_token": 2}
OURS_WITH_EXPERTS: dict[str, ModelConfig] = {
    "olmoe": OlmoeConfig(**SPARSE | {"window": 0}, clip_qkv=1.0, dropout=0.1),
    "granitemoe": GraniteMoeConfig(
        **SPARSE | {"window": 0}, tied=False, attention_bias=True, logit_divisor=1.5, dropout=0.1
    ),
    "gpt_oss_moe": GptOssConfig(**SPARSE, rope_factor=4.0, rope_original_length=8, dropout=0.1),
    "glm4_moe": Glm4MoeConfig(
        **SPARSE | {"window": 0},
        expert_size=24,
        shared_size=24,
        dense_blocks=2,
        expert_groups=3,
        open_groups=2,
        rotated=0.75,
        routed_factor=1.5,
        dropout=0.1,
    ),
    "mixtral": MixtralConfig(**SPARSE),
    "qwen2_moe": Qwen2MoeConfig(**SPARSE, expert_size=24, shared_size=40, window_pattern="GL", dropout=0.1),
    "qwen3_moe": Qwen3MoeConfig(**SPARSE, expert_size=24, expert_pattern="EDE", attention_bias="all", dropout=0.1),
}

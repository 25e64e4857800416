"""Mixtures of experts in checkpoints as Megatron-LM writes them, by a few lines of their own that share nothing with
the export. Used by tests only."""

import re
from types import SimpleNamespace

import torch

from dtgpt.models.families.glm4_moe import Glm4MoeConfig
from dtgpt.models.families.mixtral import MixtralConfig
from dtgpt.models.families.qwen2_moe import Qwen2MoeConfig
from dtgpt.models.families.qwen3_moe import Qwen3MoeConfig
from dtgpt.models.source import parameter_shapes
from tests.support import megatron_llama_trees
from tests.support.megatron_llama_trees import args_of as dense_args
from tests.support.megatron_trees import pad_rows

H, D, F, E = 32, 16, 24, 4
SHAPE = {
    "num_layers": 4, "hidden_size": H, "num_heads": 4, "num_kv_heads": 2, "head_dim": D, "seq_length": 16,
    "vocab_size": 131, "num_experts": E, "experts_per_token": 2, "norm_eps": 1e-6, "rope_theta": 500000.0,
    "rope_low_frequency": 1.0,
}  # fmt: skip
CONFIGS = {
    "mixtral": MixtralConfig(**SHAPE, ffn_hidden_size=F),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, ffn_hidden_size=40, expert_size=F, expert_pattern="ED", attention_bias="qkv"
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **SHAPE, ffn_hidden_size=40, expert_size=F, shared_size=16, attention_bias="none", tied=True
    ),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE, ffn_hidden_size=40, expert_size=F, shared_size=16, dense_blocks=1, expert_groups=2, open_groups=1,
        routed_factor=2.5, qk_norm=True, rotated=0.5,
    ),
}  # fmt: skip
ARGS = {  # what Megatron-LM's command for each has beside a LLaMA's
    "mixtral": {},
    "qwen3_moe": {"qk_layernorm": True, "add_qkv_bias": True, "moe_layer_freq": [1, 0, 1, 0]},
    "qwen2_moe": {
        "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True, "moe_router_pre_softmax": True,
    },
    "glm4_moe": {
        "moe_shared_expert_intermediate_size": 16, "moe_router_score_function": "sigmoid", "qk_layernorm": True,
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 2,
        "moe_router_group_topk": 1, "moe_layer_freq": [0, 1, 1, 1], "add_qkv_bias": True, "rotary_percent": 0.5,
    },
}  # fmt: skip
FORMS = ("each", "grouped", "one tensor")
ROUTERS = {
    "mlp.router.weight": "mlp.router.weight", "mlp.router.correction.bias": "mlp.router.expert_bias",
    "mlp.shared_gate.weight": "mlp.shared_experts.gate_weight",
}  # fmt: skip


def make_weights(config):
    """Every parameter, random and all different; rows of padding are zero, as `read` gives them."""
    generator = torch.Generator().manual_seed(13)
    tensors = {n: 0.3 * torch.randn(s, generator=generator) for n, s in parameter_shapes(config).items()}
    tables = [name for name in (config.table_name, config.output_name) if name in tensors]
    return tensors | {name: pad_rows(tensors[name], config) for name in tables}


def first_columns_rotate(heads, config):
    """Heads `[.., D, ..]` whose columns rotate by pairs (i, i + D / 2), up to the fraction, with the pairs in front."""
    turning = int(D * config.rotated) // 2
    pairs = [*range(turning), *range(D // 2, D // 2 + turning)]
    rest = [*range(turning, D // 2), *range(D // 2 + turning, D)]
    return heads[..., [*pairs, *rest], :]


def in_their_order(weights, config):
    """Weights with the columns of heads as Megatron-LM has them where a part of these rotates."""
    if getattr(config, "rotated", 1.0) == 1:
        return weights
    found = {}
    for name, tensor in weights.items():
        if ".attn.qkv." in name:
            heads = tensor.reshape(config.num_kv_heads, -1, D, tensor[0].numel()).clone()
            heads[:, :-1] = first_columns_rotate(heads[:, :-1], config)
            tensor = heads.reshape(tensor.shape)
        elif ".attn.q_norm." in name or ".attn.k_norm." in name:
            tensor = first_columns_rotate(tensor[:, None], config)[:, 0]
        found[name] = tensor
    return found


def halves(matrix, tp, t):
    """A rank's gates, then its ups, of a matrix in which they alternate."""
    return torch.cat([matrix[0::2].chunk(tp)[t], matrix[1::2].chunk(tp)[t]])


def experts(first, second, numbers, tp, t, form):
    """The matrices of the experts with these numbers, of stacks `[E, 2F, H]` and `[E, H, F]`, by Megatron-LM's keys."""
    ins = [halves(first[n], tp, t).clone() for n in numbers]
    outs = [second[n].chunk(tp, 1)[t].clone() for n in numbers]
    if form == "one tensor":  # declared [H, E 2F] and [E F, H], and used as [E, H, 2F] and [E, F, H]
        return {
            "experts.weight1": torch.stack([matrix.t() for matrix in ins]).view(H, -1),
            "experts.weight2": torch.stack([matrix.t() for matrix in outs]).view(-1, H),
        }
    found = {}
    for number, pair in enumerate(zip(ins, outs, strict=True)):
        for place, matrix in zip(("linear_fc1", "linear_fc2"), pair, strict=True):
            if form == "each":
                found[f"experts.local_experts.{number}.{place}.weight"] = matrix
                found[f"experts.local_experts.{number}.{place}._extra_state"] = None
            else:
                found[f"experts.{place}.weight{number}"] = matrix
    return found


def stage(weights, config, tp, t, ep, e, layers, first, last, family="local", form="each"):
    """The `model` of one rank: that of a LLaMA, and in place of MLPs what a mixture has."""
    model = megatron_llama_trees.stage(weights, config, tp, t, layers, first, last, family)
    for local, layer in enumerate(layers):
        own = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"blocks.{layer}.")}
        where = f"decoder.layers.{local}."
        if "mlp.router.weight" not in own:
            continue
        if family == "transformer_engine":  # a router needs the norm's result, so that no matrix takes the norm over
            model[f"{where}pre_mlp_layernorm.weight"] = model.pop(f"{where}mlp.linear_fc1.layer_norm_weight")
        for ours, theirs in ROUTERS.items():
            if ours in own:
                model[where + theirs] = own[ours].clone()
        if "mlp.shared.gate_up.weight" in own:
            for place in ("linear_fc1", "linear_fc2"):
                model[f"{where}mlp.shared_experts.{place}._extra_state"] = None
            model[f"{where}mlp.shared_experts.linear_fc1.weight"] = halves(own["mlp.shared.gate_up.weight"], tp, t)
            down = own["mlp.shared.down.weight"].chunk(tp, 1)[t].clone()
            model[f"{where}mlp.shared_experts.linear_fc2.weight"] = down
        numbers = range(e * E // ep, (e + 1) * E // ep)
        stacks = own["mlp.experts.gate_up.weight"], own["mlp.experts.down.weight"]
        model |= {f"{where}mlp.{name}": matrix for name, matrix in experts(*stacks, numbers, tp, t, form).items()}
    return model


def args_of(config, tp=1, pp=1, ep=1, **changes):
    own = {
        "num_experts": E, "moe_router_topk": config.experts_per_token, "moe_ffn_hidden_size": F,
        "ffn_hidden_size": config.ffn_hidden_size, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": tp,
        **ARGS[config.architecture],
    }  # fmt: skip
    plain = SimpleNamespace(**{**vars(config), "qk_norm": False, "attention_bias": "none"})
    return dense_args(plain, tp, pp, **{**own, **changes})


def write_tree(root, weights, config, tp=1, pp=1, ep=1, chunks=1, family="local", form="each", change=None, **extra):
    """A checkpoint at iteration 30. extra: changes of args. change: a function of a rank's content, before it is
    written."""
    weights = in_their_order(weights, config)
    per_chunk = config.num_layers // pp // chunks
    for t in range(tp):
        for p in range(pp):
            for e in range(ep):
                parts = []
                for v in range(chunks):
                    begin = v * (config.num_layers // chunks) + p * per_chunk
                    ends = (p == 0 and v == 0), (p == pp - 1 and v == chunks - 1)
                    layers = range(begin, begin + per_chunk)
                    parts.append(stage(weights, config, tp, t, ep, e, layers, *ends, family, form))
                content = {"iteration": 30, "checkpoint_version": 3.0, "args": args_of(config, tp, pp, ep, **extra)}
                content |= {"model": parts[0]} if chunks == 1 else {f"model{v}": part for v, part in enumerate(parts)}
                if change:
                    change(content, t, p, e)
                folder = root / "iter_0000030" / name_of(t, p, e, pp, ep)
                folder.mkdir(parents=True)
                torch.save(content, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("30")
    return root


def name_of(t, p, e, pp, ep):
    return f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")


def dist_keys(weights, config, stacked=True):
    """Tensors of the shapes of parameters by the keys of torch_dist: those of all experts are one tensor."""
    layers = range(config.num_layers)
    weights = in_their_order(weights, config)
    flat = stage(weights, config, 1, 0, 1, 0, layers, True, True, "transformer_engine")
    found = {}
    for key, tensor in sorted(flat.items(), key=lambda pair: [int(n) for n in re.findall(r"\d+", pair[0])]):
        if tensor is not None:
            found.setdefault(re.sub(r"local_experts\.\d+\.", "experts.", key), []).append(tensor)
    flat = {key: torch.stack(each) if ".experts.experts." in key else each[0] for key, each in found.items()}
    if not stacked:
        return flat
    found = {}
    for key, tensor in flat.items():
        found.setdefault(re.sub(r"layers\.\d+\.", "layers.", key), []).append(tensor)
    return {key: torch.stack(each) if ".layers." in key else each[0] for key, each in found.items()}

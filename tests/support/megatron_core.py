"""Megatron-Core loads a folder of `torch_dist` and computes logits on CPUs: one rank of
`megatron_core.py CHECKPOINT FOLDER TP PP EP VOCABULARY`, of FOLDER/tokens.pt into FOLDER/logits.pt. Nothing of dtgpt is
imported."""

import argparse
import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F


def config_of(args, tp, pp, ep):
    from megatron.core.transformer import TransformerConfig

    same = (
        "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "normalization",
        "layernorm_epsilon", "add_bias_linear",
    )  # fmt: skip
    own = {name: getattr(args, name) for name in same}
    own["num_query_groups"] = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    own |= {name: getattr(args, name, False) for name in ("add_qkv_bias", "qk_layernorm")}
    own |= {"gated_linear_unit": args.swiglu, "activation_func": F.silu if args.swiglu else gelu}
    off = (
        "bias_activation_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion", "persist_layer_norm",
        "apply_rope_fusion", "bias_dropout_fusion",
    )  # fmt: skip
    own |= dict.fromkeys(off, False) | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    own |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "pipeline_dtype": torch.float32}
    if args.num_experts:
        names = (
            "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
            "moe_layer_freq", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups",
            "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
            "moe_router_dtype",
        )  # fmt: skip
        own |= {name: getattr(args, name) for name in names}
        balancing = "none" if args.moe_router_score_function == "sigmoid" else "aux_loss"
        own |= {
            "num_moe_experts": args.num_experts,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": tp,
        }
        own |= {"moe_router_load_balancing_type": balancing, "moe_token_dispatcher_type": "allgather"}
    return TransformerConfig(**own)


def gelu(x):
    return F.gelu(x, approximate="tanh")


def main(checkpoint, folder, tp, pp, ep, vocabulary):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # What its modules ask of a GPU where there is none.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{folder}/ranks")
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # without Transformer Engine, 0.16.1 names it all the same
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    torch.serialization.add_safe_globals([argparse.Namespace])
    args = dist_checkpointing.load_common_state_dict(checkpoint)["args"]
    config = config_of(args, tp, pp, ep)
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    last = state.is_pipeline_last_stage()
    model = GPTModel(
        config, spec, -(-vocabulary // (128 * tp)) * 128 * tp, args.max_position_embeddings,
        pre_process=state.is_pipeline_first_stage(), post_process=last,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent,
        rotary_base=getattr(args, "rotary_base", 10000), rope_scaling=getattr(args, "use_rope_scaling", False),
        rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0), parallel_output=False,
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    # Nothing is missing, nothing is left: both raise.
    found = dist_checkpointing.load({"model": model.sharded_state_dict()}, checkpoint, strict="raise_all")
    print(model.load_state_dict(found["model"]))
    tokens = torch.load(f"{folder}/tokens.pt")
    places = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    with torch.no_grad():
        if pp == 2 and not last:
            dist.send(model(tokens, places, mask).contiguous(), 1)
        else:
            if pp == 2:
                dist.recv(hidden := torch.empty(tokens.shape[1], tokens.shape[0], args.hidden_size), 0)
                model.set_input_tensor(hidden)
            logits = model(tokens, places, mask)
            if rank == world - 1:
                torch.save(logits, f"{folder}/logits.pt")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))

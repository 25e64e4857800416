"""The weights of modules of GPT-2's and LLaMA's kind, and of mixtures of experts, as the kernels of decode steps read
them.

The modules know nothing of these kernels. A class of another family or of a user's own tells its weights by a method
`decode_weights`, which returns one of the tuples of `dtgpt.ops.kernels.decode.weights`. Blocks without kernels whose
own modules compute each row by itself, with the same bits beside any other rows, say so by `computes_rows_apart`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from dtgpt.models import gpt2, llama
from dtgpt.models.families import olmo3, olmoe, qwen3_moe
from dtgpt.models.moe.mixture import Mixture, Router
from dtgpt.ops.fp8.fused import fused_name
from dtgpt.ops.kernels.decode.experts import ACTIVATIONS, ranks
from dtgpt.ops.kernels.decode.weights import BlockWeights, EmbeddingWeights, HeadWeights, Rotary, RouterWeights
from dtgpt.ops.rotary_positions import angle_table


def decode_weights(module: nn.Module) -> Any:
    """Return the weights by which kernels compute what a module does, None where they do not: one that inherits from
    dtgpt's class, and has code of a user's own, may compute something else."""
    kind: Any = type(module)
    own = has_own_code(module)
    if "decode_weights" in vars(kind) or (hasattr(module, "decode_weights") and not own):
        return kind.decode_weights(module)
    read = None if own else next((WEIGHTS[base] for base in kind.__mro__ if base in WEIGHTS), None)
    return None if read is None else read(module)


def computes_rows_apart(block: nn.Module) -> bool:
    """Return whether the modules of a block say that they give a row the same bits beside any other rows; what has code
    of a user's own, and inherits from such a block, may not."""
    return getattr(block, "computes_rows_apart", False) and not has_own_code(block)


def has_own_code(module: nn.Module) -> bool:
    """Return whether a module, or one in it, is neither dtgpt's nor PyTorch's."""
    return any(type(part).__module__.partition(".")[0] not in ("dtgpt", "torch") for part in module.modules())


def _of_gpt2_block(block: gpt2.Block) -> BlockWeights:
    attn, mlp = block.attn, block.mlp
    return BlockWeights(
        norm_1=block.ln_1.weight,
        norm_1_bias=block.ln_1.bias,
        qkv=attn.qkv.weight,
        qkv_bias=attn.qkv.bias,
        proj=attn.proj.weight,
        proj_bias=attn.proj.bias,
        norm_2=block.ln_2.weight,
        norm_2_bias=block.ln_2.bias,
        fc=mlp.fc.weight,
        fc_bias=mlp.fc.bias,
        out=mlp.proj.weight,
        out_bias=mlp.proj.bias,
        eps=block.ln_1.eps,
        head_dim=attn.head_dim,
        activation=fused_name(mlp.activation, has_bias=True),
    )


def _of_pre_norm_block(block: Any, **others: Any) -> BlockWeights:
    """Return the weights of a block with RMSNorms before its branches, of which `others` are those of its MLP."""
    return BlockWeights(
        norm_1=block.norm_1.weight,
        norm_1_bias=None,
        qkv=block.attn.qkv.weight,
        qkv_bias=block.attn.qkv.bias,
        proj=block.attn.proj.weight,
        proj_bias=block.attn.proj.bias,
        norm_2=block.norm_2.weight,
        norm_2_bias=None,
        fc_bias=None,
        out_bias=None,
        eps=block.norm_1.eps,
        head_dim=block.attn.head_dim,
        **others,
    )


def _of_llama_block(block: llama.Block) -> BlockWeights:
    mlp = block.mlp
    return _of_pre_norm_block(
        block,
        fc=mlp.gate_up.weight,
        out=mlp.down.weight,
        activation=fused_name(mlp.activation, has_bias=False),
        rotary=_rotary_of(block.attn),
    )


def _rotary_of(attn: llama.Attention) -> Rotary:
    table = angle_table(attn.rotation, attn.head_dim, attn.num_positions, attn.qkv.weight.device)
    if attn.q_norm is None or attn.k_norm is None:
        return Rotary(table)
    return Rotary(table, attn.q_norm.weight, attn.k_norm.weight, attn.eps)


def _of_mixture_block(block: Any) -> BlockWeights | None:
    """Return the weights of a pre-norm block with rotary positions and experts, without biases; None of one that has
    something else, such as an MLP that all tokens share, or that a capability observes."""
    attn, mlp = block.attn, block.mlp
    if not isinstance(mlp, Mixture) or mlp.shared is not None or type(mlp) is not Mixture:
        return None
    router, experts = mlp.router, mlp.experts
    if not _chooses_alone(router) or experts.gate_up.bias is not None or experts.bound.run is not None:
        return None
    rotary = _any_rotary_of(attn)
    if rotary is None or experts.activation_name not in ACTIVATIONS:
        return None
    return _of_pre_norm_block(
        block,
        fc=experts.gate_up.weight,
        out=experts.down.weight,
        activation=experts.activation_name,
        rotary=rotary,
        router=RouterWeights(router.weight, router.bias, router.rule),
        joint=attn.limit if isinstance(attn, olmoe.Attention) else None,
    )


def _chooses_alone(router: Router) -> bool:
    """Return whether weights and rule alone say what a router chooses, and kernels know the rule."""
    watched = (router.correction, router.balance, router.seen)
    return all(each is None for each in watched) and ranks(router.rule, len(router.weight))


def _any_rotary_of(attn: nn.Module) -> Rotary | None:
    """Return the rotary positions of attention and its norms of heads; None where kernels do not have them, as norms
    over heads of which a rank has a part."""
    if isinstance(attn, llama.Attention):
        return _rotary_of(attn)
    if not isinstance(attn, olmo3.Attention) or attn.q_norm.bound.sum_of_heads is not None:
        return None
    table = angle_table(attn.rotation, attn.head_dim, attn.num_positions, attn.qkv.weight.device)
    return Rotary(table, attn.q_norm.weight, attn.k_norm.weight, attn.q_norm.eps)


WEIGHTS: Mapping[type[nn.Module], Callable[[Any], Any]] = {
    gpt2.Embedding: lambda embedding: EmbeddingWeights(embedding.wte.weight, embedding.wpe.weight),
    gpt2.Block: _of_gpt2_block,
    gpt2.Head: lambda head: HeadWeights(head.ln_f.weight, head.ln_f.bias, head.lm_head.weight, head.ln_f.eps),
    llama.Embedding: lambda embedding: EmbeddingWeights(embedding.tokens.weight, None),
    llama.Block: _of_llama_block,
    qwen3_moe.Block: _of_mixture_block,  # Mixtral's, too
    olmoe.Block: _of_mixture_block,
    llama.Head: lambda head: HeadWeights(head.norm.weight, None, head.output.weight, head.norm.eps),
}

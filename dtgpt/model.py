"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners") as plain modules.

Learned positions, pre-LayerNorm, tanh-GELU, biases, tied embeddings, dropout at GPT-2's three sites (embeddings,
attention probabilities, the end of each residual branch). Nothing here knows of devices, meshes or training.

Shapes: B samples, T positions, H hidden size, N heads, D = H / N, V padded vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dtgpt.errors import UserError
from dtgpt.field_types import Bounds, check_fields
from dtgpt.ops.attention import causal_attention
from dtgpt.ops.dropout import Dropout
from dtgpt.ops.gelu import bias_gelu
from dtgpt.ops.head import head_loss
from dtgpt.ops.layer_norm import layer_norm, norm_and_pass, residual_norm
from dtgpt.ops.linear import linear
from dtgpt.ops.random import fold, normal, row_chunks
from dtgpt.ops.residual import residual

VOCAB_MULTIPLE = 128  # padding that does not depend on the plan, so that every plan has the same global shapes
LARGEST_SIZE = 1_000_000  # of any one dimension
SIZE = Bounds(1, LARGEST_SIZE)
TABLE = "embedding.wte.weight"  # the name of the token table, tied to the output projection
BLOCK_SITES = 3  # dropout sites of a block: attention probabilities, attention output, MLP output


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT-2. The named sizes are `GPT2_124M` ... `GPT3_175B` below."""

    num_layers: Annotated[int, "number of transformer blocks", SIZE]
    hidden_size: Annotated[int, "width of the residual stream", SIZE]
    num_heads: Annotated[int, "number of attention heads; divides hidden_size", SIZE]
    seq_length: Annotated[int, "number of positions, and tokens of a training sample", SIZE] = 1024
    vocab_size: Annotated[int, "number of tokens in the vocabulary, before padding to a multiple of 128", SIZE] = 50257
    dropout: Annotated[float, "dropout of embeddings, attention and residual branches", Bounds(0, below=1)] = 0.0
    init_std: Annotated[
        float, "standard deviation of initial weights; residual outputs: / sqrt(2 num_layers)", Bounds(0, LARGEST_SIZE)
    ] = 0.02
    layer_norm_eps: Annotated[float, "added to the variance in LayerNorm", Bounds(above=0, below=1)] = 1e-5

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def num_sites(self) -> int:
        """Dropout sites: the embedding, then BLOCK_SITES for each block."""
        return 1 + BLOCK_SITES * self.num_layers

    @property
    def num_parameters(self) -> int:
        h, positions = self.hidden_size, self.seq_length
        return self.num_layers * (12 * h * h + 13 * h) + (self.padded_vocab_size + positions) * h + 2 * h

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6 N + 12 L H T, N without position embeddings (Chowdhery et al. 2022, PaLM, app. B)."""
        weights = self.num_parameters - self.seq_length * self.hidden_size
        return 6 * weights + 12 * self.num_layers * self.hidden_size * self.seq_length

    def validate(self) -> None:
        """Raise UserError, one sentence, if no model has this shape."""
        check_fields(self, "model.")
        if self.hidden_size % self.num_heads:
            heads = [n for n in range(1, 2 * self.num_heads + 1) if self.hidden_size % n == 0]
            near = sorted(sorted(heads, key=lambda n: abs(n - self.num_heads))[:4])
            raise UserError(
                f"model.hidden_size={self.hidden_size} cannot be split over model.num_heads={self.num_heads}; "
                f"use a divisor such as {', '.join(map(str, near))}"
            )


GPT2_124M = GPTConfig(num_layers=12, hidden_size=768, num_heads=12)
GPT2_345M = GPTConfig(num_layers=24, hidden_size=1024, num_heads=16)
GPT2_774M = GPTConfig(num_layers=36, hidden_size=1280, num_heads=20)
GPT2_1558M = GPTConfig(num_layers=48, hidden_size=1600, num_heads=25)
GPT3_175B = GPTConfig(num_layers=96, hidden_size=12288, num_heads=96, seq_length=2048)


class Linear(nn.Linear):
    """A linear map that computes in the dtype of its input; the weight may be an fp32 master."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Product(nn.Linear):
    """`Linear` that leaves its bias to the operation behind it, which adds it in passing."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Causal self-attention, up to the bias of its output. The fused QKV projection is stored per head, [N, 3, D] along
    its output dimension, so that a cut between heads keeps each head's q, k and v together."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.dropout = Dropout(config.dropout)
        self.core = causal_attention
        self.proj = Product(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, key: Tensor | None, spans: Tensor | None = None) -> Tensor:
        qkv = rearrange(self.qkv(x), "b t (n three d) -> b t n three d", three=3, d=self.head_dim)
        return self.proj(self.core(qkv, *self.dropout.site(key), spans=spans).flatten(-2))


class MLP(nn.Module):
    """Up to the bias of its output."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.fc = Product(config.hidden_size, 4 * config.hidden_size)
        self.proj = Product(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(bias_gelu(self.fc(x), self.fc.bias))


class Block(nn.Module):
    """x: [B, T, H] -> [B, T, H]. keys: [B, BLOCK_SITES, 2] or None (no dropout). spans: as of `causal_attention`.

    Between the matrices every value is read and written once: a branch's bias, its dropout, the sum and the LayerNorm
    behind it are one operation.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = Attention(config)
        self.drop_1 = Dropout(config.dropout)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)
        self.drop_2 = Dropout(config.dropout)

    def forward(self, x: Tensor, keys: Tensor | None, spans: Tensor | None = None) -> Tensor:
        core, attended, expanded = (None,) * BLOCK_SITES if keys is None else keys.unbind(1)
        first, second = self.ln_1, self.ln_2
        x, h = norm_and_pass(x, first.weight, first.bias, first.eps)
        branch = self.attn(h, core, spans), self.attn.proj.bias
        x, h = residual_norm(x, *branch, second.weight, second.bias, second.eps, *self.drop_1.site(attended))
        return residual(x, self.mlp(h), self.mlp.proj.bias, *self.drop_2.site(expanded))


class Embedding(nn.Module):
    """tokens [B, T] -> activations [B, T, H] of the given dtype: token plus learned position, which are 0, 1, ... where
    no positions [B, T] are given."""

    def __init__(self, config: GPTConfig, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.wte = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.seq_length, config.hidden_size)
        self.drop = Dropout(config.dropout)

    def forward(self, tokens: Tensor, key: Tensor | None, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.drop((self.wte(tokens) + self.wpe(positions)).to(self.dtype), key)


class Output(nn.Linear):
    """[B, T, H] -> logits [B, T, V] or, with targets [B, T], the mean loss over them, each times its weight [B, T].

    `gradient_scale`, a scalar on the device, multiplies the gradient of the loss where the training loop sets it: by
    the share of a micro-batch, and by the loss scale of fp16. The loss itself stays as it is.
    """

    def __init__(self, config: GPTConfig):
        super().__init__(config.hidden_size, config.padded_vocab_size, bias=False)
        self.vocab_size = config.vocab_size
        self.gradient_scale: Tensor | None = None

    def forward(self, x: Tensor, targets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        weight = self.weight.to(x.dtype)
        if targets is None:
            return F.linear(x, weight)
        return head_loss(x, weight, targets, self.vocab_size, scale=self.gradient_scale, weights=weights)


class Head(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.lm_head = Output(config)

    def forward(self, x: Tensor, targets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return self.lm_head(layer_norm(x, self.ln_f.weight, self.ln_f.bias, self.ln_f.eps), targets, weights)


class GPT(nn.Module):
    """tokens [B, T] -> logits [B, T, V], or the mean loss where targets [B, T] are given. keys: of dropout,
    [B, num_sites, 2]; None: evaluation.

    Logits of the padding, `[..., config.vocab_size:]`, mean nothing: loss and sampling leave them out.
    Blocks are keyed by their global index, so a parameter keeps its name when a part of the model is all that is left:
    without the embedding it takes activations [B, T, H], without the head it returns them.
    `dtype` is that of activations; parameters may be of that dtype or fp32.
    """

    def __init__(self, config: GPTConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config, dtype)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.num_layers)})
        self.head = Head(config)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the output projection the token embedding. To be called again after whatever replaces parameters."""
        if self.embedding is not None and self.head is not None:
            self.head.lm_head.weight = self.embedding.wte.weight

    def forward(
        self, x: Tensor, keys: Tensor | None = None, targets: Tensor | None = None, positions: Tensor | None = None,
        spans: Tensor | None = None, weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if self.embedding is not None:
            x = self.embedding(x, None if keys is None else keys[:, 0], positions)
        for index, block in self.blocks.items():
            first = 1 + BLOCK_SITES * int(index)
            x = block(x, None if keys is None else keys[:, first : first + BLOCK_SITES], spans)
        return x if self.head is None else self.head(x, targets, weights)

    def keep(self, blocks: range, embedding: bool, head: bool) -> None:
        """Leave only these blocks, and the ends where wanted: the part of the model that one pipeline stage holds."""
        for index in [i for i in self.blocks if int(i) not in blocks]:
            del self.blocks[index]
        self.embedding = self.embedding if embedding else None
        self.head = self.head if head else None


def unique_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name, each once. The tied table is always `embedding.wte.weight`, also in a part of the model that
    holds the head without the embedding: initial weights and checkpoints know one name for it."""
    tied, unique = {"head.lm_head.weight": TABLE}, {}
    for name, parameter in model.named_parameters():
        name = tied.get(name, name)
        if name in unique:
            raise ValueError(f"{name} is two parameters: the tie is broken; call tie_weights() first")
        unique[name] = parameter
    return unique


@torch.no_grad()
def fill_weight(part: Tensor, name: str, index: Sequence[range], config: GPTConfig, key: Tensor) -> None:
    """Fill `part`, the elements with the global `index` of parameter `name`, in place and on its device: N(0, init_std)
    for weights, with the outputs of residual branches scaled by 1 / sqrt(2 num_layers); zero biases; unit LayerNorms
    (Radford et al. 2019, section 2.3). Values are a function of (key, name, index) alone."""
    if name.endswith("bias"):
        part.zero_()
    elif ".ln_" in f".{name}":
        part.fill_(1)
    else:
        std = config.init_std / (math.sqrt(2 * config.num_layers) if name.endswith("proj.weight") else 1)
        weight_key = fold(key, name).to(part.device)
        for rows, piece in row_chunks(index):
            part[rows] = std * normal(weight_key, piece)


def allocate(model: GPT, device: torch.device) -> None:
    """Give a model laid out on the meta device its memory, with whatever values are there."""
    model.to_empty(device=device)
    model.tie_weights()


def build_model(config: GPTConfig, device: torch.device, dtype: torch.dtype, key: Tensor | None) -> GPT:
    """A whole GPT on one device, with initial weights from `key [2]`. No key: the memory is left as it is, for a
    checkpoint to fill."""
    with torch.device("meta"):
        model = GPT(config, dtype)
    allocate(model, device)
    if key is not None:
        for name, parameter in unique_parameters(model).items():
            fill_weight(parameter, name, [range(n) for n in parameter.shape], config, key)
    return model

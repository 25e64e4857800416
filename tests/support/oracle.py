"""A training run of GPT-2 or LLaMA that shares nothing with dtgpt: float64, plain torch, a Philox of its own.

Written from the papers and from the rules that dtgpt documents: which counter a random number has, how fused matrices
are packed, which token a sample begins with. Nothing here is fused, sharded, saved or fast.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox(key, counter) -> list[np.ndarray]:
    """Philox4x32-10 of Salmon et al. 2011; words are uint64 arrays with values below 2^32."""
    c = [np.asarray(word, dtype=np.uint64) for word in counter]
    k = [np.asarray(word, dtype=np.uint64) for word in key]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(second >> HALF) ^ c[1] ^ k[0], second & WORD, (first >> HALF) ^ c[3] ^ k[1], first & WORD]
        k = [(k[0] + np.uint64(0x9E3779B9)) & WORD, (k[1] + np.uint64(0xBB67AE85)) & WORD]
    return np.broadcast_arrays(*c)


def fold(key: tuple[int, int], *items: int | str) -> tuple[int, int]:
    for item in items:
        if isinstance(item, str):
            item = int.from_bytes(hashlib.blake2b(item.encode(), digest_size=8).digest(), "little")
        words = philox(key, (item & 0xFFFFFFFF, item >> 32, 0, 0xFFFFFFFF))
        key = int(words[0]), int(words[1])
    return key


def words(key: tuple[int, int], shape: tuple[int, ...], lanes: int) -> np.ndarray:
    """Four words for each `lanes` neighbours of the last dimension: `[*shape[:-1], blocks, 4]`."""
    *leading, last = shape
    index = np.indices((*leading, -(-last // lanes)), dtype=np.uint64)
    counter = [*index[::-1], *[0] * (4 - len(index))]
    return np.stack(philox(key, counter), axis=-1)


def normal(key: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    unit = (words(key, shape, 4).astype(np.float64) + 0.5) / 2**32
    pairs = []
    for i in (0, 2):
        radius, angle = np.sqrt(-2 * np.log(unit[..., i])), 2 * math.pi * unit[..., i + 1]
        pairs += [radius * np.cos(angle), radius * np.sin(angle)]
    return torch.from_numpy(np.stack(pairs, -1).reshape(*shape[:-1], -1)[..., : shape[-1]].copy())


def keep(key: tuple[int, int], shape: tuple[int, ...], p: float) -> Tensor:
    """Factors of dropout: 16 bits of a word decide on an element."""
    drawn = words(key, shape, 8)
    halves = np.stack([drawn & np.uint64(0xFFFF), drawn >> np.uint64(16)], -1)
    drop = min(round(p * 65536), 65535)
    kept = halves.reshape(*shape[:-1], -1)[..., : shape[-1]] >= drop
    return torch.from_numpy(kept.astype(np.float64) * 65536 / (65536 - drop))


def keep_pairs(key: tuple[int, int], shape: tuple[int, int, int], p: float) -> Tensor:
    """Factors of dropout of attention's probabilities, `[N, T, T]`: a bit of each of 16 words decides on an element."""
    head, row, column = np.indices(shape, dtype=np.uint64)
    group, lane = column // np.uint64(64), column % np.uint64(32)
    half, eight, pair, odd = column % np.uint64(64) // np.uint64(32), *(lane // np.uint64(n) for n in (8, 2, 1))
    two = np.uint64(2)
    bit = eight % two * np.uint64(8) + eight // two * np.uint64(4) + pair % np.uint64(4) + odd % two * np.uint64(16)
    number = np.zeros(shape, dtype=np.uint64)
    for first, counter in ((0, np.uint64(2**31) + row % np.uint64(128)), (8, row)):
        for k in (0, 1):
            block = np.uint64(4) * group + (two * half if first else np.uint64(0)) + np.uint64(k)
            for word, drawn in enumerate(philox(key, (block, counter, head, 0))):
                number += ((drawn >> bit) & np.uint64(1)) << np.uint64(first + 4 * k + word)
    drop = min(round(p * 65536), 65535)
    return torch.from_numpy((number >= drop).astype(np.float64) * 65536 / (65536 - drop))


@dataclass
class Shape:
    """Sizes of a model. groups: heads of keys and values; 0: a GPT-2."""

    layers: int
    hidden: int
    heads: int
    head_dim: int
    length: int
    vocab: int
    dropout: float
    init_std: float
    eps: float
    groups: int = 0
    ffn: int = 0
    tied: bool = True
    qk_norm: bool = False
    theta: float = 10000.0
    factor: float = 1.0
    original_length: int = 8192

    @property
    def padded(self) -> int:
        return -(-self.vocab // 128) * 128


def initial_weights(shape: Shape, key: tuple[int, int]) -> dict[str, Tensor]:
    """Weights in fp32, as float64; matrices `[out, in]`."""
    h, residual = shape.hidden, shape.init_std / math.sqrt(2 * shape.layers)
    sizes: dict[str, tuple[tuple[int, ...], float, float]] = {}  # shape, mean, standard deviation

    def put(name: str, *size: int, mean: float = 0.0, std: float = 0.0) -> None:
        sizes[name] = size, mean, std

    gpt2, std = not shape.groups, shape.init_std
    put("embedding.wte.weight" if gpt2 else "embedding.tokens.weight", shape.padded, h, std=std)
    if gpt2:
        put("embedding.wpe.weight", shape.length, h, std=std)
    for i in range(shape.layers):
        at = f"blocks.{i}."
        if gpt2:
            for name, out, width, deviation in (
                ("attn.qkv", 3 * h, h, std), ("attn.proj", h, h, residual),
                ("mlp.fc", 4 * h, h, std), ("mlp.proj", h, 4 * h, residual),
            ):  # fmt: skip
                put(f"{at}{name}.weight", out, width, std=deviation)
                put(f"{at}{name}.bias", out)
            for name in ("ln_1", "ln_2"):
                put(f"{at}{name}.weight", h, mean=1.0)
                put(f"{at}{name}.bias", h)
            continue
        d = shape.head_dim
        put(f"{at}attn.qkv.weight", (shape.heads + 2 * shape.groups) * d, h, std=std)
        put(f"{at}attn.proj.weight", h, shape.heads * d, std=residual)
        put(f"{at}mlp.gate_up.weight", 2 * shape.ffn, h, std=std)
        put(f"{at}mlp.down.weight", h, shape.ffn, std=residual)
        for name in ("norm_1", "norm_2"):
            put(f"{at}{name}.weight", h, mean=1.0)
        if shape.qk_norm:
            for name in ("q_norm", "k_norm"):
                put(f"{at}attn.{name}.weight", d, mean=1.0)
    put("head.ln_f.weight" if gpt2 else "head.norm.weight", h, mean=1.0)
    if gpt2:
        put("head.ln_f.bias", h)
    elif not shape.tied:
        put("head.output.weight", shape.padded, h, std=std)
    return {
        name: (torch.full(size, mean) if not std else (std * normal(fold(key, name), size)).float()).double()
        for name, (size, mean, std) in sizes.items()
    }


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, positions: Tensor, shape: Shape) -> Tensor:
    """x `[T, N, D]` with the pairs (i, i + D / 2) turned by their angles (Su et al. 2021); Llama 3.1's frequencies."""
    d = shape.head_dim
    angles = []
    for i in range(d // 2):
        frequency = shape.theta ** (-2 * i / d)
        wave = 2 * math.pi / frequency
        if shape.factor != 1:
            share = (shape.original_length / wave - 1.0) / (4.0 - 1.0)
            share = min(1.0, max(0.0, share))
            frequency = (1 - share) * frequency / shape.factor + share * frequency
        angles.append(positions.double() * frequency)
    angle = torch.stack(angles, -1)[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, factors: Tensor | None) -> Tensor:
    """q `[T, N, D]`, k and v `[T, G, D]` -> `[T, N D]`. documents `[T]`: tokens attend to their own."""
    length, heads, d = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("tnd,snd->nts", q, k) / math.sqrt(d)
    seen = torch.ones(length, length).tril().bool() & (documents[:, None] == documents[None])
    probabilities = scores.masked_fill(~seen, -math.inf).softmax(-1)
    if factors is not None:
        probabilities = probabilities * factors
    return torch.einsum("nts,snd->tnd", probabilities, v).flatten(1)


def nats(w: dict[str, Tensor], shape: Shape, sample: "Sample", key: tuple[int, int] | None) -> Tensor:
    """The loss of each token of one sample, `[T]`; `key`: that of the step and the sample, None without dropout."""

    def dropped(x: Tensor, site: int) -> Tensor:
        return x if key is None else x * keep(fold(key, site), tuple(x.shape), shape.dropout)

    gpt2, h, d, n = not shape.groups, shape.hidden, shape.head_dim, shape.heads
    table = w["embedding.wte.weight" if gpt2 else "embedding.tokens.weight"]
    x = table[sample.tokens]
    if gpt2:
        x = x + w["embedding.wpe.weight"][sample.positions]
    x = dropped(x, 0)
    for i in range(shape.layers):
        at, site = f"blocks.{i}.", 1 + 3 * i
        factors = None if key is None else keep_pairs(fold(key, site), (n, shape.length, shape.length), shape.dropout)
        if gpt2:
            y = F.layer_norm(x, (h,), w[at + "ln_1.weight"], w[at + "ln_1.bias"], shape.eps)
            qkv = (y @ w[at + "attn.qkv.weight"].T + w[at + "attn.qkv.bias"]).view(-1, n, 3, d)
            y = attention(*qkv.unbind(2), sample.documents, factors)
            x = x + dropped(y @ w[at + "attn.proj.weight"].T + w[at + "attn.proj.bias"], site + 1)
            y = F.layer_norm(x, (h,), w[at + "ln_2.weight"], w[at + "ln_2.bias"], shape.eps)
            y = F.gelu(y @ w[at + "mlp.fc.weight"].T + w[at + "mlp.fc.bias"], approximate="tanh")
            x = x + dropped(y @ w[at + "mlp.proj.weight"].T + w[at + "mlp.proj.bias"], site + 2)
            continue
        y = rms(x, w[at + "norm_1.weight"], shape.eps)
        packed = (y @ w[at + "attn.qkv.weight"].T).view(len(y), shape.groups, n // shape.groups + 2, d)
        q, k, v = packed[:, :, :-2].flatten(1, 2), packed[:, :, -2], packed[:, :, -1]
        if shape.qk_norm:
            q, k = (rms(t, w[f"{at}attn.{m}_norm.weight"], shape.eps) for t, m in ((q, "q"), (k, "k")))
        q, k = (rotated(t, sample.positions, shape) for t in (q, k))
        x = x + dropped(attention(q, k, v, sample.documents, factors) @ w[at + "attn.proj.weight"].T, site + 1)
        pairs = (rms(x, w[at + "norm_2.weight"], shape.eps) @ w[at + "mlp.gate_up.weight"].T).view(len(x), shape.ffn, 2)
        x = x + dropped((F.silu(pairs[..., 0]) * pairs[..., 1]) @ w[at + "mlp.down.weight"].T, site + 2)
    if gpt2:
        x = F.layer_norm(x, (h,), w["head.ln_f.weight"], w["head.ln_f.bias"], shape.eps)
    else:
        x = rms(x, w["head.norm.weight"], shape.eps)
    output = table if gpt2 or shape.tied else w["head.output.weight"]
    return F.cross_entropy((x @ output.T)[:, : shape.vocab], sample.targets, reduction="none")


@dataclass
class Sample:
    """One window: all `[T]`."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor  # the number of each token's document
    counted: Tensor  # 1.0 where the loss counts


def make_sample(window: list[int], end: int, reset_positions: bool, reset_mask: bool, skip_ends: bool) -> Sample:
    tokens, targets = window[:-1], window[1:]
    positions, documents, place, document = [], [], 0, 0
    for token in tokens:
        positions.append(place)
        documents.append(document)
        place += 1
        if token == end:
            document += reset_mask
            place = 0 if reset_positions else place
    counted = [float(not (skip_ends and token == end)) for token in tokens]
    return Sample(
        *map(torch.tensor, (tokens, targets, positions, documents)), torch.tensor(counted, dtype=torch.float64)
    )


@dataclass
class Training:
    """AdamW (Loshchilov and Hutter 2019), after clipping by the global norm."""

    seed: int
    batches: list[int]  # samples of each step
    rates: list[float]  # learning rate of each step
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float


class Curve(NamedTuple):
    """What a run did."""

    losses: list[float]  # of each step
    norms: list[float]  # of the gradient, before clipping
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]  # after the last


def train(shape: Shape, training: Training, text: list[int], end: int, options: tuple[bool, bool, bool]) -> Curve:
    """Take the steps of a run."""
    root = training.seed & 0xFFFFFFFF, training.seed >> 32
    data, dropout = fold(root, "data"), fold(root, "dropout")
    w = {name: value.requires_grad_() for name, value in initial_weights(shape, fold(root, "weights")).items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in w.items()}
    losses, norms, first, seen = [], [], {}, 0
    for step, (batch, lr) in enumerate(zip(training.batches, training.rates, strict=True)):
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        for number in range(seen, seen + batch):
            low, high = fold(data, number)
            begin = ((high << 31) ^ low) % (len(text) - shape.length)
            sample = make_sample(text[begin : begin + shape.length + 1], end, *options)
            key = fold(dropout, step, number) if shape.dropout else None
            total = total + (nats(w, shape, sample, key) * sample.counted).sum()
            count += sample.counted.sum().item()
        seen += batch
        loss = total / count
        gradients = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        losses.append(loss.item())
        first = first or gradients
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        norms.append(norm)
        scale = min(1.0, training.clip / (norm + 1e-6)) if training.clip else 1.0
        with torch.no_grad():
            for name, value in w.items():
                m, v = moments[name]
                g = gradients[name] * scale
                m.mul_(training.beta1).add_(g, alpha=1 - training.beta1)
                v.mul_(training.beta2).add_(g * g, alpha=1 - training.beta2)
                mean, square = m / (1 - training.beta1 ** (step + 1)), v / (1 - training.beta2 ** (step + 1))
                decay = training.weight_decay if value.dim() > 1 else 0.0
                value.mul_(1 - lr * decay).sub_(lr * mean / (square.sqrt() + training.eps))
    return Curve(losses, norms, first, {name: value.detach() for name, value in w.items()})

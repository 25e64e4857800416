"""A GPT-2 that shares no code with dtgpt's, and what every source of weights must do. Used by tests only."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dtgpt.models.decoder import unique_parameters
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import parameter_shapes
from dtgpt.util.errors import UserError
from tests.support.whole_model import build_model

TOLERANCE = 1e-5  # fp32, of the largest logit: rounding of other orders of summation
LAYERS, HEADS, WIDTH, LENGTH, VOCABULARY = 3, 4, 48, 24, 131


class Bare(nn.Module):
    """A node of the tree of parameters, so that their names are GPT-2's."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Reference(Bare):
    """GPT-2 from its equations, one sequence and one head at a time. tokens [T] -> logits [T, V]."""

    def __init__(self, vocab_size=VOCABULARY, bias=True, seed=0):
        def block():
            return Bare(
                ln_1=nn.LayerNorm(WIDTH, bias=bias),
                attn=Bare(c_attn=linear(WIDTH, 3 * WIDTH), c_proj=linear(WIDTH, WIDTH)),
                ln_2=nn.LayerNorm(WIDTH, bias=bias),
                mlp=Bare(c_fc=linear(WIDTH, 4 * WIDTH), c_proj=linear(4 * WIDTH, WIDTH)),
            )

        def linear(inputs, outputs):
            return nn.Linear(inputs, outputs, bias=bias)

        super().__init__(
            transformer=Bare(
                wte=nn.Embedding(vocab_size, WIDTH),
                wpe=nn.Embedding(LENGTH, WIDTH),
                h=nn.ModuleList([block() for _ in range(LAYERS)]),
                ln_f=nn.LayerNorm(WIDTH, bias=bias),
            ),
            lm_head=nn.Linear(WIDTH, vocab_size, bias=False),
        )
        self.lm_head.weight = self.transformer.wte.weight
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)

    @torch.no_grad()
    def forward(self, tokens, approximate="tanh"):
        t = self.transformer
        x = t.wte.weight[tokens] + t.wpe.weight[: len(tokens)]
        future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
        for block in t.h:
            queries, keys, values = block.attn.c_attn(block.ln_1(x)).split(WIDTH, dim=1)
            heads = []
            for q, k, v in zip(*(m.split(WIDTH // HEADS, dim=1) for m in (queries, keys, values)), strict=True):
                scores = (q @ k.T / math.sqrt(WIDTH // HEADS)).masked_fill(future, -torch.inf)
                heads.append(scores.softmax(1) @ v)
            x = x + block.attn.c_proj(torch.cat(heads, 1))
            x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x)), approximate=approximate))
        return t.ln_f(x) @ t.wte.weight.T


@torch.no_grad()
def load_model(source, device, dtype=torch.float32):
    """Build a whole model on one device with the weights of `source`."""
    model = build_model(source.config, device, dtype, key=None).to(dtype)
    for name, parameter in unique_parameters(model).items():
        parameter.copy_(source.read(name))
    return model


def filled(source):
    return load_model(source, torch.device("cpu"))


@torch.no_grad()
def distance(source, reference, approximate="tanh"):
    """Largest difference of logits, of the largest logit."""
    size = source.config.vocab_size
    tokens = torch.randint(size, (LENGTH,), generator=torch.Generator().manual_seed(7))
    expected = reference(tokens, approximate)[:, :size]
    assert expected.std() > 0.5
    return ((filled(source)(tokens[None])[0, :, :size] - expected).abs().max() / expected.abs().max()).item()


def check_parts(source):
    """Every parameter whole and in part."""
    for name, shape in parameter_shapes(source.config).items():
        whole = source.read(name)
        assert whole.shape == shape and whole.dtype == torch.float32 and whole.is_contiguous()
        part = tuple(range(n // 3, n - n // 4) for n in shape)
        piece = source.read(name, part)
        assert piece.is_contiguous() and torch.equal(piece, cut(whole, part)), name
        assert piece.untyped_storage().nbytes() == 4 * piece.numel()
        expected = whole.clone()
        whole.zero_()  # memory of its own: the next reading, and the file, know nothing of it
        assert torch.equal(source.read(name), expected), name


def refused(action, *words):
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert ";" in message or ": " in message, message  # a remedy

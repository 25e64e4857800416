import pytest
import torch

from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.loss.cross_entropy import cross_entropy
from dtgpt.ops.random.philox import root_key
from tests.support.hugging_face import hugging_face_twin, translate
from tests.support.whole_model import build_model

TOLERANCE = 1e-5  # fp32, relative: rounding of other orders of summation


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("std", [0.02, 0.2])
def test_logits_loss_and_every_gradient_agree_with_hugging_face(std):
    """init_std 0.2 drives GELU and softmax out of their linear range; biases and norms are moved off 0 and 1."""
    config = GPT2Config(num_layers=3, hidden_size=96, num_heads=4, seq_length=48, vocab_size=301, init_std=std)
    model = build_model(config, torch.device("cpu"), torch.float32, root_key(5))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    twin = hugging_face_twin(model)
    tokens = torch.randint(config.vocab_size, (3, 49), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    logits = model(inputs)
    loss = cross_entropy(logits, targets, config.vocab_size)
    loss.backward()
    their_logits = twin(inputs).logits
    their_loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), targets.flatten())
    their_loss.backward()

    assert logits.shape[-1] == 384 and their_logits.shape[-1] == 301
    assert relative_error(logits[..., :301], their_logits) < TOLERANCE
    assert relative_error(loss, their_loss) < TOLERANCE
    ours = translate(model, {name: p.grad for name, p in model.named_parameters()})
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        if name.endswith("c_attn.bias"):
            # The key's bias shifts a row of scores by a constant, so its gradient is zero but for rounding.
            gradient, keys = _without_keys(gradient), gradient.chunk(3)[1]
            assert keys.norm() < TOLERANCE * gradient.norm()
            assert relative_error(gradient, _without_keys(theirs[name])) < TOLERANCE, name
        else:
            assert relative_error(gradient, theirs[name]) < TOLERANCE, name


def _without_keys(bias: torch.Tensor) -> torch.Tensor:
    q, _, v = bias.chunk(3)
    return torch.cat([q, v])

"""The scales of fp8: powers of two from the history of the largest values."""

import math

import pytest
import torch
from torch import nn

from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.decoder import Decoder
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.fp8.quantize import quantize
from dtgpt.ops.fp8.sites import GRADIENT
from dtgpt.optim.fp8.scales import HISTORY, STATE, Fp8Scales, check_state, matrices, num_sites
from dtgpt.parallel.mesh import Mesh

CONFIG = GPT2Config(num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=257)
LLAMA = LlamaConfig(
    num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=4, ffn_hidden_size=8, vocab_size=257
)
SITES = 2 * 4 * 3


def scales() -> Fp8Scales:
    return Fp8Scales(CONFIG, Mesh(ResolvedPlan(), torch.device("cpu")))


def step(made: Fp8Scales, amax: float) -> tuple[float, float]:
    """Return the scale and its inverse of a site after a step with this amax."""
    made.amax[5] = amax
    made.update(torch.zeros(()), torch.zeros(()))
    return made.scale[5].item(), made.inverse[5].item()


def test_the_sites_are_those_of_all_matrices_of_blocks():
    names = ["attn.qkv", "attn.proj", "mlp.fc", "mlp.proj"]
    assert matrices(CONFIG) == [f"blocks.{index}.{name}" for index in range(2) for name in names]
    assert matrices(LLAMA) == [f"blocks.0.{n}" for n in ("attn.qkv", "attn.proj", "mlp.gate_up", "mlp.down")]
    assert num_sites(CONFIG) == SITES and num_sites(LLAMA) == 12


@pytest.mark.parametrize("amax", [1.0, 0.75, 1.99, 448.0, 3e-5, 1e4])
def test_a_scale_is_a_power_of_two_with_room_for_larger_values(amax):
    made = scales()
    scale, inverse = step(made, amax)
    largest = torch.finfo(GRADIENT).max
    assert math.frexp(scale)[0] == 0.5 and scale * inverse == 1
    assert largest / 3.5 <= amax * scale <= largest / 1.75
    q, _ = quantize(torch.tensor([[1.7 * amax]]), made.scale[5], GRADIENT, None, rows=True, columns=False)
    assert q is not None and q.float().item() * inverse == pytest.approx(1.7 * amax, rel=2**-4)


def test_the_largest_exponent_of_the_history_decides_until_it_is_forgotten():
    made = scales()
    before = step(made, 8.0)
    assert all(step(made, 1.0) == before for _ in range(HISTORY - 1))
    scale, _ = step(made, 1.0)
    assert scale == 8 * before[0]


def test_a_step_of_zeros_or_without_finite_values_is_passed_over():
    made = scales()
    before = step(made, 2.0)
    assert step(made, 0.0) == step(made, math.inf) == step(made, math.nan) == before
    assert made.amax.eq(0).all() and [line.split()[5] for line in made.state()] == ["2"]


@pytest.mark.parametrize("amax", [1e-40, 3e38])
def test_no_amax_leads_to_a_scale_that_is_not_a_normal_number(amax):
    scale, inverse = step(scales(), amax)
    assert 2.0**-126 <= scale <= 2.0**126 and scale * inverse == 1


def test_scales_are_not_known_before_a_step_and_sites_without_a_value_have_one():
    made = scales()
    assert not made.calibration.known
    step(made, 4.0)
    assert made.calibration.known and made.scale[0].item() == made.inverse[0].item() == 1


def test_a_state_gives_other_scales_the_same_values():
    made, other = scales(), scales()
    for amax in (1.0, 0.0, 100.0):
        step(made, amax)
    check_state(made.state(), CONFIG)
    other.restore(made.state())
    assert other.calibration.known and other.state() == made.state()
    assert torch.equal(other.scale, made.scale) and torch.equal(other.inverse, made.inverse)
    other.restore([])
    assert other.state() == []


@pytest.mark.parametrize(
    "state",
    [
        "1 2", [1], [["1"] * SITES], ["1 " * (SITES - 1)], ["1 " * (SITES + 1)], ["1 " * SITES] * (HISTORY + 1),
        ["x " * SITES], ["1.5 " * SITES], ["129 " * SITES], ["-161 " * SITES], {"0": "1"},
    ],
)  # fmt: skip
def test_a_state_of_another_model_or_broken_is_refused(state):
    with pytest.raises(ValueError, match=STATE):
        check_state(state, CONFIG)
    check_state(None, CONFIG)


def test_the_name_in_a_checkpoint_stays():
    assert STATE == "fp8_exponents"


def test_a_matrix_that_cannot_compute_in_fp8_is_refused():
    stage = Decoder(CONFIG)
    stage.get_submodule("blocks.1.mlp").fc = nn.Linear(32, 128)
    with pytest.raises(TypeError, match=r"blocks\.1\.mlp\.fc is a Linear, which does not compute in fp8"):
        scales().attach([stage])

"""The loss scaler against Megatron-LM's rules, written down once more in plain Python."""

import random

import pytest
import torch

from dtgpt.optim.fp16.config import LossScaleConfig
from dtgpt.optim.fp16.loss_scale import LossScaler, check_state

CPU = torch.device("cpu")
SETTINGS = [
    {},
    {"window": 3},
    {"initial": 8.0, "window": 4, "hysteresis": 1},
    {"initial": 4.0, "minimum": 2.0, "window": 1, "hysteresis": 3},
    {"initial": 100.0, "window": 2},
]


class Rules:
    """What Megatron-LM does with a step, in numbers of the host."""

    def __init__(self, initial=2.0**32, minimum=1.0, window=1000, hysteresis=2):
        self.minimum, self.window, self.hysteresis = minimum, window, hysteresis
        self.state = {"scale": initial, "growth_tracker": 0, "hysteresis_tracker": hysteresis, "skipped": 0}

    def update(self, overflow: bool) -> None:
        state = self.state
        if overflow:
            state["skipped"] += 1
            state["growth_tracker"] = 0
            state["hysteresis_tracker"] -= 1
            if state["hysteresis_tracker"] <= 0:
                state["scale"] = max(state["scale"] / 2, self.minimum)
            return
        state["growth_tracker"] += 1
        if state["growth_tracker"] == self.window:
            state["growth_tracker"] = 0
            state["hysteresis_tracker"] = self.hysteresis
            state["scale"] *= 2


def overflows(seed: int, steps: int = 120) -> list[bool]:
    """Long clean stretches and bursts."""
    draw, rate, found = random.Random(seed), 0.0, []
    for _ in range(steps):
        if draw.random() < 0.1:
            rate = draw.choice([0.0, 0.1, 0.5, 0.9])
        found.append(draw.random() < rate)
    return found


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_scale_follows_megatrons_rules(settings, seed):
    scaler, rules = LossScaler(CPU, LossScaleConfig(**settings)), Rules(**settings)
    for overflow in overflows(seed):
        scaler.follow(torch.tensor(overflow), torch.tensor(overflow))
        rules.update(overflow)
        assert scaler.state() == pytest.approx(rules.state, rel=1e-6)


def test_the_defaults_are_megatrons():
    scaler = LossScaler(CPU, LossScaleConfig())
    assert scaler.scale.dtype == torch.float32 and scaler.scale.item() == 2.0**32
    scales = []
    for overflow in [True, True, True] + [False] * 1000 + [True, True]:
        scaler.follow(torch.tensor(overflow), torch.tensor(overflow))
        scales.append(scaler.scale.item())
    assert scales[:3] == [2.0**32, 2.0**31, 2.0**30]  # the first overflow is forgiven
    assert scales[-4:] == [2.0**30, 2.0**31, 2.0**31, 2.0**30]  # a clean window doubles, and forgives one more


def test_clean_steps_short_of_the_window_do_not_refill_the_hysteresis():
    scaler = LossScaler(CPU, LossScaleConfig(initial=16.0, window=5))
    for overflow in [True, False, False, False, False, True, False, True]:
        scaler.follow(torch.tensor(overflow), torch.tensor(overflow))
    assert scaler.scale.item() == 4.0


def test_a_step_that_is_applied_may_lower_the_scale_without_counting_as_skipped():
    scaler = LossScaler(CPU, LossScaleConfig(initial=16.0, hysteresis=1))
    scaler.follow(torch.tensor(True), torch.tensor(False))
    assert scaler.scale.item() == 8.0 and scaler.skipped.item() == 0


def test_the_inverse_undoes_the_scale():
    scaler = LossScaler(CPU, LossScaleConfig())
    assert scaler.inverse().item() == 2.0**-32 and scaler.inverse().dtype == torch.float32


def test_a_resumed_scaler_goes_on_bitwise():
    whole, half = LossScaler(CPU, LossScaleConfig(**SETTINGS[4])), LossScaler(CPU, LossScaleConfig(**SETTINGS[4]))
    sequence = [torch.tensor(o) for o in overflows(3)]
    for overflow in sequence:
        whole.follow(overflow, overflow)
    for overflow in sequence[:50]:
        half.follow(overflow, overflow)
    state = half.state()
    assert all(type(value) in (int, float) for value in state.values())
    resumed = LossScaler(CPU, LossScaleConfig(**SETTINGS[4]))
    resumed.restore(state)
    for overflow in sequence[50:]:
        resumed.follow(overflow, overflow)
    assert resumed.state() == whole.state()


def test_state_stays_where_it_is():
    """A CUDA graph knows addresses."""
    scaler = LossScaler(CPU, LossScaleConfig(hysteresis=1))
    before = scaler.scale, scaler.scale.data_ptr()
    scaler.follow(torch.tensor(True), torch.tensor(True))
    scaler.restore(scaler.state())
    assert (scaler.scale, scaler.scale.data_ptr()) == before and before[0].item() == 2.0**31


@pytest.mark.cuda
def test_a_cuda_graph_replays_the_update():
    device = torch.device("cuda")
    scaler, rules = LossScaler(device, LossScaleConfig(**SETTINGS[1])), Rules(**SETTINGS[1])
    start, overflow = scaler.state(), torch.tensor(False, device=device)
    scaler.follow(overflow, overflow)  # warm up
    torch.cuda.synchronize()
    scaler.restore(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        scaler.follow(overflow, overflow)
    for value in overflows(5, steps=60):
        overflow.fill_(value)
        graph.replay()
        rules.update(value)
        assert scaler.state() == rules.state


@pytest.mark.parametrize("state", [{}, 5, {"scale": "x"}, {"scale": 0.0}, {"scale": 1.0, "skipped": 0.5}])
def test_a_state_that_is_none_is_told(state):
    whole = {"scale": 2.0, "growth_tracker": 1, "hysteresis_tracker": -3, "skipped": 2}
    check_state(None)
    check_state(whole)
    with pytest.raises((KeyError, TypeError, ValueError)):
        check_state({**whole, **state} if isinstance(state, dict) and state else state)

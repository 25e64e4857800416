"""z-scores of loss and gradient norm against their definition, and the updates that they skip."""

import json
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch

from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.optim.muon import MuonConfig
from dtgpt.optim.z_scores import detector as outliers
from dtgpt.optim.z_scores.detector import OutlierDetector, check_state
from dtgpt.parallel.mesh import Mesh
from dtgpt.run.records import read_records
from dtgpt.util.errors import UserError
from tests.support.bodies_train import steps_with_an_outlier, train_with_an_outlier
from tests.support.ranks import pool
from tests.support.runs import change, newest_run

MODEL = GPT2Config(num_layers=1, hidden_size=8, num_heads=1)  # by which the check of an entry may go
WINDOW = 8  # in place of 128: the last of 8 values has a score of at most 2.65
STRANGE, STEPS = 13, 16  # the step whose batch is an outlier, and all steps
LAST = f"checkpoints/step_{STEPS:08d}"


def detector(loss: float = 0.0, norm: float = 0.0, device: str = "cpu") -> OutlierDetector:
    mesh = Mesh(ResolvedPlan(dp=1), torch.device(device))
    return OutlierDetector(mesh, OptimizerConfig(lr=1.0, skip_loss_z=loss, skip_grad_norm_z=norm))


def drawn(seed: int, steps: int) -> list[tuple[float, float]]:
    """Falling losses and noisy norms with rare peaks."""
    draw = random.Random(seed)
    return [
        (10 / (1 + 0.01 * i) + draw.gauss(0, 0.05) + 3 * (draw.random() < 0.02), abs(draw.gauss(1, 0.2)))
        for i in range(steps)
    ]


def score(values: list[float]) -> float:
    """Of the last value among all, by definition; 0 among equal values."""
    deviation = statistics.pstdev(values)
    return (values[-1] - statistics.fmean(values)) / deviation if deviation else 0.0


@pytest.mark.parametrize("values", [drawn(0, 220), drawn(1, 220), [(2.5, 0.1)] * 140], ids=["0", "1", "equal"])
def test_scores_are_those_of_the_last_128_steps_by_definition(values):
    found, skips = detector(loss=2.5, norm=2.0), 0
    values = torch.tensor(values).tolist()  # as fp32 rounds them
    for step, (loss, norm) in enumerate(values):
        skip = found.update(torch.tensor(loss), torch.tensor(norm)).item()
        if step < 128:  # llm.c gives no score while it fills the window
            assert found.scores.isnan().all() and not skip
            continue
        last = values[step - 127 : step + 1]
        expected = [score([loss for loss, _ in last]), score([norm for _, norm in last])]
        assert found.scores.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert skip == (expected[0] > 2.5 or expected[1] > 2.0)
        skips += skip
        assert found.metrics() == {"loss_z": found.scores[0], "grad_norm_z": found.scores[1], "skipped_outliers": skips}
    assert (skips > 0) == (len(values) == 220)


@pytest.mark.parametrize("limits, skips", [((0, 0), False), ((2, 0), True), ((0, 2), False), ((0, 0.1), True)])
def test_each_limit_looks_at_its_own_score_and_0_is_none(monkeypatch, limits, skips):
    monkeypatch.setattr(outliers, "WINDOW", WINDOW)
    found = detector(*limits)
    for i in range(WINDOW):
        found.update(torch.tensor(3.0 + 0.01 * i), torch.tensor(1.0 + i % 2))
    assert found.update(torch.tensor(9.0), torch.tensor(2.0)).item() == skips
    low = detector(*limits)
    for i in range(WINDOW):
        low.update(torch.tensor(3.0 + 0.01 * i), torch.tensor(1.0 + i % 2))
    assert not low.update(torch.tensor(-9.0), torch.tensor(0.0)).item()  # a fall is no harm


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (3.0, math.inf)])
def test_a_step_that_is_not_finite_stays_out_of_the_window(monkeypatch, loss, norm):
    monkeypatch.setattr(outliers, "WINDOW", WINDOW)
    found, twin = detector(2.0, 2.0), detector(2.0, 2.0)
    for step, values in enumerate(drawn(2, 20)):
        assert found.update(*torch.tensor(values)) == twin.update(*torch.tensor(values))
        if step in (3, 15):
            assert not found.update(torch.tensor(loss), torch.tensor(norm)) and found.scores.isnan().all()
            assert set(found.metrics()) == {"skipped_outliers"}
    assert found.state() == twin.state()


@pytest.mark.parametrize("stop", [3, 60, 128, 200])
def test_a_resumed_detector_goes_on_bitwise_and_its_state_stays_where_it_is(stop):
    whole, half, resumed = detector(2.5, 2.5), detector(2.5, 2.5), detector(2.5, 2.5)
    place = resumed.window.data_ptr(), resumed.count.data_ptr(), resumed.skipped.data_ptr()
    for step, values in enumerate(torch.tensor(drawn(3, 260))):
        if step == stop:
            state = json.loads(json.dumps(half.state()))
            check_state(state, MODEL)
            resumed.restore(state)
        after = half if step < stop else resumed
        assert torch.equal(whole.update(*values), after.update(*values))
        assert torch.equal(whole.scores, after.scores) or step < 128
    assert resumed.state() == whole.state() and whole.skipped > 0
    assert place == (resumed.window.data_ptr(), resumed.count.data_ptr(), resumed.skipped.data_ptr())


@pytest.mark.parametrize(
    "change",
    [
        {"window": None}, {"window": [[1.0, 2.0]] * 129}, {"window": [[1.0]]}, {"window": [[1.0, math.nan]]},
        {"window": [["1", 2.0]]}, {"window": [5]}, {"skipped": -1}, {"skipped": 0.5},
    ],
)  # fmt: skip
def test_a_state_that_is_none_is_refused(change):
    whole = {"window": [[1.0, 2]], "skipped": 2}
    check_state(None, MODEL)
    check_state(whole, MODEL)
    for state in (whole | change, {}, 5):
        with pytest.raises((KeyError, TypeError, ValueError)):
            check_state(state, MODEL)


@pytest.mark.parametrize("name", ["skip_loss_z", "skip_grad_norm_z"])
@pytest.mark.parametrize("value", [-1.0, 12.0])
def test_a_limit_that_no_score_exceeds_is_refused(recipe, name, value):
    with pytest.raises(UserError, match=rf"^optimizer.{name}={value:.1f} is out of range; use .* at most 11"):
        change(recipe, optimizer={name: value}).validate()


@pytest.fixture
def watched(recipe):
    """A run whose step 13 has a batch of other tokens, whose loss is far above the others."""
    optimizer = {"skip_loss_z": 2.4, "lr": 1e-2, "warmup": 0, "decay_steps": STEPS}
    return change(recipe, steps=STEPS, micro_batch_size=2, optimizer=optimizer)


@pytest.fixture(scope="module")
def one_process() -> dict:
    return {}


def alone(recipe, made: dict):
    """What one process does, made once."""
    if not made:
        made["steps"] = steps_with_an_outlier(recipe, STRANGE, WINDOW)
    return made["steps"]


@pytest.mark.slow(5)
@pytest.mark.parametrize("plan", ["dp2_zero1", "pp2"])  # tp2 goes on below
def test_every_rank_of_every_plan_skips_the_outlier_alone(watched, one_process, plan):
    expected = alone(watched, one_process)
    skipped = [step for step, one in enumerate(expected) if one.unchanged]
    assert skipped == [STRANGE] and [one.metrics["skipped_outliers"] for one in expected] == [0] * STRANGE + [1] * 3
    assert ["loss_z" in one.metrics for one in expected] == [False] * WINDOW + [True] * (STEPS - WINDOW)
    others = [one.metrics["loss_z"] for step, one in enumerate(expected) if step >= WINDOW and step != STRANGE]
    assert max(others) < 2.4 < expected[STRANGE].metrics["loss_z"]
    assert expected[-1].updates == STEPS - 1
    for found in pool().run(2, steps_with_an_outlier, replace(watched, plan=plan), STRANGE, WINDOW):
        for one, other in zip(found, expected, strict=True):
            assert (one.unchanged, one.updates) == (other.unchanged, other.updates)
            assert one.metrics == pytest.approx(other.metrics, rel=1e-3, abs=1e-3)
            assert one.loss == pytest.approx(other.loss, rel=1e-4)


@pytest.mark.slow(2)
def test_an_outlier_that_is_not_skipped_changes_the_weights(watched):
    shown = change(watched, optimizer={"skip_loss_z": 0.0}, log={"show": "z"})
    found = steps_with_an_outlier(shown, STRANGE, WINDOW)
    assert not any(one.unchanged for one in found) and found[STRANGE].metrics["loss_z"] > 2.4
    assert found[-1].metrics["skipped_outliers"] == 0


@pytest.mark.slow(3)
def test_muon_skips_the_outlier_on_all_ranks(watched):
    muon = MuonConfig(lr=1e-2, warmup=0, decay_steps=STEPS, skip_loss_z=2.4)
    found = pool().run(2, steps_with_an_outlier, replace(watched, plan="dp2", optimizer=muon), STRANGE, WINDOW)
    for steps in found:
        assert [step for step, one in enumerate(steps) if one.unchanged] == [STRANGE] and steps[-1].updates == STEPS - 1


@pytest.mark.slow(6)
def test_a_resumed_run_skips_what_the_whole_run_skips(watched, tmp_path, capsys):
    """The window is in the checkpoint, and belongs to no plan."""
    train_with_an_outlier(change(watched, log={"show": "z"}), STRANGE, WINDOW)
    whole = newest_run(watched)
    assert "  z +2." in capsys.readouterr().out
    for first, then in (("single", "single"), ("dp2_zero1", "tp2")):
        halves = replace(watched, runs=str(tmp_path / first))
        for part in (replace(halves, steps=STRANGE - 2, plan=first), replace(halves, plan=then, resume="auto")):
            if part.plan == "single":
                train_with_an_outlier(part, STRANGE, WINDOW)
            else:
                pool().run(2, train_with_an_outlier, part, STRANGE, WINDOW)
        run = newest_run(halves)
        assert capsys.readouterr().out.count("1 outlier skipped") == (3 if then == "single" else 0)
        names = ("step", "loss", "grad_norm", "lr", "loss_z", "grad_norm_z", "skipped_outliers")
        records = [
            [{name: r[name] for name in names if name in r} for r in read_records(f / "metrics.jsonl") if "loss" in r]
            for f in (run, whole)
        ]
        assert [r["skipped_outliers"] for r in records[1]] == [0] * STRANGE + [1] * 3
        last = [json.loads((f / LAST / "state.json").read_text())["outliers"] for f in (run, whole)]
        if first == then:
            assert records[0] == records[1] and last[0] == last[1]
            file = f"{LAST}/optimizer-00000-000.safetensors"
            assert (run / file).read_bytes() == (whole / file).read_bytes()
        for one, other in zip(*records, strict=True):
            assert one == pytest.approx(other, rel=1e-3, abs=1e-3)
        assert len(last[0]["window"]) == WINDOW and last[0]["skipped"] == 1


@pytest.mark.cuda
def test_a_cuda_graph_replays_the_detector():
    found, twin = detector(2.0, 2.0, device="cuda"), detector(2.0, 2.0)
    loss, norm = torch.zeros(2, device="cuda").unbind()
    start = found.state()
    found.update(loss, norm)  # warm up
    torch.cuda.synchronize()
    found.restore(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        skip = found.update(loss, norm)
    for values in torch.tensor(drawn(4, 200)):
        loss.copy_(values[0])
        norm.copy_(values[1])
        graph.replay()
        assert skip.item() == twin.update(*values).item()
        assert found.scores.tolist() == pytest.approx(twin.scores.tolist(), rel=1e-9, abs=1e-9, nan_ok=True)
    assert found.skipped == twin.skipped > 0


@pytest.mark.cuda
def test_captured_steps_skip_the_outlier(watched):
    own = {"device": "cuda", "precision": "fp32", "compile": "off"}
    on_gpu = change(watched, **own, model={"hidden_size": 128, "seq_length": 64})
    with torch.cuda.stream(torch.cuda.Stream()):
        found = [steps_with_an_outlier(replace(on_gpu, graph=graph), STRANGE, WINDOW) for graph in ("on", "off")]
    for captured, plain in zip(*found, strict=True):
        assert captured.unchanged == plain.unchanged and captured.loss == pytest.approx(plain.loss, rel=1e-5)
        assert captured.metrics == pytest.approx(plain.metrics, rel=1e-2, abs=1e-2)
    assert found[0][STRANGE].unchanged and not found[0][STRANGE - 1].unchanged

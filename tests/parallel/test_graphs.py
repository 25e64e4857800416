"""Steps as CUDA graphs: the same numbers as without, whatever happens in between."""

import gc
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtgpt.cli import main
from dtgpt.compare.rounding import comparable
from dtgpt.config.execution import DTYPES
from dtgpt.parallel.engine import open_graphs
from dtgpt.parallel.graphs.captured import WARM_UP, CapturedGraphs, capture
from dtgpt.train.loop import train
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError
from tests.support.runs import change, losses, newest_run, on_cuda, training

CUDA = torch.device("cuda")
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(autouse=True)
def own_stream():
    """Graphs leave the default stream for good, since a process trains once: tests must not follow."""
    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.synchronize()


def test_without_graphs_work_is_done_at_once():
    graphs, calls = open_graphs(False), []
    for step in range(5):
        graphs.next_step()
        x = torch.tensor(float(step))
        result = graphs.run("double", lambda x, key: calls.append((x, key)) or 2 * x, x, None)
        assert result == 2 * step and calls[-1][0] is x and calls[-1][1] is None
    assert len(calls) == 5 and not graphs.captured
    graphs.release()
    assert graphs.run("double", lambda x: 3 * x, torch.ones(())) == 3


class Replayed:
    """In place of a captured graph, which a CPU does not have."""

    replays = 0

    def replay(self):
        self.replays += 1


ROWS = torch.ones(4, 3)


@pytest.mark.parametrize(("now", "words"), [
    ((ROWS, ROWS), "input 1 of the CUDA graph 'head' is float32 [4, 3], and was none"),
    ((None, None), "input 0 of the CUDA graph 'head' is none, and was float32 [4, 3]"),
    ((ROWS[:1], None), "is float32 [1, 3], and was float32 [4, 3]"),
    ((ROWS.double(), None), "is float64 [4, 3], and was float32 [4, 3]"),
])  # fmt: skip
def test_inputs_of_another_form_than_the_captured_ones_are_refused(now, words):
    """A graph does not read what was none, and a copy repeats a row for all: it would train on something else."""
    graphs, graph, places = CapturedGraphs(False), Replayed(), (torch.zeros(4, 3), None)
    graphs.enabled, graphs._captured = True, {"head": (graph, "result", places)}
    for _ in range(WARM_UP + 1):
        graphs.next_step()
    assert graphs.run("head", pytest.fail, ROWS, None) == "result" and torch.equal(places[0], ROWS)
    with pytest.raises(UserError, match=re.escape(words)):
        graphs.run("head", pytest.fail, *now)
    assert graph.replays == 1 and torch.equal(places[0], ROWS)


@pytest.mark.parametrize("cause", [RuntimeError("not in a capture\nat line 1"), torch.OutOfMemoryError("full")])
def test_a_piece_that_cannot_be_captured_tells_its_own_cause(monkeypatch, cause):
    """The end of a broken capture raises something else, which hides it."""

    class Capture:
        def __init__(self, graph, **options): ...
        def __enter__(self): ...
        def __exit__(self, *failure):
            raise RuntimeError("operation failed due to a previous error during capture")

    def work():
        raise cause

    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    expected = (torch.OutOfMemoryError, "full")
    if not isinstance(cause, torch.OutOfMemoryError):
        expected = UserError, r"cannot be captured as a CUDA graph \(not in a capture\); use --graph off"
    with pytest.raises(expected[0], match=expected[1]):
        capture(work, (), None, "use --graph off")
    assert gc.isenabled()


def test_no_cycles_of_objects_are_collected_during_a_capture(monkeypatch):
    """They may hold memory that cannot be freed then."""
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    assert capture(gc.isenabled, (), None, "use --graph off") == (None, False)
    assert gc.isenabled()


def test_a_run_on_a_cpu_that_asks_for_graphs_is_refused_before_it_begins(recipe):
    with pytest.raises(UserError, match=r"^graph=on, but CUDA graphs need a CUDA device; use --graph auto"):
        train(replace(recipe, graph="on"))
    assert not Path(recipe.runs).exists()


@pytest.mark.cuda
def test_a_piece_runs_as_it_is_until_it_is_captured_and_then_replays_with_new_inputs():
    graphs, calls = CapturedGraphs(), []
    weight = torch.randn(64, 64, device=CUDA)

    def work(x, key):
        calls.append(key)
        return (x @ weight).relu()

    outputs = []
    for step in range(WARM_UP + 4):
        graphs.next_step()
        x = torch.randn(8, 64, device=CUDA)
        y = graphs.run("piece", work, x, None)
        assert graphs.captured == (step >= WARM_UP)
        torch.testing.assert_close(y, (x @ weight).relu())
        outputs.append(y)
    assert len(calls) == WARM_UP + 1 and calls == [None] * len(calls)  # once more, to be captured
    assert len({y.data_ptr() for y in outputs[WARM_UP:]}) == 1
    graphs.release()
    assert not graphs.captured
    x = torch.randn(8, 64, device=CUDA)
    torch.testing.assert_close(graphs.run("piece", work, x, None), (x @ weight).relu())
    assert len(calls) == WARM_UP + 2


@pytest.mark.cuda
def test_pieces_share_their_memory_and_see_what_others_wrote():
    """What the first piece needs for itself alone is there again for the second."""
    graphs, size = CapturedGraphs(), 16 << 20
    total, counts = torch.zeros((), device=CUDA), torch.arange(size, device=CUDA, dtype=torch.float32)

    def piece(x):
        large = x * counts  # 64 MiB
        total.add_(large.sum() / size)

    x = torch.ones((), device=CUDA)
    for _ in range(WARM_UP):
        graphs.next_step()
        for name in "abcd":
            graphs.run(name, piece, x)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphs.next_step()
    for name in "abcd":
        graphs.run(name, piece, x)
    assert torch.cuda.memory_reserved() - before < 2 * 4 * size
    total.zero_()
    for factor in (1, 2, 3):
        graphs.next_step()
        for name in "abcd":
            graphs.run(name, piece, x * factor)
    assert total.item() == pytest.approx(4 * (1 + 2 + 3) * counts.double().mean().item(), rel=1e-5)


def curve_of(run: Trainer, steps: int) -> torch.Tensor:
    """`[steps, 2]`: loss and norm."""
    return torch.stack([torch.stack(run.train_step()) for _ in range(steps)]).cpu()


def weights_of(run: Trainer) -> torch.Tensor:
    """All in one, but the bias of the keys, which moves by rounding alone."""
    config = run.settings.model
    return torch.cat([comparable(config, shard.name, shard.local).flatten() for shard in run.shards])


# (loss, norm, all weights): several times what one and several micro-batches differ by, a fraction of what twenty steps
# move, which is 0.18 of the weights.
BOUNDS = {"fp32": (1e-5, 1e-4, 1e-5), "bf16": (2e-3, 5e-2, 5e-3), "fp16": (3e-4, 1e-2, 1e-3)}


def check_same(runs: list[Trainer], curves: list[torch.Tensor]) -> None:
    loss, norm, weights = next(b for name, b in BOUNDS.items() if DTYPES[name] == runs[0].settings.dtype)
    torch.testing.assert_close(curves[0][:, 0], curves[1][:, 0], rtol=loss, atol=0)
    torch.testing.assert_close(curves[0][:, 1], curves[1][:, 1], rtol=norm, atol=0)
    a, b = map(weights_of, runs)
    assert (a - b).norm() <= weights * b.norm()
    for shard in runs[0].shards:
        assert torch.equal(shard.parameter, shard.local.to(shard.parameter.dtype)), shard.name


@pytest.mark.cuda
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_twenty_steps_with_graphs_are_those_without(recipe, micro_batches, precision):
    """Dropout on: a replayed step draws new masks."""
    options = {"micro_batch_size": 8 // micro_batches, "precision": precision, "loss_scale": {"initial": 2.0**14}}
    runs = [training(on_cuda(recipe, graph=graph, compile="off", **options)) for graph in ("on", "off")]
    curves = [curve_of(run, 20) for run in runs]
    assert runs[0].graphs.captured and not runs[1].graphs.captured
    assert curves[0][:, 0].unique().numel() == 20 and curves[0][-5:, 0].mean() < curves[0][:5, 0].mean() - 0.5
    check_same(runs, curves)


@pytest.mark.cuda
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("attention", ["flash", "explicit"])
def test_a_captured_step_computes_again_what_it_did_not_keep(recipe, attention, recompute):
    options = {"precision": "bf16", "attention": attention, "compile": "off"}
    runs = [training(on_cuda(recipe, recompute=r, **options)) for r in (recompute, "none")]
    check_same(runs, [curve_of(run, 8) for run in runs])


@pytest.mark.cuda
@pytest.mark.parametrize("micro_batch_size", [4, 8])
def test_evaluation_and_samples_in_between_disturb_no_captured_step(recipe, micro_batch_size):
    """Also in the memory that the pieces of the graph believe to be theirs."""
    from dtgpt.train.texts.generate import generate_text

    recipe = on_cuda(recipe, micro_batch_size=micro_batch_size, precision="bf16")
    runs = [training(recipe) for _ in range(2)]
    undisturbed, curve, held_out = curve_of(runs[0], 12), [], []
    for _ in range(12):
        curve.append(torch.stack(runs[1].train_step()))
        held_out.append(runs[1].held_out_loss()[0])
        assert generate_text(runs[1])
        junk = [torch.full((1 << 20,), torch.nan, device=CUDA) for _ in range(8)]
        del junk
    check_same(runs[::-1], [torch.stack(curve).cpu(), undisturbed])
    assert held_out[-1] == pytest.approx(runs[0].held_out_loss()[0], rel=2e-3) and held_out[-1] < held_out[0]


@pytest.mark.cuda
def test_an_fp16_step_is_skipped_within_the_graph(recipe):
    """Too large a scale at first: the graph was captured while every step was skipped."""
    scale = {"initial": 2.0**40, "hysteresis": 1, "window": 1000}
    run = training(on_cuda(recipe, precision="fp16", loss_scale=scale))
    curve = curve_of(run, 40)
    told = run.optimizer.metrics()
    assert 10 < told["skipped_steps"] == (~curve[:, 1].isfinite()).sum() < 35
    assert told["loss_scale"] <= 2.0 ** (40 - told["skipped_steps"])  # a step that was taken may lower it, too
    assert run.optimizer.state()["updates"] == 40 - told["skipped_steps"]
    assert curve[:, 0].isfinite().all() and curve[-1, 0] < curve[0, 0]


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("graph", ["on", "off"])
def test_a_step_never_waits_for_the_device(recipe, graph, precision):
    run = training(on_cuda(recipe, graph=graph, precision=precision))
    curve_of(run, WARM_UP + 2)  # compiles or captures
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            run.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_a_resumed_run_captures_anew_and_goes_on(recipe):
    """The graph reads weights, moments and the step count where the checkpoint was read into."""
    recipe = change(recipe, device="cuda", precision="fp32", model={"hidden_size": 128}, optimizer={"decay_steps": 10})
    assert train(recipe) == 0
    halves = replace(recipe, runs=recipe.runs + "-halves")
    assert train(replace(halves, steps=5)) == 0
    run = Path(halves.runs) / "test-001"
    assert train(replace(halves, resume=str(run))) == 0
    assert list(losses(run).values()) == pytest.approx(list(losses(newest_run(recipe)).values()), rel=1e-5)


PLANS = ["dp2", "dp2_zero1", "dp2_zero3", "tp2", "tp2_sp", "pp2", "pp2_interleaved", "pp2_zbv"]


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_plans_on_gpus_follow_one_gpu(precision):
    """More steps than the warm-up: the last gradient and the weights are those of replays."""
    options = ["--graph", "on", "--model.num_layers", "4", "--model.dropout", "0.1", "--micro_batch_size", "8"]
    options += ["--precision", precision]
    with pytest.raises(SystemExit) as done:
        main(["compare", str(RECIPES / "gpt2_tiny.py"), "--plans", *PLANS, "--steps", str(WARM_UP + 4), *options])
    assert done.value.code == 0

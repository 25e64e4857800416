"""The benchmarks of whole steps, at sizes at which nothing is worth measuring: they run, and they count right."""

import json
import sys
from pathlib import Path

import pytest
import torch

from dtgpt.models.gpt2 import GPT2_124M, GPT2_345M
from dtgpt.models.llama import LLAMA3_8B
from tests.support.ranks import pool

pytestmark = pytest.mark.slow(6)

ROOT = Path(__file__).parents[2]
BENCHMARKS = str(ROOT / "benchmarks")
SMALL = [
    "--model", "tiny", "--model.hidden_size", "32", "--model.num_heads", "2", "--model.seq_length", "16",
    "--device", "cpu", "--micro_batch_size", "2", "--steps", "4", "--warmup", "1",
]  # fmt: skip
NANOGPT = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(config.vocab_size, 8), nn.Linear(8, config.vocab_size))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)

    def forward(self, x, targets):
        logits = self.body(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.fixture
def small(text, monkeypatch):
    """Arguments of a tiny run; the scripts can be imported."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return [*SMALL, "--data.path", str(text), "--data.tokenizer", "bytes"]


def call(main, name: str, arguments: list[str], monkeypatch) -> int:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return main()


@pytest.mark.long
def test_one_command_compares_plans(small, tmp_path, monkeypatch, capfd):
    import train_step

    file = tmp_path / "results.json"
    plans = ["--plans", "single", "dp2", "--micro_batches", "2", "--dropout", "0.1", "--json", str(file)]
    code = call(train_step.main, "train_step.py", [*small, *plans], monkeypatch)
    printed = capfd.readouterr()
    assert code == 0, printed.err
    single, dp2 = json.loads(file.read_text())
    assert [single["plan"], dp2["plan"]] == ["single", "dp2"]
    assert [single["batch"], dp2["batch"]] == [[1, 2, 2], [2, 2, 2]]
    assert single["recipe"]["model"]["dropout"] == 0.1
    for r, gpus in ((single, 1), (dp2, 2)):
        assert r["gpus"] == gpus and r["host"] > 0 and r["allocated"] > 0 and r["loss"] > 0
        assert r["tokens_per_second"] == pytest.approx(gpus * 2 * 2 * 16 / r["step"])
        assert r["per_gpu"] == pytest.approx(r["tokens_per_second"] / gpus)
    row = next(line for line in printed.out.splitlines() if line.startswith("dp2"))
    assert f"{dp2['per_gpu'] / single['per_gpu']:.1%}" in row


def test_settings_take_turns_and_operators_are_listed(small, monkeypatch, capsys):
    import train_step

    other = "--micro_batch_size 4 --global_batch_size 4 --seed 7"
    steps = ["--seed", "3", "--steps", "8", "--profile", "--against", other]
    monkeypatch.setattr(sys, "argv", ["train_step.py", *small, *steps])
    results = train_step.work("single", *train_step.parse())
    assert [r["recipe"]["seed"] for r in results] == [3, 7]
    printed = capsys.readouterr()
    assert "given twice" not in printed.err  # the second setting replaces the first one's seed, as it should
    assert [r["plan"] for r in results] == ["single", f"single {other}"]
    assert [r["batch"] for r in results] == [[1, 1, 2], [1, 1, 4]]
    assert all(len(r["rounds"]) == 8 // train_step.ROUND for r in results)
    assert "aten::mm" in printed.out
    assert "single" in train_step.table(results)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--plan", "tp3"], "model.num_heads=2 cannot be split over tp=3; use tp=1 or 2"),
        (["--bogus", "3"], "there is no option --bogus; see --help for the list"),
    ],
)
def test_what_cannot_run_is_told_before_anything_starts(small, arguments, sentence, monkeypatch, capsys):
    import train_step

    assert call(train_step.main, "train_step.py", [*small, *arguments], monkeypatch) == 2
    assert capsys.readouterr().err.strip() == sentence


def test_the_floor_adds_up(small, monkeypatch, capsys):
    import step_floor
    import train_step

    parts = step_floor.floor(GPT2_345M, samples=16)
    assert sum(parts.values()) == pytest.approx(66.4e-3, rel=1e-3)
    moved = [sum(passes["gpt2"](GPT2_345M).values()) for passes in (step_floor.FORWARD, step_floor.BACKWARD)]
    assert moved == [17 * GPT2_345M.hidden_size, 27 * GPT2_345M.hidden_size]
    twice = step_floor.floor(GPT2_345M, samples=32)
    assert [twice[name] / parts[name] for name in parts] == pytest.approx([2, 2, 2, 2, 1])
    weights = GPT2_124M.num_parameters - GPT2_124M.seq_length * GPT2_124M.hidden_size
    products = step_floor.floor(GPT2_124M, samples=1)["matrix products"] * step_floor.MATRIX_RATE
    assert products == pytest.approx(6 * weights * GPT2_124M.seq_length, rel=2e-3)  # but for biases and LayerNorms
    arguments = ["--model", str(ROOT / "recipes" / "gpt2_345m.py"), "--floor"]
    assert call(train_step.main, "train_step.py", arguments, monkeypatch) == 0
    assert "246,7" in capsys.readouterr().out


def test_nanogpt_takes_turns_with_ours(small, tmp_path, monkeypatch, capsys):
    import against_nanogpt

    (tmp_path / "model.py").write_text(NANOGPT)
    arguments = [*small, "--micro_batches", "2", "--nanogpt", str(tmp_path)]
    assert call(against_nanogpt.main, "against_nanogpt.py", arguments, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "nanoGPT" in printed and "x as fast" in printed
    arguments[-1] = str(tmp_path / "nowhere")
    assert call(against_nanogpt.main, "against_nanogpt.py", arguments, monkeypatch) == 2
    assert "has no model.py" in capsys.readouterr().err


def tensor_parallel(arguments: list[str]) -> int:
    sys.path.insert(0, BENCHMARKS)
    sys.argv = ["tensor_parallel.py", *arguments]
    from tensor_parallel import main

    return main()


@pytest.mark.long
@pytest.mark.parametrize("dropout", ["0", "0.1"])
def test_tensor_parallelism_by_hand_has_the_gradients_of_dtensor(small, dropout):
    assert pool().run(2, tensor_parallel, [*small, "--dropout", dropout]) == [0, 0]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("bound, within", [("32", True), ("-1", False)])
def test_what_random_samples_keep_in_memory_is_bounded(monkeypatch, capsys, bound, within):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import mapped_memory

    small = ["--gib", "0.07", "--windows", "1500", "--batch", "2", "--bound_mib", bound]
    assert call(mapped_memory.main, "mapped_memory.py", small, monkeypatch) == (0 if within else 1)
    assert (f"within {bound} MiB" if within else f"ABOVE {bound} MiB") in capsys.readouterr().out


def scaling(arguments: list[str]) -> dict[str, float]:
    sys.path.insert(0, BENCHMARKS)
    sys.argv = ["scaling.py", *arguments]
    from scaling import main

    return main()


def test_replicas_are_held_against_one_process_in_turns(small):
    wanted = ["--plans", "dp2", "--nccl", "--micro_batch_size", "1", "--rounds", "2", "--warm", "0"]
    first, second = pool().run(2, scaling, [*small[: small.index("--warmup")], *wanted, "--steps", "1"])
    assert first == second and list(first) == ["single", "dp2", "dp2 nccl"] and first["single"] == 1


def test_the_curve_of_fp8_is_held_against_that_of_bf16(small, tmp_path, monkeypatch, capsys):
    import curve_precision

    small = small[: small.index("--steps")] + small[small.index("--data.path") :]
    arguments = [*small, "--steps", "5", "--model.dropout", "0", "--json", str(tmp_path / "curves.json")]
    call(curve_precision.main, "curve_precision.py", [*arguments, "--log.eval_samples", "4"], monkeypatch)
    found = json.loads((tmp_path / "curves.json").read_text())
    losses = [run["losses"] for run in found.values()]
    assert len(losses) == 2 and all(len(run) == 5 for run in losses) and losses[0] != losses[1]
    assert "--precision fp8: validation loss" in capsys.readouterr().out


def test_runs_that_differ_in_rounding_or_seed_are_compared_by_their_means(capsys):
    import curve_precision

    runs = [{"losses": [loss] * 2, "held_out": loss, "held_out_loaded": loss} for loss in (1.0, 2.0, 1.5, 3.0)]
    curve_precision.say_means("fp8", runs[2:], runs[:2])
    assert "2.2500 (1.5000 to 3.0000), +0.7500, standard error 0.2500" in capsys.readouterr().out


def test_ways_to_generate_are_measured_beside_the_bound(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import decode

    file = tmp_path / "results.json"
    sizes = ["--model", "tiny", "--dtype", "fp32", "--device", "cpu", "--batches", "1", "3", "--positions", "0", "40"]
    counts = ["--tokens", "8", "--rounds", "2", "--prefill", "2", "--json", str(file)]
    assert call(decode.main, "decode.py", [*sizes, *counts], monkeypatch) == 0
    results = json.loads(file.read_text())
    rows = results["decode"]
    assert [(r["position"], r["batch"], r["peer"]) for r in rows] == [
        (position, batch, peer) for position in (0, 40) for batch in (1, 3) for peer in decode.USUAL
    ]
    for r in rows:
        assert len(r["seconds"]) == 2 and min(r["seconds"]) > 0
        assert r["of_bound"] == pytest.approx(r["tokens_per_second"] / r["bound"])
    assert all(rate > 0 for rate in results["prefill"].values()) and results["memory"]["planned"] > 0
    assert [r["batch"] for r in results["rounds"]] == [1, 3] and all(r["step"] > 0 for r in results["rounds"])
    assert sum(line.split()[2:3] == ["hf_compiled"] for line in capsys.readouterr().out.splitlines()) == 4


def test_the_bound_of_decoding_counts_weights_and_keys_and_values(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import decode

    assert decode.bytes_read(GPT2_345M, torch.bfloat16, 1, position=0) == pytest.approx(708e6, rel=1e-3)
    one, two = (decode.bytes_read(GPT2_345M, torch.bfloat16, batch, position=512) for batch in (1, 2))
    assert two - one == 512 * 96 * 1024
    looked_up = LLAMA3_8B.padded_vocab_size * LLAMA3_8B.hidden_size
    assert decode.bytes_read(LLAMA3_8B, torch.bfloat16, 1, 0) == 2 * (LLAMA3_8B.num_parameters - looked_up)
    assert decode.bytes_read(LLAMA3_8B, torch.bfloat16, 1, 1) - decode.bytes_read(LLAMA3_8B, torch.bfloat16, 1, 0) == (
        32 * 2 * 8 * 128 * 2
    )


@pytest.mark.parametrize("changes", [[], ["--at_once"]])
def test_the_stall_of_a_save_is_told_beside_its_whole_time(small, tmp_path, monkeypatch, capsys, changes):
    import checkpoint

    small = [*small[: small.index("--steps")], *small[small.index("--warmup") :]]
    words = [*small, "--rounds", "1", "--folder", str(tmp_path / "saved"), *changes]
    call(checkpoint.main, "checkpoint.py", words, monkeypatch)
    printed = capsys.readouterr().out.splitlines()[1:]
    assert printed[0].split()[:3] == ["stall", "total", "load"]
    rows = {line[:20].strip(): [float(word) for word in line[20:].split()[:3]] for line in printed[1:5]}
    assert list(rows) == ["dtgpt, background", "torch.save, sync", "DCP, sync", "DCP, async thread"]
    assert all(stall == total for name, (stall, total, _) in rows.items() if name.endswith("sync"))
    assert all(stall <= total for stall, total, _ in rows.values())
    assert printed[5].startswith("dtgpt, background against DCP, async thread: stall ")
    assert not (tmp_path / "saved").exists()


def test_a_save_is_measured_until_the_weights_may_change(monkeypatch):
    """The copy takes 0.4 s, in which a pass of 0.1 s is done, then the files 0.2 s more."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from types import SimpleNamespace

    import checkpoint

    clock = [0.0]

    def until(seconds: float) -> None:
        clock[0] = max(clock[0], seconds)

    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    training = SimpleNamespace(
        gradients=lambda: until(0.1), mesh=SimpleNamespace(device=torch.device("cpu"), gather=lambda _: None)
    )
    way = checkpoint.Way(lambda: None, lambda: until(0.4), lambda: until(0.6))
    times = checkpoint.stall_and_total(training, way, at_once=False)
    assert times == pytest.approx({"stall": 0.3, "total": 0.6})


def test_scoring_is_timed_beside_transformers(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import evaluate

    file = tmp_path / "results.json"
    sizes = ["--model", "tiny", "--dtype", "fp32", "--device", "cpu", "--samples", "40", "--peer_batch", "8"]
    arguments = [*sizes, "--peer_part", "0.5", "--rounds", "1", "--json", str(file)]
    assert call(evaluate.main, "evaluate.py", arguments, monkeypatch) == 0
    results = json.loads(file.read_text())
    assert [r["task"] for r in results["tasks"]] == ["lambada", "hellaswag"] and results["forward"] > 0
    for r in results["tasks"]:
        assert r["samples"] == 40 and r["difference"] < 1e-5 and r["times"] > 0
        assert r["of_forward"] == pytest.approx(r["tokens"] / r["seconds"][0] / results["forward"])
    assert sum(line.split()[:1] == ["hellaswag"] for line in capsys.readouterr().out.splitlines()) == 1

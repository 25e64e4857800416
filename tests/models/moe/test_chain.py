"""A run of a mixture of experts that is killed again and again, and goes on each time under another of eight plans: its
losses are those of one process that nobody killed."""

import os
import re
import signal
from pathlib import Path

import pytest

from dtgpt.config.plan_choice import parse_plan
from tests.support.programs import Program, run_program
from tests.support.runs import losses

pytestmark = pytest.mark.long

RECIPE = Path(__file__).parents[3] / "recipes" / "moe_tiny.py"
OPTIONS = {
    "model.num_layers": 4, "model.hidden_size": 32, "model.head_dim": 8, "model.ffn_hidden_size": 24,
    "model.seq_length": 16, "model.vocab_size": 257, "model.dropout": 0.1, "data.tokenizer": "bytes",
    "data.path": "text.txt", "data.held_out": 0.0, "optimizer.eps": 1e-4, "optimizer.warmup": 5, "balance.loss": 0.1,
    "global_batch_size": 8, "micro_batch_size": 1, "steps": 44, "device": "cpu", "log.interval": 1,
    "log.sample_interval": 0, "log.eval_interval": 0, "log.sample_tokens": 0, "checkpoint.interval": 1,
}  # fmt: skip
CHAINS = {
    "fast": [
        "dp2_ep2", "tp2_sp", "dp2_ep2_tp2_pp2", "cp2_ep2", "dp4_ep4_zero3", "dp2_ep2_pp2_zbv", "cp2_tp2",
        "dp4_ep2_zero1",
    ],
    "exact": [  # of which all have the same bits
        "dp2_ep2", "dp4_ep4_zero3", "pp2_1f1b", "dp2_ep2_pp2_interleaved_zero1", "dp2_zero2", "dp4_ep2_zero2",
        "dp2_zero3", "dp2_ep2_zero1",
    ],
}  # fmt: skip


def words_of(plan: str, reduce: str, **more: object) -> list[str]:
    options = OPTIONS | more | {"plan": plan, "reduce": reduce, "nproc": parse_plan(plan).world}
    return [str(RECIPE), *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def kill_after(words: list[str], folder: Path, steps: int) -> int:
    """Run the program until it has taken so many steps since it began, and kill its last process. Return the last step
    that it has told of."""
    program, told = Program(words, folder), []
    for line in program.stdout:
        if found := re.match(r"step +(\d+)/", line):
            told.append(int(found[1]))
        if len(told) == steps:
            break
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    os.kill(max(map(int, children)), signal.SIGKILL)
    out, err = program.communicate(120)
    assert program.returncode == 128 + signal.SIGKILL, out + err
    return max([*told, *map(int, re.findall(r"(?m)^step +(\d+)/", out))])


@pytest.mark.parametrize("reduce", CHAINS)
def test_a_run_that_is_killed_under_eight_plans_follows_one_process(tmp_path, reduce):
    plans = CHAINS[reduce]
    assert len({*plans}) == 8
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}. " for n in range(900)))
    done = run_program(words_of("single", reduce, runs="whole"), tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    ends = [0]
    for plan in plans:
        ends.append(kill_after(words_of(plan, reduce, resume="auto"), tmp_path, 3))
    assert ends == sorted({*ends}) and ends[-1] < OPTIONS["steps"]
    done = run_program(words_of("dp2_ep2", reduce, resume="auto"), tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    whole, found = (losses(tmp_path / name / "moe_tiny-001") for name in ("whole", "runs"))
    assert found.keys() == whole.keys() == {*range(1, OPTIONS["steps"] + 1)}
    assert found == (whole if reduce == "exact" else pytest.approx(whole, rel=1e-5))
    assert whole[OPTIONS["steps"]] < whole[1] - 1

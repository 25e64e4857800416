"""The table of `dtgpt plan` with several plans and numbers of processes."""

from dataclasses import replace
from pathlib import Path

import pytest

from dtgpt.cli import main
from dtgpt.parallel.stages import block_ranges
from dtgpt.planning.gpus import GIB
from dtgpt.planning.memory import fullest, memory_by_rank
from dtgpt.planning.parameters import parameters_of
from dtgpt.planning.traffic import sent_bytes
from dtgpt.planning.what_fits import HEADROOM, longest_sequence
from dtgpt.train.start import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA = RECIPES / "llama31_405b.py"


def output_of(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    assert stop.value.code == 0
    return capsys.readouterr().out


def rows_of(text: str, header: str) -> list[list[str]]:
    lines = iter(text.splitlines())
    next(line for line in lines if line.startswith(header))
    assert next(lines).split()[0] == "plan"
    return [line.split() for line in iter(lambda: next(lines, ""), "")]


def test_each_plan_and_world_has_a_line_with_the_numbers_of_its_own_report(capsys):
    plans = ["--plans", "tp8_sp_pp16_zero1", "tp8_sp_zero3", "--world", "1024", "1000", "--gpu", "80"]
    text = output_of(capsys, str(LLAMA), *plans)
    notes = " ".join(text.split())
    memory, step = rows_of(text, "GiB on the fullest rank"), rows_of(text, "a step: ")
    assert [row[:2] for row in memory] == [["tp8_sp_pp16_zero1", "1,024"], ["tp8_sp_zero3", "1,024"]]
    assert "refused: tp8_sp_pp16_zero1 on 1,000 processes: the plan" in notes and "use --world 896 or 1024" in notes
    for plan, has, does in zip(("tp8_sp_pp16_zero1", "tp8_sp_zero3"), memory, step, strict=True):
        settings = load_recipe(LLAMA, ["--plan", plan]).planned(1024)
        most = fullest(memory_by_rank(settings))
        assert float(has[7]) == pytest.approx(most.total / GIB, abs=0.05) and has[8] == "yes"
        assert sum(map(float, has[2:7])) == pytest.approx(float(has[7]), abs=0.05)
        assert does[:3] == [plan, "1,024", f"{settings.micro_batches:,}"]
    assert [row[3] for row in step] == ["5.5%", "0.0%"]


@pytest.mark.slow(1)
def test_alternatives_by_world_have_a_line_with_the_plan_that_is_chosen(capsys):
    plans = ["--plans", "dp2_tp2|tp2", "--world", "2", "4", "5"]
    batch = ["--global_batch_size", "8", "--micro_batch_size", "1"]
    text = output_of(capsys, str(RECIPES / "gpt2_tiny.py"), *plans, *batch)
    rows = rows_of(text, "MiB on the fullest rank")
    assert [row[:2] for row in rows] == [["tp2", "2"], ["dp2_tp2", "4"], ["dp2_tp2", "4"]]
    assert "note: 1 of 5 processes waits" in text


@pytest.mark.slow(2)
@pytest.mark.parametrize("plan, world", [("tp8_sp_pp16_zero1", 16384), ("tp8_sp_zero3", 1024), ("zero3", 1024)])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(plan, world):
    settings, size = load_recipe(LLAMA, ["--plan", plan]).planned(world), 80 * GIB
    if settings.plan.pp > 1:
        cut = tuple(map(len, block_ranges(settings.model, settings.plan)))
        settings = replace(settings, plan=replace(settings.plan, blocks_per_stage=cut))
    longest = longest_sequence(settings, size)

    def total(length: int) -> float:
        model = replace(settings.model, seq_length=length)
        return fullest(memory_by_rank(replace(settings, model=model, seq_length=length))).total

    assert longest % 1024 == 0 and 0 < longest < 1_000_000
    assert total(longest) <= HEADROOM * size < total(longest + 1024)
    assert longest_sequence(settings, GIB) == 0


def test_the_longest_sequence_below_a_grain_is_found_too():
    words = ["--plan", "single", "--model.num_layers", "2", "--model.seq_length", "128"]
    settings = load_recipe(LLAMA, words).planned(1)
    one = fullest(memory_by_rank(replace(settings, seq_length=128))).total
    longest = longest_sequence(settings, one / HEADROOM)
    assert 128 <= longest < 1024 and longest % 2 == 0


def test_a_rank_sends_what_rings_send():
    """Megatron's count (Korthikanti et al. 2022): eight times the activations of a block, in two gathers and two
    scatters of each half; gradients in fp32 and weights in 16 bits, once for each element."""
    recipe = load_recipe(LLAMA, ["--model.num_layers", "4", "--global_batch_size", "64", "--plan", "tp4_sp_zero1"])
    recipe = replace(recipe, recompute="none")
    settings = recipe.planned(32)
    sent, held = sent_bytes(settings, 0), parameters_of(settings.model, settings.plan, 0)
    assert sent["dp"] == pytest.approx(7 / 8 * (4 + 2) * sum(p.by_tp for p in held))
    activations = 2 * 8192 * 16384
    ends = 4  # gathers and scatters of the embedding and the head
    assert sent["tp"] == pytest.approx(3 / 4 * 8 * (4 * 8 + ends) * activations, rel=0.001)
    assert sent["pp"] == 0
    pipelined = load_recipe(LLAMA, ["--plan", "tp8_sp_pp16_zero1"]).planned(16384)
    assert sent_bytes(pipelined, 5000)["pp"] == 2 * 16 * activations / 8


@pytest.mark.parametrize("more", [[], ["--plans", "dp", "tp2"]], ids=["plan", "table"])
def test_a_gpu_that_cannot_train_in_fp8_is_refused(capsys, more):
    """It is the sentence with which a run would be refused there."""
    words = ["plan", str(RECIPES / "gpt2_tiny.py"), "--precision", "fp8", "--gpu", "a100-40gb", *more]
    with pytest.raises(SystemExit) as stop:
        main(words)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "--gpu A100-40GB does not multiply 8-bit floats" in said
    assert "use --precision bf16" in said


def test_the_heading_says_how_many_blocks_are_computed_again(capsys):
    words = [str(RECIPES / "llama32_1b.py"), "--plans", "dp", "--world", "8", "--recompute", "full"]
    assert "recompute_blocks" not in output_of(capsys, *words)
    some = output_of(capsys, *words, "--recompute_blocks", "3")
    assert "recompute full, recompute_blocks 3" in " ".join(some.split())


def test_what_is_faster_is_said_in_all_options_that_it_takes(capsys):
    words = [str(RECIPES / "llama32_1b.py"), "--plan", "dp", "--world", "8", "--gpu", "H200", "--recompute", "full"]
    assert "faster: --recompute none fits" in " ".join(output_of(capsys, *words).replace("fits:", "fits").split())
    some = output_of(capsys, *words, "--recompute_blocks", "3")
    assert "faster: --recompute none --recompute_blocks none" in " ".join(some.split())

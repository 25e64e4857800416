"""The search for a plan: held to trying every candidate, and what is kept, refused and said."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from dtgpt.cli import main
from dtgpt.config.plan_choice import parse_alternatives
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.planning.auto import AutoPlan, is_auto, with_choice
from dtgpt.planning.gpus import GIB, find_gpu, known_gpu
from dtgpt.planning.memory import fullest, memory_by_rank
from dtgpt.planning.report import options_of
from dtgpt.planning.search import Search, _divisions, numbers_of_processes, rank_plans
from dtgpt.planning.step_time import step_time
from dtgpt.planning.what_fits import FILLED, fits_into, largest_micro_batch, what_fits, with_fewest_blocks
from dtgpt.train.start import load_recipe
from dtgpt.util.console import byte_size
from dtgpt.util.errors import UserError

RECIPES = Path(__file__).parents[2] / "recipes"
GPU = replace(known_gpu("H100"), size=0.45 * GIB)
PLANS = ["dp", "zero1", "zero2", "zero3", "tp2_sp", "tp2_sp_zero1", "tp2_sp_zero3", "tp4_sp", "pp2", "pp2_zero1", "pp4"]
PLANS += ["pp2_interleaved2", "pp2_interleaved2_zero1", "pp2_gpipe", "pp4_gpipe", "tp2_sp_pp2"]
PLANS += ["tp2_sp_pp2_interleaved2"]


@pytest.fixture
def small(recipe):
    model = GPT2Config(num_layers=4, hidden_size=512, num_heads=8, seq_length=512, vocab_size=5000)
    return replace(recipe, model=model, plan="auto", micro_batch_size=1, global_batch_size=16, device="auto")


def with_plan(recipe, world, gpu):
    return AutoPlan(recipe=recipe, world=world, gpu=gpu).settled()


def tried(recipe, gpu):
    """Return the seconds of every candidate that fits, by its choice."""
    found = {}
    for plan, micro, recompute in product(PLANS, (1, 2, 4, 8, 16), ("none", "full")):
        try:
            settings = replace(recipe, plan=plan, micro_batch_size=micro, recompute=recompute).planned(4)
        except UserError:
            continue
        if fits_into(fullest(memory_by_rank(settings)).total, gpu.size):
            found[settings.plan.name, micro, recompute] = step_time(settings, gpu.rates).total
    return found


@pytest.mark.parametrize("size", [0.2, 0.45, 4.0])
def test_the_choice_is_the_fastest_of_all_that_fit(small, size):
    gpu = replace(GPU, size=size * GIB)
    every = tried(small, gpu)
    found = AutoPlan(recipe=small, world=4, gpu=gpu).ranking()
    for each in found.fitting:
        own = each.settings
        assert fits_into(fullest(memory_by_rank(own)).total, gpu.size)
        assert each.seconds == pytest.approx(step_time(own, gpu.rates).total)
    assert found.best.seconds <= min(every.values()) * (1 + 1e-9)
    assert [each.seconds for each in found.fitting] == sorted(each.seconds for each in found.fitting)
    divisions = [(p.dp, p.tp, p.pp, p.zero) for p in (each.settings.plan for each in found.fitting)]
    assert len(set(divisions)) == len(divisions) > 2
    assert all(not fits_into(each.memory.total, gpu.size) for each in found.too_large)


def test_of_a_billion_processes_only_numbers_that_can_share_the_samples_are_searched(small, monkeypatch):
    searched = []

    def rank(search, *arguments):
        searched.append(search.world)
        assert len(searched) < 20
        return rank_plans(search, *arguments)

    monkeypatch.setattr("dtgpt.planning.auto.rank_plans", rank)
    found = AutoPlan(recipe=small, world=10**9, gpu=GPU).ranking()
    assert found.best.settings.plan.world == searched[-1] == 16 * 64 * 8 * 4  # samples, MOST_CP, heads, blocks
    numbers = numbers_of_processes(
        Search(model=small.model, world=200, samples=16, seq_length=512, recomputes=[], make=None)
    )
    sharing = {
        n: [16 % plan.dp == 0 for cp in (False, True) for plan, *_ in _divisions(small.model, n, 512, cp)]
        for n in range(1, 200)
    }
    assert numbers == [200, *(n for n in range(199, 0, -1) if any(sharing[n]))]


def test_the_choice_is_written_as_a_plan_and_kept_while_it_fits(small):
    chosen = with_plan(small, 4, GPU)
    assert chosen == with_plan(small, 4, GPU) and is_auto(chosen.plan)
    assert with_plan(chosen, 4, replace(GPU, size=80 * GIB)) is chosen  # a resume, whatever it would choose now
    own = chosen.choose_plan(4)
    assert own.plan.name == chosen.plan.partition(" | ")[0] and own.waiting == 0
    assert with_plan(chosen, 2, GPU).choose_plan(2).plan.world == 2
    changed = {name for name, value in vars(small).items() if getattr(chosen, name) != value}
    assert changed <= {"plan", "micro_batch_size", "recompute"}


def test_processes_that_no_plan_can_use_wait(small):
    odd = replace(small, global_batch_size=2, model=replace(small.model, num_layers=2))
    chosen = with_plan(odd, 11, replace(GPU, size=4 * GIB))
    choice = chosen.choose_plan(11)
    assert choice.plan.world == 8 and choice.waiting == 3


def test_the_micro_batch_of_the_recipe_is_not_used(small):
    odd = replace(small, micro_batch_size=4, global_batch_size=7)
    odd.validate()
    assert with_plan(odd, 1, known_gpu("H100")).micro_batch_size in (1, 7)
    replace(odd, recompute_blocks=3).validate()
    with pytest.raises(UserError, match="global_batch_size=7 is not a multiple of micro_batch_size=4"):
        replace(odd, plan="single | auto").validate()


def test_a_model_that_no_plan_holds_is_one_sentence(small):
    with pytest.raises(UserError, match=r"plan=auto finds no plan of 4 processes for H100.*; use more processes"):
        with_plan(small, 4, replace(GPU, size=0.001 * GIB))


@pytest.mark.parametrize(
    "plan, words",
    [("auto", "plan=auto is chosen by dtgpt train"), ("auto | dp", "write auto last"), ("| auto", "no plan")],
)
def test_auto_is_last_and_for_a_number_of_processes(plan, words):
    with pytest.raises(UserError, match=words):
        parse_alternatives(plan)


def test_what_fits_is_named_with_its_memory_and_its_cost():
    """A 70B on 16 H100s."""
    sizes = {"num_layers": 80, "hidden_size": 8192, "num_heads": 64, "num_kv_heads": 8, "ffn_hidden_size": 28672}
    words = [word for name, value in sizes.items() for word in (f"--model.{name}", f"{value}")]
    settings = load_recipe(RECIPES / "llama3_8b.py", ["--plan", "tp8_sp_zero3", *words]).planned(16)
    first, *_ = what_fits(settings, find_gpu("H100"))
    assert first.startswith("--recompute full (70.1")
    other = what_fits(replace(settings, plan=replace(settings.plan, zero=1)), find_gpu("H200"))
    assert any(line.startswith("--plan dp2_tp8_zero2_sp (") for line in other)


@pytest.mark.slow(1)
def test_changes_keep_the_number_of_gpus_and_fit(small):
    settings = replace(small, plan="dp4", micro_batch_size=4).planned(4)
    gpu = replace(GPU, size=0.2 * GIB)
    assert not fits_into(fullest(memory_by_rank(settings)).total, gpu.size)
    *changes, last = what_fits(settings, gpu)
    assert (changes and "longest of this plan" in last) or "no sample" in last
    for line in changes:
        words = line.partition(" (")[0].split()
        options = dict(zip(words[::2], words[1::2], strict=True))
        own = replace(
            small,
            plan=options.get("--plan", "dp4"),
            micro_batch_size=int(options.get("--micro_batch_size", 4)),
            recompute=options.get("--recompute", "none"),
        ).planned(4)
        assert fits_into(fullest(memory_by_rank(own)).total, gpu.size), line
    micro = largest_micro_batch(replace(settings, micro_batch_size=1), 0.5 * GIB)
    assert micro and fits_into(fullest(memory_by_rank(replace(settings, micro_batch_size=micro))).total, 0.5 * GIB)


def test_the_command_ranks_plans_and_says_why_others_lost(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(RECIPES / "gpt2_345m.py"), "--plan", "auto", "--world", "4", "--gpu", "rtx 4090"])
    out = capsys.readouterr().out
    assert not stop.value.code
    lines = out.splitlines()
    assert (
        lines[0].startswith("plans of 4 processes by the time of a step on RTX4090") and lines[1].split()[0] == "plan"
    )
    chosen = next(line for line in lines if line.startswith("chosen: --plan "))
    assert lines[2].split()[0] == chosen.split()[2]
    assert any("messages over" in line or "bubble" in line for line in lines[3:8])
    assert "never measured" in out and "GPU hours" in out and "MFU" in out


def test_an_old_gpu_is_told_what_runs_there(capsys):
    with pytest.raises(SystemExit):
        main(["plan", str(RECIPES / "gpt2_tiny.py"), "--plan", "dp", "--gpu", "v100", "--precision", "bf16"])
    assert "V100 has compute capability 7.0" in capsys.readouterr().err


def test_a_network_of_a_gpu_without_rates_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(RECIPES / "gpt2_tiny.py"), "--network", "10", "--gpu", "80"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "names no GPU" in said and said.count("\n") == 1


LONG = ("--model.seq_length", "32768", "--micro_batch_size", "1", "--global_batch_size", "1", "--plan", "cp2_zero3")


@pytest.mark.parametrize("recompute", ["around_attention", "full"])
def test_as_few_blocks_are_computed_again_as_fill_the_gpu(recompute):
    settings = load_recipe(RECIPES / "llama3_8b.py", [*LONG, "--recompute", recompute]).planned(2)
    gpu = find_gpu("H200")
    fewer = with_fewest_blocks(settings, gpu.size)
    blocks = fewer.recompute_blocks
    assert 1 < blocks < 32 and fewer == replace(settings, recompute_blocks=blocks)
    none, one_less = replace(settings, recompute="none"), replace(fewer, recompute_blocks=blocks - 1)

    def needed(changed) -> float:
        return fullest(memory_by_rank(changed)).total

    assert needed(settings) < needed(fewer) <= FILLED * gpu.size < needed(one_less) < needed(none)
    times = [step_time(each, gpu.rates).total for each in (none, one_less, fewer, settings)]
    assert times == sorted(times) and len(set(times)) == 4
    assert with_fewest_blocks(settings, 2 * gpu.size) == none  # nothing has to be computed again
    assert with_fewest_blocks(settings, needed(settings)) == settings
    # Of a recipe that names blocks, fewer are faster. With one less it fits, too, but beyond FILLED.
    assert with_fewest_blocks(replace(settings, recompute_blocks=blocks + 1), gpu.size) == fewer
    assert fits_into(needed(one_less), gpu.size) and with_fewest_blocks(one_less, gpu.size) == one_less


@pytest.mark.parametrize("recompute", ["around_attention", "full"])
def test_as_many_blocks_as_there_are_need_what_all_need(recompute):
    """In fp8, in the step that observes, too."""
    words = ["--plan", "pp2", "--precision", "fp8", "--recompute", recompute]
    settings = load_recipe(RECIPES / "llama3_8b.py", words).planned(2)
    every = replace(settings, recompute_blocks=32)
    assert memory_by_rank(every) == memory_by_rank(settings)


def test_auto_computes_no_more_blocks_again_than_it_takes_to_fit():
    recipe = replace(load_recipe(RECIPES / "llama3_8b.py", LONG), plan="auto")
    gpu = replace(find_gpu("H200"), size=110 * GIB)
    best = AutoPlan(recipe=recipe, world=2, gpu=gpu).ranking().best
    assert best.settings.recompute == "around_attention" and 1 < best.settings.recompute_blocks < 32
    chosen = with_choice(recipe, best)
    assert chosen.recompute_blocks == best.settings.recompute_blocks
    assert options_of(best).endswith(f"--recompute around_attention --recompute_blocks {chosen.recompute_blocks}")


@pytest.mark.parametrize("recompute", ["around_attention", "full"])
def test_where_some_blocks_are_too_few_all_are_named(recompute):
    words = ["--plan", "zero3", "--recompute", recompute, "--recompute_blocks", "1"]
    settings = load_recipe(RECIPES / "llama3_8b_128k.py", words).planned(8)
    gpu = find_gpu("H200")
    every = fullest(memory_by_rank(replace(settings, recompute_blocks=None))).total
    assert any(line.startswith(f"--recompute_blocks none ({byte_size(every)})") for line in what_fits(settings, gpu))
    longer = replace(settings.model, seq_length=2**22)
    changes = what_fits(replace(settings, model=longer, seq_length=2**22), gpu)
    assert any(line.endswith("--recompute_blocks none on 128 GPUs") for line in changes)


@pytest.mark.slow(2)
def test_sequence_parallelism_is_named_before_more_gpus():
    """GPT-3 175B without it, in larger micro-batches than fit."""
    words = ["--plan", "tp8_pp16", "--micro_batch_size", "2", "--rampup_batch_size", "none"]
    settings = load_recipe(RECIPES / "gpt3_175b.py", words).planned(128)
    gpu = find_gpu("A800")
    assert not fits_into(fullest(memory_by_rank(settings)).total, gpu.size)
    first, *others = what_fits(settings, gpu)
    assert first.startswith("--plan tp8_pp16_sp (")
    assert any(line.startswith("--micro_batch_size 1 (") for line in others)
    assert not any("GPUs" in line for line in others)


def test_gpt3_as_its_recipe_says_takes_less_than_60_gib():
    """Also without sequence parallelism, and with all the micro-batches of a step in one pipeline."""
    for plan in ("tp8_sp_pp16", "tp8_pp16"):
        settings = load_recipe(RECIPES / "gpt3_175b.py", ["--plan", plan]).planned(128)
        assert settings.micro_batches == 1536
        assert fullest(memory_by_rank(settings)).total < 60 * GIB

"""Random cases: what is drawn, which bugs are found, how a failure is shrunk and repeated."""

import math
import shlex
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from dtgpt.compare.choices import Flip, file_of_choices
from dtgpt.compare.fuzz.case import TABLES, Case, First, Setting, parse, plain, write_text
from dtgpt.compare.fuzz.drawing import draw_case
from dtgpt.compare.fuzz.judge import BAD, Alone, Figures, Outcome, judge
from dtgpt.compare.fuzz.measure import Seen
from dtgpt.compare.fuzz.pool import Pool, PoolJob
from dtgpt.compare.fuzz.report import kinds, table
from dtgpt.compare.fuzz.run import Runner, run_random
from dtgpt.compare.fuzz.shrink import candidates, shrink
from dtgpt.compare.record import Record
from dtgpt.config.overrides import leaves
from dtgpt.config.recipe_file import call_recipe, load_module
from dtgpt.config.recipe_file import kinds as optimizers
from dtgpt.posttrain.dpo.config import DpoConfig
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.util.errors import UserError
from tests.support.bodies_fuzz import (
    hang,
    with_half_of_router_gradients,
    with_mask_offset,
    with_other_experts,
    with_swapped_experts,
)

pytestmark = pytest.mark.slow(10)

TINY = Path("recipes/gpt2_tiny.py")
PINNED = (
    "gemma3_text tp4 optimizer=normuon model.num_layers=2 model.num_kv_heads=4 model.num_heads=4 "
    "model.head_dim=16 model.hidden_size=129 model.ffn_hidden_size=76 model.tied=off model.activation=silu "
    "model.norm_eps=1e-05 model.rope_theta=100.0 model.rope_scaling=llama3 model.rope_factor=8.0 "
    "model.rope_original_length=64 model.window=0 model.window_pattern=GL model.seq_length=16 "
    "model.vocab_size=615 model.dropout=0.1 model.init_std=0.05 micro_batch_size=2 global_batch_size=6 "
    "seed=111193 precision=fp32 attention=flash recompute=none graph=off optimizer.lr=0.003 "
    "optimizer.eps=0.001 optimizer.schedule=linear optimizer.warmup=0.5 optimizer.min_lr=0.0 "
    "optimizer.clip=1.0 data.reset_position_ids=off data.reset_attention_mask=off data.eod_mask_loss=off "
    "log.eval_samples=4 log.eval_interval=1 log.sample_interval=0 log.sample_tokens=0 log.temperature=0.7 "
    "log.top_k=0 steps=none train_samples=27"
)


@pytest.fixture(scope="module")
def pool():
    with Pool("cpu") as made:
        yield made


@pytest.fixture
def setting(tmp_path) -> Setting:
    return Setting(plain(call_recipe(load_module(TINY).recipe)), {}, write_text(tmp_path / "documents.jsonl"))


def test_a_case_is_a_function_of_seed_and_index():
    drawn = [str(draw_case(7, index, 4)) for index in range(30)]
    assert drawn == [str(draw_case(7, index, 4)) for index in range(30)] and len(set(drawn)) == 30
    assert drawn != [str(draw_case(8, index, 4)) for index in range(30)]
    # Pinned: another machine, Python or version of dtgpt draws the same.
    assert str(draw_case(7, 0, 4)) == PINNED


def test_200_cases_have_every_kind_of_plan_and_option(setting):
    cases = [draw_case(5, index, 4) for index in range(200)]
    found = Counter(kind for case in cases for kind in kinds(case))
    expected = {
        "gpt2", "llama", "gpt_neo", "olmo3", "gemma3_text", "gpt_oss", "olmoe", "fp32", "bf16", "one process",
        "tp", "tp sp", "ep", "own cut", "own table",
    }  # fmt: skip
    expected |= {f"{axis} zero{level}" for axis in ("dp", "cp") for level in range(4)} | {"cp, same heads"}
    expected |= {"fp16", "fp8", "two plans", "token files"}
    expected |= {f"pp {schedule}" for schedule in ("gpipe", "1f1b", "interleaved", "zbv")}
    assert found.keys() == expected and min(found.values()) >= 3, found
    assert {case.table for case in cases} == {None, *TABLES} and {
        case.optimizer for case in cases
    } == optimizers().keys()
    several = {
        name: {case.values[name] for case in cases if name in case.values} for case in cases for name in case.values
    }
    assert {name for name, values in several.items() if len(values) < 2} == set()
    assert several["attention"] == {"auto", "explicit", "fused_softmax", "flash", "sdpa"}
    assert several["recompute"] == {"none", "selective", "around_attention", "full"} and 0.0 in several["model.dropout"]
    refused = sum(is_refused(setting, case) for case in cases)
    assert 5 <= refused <= 30, refused


def is_refused(setting: Setting, case: Case) -> bool:
    try:
        setting.check(case)
    except UserError:
        return True
    return False


def test_the_text_of_a_case_gives_the_case(setting):
    for index in range(60):
        case = draw_case(3, index, 4)
        again = parse(str(case))
        assert again == case and str(again) == str(case)
        assert setting.recipe_of(again).model == setting.recipe_of(case).model
        known = {name for name, *_ in leaves(setting.recipe_of(case))}
        assert case.values.keys() <= known


@pytest.mark.parametrize(
    "text",
    ["bert tp2", "gpt2", "gpt2 tp2 layers", "gpt2 tp2 model.layers=2", "gpt2 tp2 table=none", "gpt2 pp2 steps=x",
     "gpt2 pp2 first=tp2", "gpt2 pp2 first=tp2:0", "gpt2 pp2 first=tp2:x", "gpt2 pp2 first=tp2:1:0",
     "gpt2 pp2 data=text"],
)  # fmt: skip
def test_a_text_that_is_not_a_case_is_refused(text):
    with pytest.raises(UserError):
        parse(text)


def test_options_hold_in_every_case_as_far_as_its_architecture_has_them(tmp_path):
    recipe = call_recipe(load_module(TINY).recipe)
    given = {"model.num_layers": ["2"], "model.layer_norm_eps": ["0.01"], "data.split": ["9,1 ,0"], "seed": ["3"]}
    setting = Setting(plain(recipe), given, write_text(tmp_path / "documents.jsonl"))
    for case in (setting.pin(draw_case(1, index, 4)) for index in range(20)):
        made = setting.recipe_of(parse(str(case)))
        assert made.model.num_layers == 2 and made.data.split == "9,1 ,0" and made.seed == case.values["seed"] != 3
        assert getattr(made.model, "layer_norm_eps", 0.01) == 0.01


def test_what_belongs_to_the_data_of_a_recipe_is_in_no_case():
    recipe = call_recipe(load_module(TINY.with_name("grpo_arithmetic.py")).recipe)
    made = plain(replace(recipe, lora=LoraConfig(rank=4), dpo=DpoConfig(beta=0.1)))
    assert recipe.grpo.group and not made.grpo.group and not made.lora.rank and not made.dpo.beta


@pytest.mark.long
def test_a_failure_is_shrunk_to_a_small_case(setting, pool):
    """A mask that is not the global one needs dropout and tensor parallelism, and nothing else."""
    runner = Runner(setting, pool, with_mask_offset)
    values = {
        "model.num_layers": 1, "model.num_heads": 2, "model.hidden_size": 6, "model.seq_length": 6, "seed": 5,
        "model.dropout": 0.25, "recompute": "full", "attention": "explicit", "steps": 2,
    }  # fmt: skip
    smallest = runner.shrink(runner.run(Case("gpt2", "tp2_sp", values)), tries=9)
    assert smallest.verdict == "differs" and smallest.case.plan == "tp2"
    assert smallest.case.values["model.dropout"] == 0.25 and smallest.case.values["recompute"] == "none"
    assert smallest.case.values["steps"] == 1
    assert runner.run(parse(str(smallest.case))).verdict == "differs"


MIXTURE = {
    "model.num_layers": 2, "model.num_kv_heads": 2, "model.num_heads": 2, "model.head_dim": 4,
    "model.hidden_size": 16, "model.ffn_hidden_size": 12, "model.seq_length": 12, "model.num_experts": 5,
    "model.experts_per_token": 2, "model.init_std": 0.1, "micro_batch_size": 2, "global_batch_size": 8, "steps": 3,
    "optimizer.eps": 1e-3,
}  # fmt: skip


class KeptReferences:
    """A pool in which what one process does with a case, and the choices of experts that it leaves, are made once."""

    def __init__(self, pool: Pool, choices: Path):
        self.pool, self.choices = pool, choices
        self.made: dict[str, tuple] = {}

    def run(self, jobs, timeout):
        if [job.world for job in jobs] != [1]:
            return self.pool.run(jobs, timeout)
        key = repr(jobs)
        if key not in self.made:
            found = self.pool.run(jobs, timeout)
            self.made[key] = found, self.choices.read_bytes()
        found, chosen = self.made[key]
        self.choices.write_bytes(chosen)
        return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_faults_of_mixtures_of_experts_are_found_whose_choices_are_those_of_one_process(setting, pool, precision):
    case = Case("olmoe", "dp2", MIXTURE | {"precision": precision, "steps": 2})
    pool = KeptReferences(pool, file_of_choices(setting.shared))
    assert Runner(setting, pool).run(case).verdict == "right"
    found = {work: Runner(setting, pool, work).run(case) for work in FAULTS_OF_EXPERTS}
    assert {outcome.verdict for outcome in found.values()} == {"differs"}
    for work, words in FAULTS_OF_EXPERTS.items():
        assert words in found[work].sentence, found[work].sentence


FAULTS_OF_EXPERTS = {
    with_half_of_router_gradients: "mlp.router.weight differs by 5.0e-01",
    with_swapped_experts: "a choice that rounding does not explain: token",
    with_other_experts: "mlp.experts.",
}


def test_two_plans_of_a_mixture_take_the_choices_of_one_process(setting, pool):
    recomputed = {"precision": "bf16", "attention": "flash", "recompute": "around_attention"}
    case = Case("olmoe", "pp2", MIXTURE | recomputed, first=First("dp2_zero3", 1, 4))
    assert Runner(setting, pool).run(case).verdict == "right"


def test_larger_batches_before_have_the_exact_sums_of_one_process(setting, pool):
    values = {"reduce": "exact", "precision": "bf16", "micro_batch_size": 1, "global_batch_size": 1, "steps": 2}
    outcome = Runner(setting, pool).run(Case("gpt2", "single", values, first=First("single", 1, 2)))
    assert outcome.verdict == "right", outcome.sentence


def flip_of(gap: float) -> Flip:
    return Flip(1, "blocks.0.mlp.router", 0, 3, 2, 4, gap, 0)


def test_choices_of_experts_that_rounding_does_not_explain_are_said():
    case, record = Case("olmoe", "dp2", {}), record_of(tensors=tensors_of(1.0, 1.0, 1.0), chosen=8)

    def verdict(gap: float, moved: float | None = None, **changes) -> str:
        seen, rounded = (
            Seen(replace(record, flips=[flip_of(g or 0.0)], turned=1, **changes), 5.0, 0, [], []) for g in (gap, moved)
        )
        alone = Alone(Seen(record, 5.0, 0, [], []), moved=None if moved is None else rounded)
        return judge(case, [seen], alone)

    assert verdict(5e-7).verdict == "right" and "1 of 8 are others" in verdict(5e-7).sentence
    assert "explain: token 3 of sample 0, layer 0: experts 2 and 4 are 1e-03 apart, step 1" in verdict(1e-3).sentence
    assert verdict(-1e-3).verdict == "differs"
    assert verdict(1e-3, moved=5e-4).verdict == "right"
    assert verdict(0.0, moved=1.0, rounding="none").verdict == "right"
    assert verdict(1e-9, moved=1.0, rounding="none").verdict == "differs"
    assert verdict(0.0, loads=[{"0": [1, 7]}]).sentence == "experts have other loads"


def test_a_failure_prints_commands_that_repeat_it(setting, monkeypatch, capsys):
    asked: list[Case] = []

    def run(self, case):
        asked.append(case)
        return Outcome(case, "differs" if case.values["model.num_layers"] >= 2 else "right", "why", kind="differs")

    monkeypatch.setattr(Runner, "run", run)
    assert run_random(setting, Path("my recipe.py"), 3, which="2") == 1
    said = capsys.readouterr().out
    commands = [shlex.split(line) for line in said.splitlines() if line.startswith("  repeat: ")]
    assert {tuple(words[:5]) for words in commands} == {("repeat:", "dtgpt", "compare", "my recipe.py", "--case")}
    first, smallest = (parse(words[5]) for words in commands[:2])
    assert first == asked[0] == setting.pin(draw_case(setting.base.seed, 2, 4))
    assert smallest.values["model.num_layers"] == 2 and smallest.plan == "single"
    asked.clear()
    assert run_random(setting, Path("my recipe.py"), 3, which=str(smallest)) == 1
    assert asked == [smallest]  # which is not shrunk again
    capsys.readouterr()
    other = replace(setting, given={"optimizer.kind": ["muon"]})
    assert run_random(other, Path("my recipe.py"), 1, which=str(smallest)) == 1
    repeat = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  repeat: "))
    assert repeat.endswith(" --optimizer.kind=muon")


def test_shrinking_ends_with_the_smallest_case_or_its_tries():
    case = draw_case(1, 0, 4)
    asked: list[Case] = []

    def fails(candidate: Case) -> bool:
        asked.append(candidate)
        return candidate.values["model.num_layers"] >= 2

    smallest = shrink(case, fails, 500)
    assert smallest.values["model.num_layers"] == 2 and smallest.values["model.seq_length"] == 1
    assert len(set(map(str, asked))) == len(asked) < 500
    assert not [
        c for c in candidates(smallest) if c.values["model.num_layers"] >= 2 and str(c) not in set(map(str, asked))
    ]
    asked.clear()
    shrink(case, fails, 5)
    assert len(asked) == 5


@pytest.mark.long
def test_a_hang_and_a_crash_are_failures_and_the_next_case_runs(setting, pool):
    case = Case("gpt2", "dp2", {"global_batch_size": 2})
    runner = Runner(setting, pool, partial(hang, "wait"), timeout=8)
    assert runner.run(case).verdict == "hangs"
    runner = Runner(setting, pool, partial(hang, "raise"))
    found = runner.run(case)
    assert found.verdict == "fails" and "ZeroDivisionError: division by zero (bodies_fuzz.py:" in found.sentence
    found = Runner(setting, pool, partial(hang, "die")).run(case)
    assert found.verdict == "fails" and "exit code 3" in found.sentence
    found = Runner(setting, pool, partial(hang, "crash")).run(case)
    assert found.verdict == "fails" and "exit code -11 in hang (bodies_fuzz.py:" in found.sentence
    assert Runner(setting, pool).run(case).verdict == "right"


def test_ranks_are_the_same_processes_in_every_case(pool):
    first, second = (pool.run([PoolJob(2, process_id, ())], 60)[0] for _ in range(2))
    assert [a.value for a in first] == [a.value for a in second] and first[0].value != first[1].value


def process_id() -> int:
    import os

    return os.getpid()


def record_of(dtype: str = "torch.float32", **changes) -> Record:
    """Of one step, whose weight stays 1."""
    made = Record(
        dtype=dtype, rounding="order", losses=[5.0], norms=[1.0], rates=[1e-3], scales=[], memory=[0.0], planned=None,
        initial="same", tensors={"weight/a": torch.ones(3)},
    )  # fmt: skip
    return replace(made, **changes)


def test_what_is_not_equal_is_said(setting):
    """Bits of copies and samples, where every number is within tolerance."""
    case, record = Case("gpt2", "dp2", {}), record_of()
    one = Seen(record, 5.0, 0, [[(0, "a"), (1, "b")]], [("a [(0, 3)]", "x")])
    alone = Alone(one)
    first, second = (one._replace(dp=dp, samples=[[one.samples[0][dp]]]) for dp in (0, 1))

    def sentence(ranks, alone=alone) -> str:
        return judge(case, ranks, alone).sentence

    assert judge(case, [first, second], alone).verdict == "right"
    assert "step 1 has other samples" in sentence([second._replace(dp=0), first._replace(dp=1)])
    assert "copies of a [(0, 3)] differ" in sentence([first, second._replace(copies=[("a [(0, 3)]", "y")])])
    assert "validation loss" in sentence([first, second._replace(held_out=5.001)])
    assert "validation loss" in sentence([first, second._replace(held_out=None)])
    rounded = Alone(
        one, moved=one._replace(record=replace(record, losses=[5.001]))
    )  # which validation losses do not show
    assert judge(case, [first, second._replace(held_out=5.001)], rounded).verdict == "right"
    assert "initial weights differ" in sentence([first._replace(record=replace(record, initial="other")), second])
    assert "learning rate of step 1" in sentence([first._replace(record=replace(record, rates=[2e-3])), second])
    broken = replace(record, tensors={"weight/a": torch.tensor([1.0, 1.0, math.nan])})
    assert "weight of a" in sentence([first._replace(record=broken), second])
    texts, other = [seen._replace(texts=("a",)) for seen in (first, second)], one._replace(texts=("b",))
    assert "1 text, one process 0" in sentence(texts)
    assert "text 1 of 1 differs" in sentence(texts, Alone(other))
    assert judge(case, texts, Alone(other, moved=one)).verdict == "right"  # rounding decides on it
    assert "ranks have different texts" in sentence([texts[0], second], Alone(one._replace(texts=("a",))))
    earlier = [seen._replace(between=(5.0,)) for seen in (first, second)]
    assert judge(case, earlier, Alone(one._replace(between=(5.0,)))).verdict == "right"
    assert "validation loss" in sentence(earlier, Alone(one._replace(between=(5.1,))))
    assert "validation loss" in sentence(earlier)


def test_two_plans_are_judged_as_one_run():
    case = Case("gpt2", "dp2", {}, first=First("single", 1))
    steps = {"losses": [5.0, 4.0], "norms": [1.0, 2.0], "rates": [1e-3, 1e-3]}
    whole = record_of(**steps, tensors=tensors_of(1.0, 2.0, 3.0))
    reference = Seen(whole, 4.0, 0, [[(0, "a")], [(1, "b"), (2, "c")]], [], texts=("x",))
    alone = Alone(reference)
    begin = record_of(tensors=tensors_of(1.0, 1.0, 1.0))
    end = record_of(losses=[4.0], norms=[2.0], initial="later", tensors=tensors_of(2.0, 2.0, 3.0))
    first = [Seen(begin, None, 0, [[(0, "a")]], [], end="saved")]
    ranks = [Seen(end if dp == 0 else None, 4.0, dp, [[(1 + dp, "bc"[dp])]], [], (), ("x",), "saved") for dp in (0, 1)]
    assert judge(case, ranks, alone, first=first).verdict == "right"
    lost = [first[0]._replace(end="other")]
    assert judge(case, ranks, alone, first=lost).sentence == "weights or moments read are not those saved"
    late = [ranks[0]._replace(samples=[[(2, "c")]]), ranks[1]]
    assert "step 2 has other samples" in judge(case, late, alone, first=first).sentence
    other = [first[0]._replace(record=replace(begin, losses=[5.1]))]
    assert "the loss diverges at step 1, by 2.0e-02" in judge(case, ranks, alone, first=other).sentence


def tensors_of(first: float, last: float, weight: float) -> dict[str, torch.Tensor]:
    values = {"first gradient/a": first, "last gradient/a": last, "weight/a": weight}
    return {name: torch.full((3,), value) for name, value in values.items()}


def test_steps_that_fp16_skips_must_be_the_same_unless_rounding_decides():
    case, steps = Case("gpt2", "dp2", {}), {"losses": [5.0, 5.0], "rates": [0.0, 0.0], "scales": [4.0, 4.0]}
    record = record_of("torch.float16", **steps, norms=[math.inf, 1.0], tensors=tensors_of(math.inf, 1.0, 3.0))
    one = Seen(record, 5.0, 0, [], [])
    never = one._replace(record=replace(record, norms=[1.0, 1.0]))
    assert judge(case, [one], Alone(one)).verdict == "right"
    assert judge(case, [one], Alone(never)).sentence == "skips steps [1], one process []"
    assert judge(case, [one], Alone(never, moved=one)).verdict == "empty"


def test_a_case_of_which_fp16_skips_every_step_is_empty_and_its_loss_scale_is_compared():
    case, tensors = Case("gpt2", "dp2", {}), tensors_of(math.inf, math.inf, 3.0)
    record = record_of("torch.float16", norms=[math.inf], scales=[4.0], tensors=tensors)
    one, other = (Seen(replace(record, scales=[scale]), 5.0, 0, [], []) for scale in (4.0, 8.0))
    assert judge(case, [one], Alone(one)).verdict == "empty"
    said = judge(case, [one], Alone(other)).sentence
    assert said == "the loss scale of step 1 is 4, that of one process 8"


def test_one_process_in_16_bits_is_held_to_fp32():
    """What all plans get wrong in the same way."""
    case, narrow, wide = Case("gpt2", "dp2", {}), "torch.bfloat16", tensors_of(1.0, 1.0, 3.0)
    one = Seen(record_of(narrow, tensors=wide), 5.0, 0, [], [])
    exact = one._replace(record=record_of(tensors=tensors_of(1.01, 9.0, 9.0)))
    assert judge(case, [one], Alone(one, exact, one)).verdict == "right"  # later steps are not compared
    twice = one._replace(record=record_of(tensors=tensors_of(2.0, 1.0, 3.0)))
    said = judge(case, [one], Alone(one, twice, one)).sentence
    assert said == "in fp32, first gradient of a differs by 5.0e-01"


def test_the_table_counts_cases_by_kind():
    case = Case("gpt2", "dp2_zero3", {"precision": "fp32"})
    outcomes = [Outcome(case, "refused", "no"), *(Outcome(case, verdict, "x", None, "x") for verdict in BAD)]
    text = table(outcomes)
    assert "0 cases right, 1 refused, 0 with nothing to compare, 3 wrong" in text
    (row,) = [line for line in text.splitlines() if line.startswith("dp zero3")]
    assert row.split()[2:] == ["4", "1", "0", "3", "-", "-", "-", "-", "-"]
    right = Outcome(case, "right", "", Figures(1e-7, 2e-7, 3e-7, 4e-7, 5e-7))
    (row,) = [line for line in table([*outcomes, right]).splitlines() if line.startswith("dp zero3")]
    assert row.split()[2:] == ["5", "1", "0", "3", "1e-07", "2e-07", "3e-07", "4e-07", "5e-07"]

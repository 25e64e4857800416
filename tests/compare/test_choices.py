"""Choices of experts that rounding turns over are told from faults, and faults of routers and balance are located."""

from dataclasses import replace

import pytest

from dtgpt.compare.gate import Reference, locate
from dtgpt.compare.record import Tracing
from dtgpt.compare.verdict import Limits, difference, first_state
from dtgpt.models.families.olmoe import OlmoeConfig
from dtgpt.optim.balance.config import BalanceConfig
from tests.models.moe.test_mixture import MANY as FOUR
from tests.support.ranks import pool, several
from tests.support.runs import traced_record

pytestmark = pytest.mark.slow(10)

OLMOE = OlmoeConfig(
    num_layers=3, hidden_size=32, num_heads=4, seq_length=16, vocab_size=257, num_kv_heads=4, head_dim=8,
    ffn_hidden_size=24, num_experts=6, experts_per_token=2, corrects_choice=True, init_std=0.2,
)  # fmt: skip
MANY = replace(FOUR, num_layers=3)
ROUTER = "trainer.stages[0].blocks['1'].mlp.router"
STATE = "state = next(s for s in trainer.optimizer.states if s.name == 'balance')\n"
TIE = f"{ROUTER}.weight.data[3] = {ROUTER}.weight.data[1]\n"  # of scores


@pytest.fixture(scope="module")
def recipe(tiny):
    balance = BalanceConfig(bias_step=0.01, loss=0.1, z_loss=0.01)
    return replace(tiny, model=OLMOE, micro_batch_size=4, balance=balance)


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """Return what holds a run with a change against one process. tie: a change of both."""
    made: dict[str, tuple] = {}

    def begin(recipe, change: str = "", plan: str = "single", steps: int = 1, tie: str = ""):
        """Return the reference, and what `traced_record` is given."""
        key = repr((recipe, steps, tie))
        if key not in made:
            folder = tmp_path_factory.mktemp("choices")
            tracing = Tracing(folder / "one", folder / "shared", is_reference=True)
            record = traced_record(recipe, tracing, tie, steps)
            assert record.unrepeated is None and record.far is None
            made[key] = folder, Reference(tracing.file, record), []
        folder, reference, runs = made[key]
        runs.append(change)
        tracing = Tracing(folder / f"other-{len(runs)}", folder / "shared", is_reference=False)
        return reference, (replace(recipe, plan=plan), tracing, tie + change, steps)

    def end(reference, given, record):
        return record, locate(reference, record, given[1].file, 1e-5)

    def run(*case, **more):
        reference, given = begin(*case, **more)
        return end(reference, given, traced_record(*given))

    def on_two_ranks(cases: list[dict]):
        """Return the same of each case, in one group: its meshes and the cuts of operations are made once."""
        begun = [begin(**case) for case in cases]
        records = pool().run(2, several, [(traced_record, *given) for _, given in begun])[0]
        return [end(*each, record) for each, record in zip(begun, records, strict=True)]

    run.on_two_ranks = on_two_ranks
    run.reference = lambda recipe, steps: made[repr((recipe, steps, ""))][1].record
    return run


RIGHT = ("dp2_zero3", "pp2_1f1b", "tp2_sp", "cp2")


@pytest.fixture(scope="module")
def right(recipe, held):
    """Return what `held` says of each plan."""
    plans = held.on_two_ranks([{"recipe": recipe, "plan": plan} for plan in RIGHT])
    return {"single": held(recipe), **dict(zip(RIGHT, plans, strict=True))}


@pytest.mark.parametrize("plan", ["single", *RIGHT])
def test_a_right_run_has_the_choices_and_loads_of_the_reference(right, plan):
    record, found = right[plan]
    assert found.fault is None and record.turned == 0 and record.chosen == 8 * 16 * 3
    assert sum(record.loads[0]["1"]) == 8 * 16 * 2


ROUNDED = {"single": "full", "tp2_sp": "none", "cp2": "full"}  # how much is computed again


@pytest.fixture(scope="module")
def rounded(recipe, held):
    """Return what `held` says of each plan where the scores of two experts are equal, and one moves by its last bit."""
    recipe = replace(recipe, balance=BalanceConfig(loss=0.1), model=replace(OLMOE, corrects_choice=False))
    change = f"{ROUTER}.weight.data[3] *= 1 + 2.0**-22"
    cases = {
        plan: {"recipe": replace(recipe, recompute=how), "change": change, "plan": plan, "tie": TIE}
        for plan, how in ROUNDED.items()
    }
    alone = held(**cases.pop("single"))
    return {"single": alone, **dict(zip(cases, held.on_two_ranks(list(cases.values())), strict=True))}


@pytest.mark.parametrize("plan", ROUNDED)
def test_choices_that_rounding_turns_over_are_counted_and_no_fault(rounded, plan):
    record, found = rounded[plan]
    assert found.fault is None and 0 < record.turned < record.chosen
    assert {flip.module for flip in record.flips} == {"blocks.1.mlp.router"}
    assert all({flip.ours, flip.theirs} == {1, 3} and flip.gap < 1e-6 for flip in record.flips)
    told = record.told_choices
    assert f"{record.turned} of {record.chosen}" in told and "layer 1: experts 3 and 1 are" in told
    assert max(flip.token for flip in record.flips) > 8 and record.turned == len(record.flips)


FAULTS = {
    "choice by another correction": (STATE + "state._know(); state.corrections[1, 0] += 1", "blocks.1.mlp.router"),
    "ties by the larger index": (
        "from dtgpt.models.moe import mixture\n"
        f"router, plain = {ROUTER}, {ROUTER}.seen\n"
        "import dtgpt.compare.choices as choices, torch\n"
        "attach = choices.Choices.attach\n"
        "def attached(self, stages):\n"
        "    attach(self, stages)\n"
        "    seen = router.seen\n"
        "    if any(router is own for own in choices.routers(stages[0])):\n"
        "        router.seen = lambda l, e, c: seen(l, torch.where(e == 1, 3, torch.where(e == 3, 1, e)), c)\n"
        "choices.Choices.attach = attached",
        "blocks.1.mlp.router",
    ),
    "router gradient": (f"{ROUTER}.weight.register_hook(lambda g: 1.0001 * g)", "blocks.1.mlp.router"),
    "loads summed twice": (
        STATE + "take = state.mesh.all_reduce\n"
        "type(state.mesh).all_reduce = lambda self, t, *how: take(t, *how).mul_(2 if t.dim() == 2 else 1)",
        "blocks.0.mlp.router",
    ),
    "correction moved by each micro-batch": (
        STATE + "from dtgpt.optim.balance.state import Balance\n"
        "take = Balance.take\n"
        "def moves(self, *given):\n"
        "    made = take(self, *given)\n"
        "    self.correction[:3] += 0.01\n"
        "    return made\n"
        "Balance.take = moves",
        "blocks.1.mlp.router",  # the first in which a choice follows
    ),
    "loss not attached": (STATE + "import dataclasses\n"
        "state.config = dataclasses.replace(state.config, loss=0.0)", "blocks.2.mlp.router"),
    "loss through the number of micro-batches": (STATE + "state.samples = 8", "blocks.2.mlp.router"),
    "padding of the batch counted twice": (STATE + "state.share *= 0.999", "blocks.2.mlp.router"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_located(recipe, held, name, monkeypatch):
    from dtgpt.compare.choices import Choices
    from dtgpt.optim.balance.state import Balance
    from dtgpt.parallel.mesh import Mesh

    monkeypatch.setattr(Mesh, "all_reduce", Mesh.all_reduce)  # which the change may replace
    monkeypatch.setattr(Balance, "take", Balance.take)
    monkeypatch.setattr(Choices, "attach", Choices.attach)
    change, module = FAULTS[name]
    _, found = held(recipe, change, tie=TIE)
    assert found.fault is not None and found.fault.module.startswith(module), found.fault


def test_a_correction_that_goes_astray_later_is_named(recipe, held):
    change = STATE + (
        "plain = state.update\ndef late(*given):\n"
        "    plain(*given)\n    state.corrections[0, :3] += 1\nstate.update = late"
    )
    record, found = held(recipe, change, steps=3)
    assert found.fault is None and {flip.step for flip in record.flips} == {2}
    apart = first_state(difference(record, held.reference(recipe, 3)), Limits(1e-5, 1e-5, 1e-5, 1e-4), [])
    assert (apart.module, apart.step) == ("blocks.0.mlp.router.correction", 2)


PARTIAL = "shards = trainer.shards; shards._partial = [i for i in shards._partial"
BRANCH = "trainer.stages[0].blocks['1'].mlp"
FAULTS_OF_TP = {  # each on all ranks
    "gradient of routers not summed": (
        f"{PARTIAL} if not shards.all[i].name.endswith('router.weight')]", "blocks.2.mlp.router",
    ),
    "gradient below experts not summed": (f"{BRANCH}.entry._forward_pre_hooks.clear()", "blocks.1"),
    "output not summed": (f"{BRANCH}.exit._forward_hooks.clear()", "blocks.1"),
    "biases added by each rank": (
        f"from dtgpt.models.binding import bind\nbind({BRANCH}.experts.down, through=None)", "blocks.1.mlp",
    ),
    # Of the other ranks: it is right on the one that adds them.
    "gradient of biases not summed": (f"{PARTIAL} if not shards.all[i].name.endswith('down.bias')]", "(all)"),
    "correction summed over ranks": (
        STATE + "plain = state.update\n"
        "def summed(*given):\n"
        "    plain(*given)\n"
        "    [p.data.mul_(state.mesh.plan.tp) for p in state.parameters.values()]\n"
        "state.update = summed",
        "blocks.1.mlp.router.correction",
    ),
    "losses and loads counted by each rank": (STATE + "state.counts = state.adds = True", "blocks.2.mlp.router"),
    "losses through the number of ranks": (
        STATE + "import dataclasses\n"
        "state.config = dataclasses.replace(state.config, loss=state.config.loss / 2)", "blocks.2.mlp.router",
    ),
    "norm without experts": (
        "shards = trainer.shards\n"
        "squares = shards.sums.squares\n"
        "shards.sums.squares = lambda all, shares, alone: squares(\n"
        "    [g if g.dim() < 3 else 0 * g for g in all], shares, [g if g.dim() < 3 else 0 * g for g in alone])",
        "(all)",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def faults_of_tp(recipe, held):
    """Return what `held` says of each fault. Of one micro-batch: right runs sum the gradients of several."""
    given = {"recipe": replace(recipe, model=MANY, micro_batch_size=8), "plan": "tp2"}
    found = held.on_two_ranks([{**given, "change": change} for change, _ in FAULTS_OF_TP.values()])
    return dict(zip(FAULTS_OF_TP, found, strict=True))


@pytest.mark.parametrize("name", FAULTS_OF_TP)
def test_a_fault_of_ranks_that_share_experts_is_located(faults_of_tp, name):
    _, found = faults_of_tp[name]
    assert found.fault is not None and found.fault.module.startswith(FAULTS_OF_TP[name][1]), found.fault

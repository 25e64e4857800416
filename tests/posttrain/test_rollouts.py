"""Reinforcement: answers and losses of every plan, the formula in plain torch, the ratio, kills, rewards that fail."""

from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from dtgpt.compare.compare import compare
from dtgpt.config.plan_choice import parse_plan
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.decoder import unique_parameters
from dtgpt.ops.loss.cross_entropy import to_loss_and_gradient_
from dtgpt.optim.fp8.precision import FP8
from dtgpt.planning.gpus import find_gpu
from dtgpt.planning.memory import memory_of
from dtgpt.planning.report import describe_plan
from dtgpt.posttrain.chats.prompts import ChatPrompts
from dtgpt.posttrain.demands import slots_of
from dtgpt.posttrain.grpo.config import GrpoConfig
from dtgpt.posttrain.grpo.recipe_calls import RolloutsFailed
from dtgpt.posttrain.grpo.rollouts import why_not_exact
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.run.records import read_records
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer
from dtgpt.util.errors import UserError
from tests.models.moe.test_plans import ADAMW, OLMOE
from tests.posttrain.test_lora import save_base
from tests.support.bodies_balance import balance_of
from tests.support.bodies_grpo import Failing, Fatal, Low, Slow, failure_of, train_and_die, train_answers
from tests.support.chats import write_tokenizer
from tests.support.ranks import RankFailed, pool, several
from tests.support.runs import change, constant, newest_run, on_cuda

pytestmark = pytest.mark.slow(24)

STEPS, NEW, TOKENS = 2, 6, 257


@pytest.fixture
def grpo(recipe):
    """Two groups of four answers in each step."""
    return change(
        recipe, model={"dropout": 0.0}, grpo=Low(group=4, max_new_tokens=NEW, stop="~"), steps=5,
        optimizer=constant(1e-2), global_batch_size=8, checkpoint={"interval": 1},
        log={"interval": 1, "eval_interval": 0, "sample_tokens": 0},
    )  # fmt: skip


# By the number of ranks: plans and the size of their micro-batches. Ranks of cp have slices of answers.
PLANS = {
    2: {"dp2_zero3": 4, "pp2": 2, "tp2": 4, "cp2_zero3": 8},
    4: {"cp4": 4, "cp2_tp2": 4, "cp2_pp2": 4, "dp2_cp2": 2},
}


@pytest.fixture(scope="module")
def of_one_process():
    """Return what gives `train_answers` of one process over STEPS, made once: all recipes have one text."""
    made: dict[str, tuple] = {}

    def of(recipe):
        key = repr(replace(recipe, runs="", data=replace(recipe.data, path="")))
        if key not in made:
            made[key] = train_answers(recipe, STEPS)
        return made[key]

    return of


@pytest.mark.parametrize("world", PLANS)
def test_every_plan_draws_the_answers_and_has_the_losses_of_one_process(grpo, of_one_process, world):
    losses, ids, norms = of_one_process(grpo)
    assert len(ids) == 8 * STEPS and len(set(map(tuple, ids))) > 10
    recipes = [replace(grpo, plan=plan, micro_batch_size=size) for plan, size in PLANS[world].items()]
    for rank in pool().run(world, several, [(train_answers, recipe, STEPS) for recipe in recipes]):
        for plan, (own_losses, own_ids, own_norms) in zip(PLANS[world], rank, strict=True):
            assert own_ids == ids, plan
            assert own_losses == pytest.approx(losses, abs=1e-6), plan
            assert own_norms == pytest.approx(norms, rel=1e-5), plan


@pytest.mark.slow(4)
def test_a_mixture_of_experts_draws_the_same_answers_for_six_steps(grpo):
    """Of one process, and of ranks that share the experts; and for three under ZeRO, a pipeline and copies of all."""
    model = replace(OLMOE, num_layers=2, dropout=0.0, init_std=0.1)
    moe = replace(grpo, model=model, optimizer=replace(ADAMW, warmup=0), steps=6)
    losses, ids, _ = train_answers(moe, 6)
    assert len(ids) == 8 * 6 and len(set(map(tuple, ids))) > 30
    plans = {"dp2": 3, "dp2_ep2": 6, "dp2_zero3": 3, "pp2": 3}
    calls = [(train_answers, replace(moe, plan=plan, micro_batch_size=4), steps) for plan, steps in plans.items()]
    for (plan, steps), found in zip(plans.items(), pool().run(2, several, calls)[0], strict=True):
        assert found[1] == ids[: 8 * steps], plan
        assert found[0] == pytest.approx(losses[:steps], abs=1e-5), plan


@pytest.mark.parametrize("plan", ["dp2", "tp2"])
def test_ranks_wait_longer_than_the_timeout_for_the_rewards_of_another(grpo, of_one_process, plan):
    slow = replace(grpo, plan=plan, grpo=Slow(**vars(grpo.grpo)), timeout=3.0)  # 4 rewards take 6 s
    assert pool().run(2, train_answers, slow, 1)[0][1] == of_one_process(grpo)[1][:8]


def test_all_ranks_end_where_a_reward_fails_on_one(grpo):
    failing = replace(grpo, plan="dp2", grpo=Failing(**vars(grpo.grpo), at=1))  # the prompt of rank 1
    (kind, told), own = pool().run(2, failure_of, failing)
    assert own == ("KeyError", told) and kind == "UserError"
    assert "step 1: grpo.reward failed with KeyError: 'no answer known'; go on with --resume" in told
    assert (newest_run(grpo) / "checkpoints" / "step_00000000").is_dir()


def as_rows(answers, length):
    """Return tokens `[B, T + 1]`, the mask of answers `[B, T]`, and the engine's log-probabilities `[B, T]`."""
    tokens = torch.zeros(len(answers), length + 1, dtype=torch.int64)
    mask, drawn = torch.zeros(2, len(answers), length)
    for row, answer in enumerate(answers):
        ids, first = answer.prompt_ids + answer.ids, len(answer.prompt_ids)
        tokens[row, : len(ids)] = torch.tensor(ids)
        mask[row, first - 1 : len(ids) - 1] = 1
        drawn[row, first - 1 : len(ids) - 1] = torch.tensor(answer.logprobs)
    return tokens, mask, drawn


def by_the_formula(log_probs, mask, advantages, loss):
    """With the ratio to the policy that answered, which is the same: clipping at 1 +- 0.2 changes nothing."""
    ratio = torch.exp(log_probs - log_probs.detach())
    each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask
    if loss == "grpo":
        return (each.sum(-1) / mask.sum(-1)).mean()
    return each.sum() / (mask.sum() if loss == "dapo" else NEW * len(mask))


def test_gradients_are_those_of_the_formula(grpo):
    with open_trainer(grpo) as trainer:  # a stop that cuts some answers
        stop = next(answer.text[2] for answer in trainer.objective.rollouts.draw(0) if answer.text[2:3].isascii())
    for loss in ("dr_grpo", "grpo", "dapo"):
        given = replace(grpo, micro_batch_size=8, grpo=replace(grpo.grpo, loss=loss, stop=stop))
        with open_trainer(given) as trainer:
            check_gradients(trainer, loss)


def check_gradients(trainer, loss):
    trainer.gradients()
    answers = trainer.objective.rollouts.draw(0)  # the same again
    assert len({len(answer.ids) for answer in answers}) > 1
    groups = torch.tensor([answer.reward for answer in answers]).view(-1, 4)
    advantages = groups - groups.mean(1, keepdim=True)
    if loss != "dr_grpo":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    tokens, mask, drawn = as_rows(answers, 16)
    (model,) = trainer.stages
    found = {shard.name: trainer.gradient(shard).clone() for shard in trainer.shards}
    model.zero_grad()
    logits = model(tokens[:, :-1])[..., :TOKENS]
    log_probs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(log_probs * mask, drawn, rtol=1e-5, atol=1e-5)
    by_the_formula(log_probs, mask, advantages.view(-1, 1), loss).backward()
    for name, parameter in unique_parameters(model).items():
        atol = 1e-5 * parameter.grad.abs().max().item() + 1e-9
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=atol)


@pytest.mark.parametrize(("share", "experts"), [("on", False), ("off", False), ("on", True), ("off", True)])
def test_the_ratio_is_one_to_the_bit_in_every_pass(grpo, share, experts):
    """Of the log-probabilities that the update has, to those that a pass before it computes for the same batch."""
    grpo = replace(grpo, micro_batch_size=4, grpo=replace(grpo.grpo, share_prompts=share))
    grpo = replace(grpo, model=replace(OLMOE, dropout=0.0)) if experts else grpo
    with open_trainer(grpo) as trainer:
        for step in range(2):
            batch, before, updated = trainer.batch(step), [], []
            for piece in batch.chunk(2):
                logits = trainer.engine.evaluate(piece._replace(targets=None, loss_weights=None)).flatten(0, 1)
                before.append(to_loss_and_gradient_(logits, piece.targets.flatten(), torch.ones(()), TOKENS))

            def kept(*arguments, updated=updated):
                updated.append(to_loss_and_gradient_(*arguments))
                return updated[-1].clone()

            with mock.patch("dtgpt.ops.loss.cross_entropy.to_loss_and_gradient_", kept):
                trainer.train_step()
            ratio = torch.exp(torch.cat(before) - torch.cat(updated))[batch.loss_weights.flatten() != 0]
            assert len(ratio) > 8 and (ratio == 1.0).all()
        if experts:
            assert balance_of(trainer).last.any() and balance_of(trainer).metrics() == {}  # padding would count


@pytest.mark.cuda
def test_log_probabilities_of_answers_are_those_of_captured_steps_to_the_bit(grpo):
    """With micro-batches of 512 rows, up to which products of any size have one order of sums."""
    cuda = on_cuda(grpo, steps=8, micro_batch_size=8, global_batch_size=64)
    cuda = replace(cuda, precision="bf16", grpo=replace(grpo.grpo, group=8, max_new_tokens=48, stop=""))
    count = 0
    with open_trainer(cuda) as trainer:
        assert trainer.objective.rollouts.exact
        for step in range(6):
            answers = trainer.objective.rollouts.draw(step)
            tokens, mask, drawn = as_rows(answers, cuda.sample_length)
            for first in range(0, 64, cuda.micro_batch_size):
                rows = slice(first, first + cuda.micro_batch_size)
                logits = trainer.stages[0](tokens[rows, :-1].cuda()).detach().flatten(0, 1)
                targets = tokens[rows, 1:].flatten().cuda()
                losses = to_loss_and_gradient_(logits, targets, torch.ones((), device="cuda"), TOKENS)
                there = mask[rows].flatten() > 0
                assert torch.equal(-losses.cpu()[there], drawn[rows].flatten()[there]), step
                count += int(there.sum())
            trainer.train_step()
        assert trainer.graphs.captured
        torch.cuda.synchronize()
    assert count > 10_000


@pytest.mark.cuda
def test_captured_steps_have_the_answers_and_losses_of_others(grpo):
    cuda = on_cuda(grpo, steps=8, micro_batch_size=8, global_batch_size=16)
    cuda = replace(cuda, precision="bf16", grpo=replace(grpo.grpo, group=8, max_new_tokens=24))
    captured, plain = (train_answers(replace(cuda, graph=graph, compile="off"), 5) for graph in ("on", "off"))
    assert captured[1] == plain[1]
    assert captured[0] == pytest.approx(plain[0], abs=1e-6)


def test_adapters_answer_like_their_base_at_first_and_learn(grpo, tmp_path):
    base = save_base("gpt2", tmp_path / "base")
    whole = replace(grpo, model=replace(open_config(base), dropout=0.0), init_from=str(base))
    with open_trainer(whole) as trainer:
        expected = [answer.ids for answer in trainer.objective.rollouts.draw(0)]
    with open_trainer(replace(whole, lora=LoraConfig(rank=4))) as trainer:
        assert [answer.ids for answer in trainer.objective.rollouts.draw(0)] == expected
        rewards = []
        for _ in range(12):
            trainer.train_step()
            rewards.append(trainer.objective.rollouts.figures()["reward"])
        assert sum(rewards[-4:]) > sum(rewards[:4])


def test_answers_end_at_an_end_of_text_or_a_stop_and_may_be_empty(grpo):
    stop = "ghijklmn"
    many = replace(grpo, micro_batch_size=128, global_batch_size=128)
    with open_trainer(replace(many, grpo=replace(grpo.grpo, group=128, stop=""))) as trainer:
        end = trainer.dataset.tokenizer.end_of_text
        found = [answer for step in range(4) for answer in trainer.objective.rollouts.draw(step)]
        assert all(answer.ended == (answer.ids[-1] == end) for answer in found)
        assert all(len(answer.ids) == NEW or answer.ended for answer in found) and end not in found[0].ids[:-1]
        empty = [answer for answer in found if answer.ids == [end]]
        assert empty and all(answer.text == "" and answer.ended for answer in empty)
        trainer.train_step()
    with open_trainer(replace(many, grpo=replace(grpo.grpo, group=128, stop=stop[0]))) as trainer:
        found = trainer.objective.rollouts.draw(0)
        stopped = [answer for answer in found if answer.ids[-1] == ord(stop[0])]
        assert stopped and all(answer.ended and stop[0] not in answer.text for answer in found if answer in stopped)


@dataclass(frozen=True, kw_only=True)
class Same(Low):
    def reward(self, index: int, answer: str) -> float:
        return 0.3


def test_groups_of_one_reward_have_no_gradient(grpo):
    with open_trainer(replace(grpo, grpo=Same(**{**vars(grpo.grpo), "loss": "grpo"}))) as trainer:
        result = trainer.train_step()
        assert result.norm.item() == 0.0 and trainer.mean_loss(result) == 0.0
        assert trainer.objective.rollouts.figures()["groups_without_signal"] == 1.0


@dataclass(frozen=True, kw_only=True)
class Talk(Low):
    def prompt(self, index: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{index}?"}]


def test_a_chat_is_asked_by_the_template_and_ends_with_a_turn(grpo, tmp_path):
    pytest.importorskip("jinja2")
    folder = write_tokenizer(tmp_path / "tokenizer")
    talk = change(
        grpo, model={"vocab_size": 320, "seq_length": 64}, data={"tokenizer": "auto", "tokenizer_file": str(folder)},
        grpo=Talk(**{**vars(grpo.grpo), "group": 8}),
    )  # fmt: skip
    with open_trainer(talk) as trainer:
        prompts = ChatPrompts(trainer.dataset.tokenizer, trainer.settings.model)
        for step in range(2):
            for answer in trainer.objective.rollouts.draw(step):
                assert answer.prompt_ids == prompts.encode([{"role": "user", "content": f"{step}?"}])
                assert answer.prompt == f"{step}?\n" and not any(stop in answer.text for stop in prompts.stops)
        prompts.close()


def curve(run):
    names = ("loss", "step_loss", "grad_norm", "reward", "entropy", "answer_tokens")
    records = [record for record in read_records(run / "metrics.jsonl") if "loss" in record]
    return {record["step"]: [record.get(name) for name in names] for record in records}


def test_a_run_that_was_killed_goes_on_bit_for_bit(grpo, tmp_path):
    train(grpo)
    whole = curve(newest_run(grpo))
    for moment in ("rollout", "scoring", "update"):
        parted = replace(grpo, runs=str(tmp_path / moment))
        fatal = replace(parted, grpo=Fatal(**vars(grpo.grpo))) if moment == "scoring" else parted
        with pytest.raises(RankFailed):
            pool().run(1, train_and_die, fatal, moment)
        assert max(curve(newest_run(parted)), default=0) == 3, moment
        train(replace(parted, resume="auto"))
        assert curve(newest_run(parted)) == whole, moment


def test_a_run_shows_what_a_user_watches(grpo, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(change(grpo, steps=2, log={"tensorboard": True}))
    run = newest_run(grpo)
    names = {
        "reward", "answer_tokens", "answers_ended", "entropy", "groups_without_signal", "rollout_seconds",
        "scoring_seconds", "training_seconds", "rollout_tokens_per_second", "training_tokens_per_second",
    }  # fmt: skip
    records = [record for record in read_records(run / "metrics.jsonl") if "loss" in record]
    assert len(records) == 2 and all(names <= record.keys() for record in records)
    assert 4 < records[0]["entropy"] < 6 and 1 <= records[0]["answer_tokens"] <= NEW  # of 257 tokens at first
    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    reader.Reload()
    assert names <= set(reader.Tags()["scalars"])
    texts = {name: reader.Tensors(f"{name} answer/text_summary") for name in ("best", "worst")}
    assert [event.step for event in texts["best"]] == [1, 2]
    kept = (run / "answers" / "step_00000002.txt").read_text()
    assert kept.startswith("best: reward ") and "\nworst: reward " in kept
    for name, events in texts.items():
        first = events[-1].tensor_proto.string_val[0].decode().split("\n")[0].strip()
        assert f"{name}: {first}\n" in kept
    assert f"reward {records[1]['reward']:.3f}" in capsys.readouterr().out


WRONG = {
    "raises": (KeyError, "grpo.reward failed with KeyError: 'no answer known'"),
    "memory": (MemoryError, "grpo.reward failed with MemoryError: too many"),
    "nan": (None, "the reward of answer .* to prompt 7 is nan; return a finite number"),
    "none": (None, "the reward of answer .* to prompt 7 is None; return a finite number"),
    "large": (None, r"to prompt 7 is 1e\+39; return a finite number of at most 1e\+15"),
    "array": (None, "to prompt 7 is <Tensor>; return a finite number"),
    "integer": (None, "to prompt 7 is <integer of 1329 bits>; return a finite number"),
    "exits": (None, "grpo.reward ended the process"),
    "exits at once": (None, "grpo.reward ended the process"),
    "generator": (GeneratorExit, "grpo.reward failed with GeneratorExit: over"),
    "interrupt": (KeyboardInterrupt, "grpo.reward failed with KeyboardInterrupt"),
    "forks": (RuntimeError, "grpo.reward failed with RuntimeError: the child ended with 1"),
    "hangs": (None, "grpo.reward took longer than --timeout 1 seconds; limit its time there"),
    "prompt of bytes": (None, "prompt 7: b'a' is no prompt; return a text, or a list of messages"),
    "chat without roles": (None, "prompt 7: message 0 has the role None"),
    "long": (None, "prompt 7 has 12 tokens, which with .* are more than the 16 of a sample"),
}


def test_a_reward_or_a_prompt_that_is_wrong_is_a_sentence(grpo):
    with open_trainer(grpo) as trainer:
        rollouts, own = trainer.objective.rollouts, trainer.objective.rollouts.timeout
        for how, (cause, words) in WRONG.items():
            if how == "interrupt":  # means a user's Ctrl-C outside of a run
                continue
            rollouts.grpo, rollouts.timeout = Failing(**vars(grpo.grpo), how=how), 1.0 if how == "hangs" else own
            with pytest.raises(RolloutsFailed, match=words) as raised:
                rollouts.draw(3)
            assert type(raised.value.__cause__) is (cause or type(None)), how


@pytest.mark.parametrize("how", ["raises", "interrupt", "nan"])
def test_a_reward_that_fails_ends_the_run_with_a_checkpoint(grpo, how, capsys):
    cause, words = WRONG[how]
    failing = change(grpo, grpo=Failing(**vars(grpo.grpo), how=how), checkpoint={"interval": 0})
    end = "; go on with --resume" if how == "raises" else ""
    with pytest.raises(UserError, match=f"step 4: {words}{end}") as raised:
        train(failing)
    assert type(raised.value.__cause__) is (cause or type(None))
    told = capsys.readouterr().err
    assert ("Traceback" in told and ", in reward\n" in told) == (cause is not None)
    assert (newest_run(grpo) / "checkpoints" / "step_00000003").is_dir()
    if how == "raises":
        train(replace(grpo, resume="auto"))
        assert max(curve(newest_run(grpo))) == 5


def test_a_first_prompt_that_is_none_is_told_before_there_is_a_run_folder(grpo):
    with pytest.raises(UserError, match=r"^prompt 0"):
        train(change(grpo, grpo=Failing(**vars(grpo.grpo), how="prompt of bytes", at=0)))
    assert not list(Path(grpo.runs).glob("*"))


def test_a_run_that_goes_on_with_other_groups_asks_each_prompt_once(grpo, monkeypatch):
    asked = []
    monkeypatch.setattr(Low, "prompt", lambda task, index: asked.append(index) or "ab")
    for steps, group, size in ((2, 4, 8), (3, 2, 8), (4, 8, 8), (6, 4, 16)):
        sizes = {"global_batch_size": size, "micro_batch_size": 4}
        train(replace(grpo, steps=steps, resume="auto", grpo=replace(grpo.grpo, group=group), **sizes))
    assert sorted(set(asked)) == list(range(4 + 4 + 1 + 8))
    assert len(asked) == 4 + 4 + 1 + 8 + 4  # the first prompt of each start was tried


def test_what_answers_cannot_be_combined_with_is_refused(grpo, tmp_path, monkeypatch):
    refused = {
        "does not say what to ask": {"grpo": GrpoConfig(group=4)},
        "grpo.loss=dapo has no effect with grpo.group=0": {"grpo": GrpoConfig(loss="dapo")},
        "does not make global_batch_size=8 groups": {"grpo": replace(grpo.grpo, group=3)},
        "grpo.slots=3 is below grpo.group=4": {"grpo": replace(grpo.grpo, slots=3)},
        "grpo.max_new_tokens=16 leaves no room for a prompt": {"grpo": replace(grpo.grpo, max_new_tokens=16)},
        "but model.dropout=0.1": {"model": replace(grpo.model, dropout=0.1)},
        "precision=fp8 draws answers": {"precision": FP8},
        "cannot be combined with rampup_batch_size": {"rampup_batch_size": "4 4 8"},
        "cannot be combined with data.overfit": {"data": replace(grpo.data, overfit=True)},
    }
    for words, changes in refused.items():
        with pytest.raises(UserError, match=words):
            replace(grpo, **changes).validate()
    with pytest.raises(UserError, match=r"dtgpt compare holds steps on data.*use --grpo\.group 0"):
        compare(grpo, tmp_path, ["dp2"], 2, None, [])
    exact = replace(grpo, grpo=replace(grpo.grpo, exact="on"))
    with pytest.raises(UserError, match=r"grpo\.exact=on, but device=cpu chooses the order"), open_trainer(exact):
        pass
    monkeypatch.setattr(Tokenizer, "spells", False)
    with pytest.raises(UserError, match=r"grpo\.group=4 rewards texts, which the tokens of"), open_trainer(grpo):
        pass


@pytest.mark.parametrize(("plan", "changes", "words"), [
    ("single", {}, None), ("pp2", {}, None), ("tp2", {}, "tp=2 has weights in another form"), ("cp2", {}, None),
    ("cp2_pp2", {}, None), ("cp4", {}, "cp=4 has more ranks than heads"), ("dp2_zero1", {}, "ZeRO has"),
    ("single", {"lora": LoraConfig(rank=2)}, "lora.rank=2 has"),
    ("single", {"attention": "explicit"}, "attention=explicit here"),
    ("single", {"precision": "fp32"}, "attention=sdpa here"),
])  # fmt: skip
def test_answers_are_exact_where_training_has_the_kernels(grpo, monkeypatch, plan, changes, words):
    monkeypatch.setattr("dtgpt.posttrain.grpo.rollouts.TRITON", True)
    settings = replace(grpo, device="cuda", plan=plan, **changes).planned(parse_plan(plan).world)
    reason = why_not_exact(settings)
    assert reason is None if words is None else words in reason


def test_where_kernels_turn_out_to_be_missing_answers_are_drawn_without_them(grpo, monkeypatch):
    monkeypatch.setattr("dtgpt.posttrain.grpo.rollouts.why_not_exact", lambda settings: None)
    with open_trainer(grpo) as trainer:
        assert trainer.objective.rollouts.exact
        trainer.train_step()
        assert not trainer.objective.rollouts.exact
    wanted = replace(grpo, grpo=replace(grpo.grpo, exact="on"))
    with open_trainer(wanted) as trainer, pytest.raises(UserError, match="exact=True serves blocks of GPT-2 and LLaMA"):
        trainer.train_step()


def test_the_plan_counts_the_answers_that_are_drawn_together(grpo):
    with open_trainer(change(grpo, model={"seq_length": 64}, seq_length=16)) as trainer:
        trainer.objective.rollouts.draw(0)
        step, settings = trainer.objective.rollouts.engine._rank_step, trainer.settings
        held = [memory for layer in step.cache.layers for memory in (layer.keys, layer.values)]
        taken = sum(memory.nbytes for memory in (*held, *step.cache.state.sequences))
        assert trainer.objective.rollouts.engine.slots == 8 == slots_of(settings)
        assert memory_of(settings, 0).cache == taken
    plain = change(grpo, grpo=GrpoConfig())
    for run, said in ((grpo, True), (plain, False)):
        settings = replace(run, device="cuda").planned(1)
        report = describe_plan(settings, "test", [], find_gpu("H200"))
        assert (memory_of(settings, 0).cache > 0) == said == (" cache " in report)
        assert ("without the time in which answers are drawn" in report) == said
    shared = replace(grpo, plan="dp2_zero3", micro_batch_size=2)
    (note,) = shared.notes(shared.planned_choice(2), "cpu")
    assert "each of 2 ranks of dp x cp draws all answers" in note and grpo.notes(grpo.planned_choice(1), "cpu") == []
    assert slots_of(shared.planned(2)) == 8
    for plan in ("dp2", "cp2"):
        assert slots_of(replace(shared, plan=plan).planned(2)) == 4

"""Reinforcement: answers and losses of every plan, the formula in plain torch, kills, and rewards that fail."""

from dataclasses import dataclass, replace

import pytest
import torch

from dtgpt.config.fp8 import FP8
from dtgpt.config.grpo import GrpoConfig
from dtgpt.config.lora import LoraConfig
from dtgpt.config.plan_names import parse_plan
from dtgpt.interop.open import open_config
from dtgpt.models.decoder import unique_parameters
from dtgpt.run.sinks import read_records
from dtgpt.train.loop import train
from dtgpt.train.startup import open_trainer
from dtgpt.util.errors import UserError
from tests.support.bodies_grpo import Fatal, Vowels, train_and_die, train_answers
from tests.support.ranks import RankFailed, pool
from tests.support.runs import change, constant, newest_run
from tests.train.test_lora import save_base

pytestmark = pytest.mark.slow(25)

STEPS, NEW = 4, 6


@pytest.fixture
def grpo(recipe):
    """A run with one step on text, then two groups of four answers in each step."""
    return change(
        recipe, model={"dropout": 0.0}, grpo=Vowels(group=4, max_new_tokens=NEW, stop="~", after=1), steps=5,
        optimizer=constant(1e-2), global_batch_size=8, checkpoint={"interval": 1},
        log={"interval": 1, "eval_interval": 0, "sample_tokens": 0},
    )  # fmt: skip


@pytest.mark.parametrize("plan", ["single", "dp2", "dp2_zero3", "pp2", "tp2"])
def test_every_plan_draws_the_answers_and_has_the_losses_of_one_process(grpo, plan):
    losses, ids = train_answers(grpo, STEPS)
    assert len(ids) == 8 * (STEPS - 1) and len(set(map(tuple, ids))) > 20
    parted = replace(grpo, plan=plan, micro_batch_size=2)
    found = pool().run(parse_plan(plan).world, train_answers, parted, STEPS)[0]
    assert found[1] == ids
    assert found[0] == pytest.approx(losses, abs=1e-6)


def by_the_formula(log_probs, mask, advantages, loss):
    """TRL's: with the ratio to the policy that answered, which is the same; clipping at 1 +- 0.2 changes nothing."""
    ratio = torch.exp(log_probs - log_probs.detach())
    each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask
    if loss == "grpo":
        return (each.sum(-1) / mask.sum(-1)).mean()
    return each.sum() / (mask.sum() if loss == "dapo" else NEW * len(mask))


@pytest.mark.parametrize("loss", ["dr_grpo", "grpo", "dapo"])
def test_gradients_are_those_of_the_formula(grpo, loss):
    grpo = replace(grpo, micro_batch_size=8, grpo=replace(grpo.grpo, loss=loss, after=0))
    with open_trainer(grpo) as trainer:
        trainer.gradients()
        answers = trainer.rollouts.draw(0)  # the same again
        groups = torch.tensor([answer.reward for answer in answers]).view(-1, 4)
        advantages = groups - groups.mean(1, keepdim=True)
        if loss != "dr_grpo":
            advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
        tokens, mask = torch.zeros(8, 17, dtype=torch.int64), torch.zeros(8, 16)
        for row, answer in enumerate(answers):
            ids, first = answer.prompt_ids + answer.ids, len(answer.prompt_ids)
            tokens[row, : len(ids)] = torch.tensor(ids)
            mask[row, first - 1 : len(ids) - 1] = 1
        (model,) = trainer.stages
        found = {shard.name: trainer.gradient(shard).clone() for shard in trainer.shards}
        model.zero_grad()
        logits = model(tokens[:, :-1])[..., :257]
        log_probs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        entropy = torch.tensor([answer.entropy for answer in answers])
        torch.testing.assert_close(-(log_probs * mask).sum(-1), entropy, rtol=1e-5, atol=1e-5)  # as the engine drew
        by_the_formula(log_probs, mask, advantages.view(-1, 1), loss).backward()
        for name, parameter in unique_parameters(model).items():
            wanted = parameter.grad
            torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-5 * wanted.abs().max().item() + 1e-9)


def test_adapters_answer_like_their_base_at_first_and_learn(grpo, tmp_path):
    base = save_base("gpt2", tmp_path / "base")
    whole = replace(
        grpo, model=replace(open_config(base), dropout=0.0), init_from=str(base), grpo=replace(grpo.grpo, after=0)
    )
    with open_trainer(whole) as trainer:
        expected = [answer.ids for answer in trainer.rollouts.draw(0)]
    with open_trainer(replace(whole, lora=LoraConfig(rank=4))) as trainer:
        assert [answer.ids for answer in trainer.rollouts.draw(0)] == expected
        rewards = []
        for _ in range(12):
            trainer.train_step()
            rewards.append(trainer.rollouts.metrics["reward"])
        assert sum(rewards[-4:]) > sum(rewards[:4])


def curve(run):
    names = ("loss", "step_loss", "grad_norm", "reward", "entropy", "answer_tokens")
    records = [record for record in read_records(run / "metrics.jsonl") if "loss" in record]
    return {record["step"]: [record.get(name) for name in names] for record in records}


@pytest.mark.parametrize("moment", ["rollout", "backward", "update"])
def test_a_run_that_was_killed_goes_on_bit_for_bit(grpo, moment, tmp_path):
    train(replace(grpo, runs=str(tmp_path / "whole")))
    whole = curve(newest_run(replace(grpo, runs=str(tmp_path / "whole"))))
    assert whole[5][3] is not None and whole[1][3] is None
    fatal = replace(grpo, grpo=Fatal(**vars(grpo.grpo))) if moment == "rollout" else grpo
    with pytest.raises(RankFailed):
        pool().run(1, train_and_die, fatal, moment)
    assert max(curve(newest_run(grpo)), default=0) == 3
    train(replace(grpo, resume="auto"))
    assert curve(newest_run(grpo)) == whole
    text = (newest_run(grpo) / "answers" / "step_00000005.txt").read_text()
    assert text.startswith("best: reward ") and "worst: reward " in text


@dataclass(frozen=True, kw_only=True)
class Failing(Vowels):
    """A reward that is wrong from a prompt on."""

    how: str = "raises"

    def reward(self, index: int, answer: str) -> float:
        if index == 7 and self.how == "raises":
            raise KeyError("no answer known")
        return float("nan") if index == 7 else super().reward(index, answer)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [("raises", KeyError, "no answer known"), ("nan", UserError, "step 4: the reward of answer .* to prompt 7 is nan")],
)
def test_a_reward_that_fails_ends_the_run_with_a_checkpoint(grpo, how, error, words):
    failing = change(grpo, grpo=Failing(**vars(grpo.grpo), how=how), checkpoint={"interval": 0})
    with pytest.raises(error, match=words) as raised:
        train(failing)
    if how == "raises":
        assert any(entry.name == "reward" for entry in raised.traceback)
    train(replace(grpo, resume="auto"))
    assert max(curve(newest_run(grpo))) == 5
    assert (newest_run(grpo) / "checkpoints" / "step_00000003").is_dir()


def test_what_answers_cannot_be_combined_with_is_refused(grpo):
    refused = {
        "does not say what to ask": {"grpo": GrpoConfig(group=4)},
        "does not make global_batch_size=8 groups": {"grpo": replace(grpo.grpo, group=3)},
        "but model.dropout=0.1": {"model": replace(grpo.model, dropout=0.1)},
        "precision=fp8 draws answers": {"precision": FP8},
        "cannot be combined with rampup_batch_size": {"rampup_batch_size": "4 4 8"},
    }
    for words, changes in refused.items():
        with pytest.raises(UserError, match=words):
            replace(grpo, **changes).validate()
    with pytest.raises(UserError, match="cuts samples over cp=2"):
        replace(grpo, plan="cp2").plan_for(2)
    long = replace(grpo, grpo=replace(grpo.grpo, max_new_tokens=16, after=0))
    with open_trainer(long) as trainer, pytest.raises(UserError, match="are longer than a sample of 16"):
        trainer.train_step()

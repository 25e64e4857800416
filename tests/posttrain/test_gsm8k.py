"""GSM8K in its own form: questions, results, rewards, and prompts of epochs."""

import json
from dataclasses import replace
from decimal import Decimal

import pytest

from dtgpt.posttrain.grpo.gsm8k import Gsm8k, result_of
from dtgpt.train.setup import open_trainer
from dtgpt.util.errors import UserError
from tests.support.runs import change

LINES = [  # in the form of the set: steps with calculations in marks, and the result behind four more
    ("Ann has 3 boxes of 12 pens. How many pens are there?", "She has 3*12=<<3*12=36>>36 pens.\n#### 36"),
    ("A farm sells 1,200 eggs for $0.50 each. How much is that?", "It is 1200*.5=$<<1200*.5=600>>600.\n#### 600"),
    ("A tank loses 5 degrees from 3. What is left?", "3-5=<<3-5=-2>>-2\n#### -2"),
    ("How far are 2 trips of 750 miles?", "2*750=<<2*750=1500>>1500\n#### 1,500"),
]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in LINES))
    return str(file)


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ("#### 36", "36"), ("so 12 and 24, thus\n#### 36 pens", "36"), ("#### $1,500.", "1500"), ("", None),
        ("#### 1500.00", "1500"), ("#### 1\n#### 2", "2"), ("It is 5, no, 7.", "7"), ("#### none", None),
        ("#### -2", "-2"),
    ],
)  # fmt: skip
def test_the_result_is_the_number_behind_the_mark_or_the_last(answer, result):
    assert result_of(answer) == (None if result is None else Decimal(result))


def test_the_right_number_is_rewarded_and_each_epoch_asks_every_question(path):
    task = Gsm8k(group=2, path=path, chat=False)
    task.prepare()
    answers = {f"Question: {question}\n": answer for question, answer in LINES}
    for epoch in range(3):
        indices = range(4 * epoch, 4 * epoch + 4)
        asked = [next(q for q in answers if q in task.prompt(index)) for index in indices]
        assert sorted(asked) == sorted(answers)
        for index, question in zip(indices, asked, strict=True):
            assert task.reward(index, answers[question]) == 1.0
            assert task.reward(index, "#### 41") == task.reward(index, "") == 0.0
    orders = {tuple(task.prompt(4 * epoch + i) for i in range(4)) for epoch in range(6)}
    assert len(orders) > 2
    ((message,), again) = replace(task, chat=True).prompt(5), task.prompt(5)
    assert message["role"] == "user" and message["content"].split("\n")[0] in again and "####" in message["content"]


def test_what_is_not_in_its_form_is_a_sentence(path, tmp_path, recipe):
    other = tmp_path / "other.jsonl"
    for line, words in (
        ({"question": "Why?", "answer": "Because."}, 'other.jsonl, line 1 has an "answer" without a number'),
        ({"prompt": "Why?", "answer": "#### 1"}, 'has no "question", only prompt, answer'),
    ):
        other.write_text(json.dumps(line) + "\n")
        with pytest.raises(UserError, match=words):
            Gsm8k(path=str(other)).prepare()
    other.write_text("[]")
    with pytest.raises(UserError, match=r"other\.jsonl has no question"):
        Gsm8k(path=str(other)).prepare()
    with pytest.raises(
        UserError, match=r"missing\.jsonl cannot be read \(No such file.*github\.com/openai/grade-school-math"
    ):
        Gsm8k(path=str(tmp_path / "missing.jsonl")).prepare()
    run = change(recipe, model={"dropout": 0.0}, grpo=Gsm8k(group=4, max_new_tokens=4))
    with pytest.raises(UserError, match=r"grpo\.path names no file of questions"), open_trainer(run):
        pass


def test_a_step_is_made_of_it(path, recipe):
    task = Gsm8k(group=4, max_new_tokens=4, path=path, chat=False)
    run = change(recipe, model={"dropout": 0.0, "seq_length": 256}, grpo=task)
    with open_trainer(run) as trainer:
        trainer.train_step()
        assert trainer.objective.rollouts.figures()["reward"] == 0.0

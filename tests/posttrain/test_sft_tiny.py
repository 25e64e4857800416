"""recipes/sft_tiny.py: a base, chats that come with dtgpt, and a model that answers their questions."""

import runpy
from pathlib import Path

import pytest

import dtgpt
from dtgpt.posttrain.chats import examples
from dtgpt.posttrain.chats.prompts import ChatPrompts
from dtgpt.run.records import read_records
from dtgpt.train import loop
from dtgpt.train.loop import train
from dtgpt.train.start import settle
from tests.support.runs import change

pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow(9)
RECIPE = Path(__file__).parents[2] / "recipes" / "sft_tiny.py"


def test_the_recipe_learns_to_answer_questions_in_phrasings_that_it_has_not_seen(tmp_path, monkeypatch, capsys):
    """With questions about days alone, and few steps: more than 70, after which texts of Python 3.11.2 gave 4 right."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examples, "KINDS", examples.KINDS[:1])
    monkeypatch.setattr(examples, "CHATS", 320)
    monkeypatch.setattr(examples, "HELD_OUT", 20)
    file = runpy.run_path(str(RECIPE))
    few = {"micro_batch_size": 8, "global_batch_size": 8}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", lambda base: train(change(base, steps=2, **few)))
        recipe = file["made"]()
    recipe = settle(change(recipe, steps=100, **few), {})
    assert train(recipe) == 0
    records = read_records(Path("runs/sft_tiny-001/metrics.jsonl"))
    found = [record["loss"] for record in records if "loss" in record]
    valid = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert found[-1] < 0.3 < 4 < found[0] and valid[-1] < 0.5
    assert "next: dtgpt chat runs/sft_tiny-001" in capsys.readouterr().out
    model = dtgpt.load("runs/sft_tiny-001", device="cpu")
    prompts, days = ChatPrompts(model.tokenizer, model.config), examples.DAYS.split(", ")
    asked = [[{"role": "user", "content": f"What day comes after {day}?"}] for day in days]
    answers = model.generate([prompts.encode(chat) for chat in asked], max_new_tokens=30, temperature=0.0, details=True)
    prompts.close()
    assert {answer.finish_reason for answer in answers} == {"stop"}
    right = [f"{after} comes after {day}." for day, after in zip(days, [*days[1:], days[0]], strict=True)]
    assert sum(answer.text == text for answer, text in zip(answers, right, strict=True)) >= 5, answers

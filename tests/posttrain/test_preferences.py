"""Preferences: forms of pairs, samples, the loss under every plan, transformers' model by the formula, a run."""

import json
import random
from dataclasses import replace
from operator import add

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from dtgpt.compare.gate import Reference, locate, problem_of_reference
from dtgpt.compare.record import Tracing
from dtgpt.compare.verdict import difference, limits_between, problems
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import LogConfig
from dtgpt.data.prepare.config import PrepareConfig
from dtgpt.data.prepare.job import prepare
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.optim.balance.config import BalanceConfig
from dtgpt.optim.fp8.precision import FP8
from dtgpt.posttrain.chats.encode import encode_chat, renderer_of
from dtgpt.posttrain.chats.template import ChatError
from dtgpt.posttrain.dpo.config import DpoConfig
from dtgpt.posttrain.dpo.preferences import read_pair
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.run.records import read_records
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer, read_dataset
from dtgpt.util.errors import UserError
from tests.support.bodies_balance import balance_of
from tests.support.bodies_preferences import train_pairs, train_without_room_for_its_reference
from tests.support.chats import text, write_tokenizer
from tests.support.families import their_model
from tests.support.ranks import pool, several
from tests.support.runs import change, constant, newest_run, traced_record

pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow(18)

STEPS, LENGTH, BETA = 4, 128, 0.3


def user(content):
    return {"role": "user", "content": content}


def answer(content):
    return {"role": "assistant", "content": content}


FORMS = {
    "texts": {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
    "messages": {"prompt": [user("Hi")], "chosen": [answer("Yes")], "rejected": [answer("No")]},
    "implicit": {"chosen": [user("Hi"), answer("Yes")], "rejected": [user("Hi"), answer("No")]},
    "UltraFeedback": {
        "prompt": "Hi", "chosen": [user("Hi"), answer("Yes")], "rejected": [user("Hi"), answer("No")], "score": 2,
    },
    "whole chats": {
        "prompt": [user("Hi")], "chosen": [user("Hi"), answer("Yes")], "rejected": [user("Hi"), answer("No")],
    },
    "OpenAI": {
        "input": {"messages": [user("Hi")], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [answer("Yes")], "non_preferred_output": [answer("No")],
    },
    "HH-RLHF": {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pair(form):
    chosen, rejected = read_pair(FORMS[form])
    assert chosen.messages == [user("Hi"), answer("Yes")] and rejected.messages == [user("Hi"), answer("No")]


def test_both_chats_have_the_instruction_beside_them():
    instruction = {"role": "system", "content": "Be brief"}
    for form in ("texts", "implicit"):
        chosen, rejected = read_pair({**FORMS[form], "system": "Be brief"})
        assert chosen.messages == [instruction, user("Hi"), answer("Yes")] and rejected.messages[0] == instruction


def test_earlier_answers_do_not_count(tmp_path):
    begin = [user("Hi"), answer("Well"), user("So?")]
    fields = {"chosen": [*begin, answer("Yes")], "rejected": [*begin, answer("No")]}
    chosen, rejected = read_pair(fields)
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path)))
    renderer = renderer_of(tokenizer)
    for chat, own in ((chosen, "Yes"), (rejected, "No")):
        found = encode_chat(chat, renderer, tokenizer, "assistant")
        counted = tokenizer.decode([i for i, counts in zip(found.ids, found.counts, strict=True) if counts])
        assert counted.startswith(own) and "Well" not in counted
    renderer.close()


@pytest.mark.parametrize(("fields", "wrong"), [
    ({"text": "a"}, "no pair of answers under the keys"), ({"prompt": "a", "chosen": "b"}, "no pair of answers"),
    ({"prompt": "a", "chosen": "b", "rejected": [answer("c")]}, "no pair of answers"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
    ({"prompt": "a", "chosen": "b", "rejected": " "}, "empty answer"),
    ({"chosen": "b", "rejected": "c"}, "has no prompt"),
    (
        {"chosen": [user("a"), answer("b")], "rejected": [user("a"), user("c")]}, "rejected chat has no answer|no ans",
    ),
    ({"chosen": [user("a"), answer("b")], "rejected": [user("c"), answer("d")]}, "differ before their answers"),
    (
        {"prompt": [user("a")], "chosen": [answer("b")], "rejected": [user("a"), answer("c")]},
        "differ before their answers",
    ),
    (
        {"prompt": [user("a")], "chosen": [user("b"), answer("c")], "rejected": [user("b"), answer("d")]},
        "neither answers to the prompt nor chats that begin with it",
    ),
])  # fmt: skip
def test_what_is_no_pair_is_a_sentence(fields, wrong):
    with pytest.raises(ChatError, match=wrong):
        read_pair(fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def prepared(folder, tmp_path_factory):
    path, draw = tmp_path_factory.mktemp("pairs"), random.Random(3)
    short = [text(draw)[:4] for _ in range(120)]  # pairs for 4 steps, and for validation: each run scores all of them
    pairs = [
        {"prompt": a, "chosen": f"good {b}", "rejected": f"{c} bad"}
        for a, b, c in zip(short[::3], short[1::3], short[2::3], strict=True)
    ]
    (path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    given = {"input": path / "pairs.jsonl", "tokenizer": str(folder), "workers": 1}
    prepare(PrepareConfig(preferences=True, output_prefix=path / "mine", **given))
    return str(path / "mine_preference_document")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("base")
    model.save_pretrained(path)
    return path


@pytest.fixture
def dpo(recipe, prepared, base):
    """A run on pairs, of a model of transformers, with another number of pairs in each sample."""
    return change(
        recipe, model=open_config(base), data=replace(recipe.data, path=prepared, tokenizer="auto", split="80,20,0"),
        dpo=DpoConfig(beta=BETA), init_from=str(base), optimizer=constant(2e-3), steps=STEPS, micro_batch_size=2,
        global_batch_size=4, log=LogConfig(interval=1, eval_interval=2, eval_samples=8, sample_tokens=0),
    )  # fmt: skip


# By the number of ranks: plans and the size of their micro-batches. Ranks of cp have slices of answers.
PLANS = {
    1: {"single": 4},
    2: {"dp2_zero3": 1, "tp2_sp": 2, "pp2": 1, "cp2_zero3": 4},
    4: {"cp2_tp2": 4, "dp2_cp2": 1},
}
GO_ON = {"single", "dp2_zero3", "dp2_cp2", "tp2"}


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    """Return what gives `train_pairs` of one process over some steps, made once."""
    made: dict[str, tuple] = {}

    def of(recipe, steps=STEPS):
        key = repr((replace(recipe, runs=""), steps))
        if key not in made:
            made[key] = train_pairs(recipe, tmp_path_factory.mktemp("one"), steps)
        return made[key]

    return of


@pytest.mark.parametrize("world", PLANS)
def test_every_plan_follows_one_process_and_goes_on_where_another_stopped(dpo, of_one_process, tmp_path, world):
    """Of four ranks, by means over tokens."""
    dpo = replace(dpo, dpo=DpoConfig(beta=BETA, loss="ipo")) if world == 4 else dpo
    expected, figures = of_one_process(dpo)
    begin = (1 / (2 * BETA)) ** 2 if world == 4 else np.log(2)
    assert expected[0] == pytest.approx(begin, rel=1e-6) and expected[-1] < expected[0] - 0.01
    assert figures[0]["reward_margin"] == 0.0  # the reference has the bits of the first step
    assert_follow(
        [replace(dpo, plan=p, micro_batch_size=n) for p, n in PLANS[world].items()], tmp_path, expected, figures
    )


def assert_follow(recipes, path, expected, figures):
    """Train two steps under each plan, go on with one process, and hold all of it against these values."""
    calls = [(train_pairs, recipe, path / recipe.plan, 2) for recipe in recipes]
    for recipe, (losses, found) in zip(
        recipes, pool().run(parse_plan(recipes[0].plan).world, several, calls)[0], strict=True
    ):
        assert found[0]["reward_margin"] == 0.0
        found = found[:-1]
        if recipe.plan in GO_ON:
            alone = replace(recipe, plan="single", micro_batch_size=2, init_from=None)
            losses, found = map(add, (losses, found), train_pairs(alone, path / recipe.plan, STEPS))
        assert losses == pytest.approx(expected[: len(losses)], abs=1e-6), recipe.plan
        for own, wanted in zip(found, figures[: len(found)], strict=True):
            assert own == pytest.approx(wanted, abs=1e-5), recipe.plan


def answers_of(windows):
    """Yield (tokens, which of them count) of each answer of packed samples."""
    for sample in windows.numpy():
        begins = np.flatnonzero(sample[:, 1] & 2)
        for begin, end in zip(begins, [*begins[1:], len(sample)], strict=True):
            counts = (sample[begin:end, 1] & 1) > 0
            if counts.any():
                yield torch.from_numpy(sample[begin:end, 0]), torch.from_numpy(counts)


def log_probability(model, tokens, counts):
    logits = model(tokens[None]).logits[0, :-1]
    return nn.functional.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0][counts[1:]].sum()


@pytest.mark.parametrize(
    ("loss", "steps"),
    [(DpoConfig(beta=BETA, label_smoothing=0.1), 12), (DpoConfig(beta=BETA, loss="ipo"), 3)],
    ids=["sigmoid", "ipo"],
)
def test_steps_are_those_of_the_formula_in_transformers(dpo, base, loss, steps):
    """With every answer alone, by torch's AdamW. An epsilon of their size keeps tiny gradients from being steps."""
    optimizer = replace(dpo.optimizer, lr=5e-4, eps=1e-5, weight_decay=0.0)
    dpo = replace(dpo, steps=steps, dpo=loss, optimizer=optimizer, micro_batch_size=1, global_batch_size=1)
    model, reference = (transformers.AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    rule = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    with open_trainer(dpo) as trainer:
        for step in range(steps):
            windows, *_ = trainer.objective.read(step)
            answers, terms = list(answers_of(windows)), []
            for chosen, rejected in zip(answers[::2], answers[1::2], strict=True):
                c, r = (log_probability(model, *each) for each in (chosen, rejected))
                with torch.no_grad():
                    c_before, r_before = (log_probability(reference, *each) for each in (chosen, rejected))
                if loss.loss == "ipo":
                    c, r = (c - c_before) / chosen[1].sum(), (r - r_before) / rejected[1].sum()
                    terms.append((c - r - 1 / (2 * BETA)) ** 2)
                else:
                    z = BETA * (c - c_before - r + r_before)
                    terms.append(-0.9 * nn.functional.logsigmoid(z) - 0.1 * nn.functional.logsigmoid(-z))
            theirs = torch.stack(terms).mean()
            rule.zero_grad()
            theirs.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rule.step()
            assert trainer.mean_loss(trainer.train_step()) == pytest.approx(theirs.item(), rel=1e-5), step


def test_adapters_prefer_relative_to_their_base(dpo, of_one_process, tmp_path):
    with_adapters = replace(dpo, lora=LoraConfig(rank=4), optimizer=replace(dpo.optimizer, lr=1e-2))
    expected, figures = of_one_process(with_adapters)
    assert figures[0]["reward_margin"] == 0.0 and expected[-1] < expected[0] - 0.01
    assert_follow([replace(with_adapters, plan=plan) for plan in ("tp2", "cp2")], tmp_path, expected, figures)


@pytest.fixture(scope="module")
def base_of_experts(tmp_path_factory):
    path = tmp_path_factory.mktemp("experts")
    sizes = {"vocab_size": 320, "num_hidden_layers": 2, "num_experts": 6, "max_position_embeddings": LENGTH}
    their_model("olmoe", **sizes).save_pretrained(path)
    return path


@pytest.fixture
def of_experts(dpo, base_of_experts):
    """The same of a mixture of experts, whose routers are balanced."""
    balance = BalanceConfig(loss=0.5, z_loss=0.1)
    return replace(dpo, model=open_config(base_of_experts), init_from=str(base_of_experts), balance=balance)


@pytest.mark.parametrize(("lora", "plan"), [(0, "dp2_zero3"), (4, "pp2")])
def test_mixtures_of_experts_prefer_under_every_plan(of_experts, of_one_process, tmp_path, lora, plan):
    recipe = of_experts
    if lora:
        recipe = replace(of_experts, lora=LoraConfig(rank=lora), optimizer=replace(of_experts.optimizer, lr=1e-2))
    expected, figures = of_one_process(recipe)
    assert figures[0]["reward_margin"] == 0.0 and expected[-1] < expected[0] - 0.01
    unbalanced, _ = of_one_process(replace(recipe, balance=BalanceConfig()), 2)
    assert unbalanced[0] == expected[0] and unbalanced[1] != pytest.approx(expected[1], abs=1e-6)
    assert_follow([replace(recipe, plan=plan, micro_batch_size=1)], tmp_path, expected, figures)


def test_padding_of_pairs_counts_in_no_load(of_experts):
    with open_trainer(of_experts) as trainer:
        loads = balance_of(trainer)
        for step in range(2):
            windows, *_ = trainer.objective.read(step)
            tokens = sum(len(answer) for answer, _ in answers_of(windows[:, :-1]))
            assert 0 < tokens < windows[:, 1:, 0].numel()
            trainer.train_step()
            assert loads.last[:, :6].sum(1).tolist() == [3 * tokens] * 2, step


def test_a_run_reports_preferences_and_goes_on(dpo, capsys, tmp_path):
    whole = replace(dpo, log=replace(dpo.log, interval=4))
    train(whole)
    run = newest_run(dpo)
    records = {record["step"]: record for record in read_records(run / "metrics.jsonl") if "loss" in record}
    assert {"reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected"} <= records[4].keys()
    assert records[4]["reward_margin"] == pytest.approx(
        records[4]["reward_chosen"] - records[4]["reward_rejected"], abs=1e-9
    )
    valid = next(r for r in read_records(run / "metrics.jsonl") if "validation_loss" in r and r["step"] == 4)
    assert 0 <= valid["validation_reward_accuracy"] <= 1 and "validation_perplexity" not in valid
    assert "accuracy" in capsys.readouterr().out
    parted = replace(whole, runs=str(tmp_path / "parted"))
    train(replace(parted, exit_interval=3))  # in the middle of an interval
    train(replace(parted, resume="auto"))
    again = read_records(newest_run(parted) / "metrics.jsonl")
    again = next(record for record in again if record["step"] == 4 and "loss" in record)
    for name in ("loss", "step_loss", "reward_accuracy", "reward_margin"):
        assert again[name] == records[4][name], name
    kept = newest_run(parted) / "reference.bin"
    kept.write_bytes(kept.read_bytes()[:-1] + b"\x3f")
    with pytest.raises(UserError, match=r"reference\.bin, .* cannot be read \(its content was changed\)"):
        train(replace(parted, resume="auto", steps=6))
    kept.unlink()
    with pytest.raises(UserError, match=r"reference\.bin, the log-probabilities before training, cannot be read"):
        train(replace(parted, resume="auto", steps=6))


def test_a_reference_that_cannot_be_written_is_told_by_its_file_and_not_kept(dpo):
    told = pool().run(2, train_without_room_for_its_reference, replace(dpo, plan="dp2"), timeout=120)
    run = newest_run(dpo)
    assert told == [f"{run / 'reference.bin'}: File too large; raise the limit on the size of a file (ulimit -f), or "
                    "choose another file system"] * 2  # fmt: skip
    assert {path.name for path in run.iterdir()} == {"hugging_face.json", "lock"}
    train(replace(dpo, steps=1, resume="auto"))
    assert newest_run(dpo) != run and (newest_run(dpo) / "reference.bin").is_file()


def test_what_pairs_cannot_be_trained_with_is_refused(dpo, folder, prepared, tmp_path):
    refused = {
        "dpo.beta=0.3 trains a model on what it prefers already": {"init_from": None},
        "scales of fp8 change": {"precision": FP8},
        "is for dpo.loss=sigmoid": {"dpo": DpoConfig(beta=0.1, loss="ipo", label_smoothing=0.1)},
        "dpo.loss=ipo has no effect with dpo.beta=0": {"dpo": DpoConfig(loss="ipo")},
        "has pairs of answers, but dpo.beta=0": {"dpo": DpoConfig()},
        r"no pair to train on \(\d+ pairs of more than 5 tokens left out\)": {"seq_length": 4},
    }
    for words, changes in refused.items():
        with pytest.raises(UserError, match=words), open_trainer(replace(dpo, **changes)):
            pass
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    given = {"input": tmp_path / "chat.jsonl", "tokenizer": str(folder), "output_prefix": tmp_path / "c", "workers": 1}
    prepare(PrepareConfig(chat=True, **given))
    chats = replace(dpo.data, path=str(tmp_path / "c_chat_document"))
    with pytest.raises(UserError, match=r"trains on pairs of answers, which .* does not have"):
        read_dataset(replace(dpo, data=chats))
    with pytest.raises(UserError, match="--chat and --preferences name different inputs"):
        prepare(PrepareConfig(chat=True, preferences=True, **given))
    with pytest.raises(UserError, match="chat-loss cannot be combined with --preferences"):
        prepare(PrepareConfig(preferences=True, chat_loss="all", **given))


def test_the_gate_pairs_samples_of_pairs_and_compares_their_validation_loss(dpo, tmp_path):
    tracing = [Tracing(tmp_path / name, tmp_path / "shared", name == "one") for name in ("one", "other")]
    dpo = replace(dpo, global_batch_size=8)
    reference = Reference(tmp_path / "one", traced_record(dpo, tracing[0], steps=2))
    assert problem_of_reference(reference, None) is None and reference.record.held_out is not None
    ours, *_ = pool().run(2, traced_record, replace(dpo, micro_batch_size=4, plan="cp2"), tracing[1], "", 2)
    found = locate(reference, ours, tmp_path / "other", 1e-5)
    assert found.fault is None and found.first.error is not None
    assert problems(difference(ours, reference.record), limits_between(ours, reference.record)) == []

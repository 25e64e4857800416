import importlib.util
import re
from dataclasses import FrozenInstanceError, is_dataclass, replace
from pathlib import Path

import pytest

from dtgpt.commands.command import help_text
from dtgpt.config.overrides import apply_overrides, leaves, replace_values
from dtgpt.config.recipe import Recipe
from dtgpt.data.open import with_tokenizer
from dtgpt.train.start import checked
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds, annotations, kinds_of

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.py"))


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_is_valid_named_as_its_file_and_says_how_to_run_it(path):
    module = load(path)
    recipe = module.recipe()
    recipe.validate()
    assert recipe.name == path.stem
    assert re.search(rf"(?m)^command +(python|torchrun|sbatch) .*recipes/{path.name}", module.__doc__)
    assert "hardware" in module.__doc__ and "expect" in module.__doc__
    assert len(path.read_text().splitlines()) < 50


def test_gpt2_345m_has_megatron_lms_settings():
    recipe = load(Path(__file__).parents[2] / "recipes" / "gpt2_345m.py").recipe()
    model, optimizer = recipe.model, recipe.optimizer
    assert (model.num_layers, model.hidden_size, model.num_heads, model.seq_length) == (24, 1024, 16, 1024)
    assert (optimizer.lr, optimizer.min_lr, optimizer.schedule, optimizer.warmup) == (1.5e-4, 1e-5, "cosine", 0.01)
    assert (optimizer.weight_decay, optimizer.clip, model.dropout) == (0.01, 1.0, 0.1)
    assert (recipe.micro_batch_size, recipe.global_batch_size) == (4, 8)


def test_a_recipe_is_frozen(recipe):
    with pytest.raises(FrozenInstanceError):
        recipe.steps = 3


def test_overrides_take_both_forms_and_both_dashes(recipe):
    changed = apply_overrides(
        recipe,
        ["--micro-batch-size", "2", "--optimizer.lr=3e-4", "--steps=1_000", "--data.path", "none", "--seed", "7"],
    )
    assert (changed.micro_batch_size, changed.optimizer.lr, changed.steps) == (2, 3e-4, 1000)
    assert changed.data.path is None and changed.seed == 7
    assert apply_overrides(recipe, ["--log.prompt=a = --b"]).log.prompt == "a = --b"


def test_of_an_option_given_twice_the_last_counts_with_a_warning(recipe, capsys):
    assert apply_overrides(recipe, ["--seed", "3", "--steps=5", "--seed", "7"]).seed == 7
    assert capsys.readouterr().err == "warning: --seed is given twice; '7' replaces '3'\n"


def test_switches_may_stand_alone(recipe):
    changed = apply_overrides(recipe, ["--data.overfit", "--checkpoint.background", "on", "--seed", "-0"])
    assert changed.data.overfit is changed.checkpoint.background is True


@pytest.mark.parametrize("word, value", [("on", True), ("true", True), ("off", False), ("False", False)])
def test_switches_take_the_words_of_bools(recipe, word, value):
    words = ["--data.overfit", word, f"--checkpoint.background={word}"]
    changed = apply_overrides(recipe, words)
    assert changed.data.overfit is changed.checkpoint.background is value


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_help_is_as_wide_as_the_terminal(recipe, monkeypatch, columns):
    """Only what cannot be broken, such as a name with its type, may stick out of a narrow one."""
    monkeypatch.setenv("COLUMNS", str(columns))
    doc = load(RECIPES[0]).__doc__
    lines = help_text(doc, "torchrun x.py", recipe).splitlines()
    assert max(len(line) for line in lines if len(line.split()) > 2) <= columns
    for heading in ("model:", "optimizer:", "loss_scale:", "data:", "log:", "checkpoint:"):
        assert lines.count(heading) == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--plan", "dp2", "or", "tp2"], ["takes one value", "--plan 'dp2 or tp2'"]),
        (["--data.overfit", "yes"], ["--data.overfit yes", "on or off"]),
        (["--optimizer.lrr", "1"], ["--optimizer.lrr", "did you mean --optimizer.lr?"]),
        (["--lr", "1"], ["did you mean --optimizer.lr?"]),
        (["--micro-batch", "1"], ["did you mean --micro_batch_size?"]),
        (["--num_layer", "1"], ["did you mean --model.num_layers?"]),
        (["--zzz", "1"], ["no option --zzz", "--help"]),
        (["--steps", "many"], ["--steps many", "whole number"]),
        (["--steps", "1.5"], ["--steps 1.5", "whole number"]),
        (["--optimizer.lr", "fast"], ["--optimizer.lr fast", "a finite number"]),
        (["--seed", "9" * 30], ["too large"]),
        (["--device", "tpu"], ["--device tpu", "auto, cpu, cuda"]),
        (["--loss_scale", "8"], ["no option --loss_scale"]),
        (["--steps"], ["--steps needs a value"]),
        (["--steps", "--seed", "1"], ["--steps needs a value"]),
        (["steps=3"], ["'steps=3' is not an option"]),
        (["--model", "3"], ["no option --model"]),
    ],
)
def test_a_bad_override_is_answered_in_one_sentence(recipe, arguments, words):
    with pytest.raises(UserError) as error:
        apply_overrides(recipe, arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--global_batch_size", "6"], ["global_batch_size=6", "micro_batch_size=4", "--global_batch_size 4"]),
        (["--optimizer.min_lr", "1"], ["optimizer.min_lr=1.0", "lower --optimizer.min_lr, such as 0.0003 "]),
        (["--name", "../x"], ["name='../x'", "A-Z"]),
        (["--name", "x" * 101], ["up to 100"]),
        (["--data.path", ""], ["data.path='' is not a path"]),
        (["--resume="], ["resume='' is not a path"]),
        (["--optimizer.kind", "muon"], ["optimizer.kind='muon' is another optimizer; use adamw"]),
        (["--data.tokenizer", "bpe", "--model.vocab_size", "512"], ["bpe_vocab_size=1024", "vocab_size=512"]),
        (["--model.num_heads", "3"], ["model.num_heads=3", "use model.num_heads=1, 2 or 4, or another width"]),
        (["--attention", "sdpa"], ["attention=sdpa", "model.dropout=0.1", "--attention auto", "--model.dropout 0"]),
        (["--loss_scale.initial", "0"], ["loss_scale.initial=0.0", "such as 65536"]),
        (["--loss_scale.minimum", "1e-30"], ["loss_scale.minimum=1e-30", "such as 65536"]),
        (["--loss_scale.initial", "1e30"], ["loss_scale.initial=1e+30", "such as 65536"]),
        (["--train_samples", "80"], ["steps=10 and train_samples=80", "none"]),
        (["--steps", "none"], ["steps=None and train_samples=None"]),
        (["--steps", "none", "--train_samples", "7"], ["train_samples=7", "one step", "use 8 or more"]),
        (["--optimizer.warmup_samples", "8"], ["optimizer.warmup_samples=8", "optimizer.decay_samples"]),
        (["--optimizer.decay_samples", "80"], ["optimizer.warmup=2 counts steps", "optimizer.warmup_samples"]),
        (["--optimizer.decay_samples", "80", "--optimizer.decay_steps", "8"], ["decay_steps=8", "decay_samples=80"]),
        (["--optimizer.decay_steps", "5", "--optimizer.warmup", "5"], ["warmup of 5 steps", "ends at 5", "than 5"]),
        (
            ["--optimizer.schedule", "wsd", "--optimizer.wsd_decay", "0.5", "--optimizer.warmup", "6"],
            ["warmup of 6 steps", "begins at 5 of 10", "5 or fewer", "lower optimizer.wsd_decay"],
        ),
        (["--rampup_batch_size", "4 4 999999999999999"], ["10000000 steps", "fewer SAMPLES"]),
        (["--loss_scale.minimum", "8", "--loss_scale.initial", "4"], ["scale.minimum=8.0", "scale.initial=4.0"]),
    ],
)
def test_values_that_cannot_be_trained_with_are_refused(recipe, arguments, words):
    with pytest.raises(UserError) as error:
        checked(apply_overrides(recipe, arguments))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_tokenizer_that_auto_means_follows_from_data_and_vocabulary(recipe):
    auto = replace(recipe.data, tokenizer="auto")
    assert with_tokenizer(auto, 257).tokenizer == "bpe"
    assert with_tokenizer(auto, 50304).tokenizer == "gpt2"
    assert with_tokenizer(replace(auto, path=None), 50304).tokenizer == "bpe"
    assert with_tokenizer(recipe.data, 50304).tokenizer == "bytes"


def test_a_resolved_recipe_names_the_end_of_its_schedule(recipe):
    assert recipe.resolved().optimizer.decay_steps == recipe.steps


def test_a_constant_schedule_has_no_end(recipe):
    apply_overrides(recipe, ["--optimizer.schedule", "constant", "--optimizer.min_lr", "1"]).validate()


@pytest.mark.parametrize(
    "arguments, dp, words",
    [
        ([], 1, None),
        (["--optimizer.warmup", "11"], 1, "the run ends within its warmup: 10 of 11 steps"),
        (["--optimizer.decay_samples", "800", "--optimizer.warmup", "0.5"], 1, "80 of 400 samples"),
        (["--plan", "tp2_zero3"], 1, "ZeRO-3 shards over replicas, and there is only one"),
        (["--plan", "zero3"], 2, None),
        (["--attention", "flash"], 1, "attention=flash has no CPU kernel"),
        (["--optimizer.wsd_decay", "0.5"], 1, "optimizer.wsd_decay=0.5 has no effect with optimizer.schedule=cosine"),
        (["--optimizer.wsd_decay", "0.5", "--optimizer.schedule", "wsd"], 1, None),
        (["--loss_scale.window", "7"], 1, "loss_scale.window=7 has no effect with precision="),
        (["--loss_scale.window", "7", "--precision", "fp16"], 1, None),
        (["--log.prompt", "x", "--log.sample_tokens", "0"], 1, "log.prompt=x has no effect with log.sample_tokens=0"),
        (["--log.eval_tasks_limit", "3"], 1, "log.eval_tasks_limit=3 has no effect without log.eval_tasks"),
        (["--log.eval_tasks_limit", "3", "--log.eval_tasks", "lambada:x"], 1, None),
    ],
)
def test_notes_tell_what_has_no_effect(recipe, arguments, dp, words):
    changed = apply_overrides(recipe, arguments)
    changed.validate()
    named = next(iter(changed.alternatives().values()))
    choice = changed.choose_plan(dp * named.tp)
    told = changed.notes(choice, "cpu")
    assert told == [] if words is None else words in told[0]
    assert not any("attention" in note for note in changed.notes(choice, "cuda"))


def bounded(config, prefix=""):
    """Yield the dotted name and the bounds of every field that has some."""
    for name, hint, rules in annotations(type(config)):
        yield from ((prefix + name, rule) for rule in rules if isinstance(rule, Bounds))
        if is_dataclass(hint):
            yield from bounded(getattr(config, name), f"{prefix}{name}.")


def test_a_value_just_out_of_its_bounds_is_refused_and_named(recipe):
    found = list(bounded(recipe))
    assert len(found) > 40
    for name, rule in found:
        outside = [*([rule.at_least - 1] if rule.at_least is not None else []), rule.above, rule.below]
        outside += [rule.at_most * 2] if rule.at_most is not None else []
        for value in (value for value in outside if value is not None):
            kind = {n: t for n, t, *_ in leaves(recipe)}[name]
            value = int(value) if float not in kinds_of(kind) else float(value)
            with pytest.raises(UserError, match=rf"^{re.escape(f'{name}={value}')} is out of range; use "):
                replace_values(recipe, {name: value}).validate()


def test_validation_accepts_a_good_recipe(recipe):
    recipe.validate()
    apply_overrides(recipe, ["--attention", "sdpa", "--model.dropout", "0", "--recompute", "full"]).validate()
    apply_overrides(recipe, ["--precision", "fp16", "--loss_scale.initial", "1", "--graph", "on"]).validate()
    replace(recipe, global_batch_size=12).validate()
    assert isinstance(recipe, Recipe)


@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny"])
def test_small_recipes_show_a_text_at_each_validation_loss(name):
    log = load(Path(__file__).parents[2] / "recipes" / f"{name}.py").recipe().log
    assert log.sample_interval == log.eval_interval > 0 < log.sample_tokens

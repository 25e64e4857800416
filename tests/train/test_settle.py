"""What a command takes from the recipe file, from its options, from a run that it resumes or a model that it begins
with."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from dtgpt.checkpoint.open import open_source
from dtgpt.cli import main
from dtgpt.config.plan import Plan
from dtgpt.data.open import with_tokenizer
from dtgpt.interop.hf.model import save_huggingface
from dtgpt.models.llama import LlamaConfig
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.run.differences.texts import changes_since
from dtgpt.run.folder import values_of
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.train.start import override as settle
from dtgpt.util.errors import UserError
from tests.support.bodies_checkpoint import begun_from
from tests.support.other_optimizer import MomentumConfig
from tests.support.ranks import each, pool
from tests.support.runs import change, newest_run
from tests.support.trained import trained

pytestmark = pytest.mark.slow(3)

FILE = """
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.config.recipe import LogConfig, OptimizerConfig, Recipe


def recipe():
    return Recipe(
        name="mine", model=GPT2Config(num_layers=4, hidden_size=64, num_heads=4, seq_length=32, vocab_size=300),
        optimizer=OptimizerConfig(lr=1e-3), steps=20, micro_batch_size=4, global_batch_size=8, device="cpu",
        log=LogConfig(interval=1, sample_tokens=3, eval_samples=2),
    )
"""


def saved(recipe, changes=None, name="test-001") -> Path:
    """A run folder with this recipe and, for those who only look, a checkpoint."""
    run = Path(recipe.runs) / name
    (run / "checkpoints" / "step_00000005").mkdir(parents=True)
    resolved = replace(recipe, data=with_tokenizer(recipe.data, recipe.model.vocab_size))
    (run / "recipe.json").write_text(json.dumps(asdict(resolved) | (changes or {})))
    return run


def command(capsys, *words) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code, *capsys.readouterr()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def test_a_resume_has_every_value_of_its_run(recipe, capsys):
    """Whatever the recipe file says by now."""
    run = saved(recipe)
    optimizer = {"lr": 1.0, "schedule": "linear", "decay_steps": 7}
    file = change(
        recipe, steps=99, seed=7, plan="tp2", model={"num_layers": 9}, optimizer=optimizer, log={"prompt": "x"}
    )
    assert settle(file, ["--resume", str(run)]) == replace(recipe, resume=str(run))
    out, _ = capsys.readouterr()
    assert "\n  model.num_layers: 9 -> 2 (cannot change)\n  optimizer.lr: 1.0 -> 0.003\n" in out
    assert all(len(line) <= 90 for line in out.splitlines())
    advice = " ".join(out.partition("to change them, give ")[2].split())
    assert "--model.num_layers" not in advice and "--plan tp2" in advice and advice.endswith("--log.prompt x")


def test_one_value_of_the_file_that_the_run_does_not_take_is_told(recipe, capsys):
    run = saved(recipe)
    assert settle(replace(recipe, steps=20), ["--resume", str(run)]).steps == 10
    said = "the recipe file says otherwise than the run, which keeps its values (recipe -> run):\n  steps: 20 -> 10\n"
    assert capsys.readouterr().out == said + "to change it, give --steps 20\n"
    settle(replace(recipe, steps=20), ["--resume", str(run), "--steps", "30"])
    assert capsys.readouterr().out == ""


def test_options_replace_single_values_of_the_run(recipe):
    run = saved(recipe)
    options = ["--resume", str(run), "--steps=20", "--optimizer.lr", "1e-4", "--data.json-key", "body"]
    expected = change(recipe, steps=20, optimizer={"lr": 1e-4}, data={"json_key": "body"}, resume=str(run))
    assert settle(change(recipe, seed=3), options) == expected


def test_what_belongs_to_one_start_is_not_the_runs(recipe):
    run = saved(replace(recipe, exit_after=5.0, exit_interval=3, init_from="weights"))
    recipe = settle(replace(recipe, exit_interval=4, init_from="other"), ["--resume", str(run), "--exit_after", "7"])
    assert (recipe.exit_after, recipe.exit_interval, recipe.init_from) == (7.0, 4, None)
    recipe.validate()
    with pytest.raises(UserError, match="both given"):
        settle(recipe, ["--resume", str(run), "--init_from", "other"]).validate()


def test_auto_takes_the_recipe_of_the_run_that_it_finds(recipe, capsys):
    for number, seed in enumerate((1, 2), start=1):
        run = saved(replace(recipe, seed=seed), name=f"test-{number:03d}")
    found = settle(replace(recipe, init_from="w"), ["--resume", "auto"])
    assert found == replace(recipe, seed=2, resume=str(run))
    other = replace(recipe, name="other")
    assert settle(other, ["--resume", "auto"]) == replace(other, resume="auto")
    with pytest.raises(UserError, match="cannot name a run"):
        settle(recipe, ["--resume", "auto", "--name", "/x"])


def test_plans_are_the_recipe_files_and_their_names_the_runs(recipe):
    wide = {"wide": Plan(tp=2)}
    run = saved(replace(recipe, plan="wide", plans=wide))
    assert settle(replace(recipe, plans=wide), ["--resume", str(run)]).alternatives() == {"wide": Plan(tp=2)}


def test_an_older_run_has_what_it_lacks_from_the_file_and_decays_over_its_steps(recipe, capsys):
    """It wrote out what `none` means."""
    values = asdict(recipe.resolved())
    for group, name in ((values, "exit_interval"), (values["checkpoint"], "background"), (values["log"], "prompt")):
        del group[name]
    run = saved(recipe, {"exit_interval": None})
    (run / "recipe.json").write_text(json.dumps(values | {"left": {"over": 1}}))
    file = change(recipe, checkpoint={"background": False}, log={"prompt": "file"})
    found = settle(file, ["--resume", str(run), "--steps", "20"])
    assert found == replace(file, steps=20, resume=str(run)) and found.schedule.end == 20
    out, err = capsys.readouterr()
    assert out == "" and "has left, which this dtgpt does not know" in err


def test_an_older_run_has_on_and_off_where_bools_are_now(recipe, capsys):
    values = asdict(recipe)
    values["data"]["reset_position_ids"], values["data"]["eod_mask_loss"] = "on", "off"
    values["checkpoint"]["background"] = "off"
    run = saved(recipe, values)
    found = settle(recipe, ["--resume", str(run)])
    expected = change(recipe, data={"reset_position_ids": True}, checkpoint={"background": False}, resume=str(run))
    assert found == expected and found.data.reset_position_ids is True
    assert "to change them, give --data.reset_position_ids off --checkpoint.background on\n" in capsys.readouterr().out
    assert changes_since(run, values_of(found.resolved())) == []


def test_a_number_of_decay_steps_stays_as_it_was_given(recipe):
    run = saved(change(recipe, optimizer={"decay_steps": 10}))
    assert settle(recipe, ["--resume", str(run), "--steps", "20"]).schedule.end == 10


def test_a_tokenizer_file_and_large_vocabularies_can_be_resumed(recipe, tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"tokens{suffix}").write_bytes(b"")
    data = {"path": str(tmp_path / "tokens"), "tokenizer_file": "t.json", "tokenizer": "auto"}
    recipe = change(recipe, model={"vocab_size": 50257}, data=data)
    run = saved(recipe)
    settle(recipe, ["--resume", str(run)]).validate()
    older = asdict(recipe) | {"data": asdict(recipe.data) | {"tokenizer": "gpt2"}}
    (run / "recipe.json").write_text(json.dumps(older))
    settle(recipe, ["--resume", str(run)]).validate()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"steps": "10"}, ["steps='10'", "whole number", "give --steps"]),
        ({"steps": True}, ["steps=True", "whole number"]),
        ({"steps": 1.5}, ["steps=1.5", "whole number"]),
        ({"steps": 10**40}, ["too large"]),
        ({"steps": 10**400}, ["too large", "give --steps"]),
        ({"timeout": 10**400}, ["not a finite number", "give --timeout"]),
        ({"plan": 5}, ["plan=5", "text", "give --plan"]),
        ({"plan": [["x"] * 100] * 100}, ["plan=[[", "text"]),
        ({"timeout": float("nan")}, ["timeout=nan"]),
        ({"device": "tpu"}, ["device='tpu'", "auto, cpu, cuda"]),
        ({"model": 5}, ["model=5"]),
    ],
)
def test_a_saved_value_of_a_wrong_type_is_one_sentence(recipe, changes, words):
    run = saved(recipe, changes)
    with pytest.raises(UserError) as error:
        settle(recipe, ["--resume", str(run)])
    assert all(word in str(error.value) for word in [str(run), *words] if word), str(error.value)
    assert len(str(error.value)) < 400
    if "model" not in changes:
        (name,) = changes
        settle(recipe, ["--resume", str(run), f"--{name}", {"plan": "dp", "device": "cpu"}.get(name, "3")])


@pytest.mark.parametrize("text", ["", "[]", "5", '{"steps"', "[" * 100_000, '{"steps": ' + "1" * 5000 + "}", "\xff"])
def test_a_damaged_recipe_of_a_run_is_one_sentence(recipe, text):
    run = saved(recipe)
    (run / "recipe.json").write_text(text, encoding="latin-1")
    with pytest.raises(
        UserError, match=r"recipe\.json (cannot be read|is not JSON|holds no).*checkpoint's state\.json"
    ) as error:
        settle(recipe, ["--resume", str(run)])
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Where the runs are, once they are made."""
    return tmp_path_factory.mktemp("mine") / "runs"


@pytest.fixture
def mine(here, text, capsys, template):
    """A run that the options made another than its recipe file says."""
    options = ["--data.path", text, "--data.tokenizer", "bytes", "--model.num_layers", 2, "--model.hidden_size", 32]
    if not template.exists():
        assert command(capsys, "train", "mine.py", *options, "--steps", 4)[0] == 0
        shutil.copytree("runs", template)
    shutil.copytree(template, "runs", dirs_exist_ok=True)
    return Path("runs/mine-001")


def test_a_run_is_resumed_by_its_name_alone_and_keeps_its_history(mine, capsys):
    code, out, err = command(capsys, "train", "mine.py", "--resume", mine, "--steps", 6)
    assert code == 0, err
    assert "the recipe file says " in out and "\n  optimizer.decay_steps: 4 -> 6\n  steps: 4 -> 6\n" in out
    assert [r["step"] for r in read_records(mine / "metrics.jsonl") if "loss" in r] == [1, 2, 3, 4, 5, 6]
    old, new = (json.loads((mine / n).read_text()) for n in ("recipe-step-00000004.json", "recipe.json"))
    assert (old["steps"], new["steps"]) == (4, 6) and old["model"] == new["model"]
    assert (mine / "environment-step-00000004.json").is_file()
    older = mine / "checkpoints" / "step_00000004"
    for steps in (7, 7, 8):
        assert command(capsys, "train", "mine.py", "--resume", older, "--steps", steps)[0] == 0
    copies = sorted(p.name for p in mine.glob("recipe-*"))
    assert copies == [f"recipe-step-00000004{n}.json" for n in ("-2", "-3", "")]  # and not twice the same
    assert json.loads((mine / "recipe-step-00000004.json").read_text()) == old


def test_a_plan_of_the_run_that_does_not_fit_is_told_with_the_way_out(mine, capsys, monkeypatch):
    recipe = json.loads((mine / "recipe.json").read_text())
    (mine / "recipe.json").write_text(json.dumps(recipe | {"plan": "tp2"}))
    code, _, err = command(capsys, "train", "mine.py", "--resume", mine, "--steps", 6)
    assert code == 2 and err.count("\n") == 1 and "tp=2" in err and "plan=tp2 is that of the run: give --plan" in err
    code, out, err = command(capsys, "train", "mine.py", "--resume", mine, "--steps", 6, "--plan", "dp")
    assert code == 0 and "plan: tp2 -> dp" in out, err


def test_a_plan_can_be_shown_for_a_run(mine, capsys):
    code, out, err = command(capsys, "plan", "mine.py", "--resume", mine, "--plan", "pp2", "--world", 2)
    assert code == 0 and "2 blocks of 32" in out, err


@pytest.mark.parametrize("kind", ["run", "checkpoint", "hf"])
def test_a_new_run_has_the_dimensions_of_the_model_that_it_begins_with(mine, capsys, text, kind):
    path = {"run": mine, "checkpoint": mine / "checkpoints" / "step_00000004", "hf": Path("hf")}[kind]
    if kind == "hf":
        save_huggingface(open_source(mine), path)
    options = ["--data.path", text, "--data.tokenizer", "bytes", "--steps", 1, "--init_from", path]
    code, out, err = command(capsys, "train", "mine.py", *options, "--model.dropout", "0.1")
    assert code == 0, err
    assert f"the model has the dimensions of {path} (recipe -> model):\n  model.num_layers: 4 -> 2\n  model.hid" in out
    model = json.loads(Path("runs/mine-002/recipe.json").read_text())["model"]
    assert (model["num_layers"], model["hidden_size"], model["dropout"]) == (2, 32, 0.1)
    for wrong, words in (
        (["--model.num_layers", "3"], "--model.num_layers 3, where the model has 2; leave --model.num_layers out"),
        (["--model.seq_length", "64"], "--model.seq_length 64, where the model has 32"),
    ):
        code, _, err = command(capsys, "train", "mine.py", *options, *wrong)
        assert code == 2 and err.count("\n") == 1 and words in err, err
    assert not Path("runs/mine-003").exists()


def test_a_shorter_context_takes_the_first_positions(recipe, tmp_path):
    run = trained(recipe, steps=1)
    source = open_source(run)
    save_huggingface(source, tmp_path / "hf")
    shorter = change(recipe, model={"seq_length": 8}, micro_batch_size=2)
    pairs = [(run, "single"), (run, "dp2_zero3"), (run, "tp2_sp"), (run, "pp2"), (tmp_path / "hf", "tp2_sp")]
    alone, *parted = (replace(shorter, init_from=str(path), plan=plan) for path, plan in pairs)
    for whole, *_ in (begun_from(alone), *pool().run(2, each, begun_from, parted)[0]):
        positions = "embedding.wpe.weight"
        assert torch.equal(whole[positions], source.read(positions)[:8])
        assert torch.equal(whole["blocks.1.mlp.fc.weight"], source.read("blocks.1.mlp.fc.weight"))


def test_a_value_that_a_resume_cannot_change_is_not_offered(recipe, capsys):
    run = saved(recipe)
    file = change(
        recipe, name="other", steps=99, model={"num_layers": 9, "dropout": 0.5}, data={"bpe_vocab_size": 280},
        lora=LoraConfig(rank=4),
    )  # fmt: skip
    settle(file, ["--resume", str(run)])
    told, advice = capsys.readouterr().out.split("to change them, give ")
    for name in (
        "name: other -> test",
        "lora.rank: 4 -> 0",
        "model.num_layers: 9 -> 2",
        "data.bpe_vocab_size: 280 -> 1024",
    ):
        assert f"  {name} (cannot change)\n" in told
    assert advice == "--model.dropout 0.5 --steps 99\n"
    settle(change(recipe, model={"num_layers": 9}), ["--resume", str(run)])
    assert capsys.readouterr().out.endswith("\n  model.num_layers: 9 -> 2 (cannot change)\n")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"lr": 3e-4}, "give --optimizer.min_lr 2e-05\n"), ({"lr": 3e-4, "min_lr": 1e-4}, ""), ({"lr": 6e-3}, ""),
    ],
)  # fmt: skip
def test_a_lower_learning_rate_says_what_to_do_about_the_last_one(recipe, options, words):
    run = saved(change(recipe, optimizer={"min_lr": 2e-4}))
    now = change(recipe, optimizer={"min_lr": 2e-4, **options})
    said = "\n".join([*changes_since(run, values_of(now)), ""])
    assert ("optimizer.min_lr stays 0.0002; " in said and words in said) if words else "stays" not in said
    with pytest.raises(UserError, match=r"give a lower --optimizer\.min_lr, such as 1e-05 "):
        settle(now, ["--resume", str(run), "--optimizer.lr", "1e-4"]).validate()


def test_train_samples_of_a_run_that_goes_on_count_what_it_has_seen(recipe, capsys):
    """Also where its steps had another size."""
    recipe = replace(recipe, steps=2)
    run, size = trained(recipe), recipe.global_batch_size
    half = ["--resume", str(run), "--global_batch_size", str(size // 2), "--micro_batch_size", "1", "--steps", "none"]
    half += ["--optimizer.warmup", "0.1"]
    assert settle(recipe, [*half, f"--train_samples={4 * size}"]).steps == 2 + 4
    with pytest.raises(UserError, match=f"already seen {2 * size} samples; raise --train_samples"):
        settle(recipe, [*half, f"--train_samples={2 * size - 1}"])
    capsys.readouterr()
    assert train(settle(recipe, [*half, f"--train_samples={3 * size}"])) == 0
    newest = max((run / "checkpoints").iterdir())
    assert json.loads((newest / "state.json").read_text())["consumed_samples"] == 3 * size
    assert "-> None" not in capsys.readouterr().out
    train(settle(recipe, ["--resume", str(run), "--steps", "5"]))
    said = "resuming, with other options than before:\n  steps: 4 -> 5\n"
    assert said in capsys.readouterr().out  # the schedule, in samples, is the same


def test_a_run_to_resume_that_does_not_exist_is_told_so(recipe, tmp_path):
    with pytest.raises(UserError, match=r"nope does not exist; give a run folder"):
        settle(recipe, ["--resume", str(tmp_path / "nope")])


def test_a_run_begins_with_the_weights_of_another_optimizers_run(recipe):
    other = replace(recipe, optimizer=MomentumConfig(lr=0.3, warmup=2), steps=1)
    train(other)
    assert train(replace(recipe, steps=1, init_from=str(newest_run(other)))) == 0


def test_a_run_begins_with_another_of_any_length_but_of_no_other_architecture(recipe, tmp_path):
    model = LlamaConfig(
        num_layers=2, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=12, ffn_hidden_size=44, seq_length=16,
        vocab_size=257, qk_norm=True,
    )  # fmt: skip
    llama = change(recipe, model=model, steps=1, log={"sample_tokens": 0})
    train(llama)
    run = newest_run(llama)
    words = ["--init_from", str(run), "--model.seq_length", "40", "--runs", str(tmp_path / "longer")]
    longer = settle(change(llama, model={"num_kv_heads": 2, "qk_norm": False}), words)
    assert longer.model == replace(llama.model, seq_length=40)
    assert train(longer) == 0
    with pytest.raises(UserError, match="holds a llama, and the recipe's model is a gpt2; give another"):
        settle(recipe, ["--init_from", str(run)])
    with pytest.raises(UserError, match="holds a llama, and the recipe's model is a gpt2; give another"):
        train(replace(recipe, resume=str(run)))

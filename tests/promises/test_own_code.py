"""A model and an optimizer in files of a user's own: trained, resumed, generated from, served, converted, compared."""

import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import dtgpt
from dtgpt.checkpoint.manifest import Checkpoint, read_state, step_folder
from dtgpt.checkpoint.open import open_source
from dtgpt.commands import train
from dtgpt.commands.generate import command as generate_command
from dtgpt.compare import command as compare
from dtgpt.config.recipe_file import call_recipe, load_module
from dtgpt.evaluation import command as eval
from dtgpt.evaluation import harness_command as lm_eval
from dtgpt.evaluation.shared_model import open_shared
from dtgpt.inference.kernels.stages import parts_of
from dtgpt.inference.kernels.weights import decode_weights
from dtgpt.interop import convert
from dtgpt.interop import inspect_command as inspect
from dtgpt.interop.inspect import model_digest
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.planning import command as plan
from dtgpt.posttrain.chats.command import command as chat_command
from dtgpt.serve.command import command as serve_command
from dtgpt.train.start import load_recipe
from dtgpt.util.errors import UserError
from tests.support.programs import TORCHRUN, run_program
from tests.support.runs import losses
from tests.support.whole_model import build_model

SUPPORT = Path(__file__).parents[1] / "support"
RECIPE = '''"""A model of its own, in a module beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dtgpt.cli import run_recipe
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, LogConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config, Head
from own_model import OtherConfig
from own_optimizer import MomentumConfig


@dataclass(frozen=True, kw_only=True)
class OwnConfig(OtherConfig):
    architecture: ClassVar[str] = "own"
    widths: Annotated[tuple[int, ...], "a field that JSON holds as a list"] = (3, 3)


@dataclass(frozen=True, kw_only=True)
class Doubled(GPT2Config):
    """A class with the name of dtgpt's architecture."""

    def make_head(self):
        return DoubledHead(self)


class DoubledHead(Head):
    def compute(self, x, targets=None, loss_weights=None):
        found = super().compute(x, targets, loss_weights)
        return 2 * found if targets is None else found


def recipe():
    return Recipe(
        name="own", model=MODEL, optimizer=OPTIMIZER, steps=2, micro_batch_size=2, global_batch_size=4, plan="single",
        device="cpu", data=DataConfig(path=TEXT, tokenizer="bytes"), log=LogConfig(sample_tokens=0, eval_interval=0),
    )


if __name__ == "__main__":
    run_recipe(recipe, __doc__)
'''
SIZES = "num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=257"


def write(folder: Path, text: Path, model: str = "OwnConfig", optimizer: str = "OptimizerConfig") -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copy(SUPPORT / "other_architecture.py", folder / "own_model.py")
    shutil.copy(SUPPORT / "other_optimizer.py", folder / "own_optimizer.py")
    values = {
        "MODEL": f"{model}({SIZES})",
        "OPTIMIZER": f"{optimizer}(lr=1e-2, warmup=0, schedule='constant')",
        "TEXT": repr(str(text)),
    }
    content = RECIPE
    for name, value in values.items():
        content = content.replace(f"={name}", f"={value}")
    path = folder / "mine.py"
    path.write_text(content)
    return path


@pytest.fixture
def mine(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "räzept é", text)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A recipe file, and the folder of its run of four steps."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "text.txt").write_text("".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(400)))
    mine = write(folder / "räzept é", folder / "text.txt")
    assert train.command([str(mine), "--steps", "4", "--runs", str(folder / "runs")]) == 0
    return mine, folder / "runs" / "own-001"


def test_a_run_goes_on_with_the_class_of_its_recipe(first, tmp_path, monkeypatch, capsys):
    """Also as weights of a new run, and with a field that JSON holds as a list."""
    monkeypatch.chdir(tmp_path)
    mine, run = first
    assert train.command([str(mine)]) == 0
    assert f"next: dtgpt generate runs/own-001 --recipe '{mine}' --interactive" in capsys.readouterr().out
    assert train.command([str(mine), "--resume", "auto", "--steps", "4"]) == 0
    assert "widths" not in capsys.readouterr().out
    resumed = tmp_path / "runs" / "own-001"
    folders = [step_folder(each / "checkpoints", 4) for each in (run, resumed)]
    own = type(call_recipe(load_module(mine).recipe).model)
    whole, halves = (Checkpoint(folder, own=own) for folder in folders)
    assert whole.files["weights-00000-000.safetensors"] == halves.files["weights-00000-000.safetensors"]
    assert whole.config.widths == (3, 3) and type(whole.config) is own
    assert whole.state["model_class"] == "OwnConfig" and whole.state["recipe_file"] == str(mine.resolve())
    assert train.command([str(mine), "--init_from", str(run), "--name", "begun", "--steps", "1"]) == 0
    with dtgpt.open_trainer(load_recipe(mine, ["--steps", "4"]), run) as trainer:
        assert trainer.step == 4


def test_every_command_that_opens_a_run_takes_its_recipe_and_names_it(first, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mine, run = first
    given = ["--recipe", str(mine), "--device", "cpu"]
    (tmp_path / "lambada.jsonl").write_text('{"text": "1 and 2 make 3."}\n')
    task = ["--task", "lambada", "--data", "lambada.jsonl"]
    assert generate_command([str(run), *given, "--max-new-tokens", "3", "--prompt", "1 and"]) == 0
    assert "1 and" in capsys.readouterr().out
    assert eval.command([str(run), *given, *task]) == 0
    assert inspect.command([str(run), *given[:2]]) == 0
    assert "widths (3, 3)" in capsys.readouterr().out
    assert convert.command([str(run), "copy", *given[:2]]) == 0
    own = type(call_recipe(load_module(mine).recipe).model)
    digests = {model_digest(open_source(path, own=own)) for path in (run, Path("copy"))}
    assert len(digests) == 1
    assert read_state(Path("copy"), own=own)["model_class"] == "OwnConfig"
    assert dtgpt.load("copy", recipe=mine, tokenizer="bytes").config.widths == (3, 3)
    assert dtgpt.load(run, recipe=call_recipe(load_module(mine).recipe)).generate("1 and", max_new_tokens=2)
    told = "has a model of the class OwnConfig, which is not dtgpt's; give the recipe file with its class: --recipe '"
    for command, words in (
        (generate_command, []), (chat_command, []), (serve_command, ["--port", "0"]), (eval.command, task),
        (inspect.command, []), (convert.command, ["new"]),
    ):  # fmt: skip
        with pytest.raises(UserError, match=told + str(mine.resolve())):
            command([str(run), *words])
    for open_model in (dtgpt.load, open_shared):
        with pytest.raises(UserError, match=told):
            open_model(str(run))
    own_words, others = lm_eval.split_words([str(run), *given[:2], "--tasks", "x"])
    assert lm_eval.command.read(own_words)[1].recipe == str(mine) and others == ["--tasks", "x"]
    assert open_shared(str(run), recipe=str(mine), tokenizer="bytes").model.config.widths == (3, 3)
    capsys.readouterr()
    with pytest.raises(UserError, match="the architecture own, and a Hugging Face folder holds one of"):
        convert.command([str(run), "new", "--to", "hf", *given[:2]])
    assert "computes otherwise" not in capsys.readouterr().err
    assert not Path("new").exists()


def test_a_recipe_without_the_class_is_told(first, mine, tmp_path, text):
    trained, run = first
    other = write(tmp_path / "other", text, "Doubled")
    with pytest.raises(UserError, match=r"class OwnConfig, .* the recipe given is a Doubled;") as error:
        generate_command([str(run), "--recipe", str(other)])
    assert error.match(f"; give the recipe file that has the class instead: '{trained.resolve()}'$")
    with pytest.raises(UserError, match="; give the recipe file that has the class instead"):  # no --recipe there
        train.command([str(other), "--init_from", str(run)])
    for content, told in (
        ("def recipe(:", "wrong.py line 1: invalid syntax; correct the recipe"),
        ("x = 1", "wrong.py is not a recipe: it defines no function recipe()"),
        ("import absent_module", "wrong.py line 1: ModuleNotFoundError: No module named 'absent_module'"),
        ("from .beside import x", "line 1: ImportError: attempted relative import with no known parent package"),
        ("import broken", "broken.py line 2: invalid syntax; correct the recipe"),
    ):
        (tmp_path / "broken.py").write_text("\nx = = 1")
        (tmp_path / "wrong.py").write_text(content)
        with pytest.raises(UserError) as error:
            dtgpt.load(run, recipe="wrong.py")
        assert told in str(error.value)
    with pytest.raises(UserError, match=r"there is no recipe file absent\.py"):
        generate_command([str(run), "--recipe", "absent.py"])
    with pytest.raises(UserError, match="recipe=3 is not a recipe"):
        dtgpt.load(run, recipe=3)
    mine.write_text(mine.read_text().replace("    widths:", "    sizes:"))
    with pytest.raises(UserError, match="unexpected keyword argument 'widths'; give the recipe file as it was"):
        generate_command([str(run), "--recipe", str(mine)])
    assert train.command([str(write(tmp_path / "plain", text, "GPT2Config")), "--name", "plain", "--steps", "1"]) == 0
    plain = tmp_path / "runs" / "plain-001"
    with pytest.raises(UserError, match="has a GPT2Config, and the model of the recipe given is a OwnConfig; give"):
        generate_command([str(plain), "--recipe", str(write(tmp_path / "again", text))])
    assert "model_class" not in read_state(step_folder(plain / "checkpoints", 1))


def test_a_class_with_the_name_of_dtgpts_architecture_is_not_taken_for_it(tmp_path, text, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mine = write(tmp_path / "doubled", text, "Doubled")
    assert train.command([str(mine), "--steps", "1"]) == 0
    assert train.command([str(mine), "--resume", "auto"]) == 0
    run = tmp_path / "runs" / "own-001"
    with pytest.raises(UserError, match="has a model of the class Doubled, which is not dtgpt's"):
        dtgpt.load(run)
    (doubled,) = dtgpt.load(run, recipe=mine, device="cpu").stages
    plain = build_model(GPT2Config(**asdict(doubled.config)), torch.device("cpu"), torch.float32, None)
    plain.load_state_dict(doubled.state_dict())
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(doubled(tokens), 2 * plain(tokens), rtol=1e-5, atol=1e-6)
    # Kernels of decode steps compute what dtgpt's head does, from which the own one inherits.
    assert None not in map(decode_weights, parts_of(plain)) and decode_weights(doubled.head) is None
    assert None not in map(decode_weights, doubled.blocks.values())
    capsys.readouterr()
    assert convert.command([str(run), "exported", "--to", "hf", "--recipe", str(mine)]) == 0
    assert "what Doubled computes otherwise than GPT2Config is not in it" in capsys.readouterr().err


def test_an_optimizer_of_ones_own_goes_on_and_its_run_needs_no_recipe(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = write(tmp_path / "recipes", text, "GPT2Config", "MomentumConfig")
    assert train.command([str(mine), "--steps", "4"]) == 0
    assert train.command([str(mine)]) == 0
    assert train.command([str(mine), "--resume", "auto", "--steps", "4"]) == 0
    runs = [tmp_path / "runs" / name for name in ("own-001", "own-002")]
    states = [read_state(step_folder(run / "checkpoints", 4)) for run in runs]
    assert states[0]["optimizer"] == "momentum" and states[0]["files"] == states[1]["files"]
    assert dtgpt.load(runs[1]).generate("1 and", max_new_tokens=2)


@pytest.mark.parametrize("imported", ["from own_model", "    return"])
def test_recipes_of_two_folders_have_modules_of_their_own(imported, tmp_path, text):
    """Each a package `helper`, of which the second would be the first one's; also where `recipe()` imports it."""
    found = []
    for number in (1, 2):
        path = write(tmp_path / str(number), text)
        (path.parent / "helper").mkdir()
        (path.parent / "helper" / "sizes.py").write_text(f"LAYERS = {number}")
        content = path.read_text().replace("num_layers=2", "num_layers=helper.sizes.LAYERS")
        indent = imported[: -len(imported.lstrip())]
        head, _, tail = content.rpartition(imported)
        path.write_text(f"{head}{indent}import helper.sizes\n{imported}{tail}")
        found.append(call_recipe(load_module(path).recipe).model.num_layers)
    assert found == [1, 2]
    assert str(tmp_path / "2") in sys.path and str(tmp_path / "1") not in sys.path


def test_plan_and_comparison_of_two_runs_find_the_modules(first, tmp_path):
    mine, run = first
    assert plan.command([str(mine), "--plan", "tp2"]) == 0
    other = shutil.copytree(run, tmp_path / "other")
    assert compare.command([str(run), str(other)]) == 0
    assert compare.command([str(run), str(other), "--recipe", str(mine)]) == 0


@pytest.mark.slow(12)
def test_every_program_finds_the_modules_beside_a_recipe(mine, tmp_path, monkeypatch):
    """In processes that dtgpt, torchrun and the comparison of plans start."""
    words = ["--global_batch_size", "4", "--plan", "dp2"]
    found = []
    for program in (
        [*TORCHRUN, "--nproc-per-node", "2", mine, *words], ["-m", "dtgpt", "train", mine, "--nproc", "2", *words],
    ):  # fmt: skip
        done = run_program(program, tmp_path)
        assert done.returncode == 0, done.stderr
        found.append(losses(max((tmp_path / "runs").iterdir())))
    assert found[0] == found[1]
    assert compare.command([str(mine), "--plans", "dp2", "--steps", "1"]) == 0
    words = ["generate", tmp_path / "runs" / "own-001", "--recipe", mine, "--max-new-tokens", "2", "--device", "cpu"]
    done = run_program([*TORCHRUN, "--nproc-per-node", "2", "-m", "dtgpt", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    assert torch.isfinite(torch.tensor(list(found[0].values()))).all()

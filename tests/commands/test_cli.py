"""The program from outside: commands, exit codes, sentences, signals."""

import os
import platform
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import dtgpt
from dtgpt.cli import main, run_recipe
from dtgpt.config.overrides import leaves
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import recipe_module
from dtgpt.util.shared.environment import child_environment
from tests.support.programs import TORCHRUN, Program, run_program

pytestmark = pytest.mark.slow(12)

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes" / "gpt2_tiny.py"
SMALL = ["--model.hidden_size", "32", "--model.num_heads", "2", "--model.seq_length", "16", "--device", "cpu"]
SMALL += ["--log.eval_samples", "8"]


def run(arguments, cwd, **options):
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=400, **options)


def in_process(arguments, capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_torchrun_trains_on_the_embedded_text_and_prints_a_sample(tmp_path):
    done = run_program([*TORCHRUN, TINY, *SMALL, "--steps", "3", "--log.sample_tokens", "8"], tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("pydoc_data.topics", "step 3/3", "validation loss", "sample at step 3", "runs/gpt2_tiny-001"):
        assert words in done.stdout


@pytest.mark.parametrize(
    "options, words",
    [
        (["--data.path", "missing.txt"], ["missing.txt does not exist", "leave data.path out"]),
        (["--data.path", "empty.txt"], ["empty.txt holds no text"]),
        (["--data.path", "short.txt", "--data.tokenizer", "bytes"], ["training text has", "seq_length=64"]),
        (["--data.path", "short.txt", "--data.bpe_vocab_size", "99"], ["bpe_vocab_size=99", "257"]),
        (["--model.vocab_size", "512"], ["bpe_vocab_size=1024", "model.vocab_size=512"]),
        (["--model.seq_length", "1000000"], ["training text has", "seq_length=1000000"]),
        (["--optimizer.lrr", "1"], ["did you mean --optimizer.lr?"]),
        (
            ["--data.tokenizer", "bytes", "--model.vocab_size", "256"],
            ["model.vocab_size=256", "257 tokens", "--data.tokenizer"],
        ),
        (["--steps", "ten"], ["--steps ten", "whole number"]),
        (["--steps", "-3"], ["steps=-3", "1 or more"]),
        (["--model.num_heads", "5"], ["num_heads=5"]),
        (["--global_batch_size", "33"], ["global_batch_size=33", "--global_batch_size 32"]),
        (["--resume", "runs/none"], ["runs/none does not exist", "give a run folder"]),
        (["--runs", "short.txt/runs"], ["short.txt/runs", "--runs"]),
    ],
)
def test_wrong_use_is_one_sentence_and_leaves_nothing(here, capsys, options, words):
    (here / "empty.txt").write_text("")
    (here / "short.txt").write_text("too short\n")
    before = sorted(here.iterdir())
    code, out, err = in_process(["train", TINY, *options], capsys)
    assert code == 2 and out == ""
    assert err.startswith("dtgpt: ") and err.count("\n") == 1 and all(word in err for word in words), err
    assert sorted(here.iterdir()) == before


def test_wrong_use_from_a_shell_shows_no_traceback(tmp_path):
    done = run_program([TINY, "--data.path", "missing.txt"], tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("variables, words", [
    ({"WORLD_SIZE": "4"}, ["RANK= WORLD_SIZE=4", "torchrun"]),
    ({"WORLD_SIZE": "4", "RANK": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, ["RANK=4 WORLD_SIZE=4"]),
    ({"WORLD_SIZE": "four"}, ["WORLD_SIZE=four", "torchrun"]),
    ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1 LOCAL_WORLD_SIZE=", "torchrun"]),
])  # fmt: skip
def test_an_environment_that_torchrun_did_not_make_is_refused(here, capsys, monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = in_process(["train", TINY, "--device", "cpu", "--micro_batch_size", "8"], capsys)
    assert code == 2 and out == "" and err.count("\n") == 1 and all(word in err for word in words), err
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["trian", "x"], ["'trian'", "did you mean dtgpt train?"]),
        (["Plan", "x"], ["'Plan'", "did you mean dtgpt plan?"]),
        (["evil", "x"], ["'evil'", "did you mean dtgpt eval?"]),
        (["recrod"], ["'recrod'; use one of prepare"]),
        (["\udcff" * 100], ["use one of prepare"]),
        (["train"], ["needs a recipe file"]),
        (["train", "nothing.py"], ["no recipe file nothing.py"]),
        (["train", str(ROOT / "dtgpt" / "util" / "errors.py")], ["defines no function recipe()"]),
        (["plot"], ["dtgpt plot needs RUN ..., such as"]),
        (["plot", "nothing"], ["nothing does not exist; give a run folder"]),
        (["plot", "nothing", "--output"], ["--output needs a value"]),
        (["plot", "nothing", "--output=no/dir/x.png"], ["no/dir/x.png is not a file name for the picture"]),
        (["plot", "nothing", "--output", "x.jpg"], ["x.jpg is not a file name for the picture"]),
        (["plot", "--size", "3"], ["no option --size"]),
        (["generate", "."], [". holds no model that dtgpt knows", "run folder"]),
        (["generate", "x" * 300], ["File name too long", "shorter"]),
        (["generate"], ["dtgpt generate needs"]),
        (["generate", "nothing"], ["nothing does not exist; give a run folder"]),
        (["generate", "one", "two"], ["'two' is not an option, and dtgpt generate takes MODEL only"]),
        (["generate", "nothing", "--top_k", "-1"], ["--top-k=-1 is out of range; use 0 or more"]),
        (["prepare"], ["dtgpt prepare needs INPUT ... --output-prefix PREFIX, such as"]),
        (["plan", TINY, "--world", "0"], ["--world=0 is out of range; use 1 or more"]),
        (["plan", TINY, "--wrld", "2"], ["no option --wrld; did you mean --world?"]),
        (["compare", TINY, "--plans", "dp2", "--tolerance", "-1"], ["--tolerance=-1.0 is out of range"]),
        (["compare", TINY, "--minutes", "1"], ["--minutes 1 limits random cases", "--random 100"]),
        (["compare", TINY, "--random", "0"], ["--random=0 is out of range"]),
        (["compare", TINY, "--random", "3", "--plans", "pt2"], ["'pt2' is not part of a plan"]),
        (["compare", TINY, "--case", "bert tp2"], ["--case 'bert tp2' is not a case", "such as 'gpt2 tp2"]),
        (["compare", TINY, "--commits", "nonsense"], ["--commits nonsense", "no such commit", "git log"]),
        (["compare", TINY, "--commits", "a", "b", "c"], ["one or two commits, and 3 were given"]),
        (["compare", TINY, "--against", "--plan tp2"], ["--against '--plan tp2' has --plan; use --plans"]),
        (["compare", TINY, "--against", "--precision bf61"], ["bf61 is not a choice"]),
        (["compare", TINY, "--against", "--model.hidden_size 64"], ["size 64' changes the shapes of weights"]),
        (
            ["compare", TINY, "--plans", "dp2", "--json", "no/such/file"],
            ["which is not a folder; make it, or give another path"],
        ),
        (["compare", TINY, "--random", "2", "--commits", "HEAD"], ["--commits is for the steps of one recipe"]),
        (["compare", TINY, "--plan", "dp2"], ["dtgpt compare does not take --plan; use --plans"]),
        (["compare", TINY, "--plans", "dp2", "--resume", "auto"], ["does not take --resume", "leave --resume out"]),
    ],
)
def test_wrong_commands_are_one_sentence(here, capsys, arguments, words):
    code, _, err = in_process(arguments, capsys)
    assert code == 2 and err.count("\n") == 1 and all(word in err for word in words), err


@pytest.mark.parametrize("words", [["generate", "x", "--help"], ["plot", "-h"], ["train", "-h"]])
def test_every_command_explains_itself(capsys, words):
    code, out, _ = in_process(words, capsys)
    assert code == 0 and "usage: dtgpt" in out


OWN = {
    "train": "--optimizer.lr", "plan": "--world", "compare": "--tolerance", "convert": "--to", "inspect": "--samples",
    "plot": "PNG file to write", "generate": "--top-k", "eval": "--overlapping-eval", "prepare": "--append-eod",
}  # fmt: skip


@pytest.mark.parametrize("command", OWN)
def test_help_of_a_command_is_its_own_and_fits_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = in_process([command, "--help"], capsys)
    assert code == 0 and f"usage: dtgpt {command} " in out and max(map(len, out.splitlines())) <= 80
    for name, option in OWN.items():
        assert (f"{option} " in out) == (name == command or (name == "train" and command in ("plan", "compare")))


@pytest.mark.parametrize("command", ["train", "plan", "compare"])
def test_help_with_a_recipe_shows_its_values_and_each_option_once(capsys, command):
    code, out, _ = in_process([command, TINY, "--help"], capsys)
    assert code == 0 and "peak learning rate [0.006]" in out and "\nmodel:\n" in out
    options = [line.split()[0] for line in out.splitlines() if line.startswith("  --")]
    assert len(options) == len(set(options)) and ("--plans" in options) == (command != "train")
    assert command != "compare" or not {"--plan", "--resume"} & set(options)


def test_a_recipe_file_without_a_docstring_explains_itself(capsys):
    with pytest.raises(SystemExit) as stop:
        run_recipe(recipe_module([str(TINY)], "train").recipe, None, ["--help"])
    assert stop.value.code == 0 and "peak learning rate [0.006]" in capsys.readouterr().out


@pytest.mark.parametrize("words, usage", [
    (["recipe.py"], "python recipe.py [--option"),
    (["-m", "dtgpt", "train", "recipe.py"], "python -m dtgpt train recipe.py [--option"),
    (["-m", "dtgpt", "plot"], "python -m dtgpt plot RUN"),
    ([*TORCHRUN, "recipe.py"], "torchrun --nproc-per-node N recipe.py [--option"),
    ([*TORCHRUN, "-m", "dtgpt", "train", "recipe.py"], "torchrun --nproc-per-node N -m dtgpt train recipe.py"),
])  # fmt: skip
def test_the_usage_is_how_the_program_was_started(tmp_path, words, usage):
    (tmp_path / "recipe.py").write_text(TINY.read_text())
    done = run_program([*words, "--help"], tmp_path, {**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {usage}"), done.stdout[:200] + done.stderr
    if words == ["recipe.py"]:
        for part in ("--optimizer.lr FLOAT", "peak learning rate [0.006]", "2 CPU cores"):
            assert part in done.stdout


def test_the_first_screen_has_the_options_that_are_used_most_and_help_all_the_rest(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    every = {name for name, *_ in leaves(recipe_module([str(TINY)], "train").recipe())}

    def listed(*words):
        code, out, _ = in_process(words, capsys)
        assert code == 0
        return [line.split()[0][2:] for line in out.splitlines() if line.startswith("  --")], out

    first, out = listed("train", TINY, "--help")
    assert len(first) == 25 and {"nproc", *Recipe.common} == set(first) and len(out.splitlines()) <= 72
    assert out.endswith(f"\n{len(every) - 24} more options: --help-all\n") and "\noptimizer:\n" in out
    both, out = listed("train", TINY, "--help-all")
    assert len(both) == len(every) + 1 and {*every, "nproc"} == set(both) and "more options" not in out
    for command in ("plan", "compare"):
        few, all_of_them = listed(command, TINY, "--help")[0], listed(command, TINY, "--help-all")[0]
        assert set(few) < set(all_of_them) and "optimizer.beta1" not in few and "optimizer.beta1" in all_of_them
        assert f"{len(all_of_them) - len(few)} more options" in listed(command, TINY, "--help")[1]
    assert listed("plot", "--help-all") == listed("plot", "--help")


@pytest.mark.parametrize("words", [[], ["help"], ["--help"]])
def test_the_general_usage_fits_80_columns(capsys, words):
    code, out, _ = in_process(words, capsys)
    assert code == 0 and "dtgpt train RECIPE.py" in out and max(map(len, out.splitlines())) <= 80


def test_the_version_and_python_m_dtgpt(tmp_path, capsys):
    code, out, _ = in_process(["--version"], capsys)
    own, theirs = re.escape(dtgpt.__version__), re.escape(torch.__version__)
    known = rf"dtgpt {own}( \(\w+(-dirty)?\))?, torch {theirs}, (no )?CUDA"
    assert code == 0 and re.match(known, out) and out.endswith(f", Python {platform.python_version()}\n")
    done = run([sys.executable, "-m", "dtgpt", "--version"], tmp_path)
    assert (done.returncode, done.stdout) == (0, out)


def test_a_reader_that_goes_away_does_not_end_a_run(tmp_path):
    program = Program([TINY, *SMALL, "--steps", "20", "--log.interval", "1"], tmp_path)
    assert all(program.stdout.readline() for _ in range(2))
    program.stdout.close()
    program.wait(60)
    assert "Traceback" not in program.stderr.read()
    assert (tmp_path / "runs" / "gpt2_tiny-001" / "checkpoints" / "step_00000020").is_dir()


def test_a_run_can_be_continued_in_text_and_drawn(here, capsys):
    code, _, _ = in_process(["train", TINY, *SMALL, "--steps", 2, "--log.sample_tokens", 0], capsys)
    assert code == 0
    texts = []
    for seed in (0, 0, 1):
        code, out, _ = in_process(
            ["generate", "runs/gpt2_tiny-001", "--prompt", "The ünicode", "--tokens", 9, "--seed", seed], capsys
        )
        assert code == 0 and out.startswith("The ünicode")
        texts.append(out)
    assert texts[0] == texts[1] != texts[2]
    code, _, err = in_process(["generate", "runs/gpt2_tiny-001", "--tokens", "-1"], capsys)
    assert code == 2 and "tokens=-1" in err
    assert in_process(["plot", "runs/gpt2_tiny-001", "--output", "both.png"], capsys)[0] == 0
    assert (here / "both.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("launcher, number", [("torchrun", signal.SIGTERM), ("python", signal.SIGINT)])
def test_a_signal_ends_a_run_with_a_checkpoint_and_it_resumes(tmp_path, launcher, number):
    options = ["--steps", "100000", "--log.interval", "5", "--checkpoint.interval", "0"]
    process = Program([*(TORCHRUN if launcher == "torchrun" else []), TINY, *SMALL, *options], tmp_path)
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            if line.startswith("step") and int(line.split()[1].split("/")[0]) >= 10:
                break
        process.send_signal(number)
        out, err = process.communicate()
    finally:
        watchdog.cancel()
        process.kill()
    assert process.returncode != 0 and "stopped at step" in out, out + err
    if launcher == "python":
        assert process.returncode == 128 + number and "Traceback" not in err
    folder = tmp_path / "runs" / "gpt2_tiny-001"
    (checkpoint,) = (folder / "checkpoints").glob("step_*")
    stopped = int(checkpoint.name.removeprefix("step_"))
    resume = ["--resume", "runs/gpt2_tiny-001", "--steps", str(stopped + 2), "--log.sample_tokens", "0"]
    done = run_program([TINY, *SMALL, *resume], tmp_path)
    assert done.returncode == 0 and f"from step {stopped}" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("words", [[str(TINY), "--steps", "1"], ["-m", "dtgpt", "prepare", "text.jsonl"]])
def test_a_current_folder_that_was_removed_is_named_before_torch_ends_the_process(tmp_path, words):
    (tmp_path / "gone").mkdir()
    script = 'cd gone && rmdir ../gone && exec "$@"'
    done = run(["/bin/sh", "-c", script, "sh", sys.executable, *words], tmp_path, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "dtgpt: the current folder was removed; go to one that exists (cd), and start again\n"


WITHOUT_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from dtgpt.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("words", [["train", "--help"], ["plan", "--help"], ["generate", "model"]])
def test_a_python_without_torch_is_told_in_one_sentence(tmp_path, words):
    code = WITHOUT_TORCH.replace("MISSING", "'torch'")
    done = run([sys.executable, "-c", code, *words], tmp_path, env=child_environment())
    sentence = f"torch is not installed in {sys.executable}; install it: python -m pip install torch"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"dtgpt: {sentence}\n")


def test_another_module_that_is_missing_is_a_fault_with_a_traceback(tmp_path):
    code = WITHOUT_TORCH.replace("MISSING", "'dtgpt.config.recipe'")
    done = run([sys.executable, "-c", code, "train", "--help"], tmp_path, env=child_environment())
    assert done.returncode == 1 and "ModuleNotFoundError: No module named 'dtgpt.config.recipe'" in done.stderr

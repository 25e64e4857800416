"""The programs of docs/library.md and the loss of docs/seams.md, as they stand there, in one process and in two, and
their checkpoints."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import dtgpt
from dtgpt.checkpoint.manifest import step_folder
from dtgpt.commands.generate import command as generate_command
from dtgpt.train.start import load_recipe, override
from tests.support.programs import TORCHRUN, run_program

GPT2_TINY = Path(__file__).parents[2] / "recipes/gpt2_tiny.py"
PAGE = (Path(__file__).parents[2] / "docs/library.md").read_text()
SEAMS = (Path(__file__).parents[2] / "docs/seams.md").read_text()


@pytest.mark.slow(10)
def test_the_program_has_the_same_losses_in_two_processes_and_can_be_loaded(tmp_path, capsys):
    pieces = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(pieces) == 5
    (tmp_path / "own_loop.py").write_text("\n".join(pieces[:4]))
    said = []
    for plan, launcher in (("single", []), ("tp2", [*TORCHRUN, "--nproc-per-node", "2"])):
        folder = tmp_path / plan
        folder.mkdir()
        done = run_program([*launcher, tmp_path / "own_loop.py", plan], folder)
        assert done.returncode == 0, done.stderr
        said.append(re.findall(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)", done.stdout))
        assert done.stdout.count("largest gradient: ") == 2 and "validation loss " in done.stdout
    assert [step for step, *_ in said[0]] == ["5", "10", "15", "20"]
    for (_, loss, norm), (_, other_loss, other_norm) in zip(*said, strict=True):
        assert float(loss) == pytest.approx(float(other_loss), rel=1e-5)
        assert float(norm) == pytest.approx(float(other_norm), rel=1e-3)
    again = run_program([tmp_path / "own_loop.py", "single"], tmp_path / "tp2")  # a run that has ended
    assert again.returncode == 0 and "step " not in again.stdout
    run, texts = tmp_path / "tp2" / "own_run", []
    for path in (run, step_folder(run / "checkpoints", 20)):  # what the page says
        model = dtgpt.load(path)
        texts.append(model.generate("import", max_new_tokens=4))
        assert generate_command([str(path), "--prompt", "import", "--max-new-tokens", "4", "--device", "cpu"]) == 0
        assert model.config.num_layers == 2 and capsys.readouterr().out.startswith("import")
    assert texts[0] == texts[1]
    begun = override(replace(load_recipe(GPT2_TINY, []), device="cpu"), ["--init_from", str(run)])
    assert begun.model.hidden_size == 64


@pytest.mark.slow(3)
def test_nanogpts_program_trains_evaluates_saves_and_goes_on(tmp_path):
    program = re.findall(r"```python\n(.*?)```", PAGE, re.S)[4]
    (tmp_path / "nanogpt.py").write_text(program)
    done = run_program([tmp_path / "nanogpt.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"iter \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < losses[0] and done.stdout.count("val loss") == 2
    assert dtgpt.load(step_folder(tmp_path / "out" / "checkpoints", 20)).config.num_layers == 2
    again = run_program([tmp_path / "nanogpt.py"], tmp_path)
    assert again.returncode == 0 and "iter " not in again.stdout


OWN_LOSS = """
import sys
import dtgpt
from dtgpt.config.sections import OptimizerConfig

model = SmoothConfig(num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=1024, dropout=0.0)
recipe = dtgpt.Recipe(
    name="smooth", model=model, optimizer=OptimizerConfig(lr=1e-2), plan=sys.argv[1], micro_batch_size=int(sys.argv[2]),
    global_batch_size=8, steps=5, device="cpu",
)
with dtgpt.open_trainer(recipe) as trainer:
    results = [trainer.train_step() for _ in range(5)]
    losses = [trainer.mean_loss(result) for result in results]
    if trainer.mesh.rank == 0:
        print("found", *losses, *[result.norm.item() for result in results])
"""


@pytest.mark.slow(4)
def test_an_own_loss_has_the_same_curve_under_plans(tmp_path):
    (tmp_path / "own_loss.py").write_text(re.search(r"```python\n(.*?)```", SEAMS, re.S)[1] + OWN_LOSS)
    found = []
    for plan, size, ranks in (("single", 8, 1), ("dp2_zero3", 2, 2), ("pp2", 2, 2)):
        launcher = [*TORCHRUN, "--nproc-per-node", str(ranks)] if ranks > 1 else []
        done = run_program([*launcher, tmp_path / "own_loss.py", plan, str(size)], tmp_path)
        assert done.returncode == 0, done.stderr
        found.append([float(word) for word in re.search("found (.*)", done.stdout)[1].split()])
    assert found[0][0] == pytest.approx(6.93, abs=0.1) and found[0][4] < found[0][0]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4)


def test_the_public_names_are_listed():
    assert {"load", "Plan", "Recipe", "open_trainer"} <= set(dir(dtgpt))
    for name in ("Plan", "Recipe", "open_trainer"):
        assert getattr(dtgpt, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dtgpt.nothing

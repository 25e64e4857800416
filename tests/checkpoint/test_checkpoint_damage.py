"""A damaged checkpoint is named and passed over, and nothing outside its folder is read or touched."""

import hashlib
import json
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dtgpt.checkpoint import manifest
from dtgpt.checkpoint.load import Saved, find_checkpoint
from dtgpt.checkpoint.manifest import VERSION, Checkpoint
from dtgpt.checkpoint.open import open_source
from dtgpt.checkpoint.shard_file import Damaged, Piece, read_header, write_file
from dtgpt.config.plan import ResolvedPlan
from dtgpt.parallel.mesh import Mesh
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.support.bodies_checkpoint import change_state
from tests.support.ranks import pool
from tests.support.runs import change, losses, newest_run

pytestmark = pytest.mark.slow(2)

WEIGHTS, OPTIMIZER, STATE = "weights-00000-000.safetensors", "optimizer-00000-000.safetensors", "state.json"
MESH = Mesh(ResolvedPlan(dp=1), torch.device("cpu"))
OLD, NEW = "step_00000002", "step_00000004"
templates: dict[str, tuple[Path, dict[int, float]]] = {}  # of this pytest worker: a run, and the losses of a longer one


@pytest.fixture
def recipe(recipe):
    recipe = change(recipe, steps=4, optimizer={"decay_steps": 6}, checkpoint={"interval": 2, "keep_last": 0})
    return change(recipe, data={"held_out": 0.0}, log={"sample_tokens": 0})


@pytest.fixture
def run(recipe, tmp_path):
    """A run of four steps with checkpoints of the second and the fourth."""
    if "run" not in templates:
        train(recipe)
        first = newest_run(recipe)
        train(change(recipe, steps=6, name="whole", checkpoint={"interval": 0}))
        templates["run"] = first, losses(newest_run(recipe))
        assert len(templates["run"][1]) == 6
    return Path(shutil.copytree(templates["run"][0], tmp_path / "runs" / "copy-001"))


def tree(folder: Path) -> dict[Path, bytes]:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def empty(path):
    path.write_bytes(b"")


def braces(path):
    path.write_text("{}")


def huge_header(path):
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def to_folder(path):
    path.unlink()
    path.mkdir()


def sign(folder: Path, name: str) -> None:
    """Let `state.json` say of a file what it is now."""
    content = (folder / name).read_bytes()
    files = json.loads((folder / STATE).read_text())["files"]
    files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change_state(folder, {"files": dict(sorted(files.items()))})


DAMAGES = [
    *((damage, name) for damage in (flip, cut, Path.unlink, empty, to_folder) for name in (WEIGHTS, OPTIMIZER, STATE)),
    (braces, STATE),
    (huge_header, WEIGHTS),
]


@pytest.mark.parametrize("damage, name", DAMAGES, ids=[f"{d.__name__}-{n.split('-')[0]}" for d, n in DAMAGES])
def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(recipe, run, capsys, damage, name):
    damage(run / "checkpoints" / NEW / name)
    capsys.readouterr()
    assert find_checkpoint(MESH, run).folder.name == OLD
    err = capsys.readouterr().err
    assert f"{NEW}/{name} is damaged (" in err and "going on from the checkpoint before it" in err
    if (damage, name) not in ((flip, WEIGHTS), (Path.unlink, OPTIMIZER), (cut, STATE)):
        return
    assert train(change(recipe, resume=str(run), steps=6)) == 0
    err = capsys.readouterr().err
    assert f"newer than step 2 is called aside-{NEW}" in err
    assert losses(run) == templates["run"][1]
    names = {p.name for p in (run / "checkpoints").iterdir()}
    assert names == {OLD, f"aside-{NEW}", NEW, "step_00000006", "latest"}


@pytest.mark.parametrize("damage, name", [(flip, WEIGHTS), (cut, STATE), (Path.unlink, OPTIMIZER)])
def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_stays_as_it_is(recipe, run, damage, name):
    for step in (OLD, NEW):
        damage(run / "checkpoints" / step / name)
    before = tree(run)
    with pytest.raises(UserError, match=rf"{OLD}/{name} is damaged .*no other checkpoint is left"):
        train(change(recipe, resume=str(run), steps=6))
    assert tree(run) == before and (run / "checkpoints" / NEW).is_dir()


def test_a_chosen_checkpoint_that_is_damaged_is_not_replaced_by_another(recipe, run):
    flip(run / "checkpoints" / NEW / WEIGHTS)
    before = tree(run)
    with pytest.raises(UserError, match=f"{NEW}/{WEIGHTS} is damaged"):
        train(change(recipe, resume=str(run / "checkpoints" / NEW), steps=6))
    assert tree(run) == before


def test_what_one_rank_finds_sends_all_back(recipe, run):
    """Each rank reads some of the files."""
    recipe = change(recipe, resume=str(run), plan="dp2", steps=5, log={"eval_interval": 0})
    for name in (WEIGHTS, OPTIMIZER):
        copy = run.with_name(f"copy-{name[0]}")
        shutil.copytree(run, copy)
        flip(copy / "checkpoints" / NEW / name)
        assert pool().run(2, train, change(recipe, resume=str(copy))) == [0, 0]
        assert (copy / "checkpoints" / f"aside-{NEW}").is_dir()
        expected = {step: loss for step, loss in templates["run"][1].items() if step < 6}
        assert losses(copy) == pytest.approx(expected, rel=1e-5)


opened: list[str] | None = None
sys.addaudithook(lambda event, args: opened is not None and event == "open" and opened.append(str(args[0])))


@contextmanager
def watched():
    """The names of the files that were opened meanwhile."""
    global opened
    names = opened = []
    try:
        yield names
    finally:
        opened = None


HOSTILE = ["../victim.safetensors", "../../../victim.safetensors", "ABSOLUTE",
           f"{WEIGHTS}/../../victim.safetensors",
           f"../{NEW}/{WEIGHTS}", "", ".", "..", f"{WEIGHTS}\0", f"{WEIGHTS}\n", f"./{WEIGHTS}", STATE,
           f"{WEIGHTS}.pt", "Weights-00000-000.safetensors", "weights-0-000.safetensors"]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_state_that_names_another_file_is_refused_before_that_is_read(run, tmp_path, capsys, name):
    """Its digest is right."""
    newest = run / "checkpoints" / NEW
    name = str(tmp_path / "victim.safetensors") if name == "ABSOLUTE" else name
    content = (newest / WEIGHTS).read_bytes()
    victims = [tmp_path / "victim.safetensors", run / "victim.safetensors", run / "checkpoints" / "victim.safetensors"]
    for victim in victims:
        victim.write_bytes(content)
    files = json.loads((newest / STATE).read_text())["files"]
    change_state(newest, {"files": {name: files[WEIGHTS], OPTIMIZER: files[OPTIMIZER]}})
    capsys.readouterr()
    with watched() as names:
        assert find_checkpoint(MESH, run).folder.name == OLD
    err = capsys.readouterr().err
    assert f"{NEW}/{STATE} is damaged" in err and "is not the name of a file of a checkpoint" in err
    assert any(OLD in n for n in names) and not any("victim" in n for n in names)
    assert {p for p in names if f"/{NEW}/" in p and "partial" not in p} <= {str(newest / STATE)}
    assert all(victim.read_bytes() == content for victim in victims)


def reopened(folder: Path) -> Saved:
    return Saved(find_checkpoint(MESH, folder.parents[1], folder))


NAMES = ["embedding.wpe.weight", "blocks.1.mlp.fc.weight"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "kind", ["gone", "part gone", "twice", "part twice, part gone", "another shape", "lying header"]
)
def test_weights_that_are_not_all_there_once_are_refused(run, kind, name):
    """Also where every digest is right."""
    folder = run / "checkpoints" / NEW
    pieces = [piece for piece, _ in read_header(folder / WEIGHTS)]
    data = torch.zeros(sum(p.num_bytes for p in pieces) // 4)
    piece = next(p for p in pieces if p.name == name)
    rows = piece.size[0]
    others = [p for p in pieces if p is not piece]

    def part(begin, end, shape=piece.shape):
        return Piece(name, shape, (begin, 0), (end - begin, piece.size[1]))

    cuts = {
        "gone": [[]],
        "part gone": [[part(0, rows - 1)]],
        "twice": [[piece], [piece]],
        "part twice, part gone": [[part(0, rows // 2)], [part(0, rows // 2)]],
        "another shape": [[part(0, rows, (rows + 1, piece.shape[1]))]],
        "lying header": [[piece]],
    }
    for rank, mine in enumerate(cuts[kind]):
        path = folder / f"weights-{rank:05d}-000.safetensors"
        path.unlink(missing_ok=True)
        listed = [*mine, *others] if rank == 0 else mine
        write_file(path, listed, data[: sum(p.num_bytes for p in listed) // 4])
        if kind == "lying header":
            huge_header(path)
        sign(folder, path.name)
    assert Checkpoint(folder).problem() is None  # files are what the state says
    with pytest.raises(Damaged, match=NEW):
        reopened(folder).read(name)


def test_a_checkpoint_of_a_newer_format_says_so(recipe, run):
    for step in (OLD, NEW):
        change_state(run / "checkpoints" / step, {"version": VERSION + 1})
    told = f"was written by a newer dtgpt in format {VERSION + 1}, this one reads up to {VERSION}; use the dtgpt that"
    with pytest.raises(UserError, match=told):
        train(change(recipe, resume=str(run), steps=6))


def test_a_checkpoint_of_an_older_format_is_read(recipe, run, monkeypatch):
    monkeypatch.setattr(manifest, "VERSION", VERSION + 1)
    assert train(change(recipe, resume=str(run), steps=6)) == 0
    states = [json.loads((run / "checkpoints" / step / STATE).read_text()) for step in (NEW, "step_00000006")]
    assert [state["version"] for state in states] == [VERSION, VERSION + 1]


@pytest.mark.parametrize("version", [0, -1, True, "2", None, 1.5])
def test_a_format_that_is_no_number_is_damage(run, version):
    change_state(run / "checkpoints" / NEW, {"version": version})
    with pytest.raises(Damaged, match=r"of its format, version=.* must be a whole number from 1 on"):
        Checkpoint(run / "checkpoints" / NEW)


def test_the_number_of_the_format_moves_with_what_a_checkpoint_says(run):
    """An entry that comes, goes or changes its meaning: raise VERSION if an older dtgpt would misread the checkpoint,
    and then renew this list."""
    state = json.loads((run / "checkpoints" / NEW / STATE).read_text())
    assert VERSION == 1 and state.keys() == {
        "format", "version", "step", "consumed_samples", "tokens", "schedule", "keys", "plan", "world", "recipe",
        "architecture", "model", "padded_vocab_size", "versions", "data_digest", "optimizer", "updates",
        "interval_loss", "files", "digest",
    }  # fmt: skip


def test_a_checkpoint_names_its_architecture_and_an_unknown_one_is_refused(recipe, run):
    """The one before is not taken instead: the newest is not damaged, but of a newer dtgpt."""
    newest = run / "checkpoints" / NEW
    assert json.loads((newest / STATE).read_text())["architecture"] == "gpt2"
    change_state(newest, {"architecture": "mixture", "model": {"num_experts": 8}})
    for action in (lambda: train(change(recipe, resume=str(run), steps=6)), lambda: open_source(newest)):
        with pytest.raises(
            UserError,
            match=r"a model of the architecture mixture, and this dtgpt has gpt2, .*track3.*; use the dtgpt that",
        ):
            action()

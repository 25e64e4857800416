"""Models of the Hub, by huggingface_hub itself, from a cache that is made by hand: nothing here needs a network."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import dtgpt
from dtgpt.cli import main
from dtgpt.hub import names
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.train.start import override
from tests.support.runs import change, newest_run

huggingface_hub = pytest.importorskip("huggingface_hub")
from huggingface_hub import constants  # noqa: E402

from dtgpt.hub import fetch  # noqa: E402

pytestmark = pytest.mark.slow(6)
COMMIT = "0123456789" * 4


def command(*words) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code or 0


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """An empty cache, of a machine that is offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetch.fetched.cache_clear()
    return tmp_path / "hub"


def keep(cache: Path, folder: Path, repository: str = "org/tiny", tag: str = "v1") -> None:
    """Put the files of a folder into the cache, as huggingface_hub has them: links to blobs."""
    place = cache / f"models--{repository.replace('/', '--')}"
    snapshot = place / "snapshots" / COMMIT
    for path in (snapshot, place / "blobs", place / "refs"):
        path.mkdir(parents=True)
    for number, file in enumerate(folder.iterdir()):
        shutil.copy(file, place / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    for ref in ("main", tag):
        (place / "refs" / ref).write_text(COMMIT)


@pytest.fixture
def exported(recipe, cache, tmp_path, capsys) -> Path:
    """A model's folder of Hugging Face, which is in the cache, too."""
    assert train(change(recipe, steps=1)) == 0
    assert command("convert", newest_run(recipe), tmp_path / "exported", "--to", "hf") == 0
    keep(cache, tmp_path / "exported")
    capsys.readouterr()
    return tmp_path / "exported"


def test_a_name_of_the_hub_is_as_good_as_its_folder(recipe, exported, tmp_path, capsys):
    found = {}
    for name, init_from in (("folder", str(exported)), ("hub", "hf:org/tiny"), ("tag", "hf:org/tiny@v1")):
        begun = override(change(recipe, steps=2, name=name), ["--init_from", init_from])
        assert train(begun) == 0
        (run,) = Path(recipe.runs).glob(f"{name}-*")
        found[name] = [record["loss"] for record in read_records(run / "metrics.jsonl") if "loss" in record]
    assert found["folder"] == found["hub"] == found["tag"] != []
    assert dtgpt.load("hf:org/tiny", device="cpu").config == dtgpt.load(exported, device="cpu").config
    assert command("convert", "hf:org/tiny", tmp_path / "again", "--to", "hf") == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    capsys.readouterr()
    for path in ("hf:org/tiny", exported):
        assert command("generate", path, "--prompt", "a", "--max-new-tokens", "4", "--temperature", "0") == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first == second
    assert command("inspect", "hf:org/tiny", "--tensors") == command("inspect", exported, "--tensors") == 0
    first, second = capsys.readouterr().out.split("HuggingFace model ")[1:]
    assert first.splitlines()[1:] == second.splitlines()[1:]
    assert command("inspect", "hf:org/none") == 2 and "hf:org/none is not in the cache" in capsys.readouterr().err
    for words in (["convert", exported, tmp_path / "out"], ["generate", exported]):
        assert command(*words, "--adapter", "hf:org/lora") == 2
        assert "hf:org/lora is not in the cache" in capsys.readouterr().err


def test_pickles_code_and_other_copies_are_not_fetched(monkeypatch, cache):
    wanted = [
        "config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja",
    ]  # fmt: skip
    others = [
        "pytorch_model.bin", "modeling_x.py", "consolidated.safetensors", "original/model.safetensors", "x.gguf",
        "onnx/config.json", "model.fp32.safetensors", "README.md", "training_args.bin",
    ]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(
        [*wanted, *others], allow_patterns=fetch.WANTED, ignore_patterns=fetch.IGNORED
    )
    assert list(kept) == wanted
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: asked.update(how) or cache)
    cache.mkdir()
    (cache / "model.safetensors").touch()
    assert names.place("hf:org/tiny@v1") == cache and names.place("hf") is None
    assert (asked["revision"], asked["allow_patterns"], asked["ignore_patterns"]) == ("v1", fetch.WANTED, fetch.IGNORED)


@pytest.mark.parametrize("name, told", [
    ("hf:", "'hf:' names no model of the Hub; write hf:ORG/NAME, or hf:ORG/NAME@REVISION"),
    ("hf:../x", "'hf:../x' names no model of the Hub"),
    ("hf:a/b@", "'hf:a/b@' names no model of the Hub"),
    ("hf:org/other", "hf:org/other is not in the cache"),
    ("hf:org/tiny@v2", "hf:org/tiny@v2 is not in the cache"),
    ("hf:org/pickles", "hf:org/pickles has no weights in safetensors, and dtgpt reads no pickles"),
])  # fmt: skip
def test_other_names_are_refused_in_a_sentence(cache, tmp_path, name, told, capsys):
    (tmp_path / "pickles").mkdir()
    for file in ("config.json", "pytorch_model.bin"):
        (tmp_path / "pickles" / file).write_text("{}")
    keep(cache, tmp_path / "pickles", "org/pickles")
    keep(cache, tmp_path / "pickles")
    assert command("convert", name, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_what_is_missing_is_told_before_anything_is_read(monkeypatch, tmp_path, cache, capsys):
    monkeypatch.setattr(names, "find_spec", lambda name: None)
    for words in (["hf:org/tiny", tmp_path / "out"], ["no", tmp_path / "out", "--to", "hf", "--push", "org/mine"]):
        assert command("convert", *words) == 2
        assert "needs the package huggingface_hub; run pip install 'dtgpt[hub]'" in capsys.readouterr().err
    monkeypatch.setattr(names, "find_spec", find_spec)
    pushes = {"mine": "write --push ORG/NAME", "org/mine": "HF_HUB_OFFLINE is set; unset it, or leave --push out"}
    for name, told in pushes.items():
        assert command("convert", "no", tmp_path / "out", "--to", "hf", "--push", name) == 2
        assert told in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert command("convert", "no", tmp_path / "out", "--to", "hf", "--push", "org/mine") == 2
    assert "push=org/mine needs a login; run hf auth login, or set HF_TOKEN" in capsys.readouterr().err
    assert command("convert", "no", tmp_path / "out", "--push", "org/mine") == 2
    assert "push=org/mine applies to --to hf and --to peft only" in capsys.readouterr().err


@pytest.mark.parametrize("failure", [None, OSError("no route\nto host")])
def test_a_folder_is_sent_to_the_hub(exported, monkeypatch, tmp_path, capsys, failure):
    """By huggingface_hub's own upload_folder; its two messages to the Hub are noted here."""
    made, sent = [], {}

    def create_commit(self, repo_id, operations, **options):
        if failure:
            raise failure
        sent[repo_id] = {each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in operations}
        return huggingface_hub.CommitInfo(
            commit_url=f"https://huggingface.co/{repo_id}/commit/{COMMIT}", commit_message="", commit_description="",
            oid=COMMIT,
        )  # fmt: skip

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    monkeypatch.setattr("huggingface_hub.hf_api.is_xet_available", lambda: False)  # else it sends more messages
    monkeypatch.setattr(
        huggingface_hub.HfApi, "create_repo", lambda self, name, **options: made.append((name, options))
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    target = tmp_path / "again"
    code = command("convert", exported, target, "--to", "hf", "--push", "org/mine")
    out, error = capsys.readouterr()
    assert made == [("org/mine", {"private": True, "exist_ok": True})] and target.is_dir()
    if failure:
        told = f"could not be sent to org/mine (no route); send it later: hf upload org/mine {target}"
        assert code == 2 and told in error
    else:
        assert code == 0 and sent == {"org/mine": {file.name: file.read_bytes() for file in target.iterdir()}}
        assert "sent to https://huggingface.co/org/mine" in out

"""The words of `dtgpt prepare` and `dtgpt tokenizer`, merging, training a tokenizer, and progress."""

import os
import signal
import subprocess
import sys

import pytest

from dtgpt.data.megatron.indexed import IndexedDataset
from dtgpt.data.prepare.command import SignalsAsExit
from dtgpt.data.prepare.command import command as prepare_command
from dtgpt.data.prepare.job import PrepareConfig
from dtgpt.data.prepare.progress import Progress
from dtgpt.data.prepare.tokenizer_command import command as tokenizer_command
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.util.errors import UserError
from tests.support.prepared import leftovers, run, words_of, write_lines
from tests.support.vocabularies import tokenizer_json


def test_merge_joins_datasets_in_order(tmp_path, capsys):
    for name, text in (("a", "one"), ("b", "two")):
        run(tmp_path, [{"text": text}, {"text": ""}], output_prefix=str(tmp_path / name))
    prefixes = [str(tmp_path / f"{name}_text_document") for name in "ab"]
    assert prepare_command(["--merge", *prefixes, "--output-prefix", str(tmp_path / "out")]) == 0
    dataset = IndexedDataset(tmp_path / "out")
    assert words_of(dataset) == ["one", "two"] and dataset.documents.tolist() == [0, 1, 1, 2, 2]
    assert "2 datasets joined" in capsys.readouterr().out
    with pytest.raises(UserError, match="exists already"):
        prepare_command(["--merge", *prefixes, "--output-prefix", str(tmp_path / "out")])
    for named in ("?_text_document", "?_text_document*", "?_text_document.idx"):
        assert prepare_command(["--merge", str(tmp_path / named), "--output-prefix", str(tmp_path / "out"),
                                "--overwrite"]) == 0  # fmt: skip
        assert words_of(IndexedDataset(tmp_path / "out")) == ["one", "two"]
    assert prepare_command(["--merge", f"{prefixes[0]}.bin", "--output-prefix", str(tmp_path / "one")]) == 0
    assert "1 dataset joined" in capsys.readouterr().out
    run(tmp_path, [{"text": "one"}], output_prefix=str(tmp_path / "a[1]"))
    for ending in ("", ".bin", ".idx"):  # a name is a name where it is there, and else a glob
        named = str(tmp_path / f"a[1]_text_document{ending}")
        assert prepare_command(["--merge", named, "--output-prefix", str(tmp_path / f"brackets{ending}")]) == 0


def test_merge_does_not_join_its_own_output(tmp_path):
    for name, text in (("txt1", "one"), ("txt2", "two")):
        run(tmp_path, [{"text": text}], output_prefix=str(tmp_path / name))
    words = ["--output-prefix", str(tmp_path / "txtall"), "--overwrite"]
    (tmp_path / "link").symlink_to(tmp_path)
    for _ in range(2):
        assert prepare_command(["--merge", str(tmp_path / "link" / "txt*"), *words]) == 0
        assert words_of(IndexedDataset(tmp_path / "txtall")) == ["one", "two"]
    for named in ("txtall", "txtall.bin"):
        with pytest.raises(UserError, match=f"--merge .*{named} is the output itself; leave it out"):
            prepare_command(["--merge", str(tmp_path / "txt1_text_document"), str(tmp_path / named), *words])
    with pytest.raises(UserError, match=r"no dataset matches --merge .*all\* beside the output"):
        prepare_command(["--merge", str(tmp_path / "*all*"), *words])
    assert words_of(IndexedDataset(tmp_path / "txtall")) == ["one", "two"]


def test_a_command_line_of_megatron_is_understood():
    words = (
        "--input a.jsonl b.jsonl --json-keys text title --output-prefix out --append-eod --workers 2 --vocab-file v "
        "--merge-file m --tokenizer-type GPT2BPETokenizer --log-interval 100 --tokenizer-model x"
    )
    assert prepare_command.read(words.split())[1] == PrepareConfig(
        input=("a.jsonl", "b.jsonl"), json_keys=("text", "title"), output_prefix="out", append_eod=True, workers=2,
        vocab_file="v", merge_file="m", tokenizer_type="GPT2BPETokenizer", log_interval=100, tokenizer="x",
    )  # fmt: skip


@pytest.mark.parametrize("words, changes", [
    ("a b --strict c", {"input": ("a", "b", "c"), "strict": True}),
    ("--append-eod off a --workers 3 b", {"input": ("a", "b"), "append_eod": False, "workers": 3}),
    ("--append_eod=on - --json-keys=x", {"input": ("-",), "append_eod": True, "json_keys": ("x",)}),
    ("--strict --append-eod", {"strict": True, "append_eod": True})
])  # fmt: skip
def test_flags_and_inputs_stand_where_they_like(words, changes):
    assert prepare_command.read(words.split())[1] == PrepareConfig(**changes)


@pytest.mark.parametrize(
    "words, message",
    [
        ("a.jsonl", "needs a name; give --output-prefix"),
        ("--output-prefix out", "give either inputs"),
        ("a --merge b --output-prefix out", "give either inputs"),
        ("a --output-prefix out --workers -1", "--workers=-1 is out of range; use 0 or more and at most 1024"),
        ("a --output-prefix out --workers many", "--workers many is not a whole number"),
        ("a --output-prefix out --json-keys", "--json-keys needs at least one word"),
        ("a --output-prefix out --json-keys x x", "each key once"),
        ("a --output-prefix out --append-oed", "did you mean --append-eod"),
        (
            "a.jsonl --output-prefix out --tokenizer-type Llama2Tokenizer",
            "needs a SentencePiece .model on this",
        ),
        (
            "a.jsonl --output-prefix out --tokenizer bytes --prepend-bos",
            "does not have the token of --prepend-bos; leave it out",
        ),
        ("a.jsonl --output-prefix out --append-eod yes", "--append-eod yes is not a choice; use on or off"),
        ("a.jsonl --output-prefix out --partitions 2", "--partitions of Megatron-LM does not exist here: one command"),
        ("a.jsonl --output-prefix out --max_documents=2", "--max-documents of Megatron-LM .* head -n"),
        ("a.jsonl --output-prefix out --tokenizer-type NullTokenizer", "NullTokenizer of Megatron-LM does not exist"),
        ("a.jsonl --output-prefix out --tokenizer-type=TikTokenizer", "--tokenizer cl100k_base"),
        (
            "a.jsonl --output-prefix out --tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2",
            "HuggingFaceTokenizer needs a tokenizer.json on this machine, which gpt2 is not; .*nothing is fetched",
        ),
        (
            "a.jsonl --output-prefix out --tokenizer-type SentencePieceTokenizer --tokenizer-model t.json",
            "needs a SentencePiece .model on this machine, which t.json is not",
        ),
        (
            "a.jsonl --output-prefix out --tokenizer-type HuggingFaceTokenizer --tokenizer-model t.model",
            "needs a tokenizer.json on this machine, which t.model is not",
        ),
        ("a.jsonl --output-prefix out --tokenizer-type GPT2BPETokenizer --tokenizer t.json", "needs --vocab-file and"),
        (
            "a.jsonl --output-prefix out --tokenizer t.json --vocab-file v --merge-file m",
            "are both given",
        ),
        ("--merge a --output-prefix out --append-eod", "--append-eod has no effect with --merge"),
        ("--merge a --output-prefix out --strict", "--strict has no effect with --merge"),
        ("--merge a --output-prefix out --vocab-file v", "--vocab-file has no effect with --merge"),
        ("--merge none* --output-prefix out", r"no dataset matches --merge none\*"),
        ("a.jsonl --output-prefix out --txt line", "--txt line is for texts, and no input is one"),
        ("a.jsonl --output-prefix out --broken t.json", "--broken t.json exists already"),
        ("a.jsonl --output-prefix out --broken ./a.jsonl --overwrite", "--broken a.jsonl is a file that is read"),
        ("a.jsonl --output-prefix out --tokenizer t.json --broken t.json --overwrite", "t.json is a file that is read"),
        ("a.jsonl --output-prefix out --broken out_text_document.idx", "idx is a file of the dataset that is written"),
    ],
)
def test_wrong_words_are_refused_in_one_sentence(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "t.model").write_text("x")
    with pytest.raises(UserError, match=message):
        prepare_command(words.split())
    assert leftovers(tmp_path) == []


def test_under_nohup_a_closed_terminal_ends_nothing():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalsAsExit():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGHUP, former)


def test_help_names_every_option(capsys):
    assert prepare_command(["--help"]) == tokenizer_command(["-h"]) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("--json-keys TEXT ...", "--append-eod", "--merge TEXT ...", "--vocab-size"))
    assert tokenizer_command(["-h"]) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("--json-keys TEXT ...", ".jsonl", "--output "))


def test_a_tokenizer_trained_on_own_text_prepares_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [{"text": f"number {i} of many numbers"} for i in range(300)])
    assert tokenizer_command(["train", "in.jsonl", "--vocab-size", "300", "--output", "own.json"]) == 0
    assert open_tokenizer("own.json").vocab_size == 300
    words = ["in.jsonl", "--tokenizer", "own.json", "--output-prefix", "out", "--workers", "1", "--append-eod"]
    assert prepare_command(words) == 0
    assert "300 documents" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"own\.json exists already"):
        tokenizer_command(["train", "in.jsonl", "--output", "own.json"])
    for words, message in (
        ("train in.jsonl --vocab-size 9", "out of range"), ("train", "needs INPUT"), ("learn x", "no command 'learn'"),
        ("train empty.txt", "holds no text"),
        ("train in.jsonl --output in.jsonl --overwrite", "--output in.jsonl is a file that is read"),
    ):  # fmt: skip
        (tmp_path / "empty.txt").write_text("")
        with pytest.raises(UserError, match=message):
            tokenizer_command(words.split())


@pytest.mark.parametrize("words, message", [
    ("--vocab-size 256", r"--vocab-size=256 is out of range; use 257 or more and at most 16777215$"),
    ("--vocab-size 16777216", "--vocab-size=16777216 is out of range; use 257 or more and at most 16777215$"),
    ("--json-keys a b", "a text has no keys a b; give one"),
    ("--output folder --overwrite", "--output folder is a folder; give another --output, such as a file in it"),
    ("--output a.txt/x/own.json", "own.json would lie in a file, not in a folder; give another --output$")
])  # fmt: skip
def test_a_training_that_cannot_succeed_is_refused_before_it_starts(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dtgpt.data.prepare.tokenizer_command.make_tokenizer", lambda *_: pytest.fail("trained"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=message):
        tokenizer_command(["train", "a.txt", *words.split()])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "folder"]


def test_a_training_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs the package tokenizers, which is missing; run pip install"):
        tokenizer_command(["train", str(tmp_path / "a.txt"), "--output", str(tmp_path / "new" / "own.json")])
    assert not (tmp_path / "new").exists()


def test_progress_tells_rates_and_what_is_left(monkeypatch, capsys):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr("dtgpt.data.prepare.progress.time.monotonic", lambda: next(clock))
    progress = Progress(total=100)
    progress.update(1000, 40_000_000, 25)
    told = capsys.readouterr().err
    assert "25%" in told and "1,000 documents  50 documents/s  2.0 MB/s  eta 1m 00s" in told
    progress = Progress(total=None, every=1000)
    for documents in (999, 1000, 1001, 2500):
        progress.update(documents, 1, 0)
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["1,000", "2,500"]


def test_a_preparation_loads_nothing_that_trains(tmp_path):
    """All formats of tokenizers are asked, and so imported: one of them brought torch, and seconds."""
    (tmp_path / "a.txt").write_text("a text\n" * 9)
    words = ["a.txt", "--output-prefix", "mine", "--tokenizer", str(tokenizer_json(tmp_path)), "--workers", "1"]
    script = (
        "import sys; from dtgpt.data.prepare.command import command; command(sys.argv[1:]); "
        "print('LOADED', *({'torch', 'transformers', 'datasets', 'huggingface_hub'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["LOADED"]

import errno
import fcntl
import gzip
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

from dtgpt.config.sections import DataConfig
from dtgpt.data.cached.folders import load_or_make
from dtgpt.data.dataset import Dataset, held_out_batches, load_dataset, training_batch
from dtgpt.data.library_tokenizers.byte_level import PATTERN
from dtgpt.data.open import check_data
from dtgpt.data.prepare.inputs import find_sources
from dtgpt.data.text import read_documents, split_documents
from dtgpt.data.tokenizers.open import make_tokenizer, read_saved
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.util.errors import UserError
from tests.support.disks import files_of_at_most

UNICODE = "Grüße, 世界! 🎈👩‍👩‍👧 \u2028 zero\x00byte\r\n\ttabs   spaces <|endoftext|> '’ don't\n\n\n"
KEY = fold(root_key(1), "data")


def load(path, tmp_path, **changes) -> Dataset:
    settings = {"tokenizer": "bpe", "bpe_vocab_size": 300, "held_out": 0.1, **changes}
    return load_dataset(DataConfig(path=str(path) if path else None, **settings), tmp_path / "cache")


def test_the_embedded_text_is_real_and_repeats_no_paragraph():
    documents = read_documents(None, "text")
    assert 300_000 < sum(map(len, documents)) < 600_000
    paragraphs = [p.strip() for d in documents for p in d.split("\n\n") if p.strip()]
    assert len(paragraphs) == len(set(paragraphs))


def test_a_jsonl_file_is_one_document_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"text": UNICODE}, {"text": " "}, {"text": "b", "url": "x"}]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines) + "\n", encoding="utf-8")
    assert read_documents(str(path), "text") == [UNICODE, "b"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_txt_file_is_one_document_kept_as_it_is(tmp_path, mark):
    path = tmp_path / "a.txt"
    path.write_bytes(mark + UNICODE.encode())
    assert read_documents(str(path), "text") == [UNICODE]


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a \\ud83d b \\ud83c\\udf88"}\n')
    assert read_documents(str(path), "text") == ["a \ufffd b 🎈"]


def zero_half(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def flip(place):
    def damage(path):
        content = bytearray(path.read_bytes())
        content[round(place * (len(content) - 1))] ^= 4
        path.write_bytes(content)

    return damage


DAMAGE = {
    "half zero": zero_half,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: path.write_bytes(b""),
    "lost": lambda path: path.unlink(),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    **{f"flipped {place}": flip(place) for place in (0.0, 0.01, 0.3, 0.7, 1.0)},
}


@pytest.mark.slow(2)
@pytest.mark.parametrize("name", ["tokenizer.json", "train.npy", "valid.npy", "contents.json"])
def test_a_damaged_cache_of_a_text_is_made_again(tmp_path, text, name, capsys):
    """Whatever the disk lost: the same tokens, and a line that says so. What is made again is damaged next."""
    before = load(text, tmp_path)
    train, valid = before.train[:], before.valid[:]
    (folder,) = (tmp_path / "cache").iterdir()
    content = (folder / name).read_bytes()
    for damage, harm in DAMAGE.items():
        harm(folder / name)
        for told in (True, False):
            after = load(text, tmp_path)
            assert (f"{folder} is damaged (" in capsys.readouterr().err) == told, damage
            assert after.digest == before.digest and np.array_equal(after.train, train), damage
            assert np.array_equal(after.valid, valid) and after.tokenizer.ranks == before.tokenizer.ranks
        assert list((tmp_path / "cache").iterdir()) == [folder] and (folder / name).read_bytes() == content, damage


def test_the_digest_of_a_text_is_that_of_its_tokens(tmp_path, text, monkeypatch):
    """Another tokenizer of the same name, or one token that differs, is told at a resume and between nodes."""
    found = [load(text, tmp_path).digest]
    for part in ("train", "valid"):

        def make(*_, part=part):
            tokens = {"train": np.arange(400, dtype=np.uint16) % 256, "valid": np.arange(50, dtype=np.uint16)}
            tokens[part][7] += 1
            return load_or_make(tmp_path / f"text-{part}", "x", lambda: tokens)

        original = json.dumps(make_tokenizer("bytes", [], 0).to_json())
        (tmp_path / "tokenizer.json").write_text(original)
        with monkeypatch.context() as patch:
            patch.setattr("dtgpt.data.cached.text.load_or_make", make)
            patch.setattr("dtgpt.data.cached.text.read_saved", lambda *_, **__: make_tokenizer("bytes", [], 0))
            found.append(load(text, tmp_path).digest)
    assert len(set(found)) == 3


FILLER = """
import sys, time
from pathlib import Path
import numpy as np
from dtgpt.data.cached import folders as cache
real = np.save
def slow(*arguments, **options):
    real(*arguments, **options)
    print("half", flush=True)
    sys.stdin.readline()
cache.np.save = slow
cache.load_or_make(Path(sys.argv[1]), "the tokens", lambda: {"a": np.arange(9), "b": np.arange(8)})
"""


@pytest.fixture
def filler(tmp_path):
    """A process that has written one of two arrays of text-aa, and waits for a line."""
    words = [sys.executable, "-c", FILLER, tmp_path / "cache" / "text-aa"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half\n"
        yield process
        process.kill()


def test_what_killed_fillers_left_is_removed(tmp_path, text, filler):
    """By whoever fills the cache next, with whatever."""
    cache = tmp_path / "cache"
    filler.kill()
    filler.wait()
    assert [path.name for path in cache.glob(".text-aa.*.new")]
    load(text, tmp_path)
    assert [path.name[:5] for path in cache.iterdir()] == ["text-"]


def test_what_a_living_filler_writes_is_left_alone(tmp_path, text, filler):
    cache = tmp_path / "cache"
    (partial,) = cache.glob(".text-aa.*.new")
    load(text, tmp_path)
    assert partial.is_dir()
    filler.communicate("\n\n", timeout=120)
    assert filler.returncode == 0 and sorted(path.name[:5] for path in cache.iterdir()) == ["text-", "text-"]


def test_two_processes_that_fill_at_once_both_succeed(tmp_path, filler):
    """The second waits, and takes what the first has made."""
    with ThreadPoolExecutor() as pool:
        folder = tmp_path / "cache" / "text-aa"
        second = pool.submit(load_or_make, folder, "the tokens", lambda: pytest.fail("made twice"))
        time.sleep(0.2)
        assert not second.done()
        filler.communicate("\n\n", timeout=120)
        assert second.result(timeout=120)["b"][:].tolist() == list(range(8)) and filler.returncode == 0
    assert [path.name for path in folder.parent.iterdir()] == ["text-aa"]


def test_without_locks_two_processes_may_fill_at_once(tmp_path, filler, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = tmp_path / "cache" / "text-aa"
    mine = load_or_make(folder, "the tokens", lambda: {"a": np.arange(9), "b": np.arange(8)})
    filler.communicate("\n\n", timeout=120)
    assert filler.returncode == 0 and mine["b"][:].tolist() == list(range(8))
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["text-aa"]


@pytest.mark.parametrize("name, content, words", [
    ("missing.txt", None, ["missing.txt does not exist", "leave data.path out"]),
    ("a.pdf", b"x", ["a.pdf", ".txt or .jsonl"]), ("empty.txt", b"", ["empty.txt holds no text"]),
    ("blank.txt", b" \n\n", ["holds no text"]),
    ("latin.txt", "caf\xe9".encode("latin-1"), ["not UTF-8 (byte 4 of the file)", "iconv -f ENCODING -t UTF-8"]),
    ("a.jsonl", b'{"text": "x"}\n{"text": \n', ["line 2", "not JSON"]),
    ("b.jsonl", b'{"content": "x"}\n', ["line 1", "'text'", "--data.json_key"]),
    ("c.jsonl", b'["text"]\n', ["line 1", "a JSON array"]), ("d.jsonl", b"", ["holds no text"])
])  # fmt: skip
def test_text_that_cannot_be_read_is_refused_in_one_sentence(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read_documents(str(tmp_path / name), "text")
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("held_out", [0.0, 0.01, 0.3, 0.5, 0.99])
@pytest.mark.parametrize("documents", [["one line\n" * 50], ["a\n" * 9, "b" * 40, "c\nd\n" * 30, "e"]])
def test_splitting_loses_no_text_and_keeps_its_order(documents, held_out):
    train, valid = split_documents(documents, held_out)
    assert "".join(train + valid) == "".join(documents)
    share = sum(map(len, valid)) / sum(map(len, documents))
    assert share <= held_out + 0.02 and share >= held_out - 0.1


@pytest.mark.parametrize("kind, size", [("bytes", 257), ("bpe", 300)])
def test_any_text_survives_a_tokenizer_and_its_file(tmp_path, kind, size):
    tokenizer = make_tokenizer(kind, ["some text to learn merges from, some more text\n" * 20, UNICODE], 300)
    assert tokenizer.vocab_size == size or (kind == "bpe" and tokenizer.vocab_size <= 300)
    tokenizer.save(tmp_path / "t.json")
    again = read_saved(tmp_path / "t.json", "")
    ids = tokenizer.encode(UNICODE)
    assert again.decode(ids) == UNICODE and again.encode(UNICODE) == ids
    assert tokenizer.end_of_text not in ids  # the special token's spelling inside a text is text
    assert tokenizer.token_bytes()[ids].sum() == len(UNICODE.encode())
    array = tokenizer.encode_documents([UNICODE, "b"])
    assert list(array) == [*ids, tokenizer.end_of_text, *tokenizer.encode("b"), tokenizer.end_of_text]
    assert array.dtype == np.uint16


def test_ids_of_a_trained_bpe_are_those_of_the_library_that_trained_it():
    from tokenizers import Tokenizer as Trainable
    from tokenizers import models, pre_tokenizers, trainers

    documents = read_documents(None, "text")[:20]
    theirs = Trainable(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=599, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator(documents, trainer)
    ours = make_tokenizer("bpe", documents, 600)
    assert ours.vocab_size == 600
    for text in (*documents[:5], UNICODE):
        assert ours.encode(text) == theirs.encode(text).ids


def test_one_endless_word_does_not_hold_up_the_training_of_a_bpe():
    text = "some words " * 200 + "a" * 300_000 + " " * 300_000 + "some words " * 200
    begin = time.monotonic()
    tokenizer = make_tokenizer("bpe", [text], 300)
    assert time.monotonic() - begin < 20
    assert tokenizer.decode(tokenizer.encode(text[:5000])) == text[:5000]


def test_gpt2_takes_the_ranks_of_tiktoken(monkeypatch):
    ranks = {bytes([b]): b for b in range(256)} | {b"th": 256, b"the": 257}
    small = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"gpt2": small}[name])
    tokenizer = make_tokenizer("gpt2", [], 0)
    assert tokenizer.encode("the end") == small.encode_ordinary("the end") and tokenizer.end_of_text == 258


def test_gpt2_without_cache_and_network_says_what_to_do(monkeypatch):
    def offline(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(
        UserError, match=r"could not be fetched \(ConnectionError\).*TIKTOKEN_CACHE_DIR.*another tokenizer"
    ):
        make_tokenizer("gpt2", [], 0)


def test_a_bpe_too_small_for_the_bytes_is_refused():
    with pytest.raises(UserError, match=r"bpe_vocab_size=256 is too small.*257"):
        make_tokenizer("bpe", ["x"], 256)


def test_tokens_are_made_once_per_content_and_settings(tmp_path, text):
    first = load(text, tmp_path)
    folders = sorted((tmp_path / "cache").iterdir())
    stamps = [f.stat().st_mtime_ns for f in folders[0].iterdir()]
    again = load(text, tmp_path)
    assert sorted((tmp_path / "cache").iterdir()) == folders and first.digest == again.digest
    assert [f.stat().st_mtime_ns for f in folders[0].iterdir()] == stamps
    assert load(text, tmp_path, held_out=0.2).digest != first.digest
    text.write_text(text.read_text() + "more")
    assert load(text, tmp_path).digest != first.digest


def test_an_interrupted_preparation_leaves_nothing_that_looks_whole(tmp_path, text, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(UserError, match=r"cannot be cached in .*No space left.*DTGPT_CACHE"):
        load(text, tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_under_the_cache_is_told_as_such(tmp_path):
    """numpy reports it without its number, where the array is larger than the buffer of a file."""
    told = r"cannot be cached in .*written\); free space there, or set"
    with files_of_at_most(20_000), pytest.raises(UserError, match=told):
        load_or_make(tmp_path / "cache" / "text-aa", "the tokens", lambda: {"train": np.zeros(100_000)})
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_names_of_special_tokens_in_a_text_are_told(tmp_path, capsys, tokenizer):
    (tmp_path / "t.txt").write_text("a<|endoftext|>b" * 30)
    load(tmp_path / "t.txt", tmp_path, tokenizer=tokenizer, bpe_vocab_size=300)
    assert "30 names of special tokens" in capsys.readouterr().err


def test_a_sample_is_a_function_of_its_id_alone():
    tokens = np.arange(1000, dtype=np.uint16)
    whole = training_batch(tokens, KEY, torch.arange(64), 16)
    assert whole.shape == (64, 17) and whole.dtype == torch.int64
    assert torch.equal(training_batch(tokens, KEY, torch.tensor([41, 7]), 16), whole[[41, 7]])
    assert (whole[:, 1:] - whole[:, :-1] == 1).all()  # windows are cut, never joined
    assert not torch.equal(training_batch(tokens, fold(root_key(2), "data"), torch.arange(64), 16), whole)


def test_samples_cover_the_text_evenly():
    tokens = np.arange(132, dtype=np.uint16)
    starts = training_batch(tokens, KEY, torch.arange(32_000), 32)[:, 0].numpy()
    counts = np.bincount(starts, minlength=100)
    assert len(counts) == 100 and abs(counts - 320).max() < 5 * 320**0.5


@pytest.mark.parametrize("batch_size", [1, 4, 5, 12, 64])
def test_held_out_windows_lie_side_by_side_under_any_batch_size(batch_size):
    tokens = np.arange(100, dtype=np.uint16)
    batches = list(held_out_batches(tokens, 8, batch_size, 512))
    assert torch.cat(batches)[:, 0].tolist() == list(range(0, 96, 8))
    assert all(b.shape == (batch_size, 9) for b in batches[:-1])
    assert len(torch.cat(list(held_out_batches(tokens, 8, batch_size, 7)))) == 7
    assert list(held_out_batches(tokens[:0], 8, batch_size, 512)) == []


@pytest.mark.parametrize("seq_length, vocab_size, words", [
    (10_000, 300, ["training text has", "seq_length=10000", "10001"]),
    (700, 300, ["validation text has", "--data.held_out"]),
    (16, 200, ["model.vocab_size=200", "300", "--data.tokenizer"])
])  # fmt: skip
def test_a_model_that_does_not_fit_the_text_is_refused(tmp_path, text, seq_length, vocab_size, words):
    with pytest.raises(UserError) as error:
        load(text, tmp_path).check(seq_length, vocab_size)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(("record", "kind"), [
    ({"messages": []}, "chat"), ({"conversations": []}, "chat"), ({"prompt": "a", "completion": "b"}, "chat"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences"), ({"chosen": [], "rejected": []}, "preferences")
])  # fmt: skip
def test_chats_name_the_command_that_prepares_them(tmp_path, monkeypatch, record, kind):
    monkeypatch.chdir(tmp_path)
    Path("my chats.jsonl").write_text(json.dumps(record) + "\n")
    for model, folder in ((None, "FOLDER"), (Path("llama"), "llama")):
        words = f"dtgpt prepare 'my chats.jsonl' --{kind} --tokenizer {folder} --output-prefix 'my chats'"
        with pytest.raises(UserError, match=re.escape(words)):
            check_data(DataConfig(path="my chats.jsonl", tokenizer="bytes"), 257, model)
    Path("my chats.jsonl").write_text(json.dumps(record | {"text": "x"}) + "\n")
    check_data(DataConfig(path="my chats.jsonl", tokenizer="bytes"), 257)


@pytest.mark.parametrize(("name", "content"), [
    ("a b.csv", 'text,n\n"x, y",1\n'), ("t.tsv", "text\tn\nx, y\t1\n"), ("c d.CSV.gz", 'text,n\n"x, y",1\n'),
])  # fmt: skip
def test_a_table_comes_with_the_lines_that_make_json_lines_of_it(tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    write = gzip.compress if name.endswith(".gz") else bytes
    Path(name).write_bytes(write(content.encode()))
    for check in (lambda: check_data(DataConfig(path=name, tokenizer="bytes"), 257), lambda: find_sources([name])):
        with pytest.raises(UserError, match="is a table, which is not read") as error:
            check()
    _, _, command = str(error.value).partition("\n")
    command = command.replace("python", sys.executable, 1)
    subprocess.run(["bash", "-c", command], check=True)
    assert read_documents(f"{name.partition('.')[0]}.jsonl", "text") == ["x, y"]

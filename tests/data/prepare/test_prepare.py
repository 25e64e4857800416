"""`dtgpt prepare`: Megatron-LM's bytes, whatever the workers; and nothing half written, whatever happens."""

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtgpt.data.library_tokenizers.base import SpecialNames
from dtgpt.data.library_tokenizers.byte_level import PATTERN, ByteLevel
from dtgpt.data.megatron.indexed import IndexedDataset, IndexedWriter
from dtgpt.data.prepare import job
from dtgpt.data.prepare.job import PrepareConfig, prepare
from dtgpt.data.prepare.pool import ordered_map
from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.util.errors import UserError
from tests.support.prepared import leftovers, run, words_of
from tests.support.vocabularies import DATA, cut_by_pattern, gpt2_files, sentencepiece_model

pytestmark = pytest.mark.slow(9)

EXPECTED = json.loads((DATA / "preprocess" / "expected.json").read_text())
RUN = "import sys; from dtgpt.data.prepare.command import command; sys.exit(command(sys.argv[1:]))"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    vocab, merges = gpt2_files(tmp_path_factory.mktemp("gpt2"))
    return {"vocab_file": str(vocab), "merge_file": str(merges)}


@pytest.mark.parametrize("expected, workers", list(zip(EXPECTED["runs"], (1, 2), strict=True)))
def test_the_bytes_are_those_of_megatron(tmp_path, gpt2, expected, workers):
    config = PrepareConfig(
        input=(str(DATA / "preprocess" / "docs.jsonl"),), output_prefix=str(tmp_path / "deep" / "out"), **gpt2,
        append_eod=expected["append_eod"], workers=workers,
    )  # fmt: skip
    summary = prepare(config)
    for suffix in ("bin", "idx"):
        written = (tmp_path / "deep" / f"out_text_document.{suffix}").read_bytes()
        assert hashlib.sha256(written).hexdigest() == expected[f"{suffix}_sha256"]
    assert (summary.tokens, summary.documents, summary.sequences) == tuple(
        expected[name] for name in ("tokens", "documents", "sequences")
    )
    assert (summary.empty, summary.broken, summary.longest) == (1, 0, max(expected["sequence_lengths"]))
    assert len(os.listdir(tmp_path / "deep")) == 3


def test_the_order_of_the_inputs_is_kept_by_any_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("dtgpt.data.prepare.documents.BLOCK", 5000)
    rng = random.Random(1)
    documents = [{"text": f"{i}:" + "ä🙂x"[i % 3] * rng.randrange(2000)} for i in range(600)]
    expected = [d["text"] for d in documents]
    for workers in (1, 3):
        _, dataset = run(tmp_path, documents, workers=workers)
        assert words_of(dataset) == expected


def test_lists_empty_texts_and_ends(tmp_path):
    documents = [{"text": ["a", "", "bc"]}, {"text": ""}, {"text": []}, {"text": "d"}]
    summary, dataset = run(tmp_path, documents, append_eod=True)
    assert [dataset.window(i).tolist() for i in range(3)] == [[97], [98, 99, 256], [100, 256]]
    assert dataset.documents.tolist() == [0, 2, 2, 2, 3]
    assert (summary.empty, summary.longest, summary.tokens, summary.text_tokens, summary.text_bytes) == (2, 4, 6, 4, 4)
    assert "4 documents (2 empty, 0 broken lines left out), 6 tokens, 1.00 bytes per token" in str(summary)


def test_the_literal_end_of_text_is_text_unless_asked_for(tmp_path):
    documents = [{"text": "a<|endoftext|>"}]
    ids = [run(tmp_path, documents, encode_special=on)[1].window(0).tolist() for on in (False, True)]
    assert ids == [[*b"a<|endoftext|>"], [97, 256]]


CHATS = [{"text": f"<|im_start|>user\nnumber {i}<|im_end|>\n<|im_start|>you\nthe fox<|im_end|>"} for i in range(50)]


@pytest.mark.parametrize("kind, workers", [("tokenizer.json", 2), ("ranks", 1)])
def test_names_of_special_tokens_that_become_text_are_counted(tmp_path, capsys, kind, workers):
    chats, options, each = CHATS, {"tokenizer": str(tmp_path)}, 4
    if kind == "tokenizer.json":
        cut_by_pattern(tmp_path, "qwen3")
    else:
        chats, each = [{"text": "once<|endoftext|>twice"}] * 50, 1
        options = {"tokenizer": str(tmp_path / "t.json")}
        make_tokenizer("bytes", [], 0).save(tmp_path / "t.json")
    split = run(tmp_path, chats, workers=workers, **options)[0]
    told = capsys.readouterr().err
    assert f"the texts have {50 * each} names of special tokens" in told and "give --encode-special" in told
    assert ("<|im_start|>: 100, <|im_end|>: 100)" if each == 4 else "(<|endoftext|>: 50)") in told
    kept = run(tmp_path, chats, workers=workers, encode_special=True, overwrite=True, **options)[0]
    assert "special" not in capsys.readouterr().err and kept.tokens < split.tokens - 50 * each


def test_names_that_are_no_special_tokens_are_text_without_a_word(tmp_path, capsys):
    run(tmp_path, [*CHATS, {"text": "a < b <| c <|endof text|> <s>"}])
    assert "special" not in capsys.readouterr().err


def test_a_name_within_another_counts_once(tmp_path):
    ids = {"<|a|>": 256, "<|a|>b": 257, "</s>": 258}
    counter = SpecialNames(ByteLevel("t", PATTERN, [bytes([b]) for b in range(256)], ids))
    assert counter.count(["x<|a|>b<|a|>", "", "</s></s>", "<|"]) == {"<|a|>b": 1, "<|a|>": 1, "</s>": 2}


def test_control_symbols_of_sentencepiece_are_counted_too(tmp_path, capsys):
    sentencepiece_model(tmp_path)
    run(tmp_path, [{"text": "the fox</s>"}], tokenizer=str(tmp_path / "sp.model"))
    assert "(</s>: 1)" in capsys.readouterr().err


def test_each_key_makes_a_dataset(tmp_path):
    summary, dataset = run(tmp_path, [{"a": "x", "b": ["y", "z"]}, {"a": "", "b": ""}], json_keys=("a", "b"))
    assert words_of(dataset) == ["x"] and words_of(IndexedDataset(tmp_path / "out_b_document")) == ["y", "z"]
    assert (summary.documents, summary.empty, summary.longest) == (2, 1, 3)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="a text has no keys a b"):
        prepare(PrepareConfig(input=(str(tmp_path / "a.txt"),), json_keys=("a", "b"), output_prefix="x"))


def test_broken_lines_are_warned_of_and_left_out(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n' + '{"no": 1}\n' * 30 + '{"text": "b"}\n')
    config = PrepareConfig(input=(str(path),), output_prefix=str(tmp_path / "out"), tokenizer="bytes", workers=2)
    assert prepare(config).broken == 31
    assert words_of(IndexedDataset(tmp_path / "out_text_document")) == ["a", "b"]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 22 and f"{path}, line 2: not JSON" in warnings[0] and "counted" in warnings[20]
    assert f"{path}: 31 broken lines left out" in warnings[21]


def test_a_list_of_broken_lines_names_a_file_whose_name_is_no_utf8(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")
    Path(path).write_text('{"text": "a"}\nbroken\n')
    listed = tmp_path / "broken"
    prepare(PrepareConfig(input=path, output_prefix=tmp_path / "out", tokenizer="bytes", workers=1, broken=listed))
    assert json.loads(listed.read_text())["source"] == path


def test_strict_stops_at_the_first_broken_line_and_writes_nothing(tmp_path):
    lines = [{"text": "a"}] * 3 + [{"no": 1}] * 2
    with pytest.raises(UserError, match=r"in\.jsonl, line 4: no key 'text'; nothing was written"):
        run(tmp_path, lines, strict=True, workers=2)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("content, words", [
    ("", "is empty, so nothing was written"), ("\n\n", "is empty"),
    ('{"text": ""}\n', "holds no text, only 1 empty document,"),
    ('[{"text": "a"}]\n', "no document that can be read, but 1 broken line .*line 1: a JSON array; dtgpt reads")
])  # fmt: skip
def test_inputs_without_text_are_refused(tmp_path, content, words):
    (tmp_path / "a.jsonl").write_text(content)
    config = PrepareConfig(input=(str(tmp_path / "a.jsonl"),), output_prefix=str(tmp_path / "out"), tokenizer="bytes")
    with pytest.raises(UserError, match=words):
        prepare(config)
    assert leftovers(tmp_path) == []


def test_a_dataset_is_not_replaced_by_mistake_nor_by_a_failure(tmp_path):
    run(tmp_path, [{"text": "old"}])
    with pytest.raises(UserError, match=r"out_text_document\.bin exists already; .*--overwrite"):
        run(tmp_path, [{"text": "new"}], overwrite=False)
    with pytest.raises(UserError, match="no key"):
        run(tmp_path, [{"text": "new"}, {}], strict=True)
    assert words_of(IndexedDataset(tmp_path / "out_text_document")) == ["old"]
    _, dataset = run(tmp_path, [{"text": "new"}])
    assert words_of(dataset) == ["new"] and len(leftovers(tmp_path)) == 3


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    class Full(IndexedWriter):
        def __enter__(self):
            super().__enter__()
            file = self._file

            class Device:
                def write(self, data):
                    raise OSError(errno.ENOSPC, "No space left on device")

                def __getattr__(self, name):
                    return getattr(file, name)

            self._file = Device()
            return self

    monkeypatch.setattr(job, "IndexedWriter", Full)
    with pytest.raises(UserError, match=r"out_text_document\.bin cannot be written \(No space left on device\)"):
        run(tmp_path, [{"text": "a"}], workers=2)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("syncs", range(4))
def test_a_disk_that_is_full_at_the_end_leaves_no_key_without_the_others(tmp_path, monkeypatch, syncs):
    sync, done = os.fsync, []

    def full(file):
        done.append(file)
        if len(done) > syncs:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"out_[ab]_document\.bin cannot be written \(No space left on device\)"):
        run(tmp_path, [{"a": "x", "b": "y"}, {}], json_keys=("a", "b"), broken=str(tmp_path / "out.list"))
    assert leftovers(tmp_path) == [] and len(done) == syncs + 1


def start_slow(tmp_path, workers: int):
    """A preparation in a process group of its own whose input does not end; returns it when it has begun to write."""
    command = [sys.executable, "-c", RUN, "-", "--tokenizer", "bytes", "--workers", str(workers)]
    process = subprocess.Popen(
        [*command, "--output-prefix", str(tmp_path / "out")], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    for _ in range(12):
        process.stdin.write(line * 1000)
        process.stdin.flush()
    for _ in range(200):
        if any((tmp_path / name).stat().st_size for name in leftovers(tmp_path)):
            break
        time.sleep(0.05)
    return process


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_ended_preparation_leaves_no_file_that_looks_finished_and_no_worker(tmp_path, sent):
    process = start_slow(tmp_path, workers=2)
    workers = workers_of(process.pid)
    assert len(workers) == 2 and leftovers(tmp_path)
    process.send_signal(sent)
    process.wait(10)
    process.stdin.close()
    names = leftovers(tmp_path)
    assert not any(name.endswith((".bin", ".idx")) for name in names)
    assert sent == signal.SIGKILL or names == []
    for _ in range(100):
        if all(map(gone, workers)):
            return
        time.sleep(0.05)
    raise AssertionError("a worker outlived its parent")


def workers_of(pid: int) -> list[int]:
    """Return the children of a process, without the one in which multiprocessing tracks resources."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return [child for child in found if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_a_worker_that_is_killed_ends_the_preparation_in_one_sentence(tmp_path):
    process = start_slow(tmp_path, workers=2)
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    with pytest.raises(BrokenPipeError):
        for _ in range(200):
            process.stdin.write(json.dumps({"text": "x" * 100_000}).encode() + b"\n")
            process.stdin.flush()
            time.sleep(0.01)
    error = process.stderr.read().decode()
    process.wait(10)
    assert "a worker process was killed by SIGKILL" in error and "--workers" in error
    assert leftovers(tmp_path) == []


def refuse(block):
    if block == 3:
        raise UserError("three is refused")
    if block == 7:
        raise MemoryError
    return block if block != 5 else 1 // 0


def test_errors_of_a_worker_reach_the_caller():
    with ordered_map(refuse, 2) as results:
        assert list(results([0, 1, 2])) == [0, 1, 2]
        with pytest.raises(UserError, match="three is refused"):
            list(results([1, 3]))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            list(results([1, 5]))


@pytest.mark.parametrize("workers", [1, 2])
def test_memory_that_runs_out_in_a_worker_is_one_sentence(workers):
    with ordered_map(refuse, workers) as results, pytest.raises(UserError, match="memory ran out for a part of the"):
        list(results([7]))


def test_a_script_without_a_guard_is_not_run_again_by_its_workers(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    script = tmp_path / "script.py"
    script.write_text(
        "from dtgpt.data.prepare import PrepareConfig, prepare\n"
        "print('once')\n"
        "prepare(PrepareConfig(input='a.txt', output_prefix='out', tokenizer='bytes', workers=2))\n"
    )
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "once\n" and done.stderr == "" and len(leftovers(tmp_path)) == 3


def test_a_preparation_and_its_workers_start_without_torch():
    code = "import sys, dtgpt.data.prepare.command, dtgpt.data.prepare.pool; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_blocks_are_read_only_a_little_ahead():
    read = []

    def blocks():
        for i in range(100):
            read.append(i)
            yield i * 10

    with ordered_map(refuse, 2) as results:
        for done, _ in enumerate(results(blocks())):
            assert len(read) <= done + 7

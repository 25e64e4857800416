"""Texts in Parquet files: which values are texts, the order among other inputs, and files that are none."""

import datetime
import json
import os
import subprocess
import sys

import pytest

from dtgpt.data.prepare import parquet as reader
from dtgpt.data.prepare.inputs import find_sources, read_blocks
from dtgpt.util.errors import UserError
from tests.data.prepare.test_inputs import read, texts_of

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


pytestmark = pytest.mark.slow(10)


def write(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_bytes_are_texts_where_they_are_utf8(tmp_path):
    values = [b"one", "Grüße".encode(), b"\xff\xfe"]
    path = write(tmp_path / "a.parquet", text=pyarrow.array(values, pyarrow.binary()))
    found, broken = read([path])
    assert found == [{"text": ["one"]}, {"text": ["Grüße"]}]
    assert len(broken) == 1 and "line 3: 'text' holds neither text" in broken[0]


def test_dates_are_no_texts(tmp_path):
    found, broken = read([write(tmp_path / "a.parquet", text=[datetime.date(2024, 1, 1)])])
    assert not found and "neither text nor a list" in broken[0]


def test_values_that_python_cannot_hold_leave_other_rows_and_columns_as_they_are(tmp_path):
    late = pyarrow.array([1, 2**62], pyarrow.timestamp("us"))
    assert texts_of([write(tmp_path / "a.parquet", text=["one", "two"], when=late)]) == ["one", "two"]
    stored = pyarrow.array([b"one", b"\xff"], pyarrow.binary()).buffers()
    path = write(tmp_path / "b.parquet", text=pyarrow.Array.from_buffers(pyarrow.string(), 2, stored))
    found, broken = read([path])
    assert found == [{"text": ["one"]}] and len(broken) == 1


def test_rows_come_in_the_order_of_the_inputs(tmp_path):
    for name in ("a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    path = write(tmp_path / "b.parquet", text=["b"])
    assert texts_of([tmp_path / "a.txt", path, tmp_path / "c.txt"]) == ["a", "b", "c"]


def test_the_input_format_says_that_a_file_is_parquet(tmp_path):
    path = write(tmp_path / "a", text=["one"])
    assert texts_of([path], kind="parquet") == ["one"]
    with pytest.raises(UserError, match="--input-format parquet"):
        texts_of([path], kind="jsonl")


@pytest.mark.parametrize("name, content", [("a.parquet", b'{"text": "one"}'), ("a.parquet.gz", b"\x1f\x8b\x08\0")])
def test_a_file_that_is_no_parquet_is_refused_at_once(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} is not a Parquet file, which begins with PAR1"):
        read([write(tmp_path / "first.parquet", text=["one"]), tmp_path / name])


def test_parquet_from_a_stream_is_refused(tmp_path):
    with pytest.raises(UserError, match="standard input is a stream"):
        read(["-"], kind="parquet")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is a stream"):
        read([tmp_path / "pipe"], kind="parquet")


def repeated(text, rows):
    """Return a column that is stored as one text and `rows` numbers."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array([text]))


def test_texts_that_a_few_bytes_stand_for_are_read_row_by_row(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": repeated("x" * 2_000_000, 1000)})
    parquet.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1000
    done = subprocess.run([sys.executable, "-c", FIVE_ROWS, path], capture_output=True, text=True, check=True)
    rows, own, children = json.loads(done.stdout)  # of a process of its own: memory is that of its largest moment
    assert rows == [1, 2, 3, 4, 5]  # a block of at most a row each
    assert own < 50_000 and children < 600_000  # KiB, of 2 GB


FIVE_ROWS = """
import json, resource, sys
from dtgpt.data.prepare.inputs import find_sources, read_blocks
blocks = read_blocks(find_sources(sys.argv[1:]), ("text",))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = [next(blocks).first for _ in range(5)]
blocks.close()
own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps([rows, own - before, children]))
"""


def test_only_the_columns_that_are_asked_for_are_read(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", other=["x" * 2_000_000] * 3, text=["one", "two", "three"])
    (block,) = read_blocks(find_sources([str(path)]), ("text",))
    assert block.data.splitlines()[0] == b'{"other": null, "text": "one"}'
    assert [len(each.data) > 2_000_000 for each in read_blocks(find_sources([str(path)]), ())] == [True] * 3
    with pytest.raises(UserError, match=r"has the columns 'other', 'text', and none is 'body'; give one of them"):
        list(read_blocks(find_sources([str(path)]), ("body",)))


@pytest.mark.parametrize("what, mebibytes", [("large", 300), ("large", 500), ("nested", 400)])
def test_a_file_that_takes_all_memory_ends_in_a_sentence(tmp_path, monkeypatch, what, mebibytes):
    """Where memory ends within pyarrow, that ends its process."""
    text = {"large": repeated("x" * 30_000_000, 8), "nested": pyarrow.array([[None] * 20_000_000] * 2)}
    path = write(tmp_path / "a.parquet", text=text[what])
    monkeypatch.setattr(reader, "MEMORY", mebibytes << 20)
    with pytest.raises(UserError, match="take more than 0 GiB of memory; write it with smaller ones"):
        list(read_blocks(find_sources([str(path)]), ("text",)))


@pytest.mark.parametrize("program, told", [
    ("import os; os.write(2, b\"of 'std::bad_alloc'\"); os.abort()", "take more than 4 GiB"),
    ("import os; os.abort()", r"ended the process that reads it \(SIGABRT\), as a damaged file does"),
    ("import os; os.kill(os.getpid(), 9)", r"ended the process that reads it \(SIGKILL\)"),
])  # fmt: skip
def test_a_file_that_ends_the_process_which_reads_it_is_told(tmp_path, monkeypatch, program, told):
    path = write(tmp_path / "a.parquet", text=["one"])
    monkeypatch.setattr(reader, "PROGRAM", tmp_path / "rows.py")
    reader.PROGRAM.write_text(program)
    with pytest.raises(UserError, match=told):
        list(read_blocks(find_sources([str(path)]), ("text",)))


@pytest.mark.parametrize("what", ["cut", "hurt"])
def test_a_damaged_file_is_told(tmp_path, what):
    path = write(tmp_path / "a.parquet", text=[f"text {i}" for i in range(9999)])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if what == "cut" else content[:100] + b"\xff" * 500 + content[600:])
    with pytest.raises(UserError, match=r"is not a Parquet file that can be read \(.*\); fetch it again"):
        list(read_blocks(find_sources([str(path)]), ("text",)))

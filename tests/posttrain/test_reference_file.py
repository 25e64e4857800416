"""`reference.bin` of a run folder, as others may have left it: nothing but what was written is taken."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from dtgpt.posttrain.dpo.reference import FILE, read_reference, save_reference
from dtgpt.util.errors import UserError


@pytest.fixture
def data():
    parts = {"train": SimpleNamespace(chats=np.arange(6)), "valid": SimpleNamespace(chats=np.arange(2))}
    return SimpleNamespace(parts=parts, pairs_digest="of these", reference={})


@pytest.fixture
def saved(data, tmp_path):
    data.reference = {"train": -np.arange(6.0), "valid": np.array([-7.5, 1e-9])}
    save_reference(tmp_path, data)
    data.reference = {}
    return tmp_path / FILE


def rewrite(path, change):
    header, _, values = path.read_bytes().partition(b"\n")
    header, values = change(json.loads(header), values)
    path.write_bytes((header if isinstance(header, bytes) else json.dumps(header).encode()) + b"\n" + values)


def test_what_was_written_is_read(data, saved):
    read_reference(saved.parent, data)
    assert data.reference["train"].tolist() == [0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert data.reference["valid"].tolist() == [-7.5, 1e-9]
    rewrite(saved, lambda header, values: ({n: v for n, v in header.items() if n != "sha256"}, values))
    read_reference(saved.parent, data)  # as older versions wrote it
    assert data.reference["valid"].tolist() == [-7.5, 1e-9]


@pytest.mark.parametrize("target", ["/dev/zero", "pipe", "folder"])
def test_only_a_regular_file_is_read(data, saved, target):
    saved.unlink()
    if target == "pipe":
        os.mkfifo(saved)
    else:
        (saved.parent / "folder").mkdir()
        saved.symlink_to(target)
    with pytest.raises(UserError, match=r"before training, cannot be read \(.*not a regular file\); put it back"):
        read_reference(saved.parent, data)


@pytest.mark.parametrize(("change", "words"), [
    (lambda header, values: (header, values + bytes(1 << 17)), r"more than \d+ bytes"),
    (lambda header, values: (b"[" * 60_000, values), "nested too deeply"),
    (lambda header, values: (b'{"answers": ' + b"9" * 4400 + b"}", values), "too many digits"),
    (lambda header, values: ([header], values), "list indices"),
    (
        lambda header, values: (
            {"answers": header["answers"], "pairs": header["pairs"]}, values[:-8] + b"\xff" * 8,
        ),
        "it has no digest, and values that are no log-probabilities",
    ),
    (lambda header, values: (header, b"\xff" * len(values)), "its content was changed"),
])  # fmt: skip
def test_what_was_changed_is_told(data, saved, change, words):
    rewrite(saved, change)
    with pytest.raises(UserError, match=f"cannot be read .*{words}"):
        read_reference(saved.parent, data)

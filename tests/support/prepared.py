"""Preparing a few documents in a test."""

import json

import numpy as np

from dtgpt.data.megatron.indexed import IndexedDataset
from dtgpt.data.prepare.job import PrepareConfig, prepare


def write_lines(path, documents) -> str:
    path.write_text("".join(json.dumps(d) + "\n" for d in documents))
    return str(path)


def run(tmp_path, documents, **options):
    """(summary, dataset) of some documents in bytes, in this process."""
    path = write_lines(tmp_path / "in.jsonl", documents)
    settings = {"workers": 1, "output_prefix": str(tmp_path / "out"), "overwrite": True} | options
    if "vocab_file" not in settings:
        settings.setdefault("tokenizer", "bytes")
    summary = prepare(PrepareConfig(input=(path,), **settings))
    return summary, IndexedDataset(summary.files[0])


def words_of(dataset):
    return [bytes(dataset.window(i).astype(np.uint8)).decode() for i in range(len(dataset))]


def leftovers(folder):
    return sorted(p.name for p in folder.iterdir() if "out" in p.name)

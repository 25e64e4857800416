"""The counts of parameters and the learning rates of docs/known_runs.md."""

from pathlib import Path

import pytest

from dtgpt.config.schedule import Cosine
from dtgpt.models.gpt2 import GPT2_124M, GPT2_345M

PAGE = (Path(__file__).parents[2] / "docs" / "known_runs.md").read_text()


def parameters(model, tp=1, multiple=128):
    """Return the number of parameters of each rank, with the vocabulary padded to this multiple."""
    h = model.hidden_size
    rows = -(-model.vocab_size // multiple) * multiple
    split = 3 * h * h + 3 * h + h * h + 4 * h * h + 4 * h + 4 * h * h  # qkv, attention's output, both of the MLP
    whole = 4 * h + h + h  # two norms, the biases that are added after a sum over ranks
    return rows // tp * h + model.seq_length * h + model.num_layers * (split // tp + whole) + 2 * h


@pytest.mark.parametrize(("name", "model"), [("124M", GPT2_124M), ("345M", GPT2_345M)])
def test_the_page_has_the_parameters(name, model):
    assert parameters(model) == model.num_parameters
    one = f"| {parameters(model, multiple=1):,} | {parameters(model):,} |"
    theirs = "; ".join(f"{parameters(model, tp, 128 * tp):,}" for tp in (2, 4))
    ours = "; ".join(f"{parameters(model, tp):,}" for tp in (2, 4))
    assert f"| {name} {one} {theirs} | {ours} |" in PAGE


def test_the_schedules_have_the_rates_of_the_tutorials():
    shape = {"shape": "cosine", "counts_samples": False}
    megatron = Cosine(lr=1.5e-4, min_lr=1e-5, warmup=3200, end=320_000, **shape)
    llmc = Cosine(lr=6e-4, min_lr=0.0, warmup=700, end=18_865, **shape)
    rates = [f"{one.rate(step - 1, step):.4e}" for step in (1, 100, 200) for one in (megatron, llmc)]
    assert rates == ["4.6875e-08", "8.5714e-07", "4.6875e-06", "8.5714e-05", "9.3750e-06", "1.7143e-04"]

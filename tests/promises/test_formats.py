"""Formats of models, data and tokenizers are one file each, and what reads one is loaded where a file is of it."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import dtgpt
from dtgpt.capabilities import CAPABILITIES
from dtgpt.checkpoint.open import open_source
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, OptimizerConfig
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.models.decoder import unique_parameters
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.setup import open_trainer
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from tests.support.fresh import run_fresh
from tests.support.whole_model import build_model

ALPHABET = "\n abcdefghijklmnopqrstuvwxyz.,"
CONFIG = GPT2Config(num_layers=1, hidden_size=16, num_heads=2, seq_length=8, vocab_size=len(ALPHABET), dropout=0.0)
MODULES = [module for module, _ in CAPABILITIES]
RECIPE = Path(__file__).parents[2] / "recipes" / "gpt2_tiny.py"
# What a run on a text may load of formats that it does not use: what tells them apart by a path.
# What says whether a path is of its format; the BPE that such a run has; what opens cached tokens.
# Or what has a section of recipes.
LIGHT = r"(formats?|paths|marks|source|ids|base|byte_level|file_array|last|config)"
HEAVY = (
    r"dtgpt\.(interop\..*|data\.(library_tokenizers|megatron)\..*|posttrain\.chats\..*|"
    r"data\.prepare\.(inputs|parquet|encode|job)|posttrain\.lora\.source)"
)
PLAIN = """
import sys
from dtgpt.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print("LOADED", *sorted(name for name in sys.modules if name.startswith("dtgpt.")))
"""


@pytest.fixture
def example():
    """The example's formats beside those of dtgpt."""
    seams.use(["tests.support.example_formats", *MODULES])
    yield
    seams.use(MODULES)


@pytest.fixture
def core_alone():
    seams.use([])
    yield
    seams.use(MODULES)


@pytest.fixture
def parts(tmp_path):
    """A model, data and a tokenizer in the example's formats."""
    parameters = unique_parameters(build_model(CONFIG, torch.device("cpu"), torch.float32, root_key(1)))
    weights = {name: parameter.detach().numpy() for name, parameter in parameters.items()}
    np.savez(tmp_path / "model.npz", config=json.dumps(asdict(CONFIG)), **weights)
    np.random.RandomState(0).randint(0, len(ALPHABET), 500).astype(np.uint8).tofile(tmp_path / "some.letters")
    (tmp_path / "alphabet").write_text(ALPHABET)
    return tmp_path, weights


def test_a_run_begins_with_weights_data_and_a_tokenizer_in_formats_that_one_file_knows(example, parts):
    folder, weights = parts
    data = DataConfig(path=str(folder / "some.letters"))
    recipe = Recipe(
        name="letters",
        model=CONFIG,
        data=data,
        optimizer=OptimizerConfig(lr=1e-3),
        init_from=str(folder / "model.npz"),
        steps=2,
        device="cpu",
        micro_batch_size=2,
        global_batch_size=2,
    )
    with open_trainer(recipe) as trainer:
        assert trainer.dataset.source == data.path and trainer.dataset.tokenizer.decode([2, 3]) == "ab"
        for name, parameter in unique_parameters(trainer.stages[0]).items():
            assert torch.equal(parameter[: len(weights[name])], torch.from_numpy(weights[name]))
    with pytest.raises(UserError, match=r"give a run folder of dtgpt, .*, weights in a .npz, a Hugging Face folder"):
        open_source(folder / "none")


def test_a_model_in_such_a_format_generates_and_ends_where_its_file_says(example, parts):
    folder, _ = parts
    model = dtgpt.load(folder / "model.npz", device="cpu")
    assert model.tokenizer.decode([2]) == "a" and model.special.ends == (1,)
    assert model.generate([2, 3], max_new_tokens=3)
    assert open_config(folder / "model.npz") == CONFIG


def test_the_core_alone_knows_none_of_them(core_alone, parts):
    folder, _ = parts
    with pytest.raises(UserError, match=r"model.npz holds no model .* give a run folder of dtgpt or one of its check"):
        open_source(folder / "model.npz")
    with pytest.raises(UserError, match="alphabet is not a tokenizer"):
        open_tokenizer(str(folder / "alphabet"))


@pytest.mark.slow(4)
def test_a_run_on_a_text_loads_no_reader_of_another_format(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i} of a text, and {i * i} more\n" for i in range(2000)))
    words = f"train {RECIPE} --data.path a.txt --steps 1 --device cpu --log.eval_samples 2 --log.sample_tokens 2"
    done = run_fresh(["-c", PLAIN, *words.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = re.search("LOADED (.*)", done.stdout)[1].split()
    assert len(loaded) > 100
    heavy = [name for name in loaded if re.fullmatch(HEAVY, name)]
    assert [name for name in heavy if not re.fullmatch(LIGHT, name.rpartition(".")[2])] == []

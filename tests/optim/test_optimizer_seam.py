"""The seam: an optimizer in a file of its own names its state in checkpoints, and its runs are not another's.

`tests/promises/test_pairs.py` trains with it under plans, through checkpoints, and holds `dtgpt plan` to its memory.
"""

from dataclasses import replace

import pytest

from dtgpt.checkpoint.manifest import Checkpoint, step_folder
from dtgpt.config.sections import OptimizerConfig
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import override
from dtgpt.util.errors import UserError
from tests.support.other_optimizer import MomentumConfig
from tests.support.runs import newest_run


def test_the_run_of_one_optimizer_is_not_resumed_by_another(recipe, capsys):
    other = replace(recipe, optimizer=MomentumConfig(lr=0.3, warmup=2), steps=1)
    train(other)
    run = newest_run(other)
    checkpoint = Checkpoint(step_folder(run / "checkpoints", 1))
    assert checkpoint.state["optimizer"] == "momentum"
    assert checkpoint.pieces("blocks.0.attn.qkv.weight.momentum")
    assert not checkpoint.pieces("blocks.0.attn.qkv.bias.momentum")
    capsys.readouterr()
    assert override(other, ["--resume", str(run)]).optimizer.momentum == 0.5
    assert capsys.readouterr().err == ""
    adamw = replace(other, optimizer=OptimizerConfig(lr=1e-3))
    sentence = "optimizer.kind=momentum, and the recipe has adamw; .* --init_from "
    with pytest.raises(UserError, match=sentence):
        override(adamw, ["--resume", str(run)])
    with pytest.raises(UserError, match=sentence), open_trainer(adamw, run):
        pass

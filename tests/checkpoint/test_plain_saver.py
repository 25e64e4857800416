"""Checkpoints that are written while training waits, as the core does it without a capability."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from dtgpt.checkpoint import shard_file
from dtgpt.checkpoint.manifest import list_checkpoints
from dtgpt.checkpoint.save import Saver
from dtgpt.config.plan import ResolvedPlan
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.errors import UserError


class Plain(Saver):
    """Of no capability."""


@pytest.fixture
def saver(tmp_path):
    shards = SimpleNamespace(mesh=Mesh(ResolvedPlan(dp=1), torch.device("cpu")))
    file = shard_file.ShardFile("weights-00000-000.safetensors", [shard_file.Piece.whole("a", (2, 2))], [torch.eye(2)])
    with mock.patch("dtgpt.checkpoint.save.files_of", lambda *_: [file]):
        return Plain(tmp_path / "checkpoints", shards, None, keep_last=2)


def test_a_checkpoint_is_there_when_save_returns_and_old_ones_go(saver):
    for step in (1, 2, 3):
        saver.save(step, {"step": step})
    assert [folder.name for folder in list_checkpoints(saver.checkpoints)] == ["step_00000002", "step_00000003"]
    ((piece, position),) = shard_file.read_header(saver.checkpoints / "step_00000003" / "weights-00000-000.safetensors")
    target = torch.empty(2, 2)
    shard_file.copy_overlap(
        saver.checkpoints / "step_00000003" / "weights-00000-000.safetensors", piece, position, piece.part, target
    )
    assert torch.equal(target, torch.eye(2))


def test_what_fails_is_a_warning_or_an_error_and_leaves_nothing(saver, capsys):
    saver.save(1, {"step": 1})

    def full(path: Path, *_):
        raise OSError(28, "No space left on device", str(path))

    with mock.patch.object(shard_file, "write_file", full):
        saver.save(2, {"step": 2})
        assert "no checkpoint of step 2" in (told := capsys.readouterr().err) and "training goes on" in told
        with pytest.raises(UserError, match=r"no checkpoint of step 3 .*rank 0: .*No space .*; free space there$"):
            saver.save(3, {"step": 3}, must=True)
    assert sorted(path.name for path in saver.checkpoints.iterdir()) == ["latest", "step_00000001"]

"""The loss on held-out text, by the replicas of a plan in turns."""

from types import SimpleNamespace

import pytest
import torch

from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.batch import Batch
from dtgpt.parallel.mesh import RankCoordinates
from dtgpt.train.objective import held_out_loss


def loss_of_replica(replica: int, replicas: int, batches: list[torch.Tensor]) -> float:
    """Over what one replica counts. The loss of a batch is its first token."""
    plan = ResolvedPlan(dp=replicas)
    mesh = SimpleNamespace(
        plan=plan, place=RankCoordinates(plan, replica), device=torch.device("cpu"),
        sum=lambda *totals: torch.stack(totals),
    )  # fmt: skip
    engine = SimpleNamespace(evaluate=lambda batch: batch.tokens[0, 0].double())
    masks = SimpleNamespace(batch=lambda windows: Batch(windows[:, :-1], targets=windows[:, 1:]))
    return held_out_loss(engine, mesh, batches, masks.batch, torch.ones(99), lambda: False)[0]


@pytest.mark.parametrize("replicas, expected", [(1, [2.5]), (2, [2.0, 3.0]), (3, [2.5, 2.0, 3.0]), (4, [1, 2, 3, 4])])
def test_each_batch_counts_once_where_replicas_repeat_one_to_keep_in_step(replicas, expected):
    batches = [torch.full((2, 5), loss) for loss in (1, 2, 3, 4)]
    assert [loss_of_replica(replica, replicas, batches) for replica in range(replicas)] == expected

"""A pipeline stage whose messages travel over `Edges`.

There is nothing left that torch's schedule would have to send or to receive: a message leaves when the schedule asks
what to send, and the stage waits for one right before it needs it.
"""

from typing import Any

import torch.distributed as dist

from dtgpt.parallel.pipeline import Stage


class EdgeStage(Stage):
    edges: Any  # the `Edges` that made it

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._receive(self.args_recv_info, self.stage_index - 1, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._receive(self.grad_recv_info, self.stage_index + 1, bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(super().get_fwd_send_ops(fwd_chunk_id), self.stage_index + 1, fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(super().get_bwd_send_ops(bwd_chunk_id), self.stage_index - 1, bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def _send(self, ops: list[dist.P2POp], target: int, micro_batch: int) -> list[dist.P2POp]:
        """Send now what the operations would, over the edge to `target`. Returns those that are left: none."""
        for op in ops:
            self.edges.send(op.tensor.detach(), self.stage_index, target, micro_batch)
        return []

    def _receive(self, infos: dict[int, tuple[Any, ...]], source: int, micro_batch: int) -> None:
        """Wait for what comes over the edge from `source`, if there is one, and let torch find it where it expects
        what it received."""
        if self.edges.joins(source, self.stage_index):
            (info,) = infos[micro_batch]
            received = self.edges.receive(source, self.stage_index, micro_batch)
            info.buffer = received.requires_grad_(source < self.stage_index)

    def _take_places(self, infos: dict[int, tuple[Any, ...]], source: int) -> None:
        """Allocate nothing: the edges have places of their own."""

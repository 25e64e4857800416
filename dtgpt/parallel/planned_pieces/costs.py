"""What `dtgpt plan` tells of sums in pieces: the messages over tensor-parallel ranks."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.models.roles import Role
from dtgpt.ops.loss.head import chunk_rows
from dtgpt.parallel.exact_tp.config import WHOLE, pieces_of_size, values_of
from dtgpt.parallel.expert_parallel.gathered import most_rows
from dtgpt.parallel.more_pieces import roles
from dtgpt.planning.activations import whole_bytes
from dtgpt.planning.sums import Collective, ExactCosts, Parameters
from dtgpt.posttrain.demands import rows_of


class PiecewiseCosts(ExactCosts):
    """Of sums of integers, of gradients that tensor-parallel ranks have computed in pieces."""

    def addends_over_tp(self, parameters: Parameters) -> list[Any]:
        return [p for p in super().addends_over_tp(parameters) if p.role not in (*WHOLE, *roles.WHOLE)]

    def over_tp(self, found: list[Collective], rank: Any) -> list[Collective]:
        loss, *others, joint = found
        looked_up = self.settings.micro_batches * rank.place.holds_first
        others = self._of_branches(others, rank)
        others = [made for c in others for made in self._in_trees(c, looked_up)]
        return [self._loss(loss, rank), *others, self._joint(joint, rank), self._vectors(rank), self._heads(rank)]

    def _of_branches(self, found: list[Collective], rank: Any) -> list[Collective]:
        """Return the messages of activations: where there are experts, sums of their rows, and of the gradients of
        these, in place of those of a branch."""
        settings, plan, config = self.settings, self.settings.plan, self.settings.model
        if not isinstance(config, ExpertsConfig):
            return found
        from dtgpt.planning.traffic import repeated_blocks  # which imports what imports this

        unit, blocks = whole_bytes(settings), set(filter(config.has_experts, rank.blocks))
        once = 2 * settings.micro_batches * len(blocks)  # forward and backward
        again = settings.micro_batches * len(repeated_blocks(settings) & blocks)
        to_the_end = again if config.dropout else 0  # where recomputation comes to the end of a block
        slots: float = config.experts_per_token / plan.ep
        if plan.ep > 1 and not plan.asks_host:
            slots = most_rows(config.experts_per_token, config.num_experts // plan.ep)
        rows = plan.ep * (once + again)  # of the tokens of each rank by themselves
        shared = once + (again if config.gates_shared else to_the_end) if config.shared_size else 0
        scatters = plan.sequence_parallel and plan.ep == 1 and not config.expert_biases
        kind, what = "reduce-scatter" if plan.sequence_parallel else "all-reduce", "activations"
        spared = [c.kind == kind and c.what.startswith(what) for c in found]
        others = [self._fewer(c, own * (once + to_the_end)) for c, own in zip(found, spared, strict=True)]
        what, of_rows = f"{what} of rows of experts, and gradients", round(rows * slots * unit)
        if not scatters:
            return [*others, Collective("all-reduce", "tp", what, rows + shared, of_rows + shared * unit)]
        weights, number = once // 2, rows_of(settings).number * rows_of(settings).length * config.experts_per_token
        size = weights * number * max(4, settings.dtype.itemsize)
        return [
            *others,
            Collective("reduce-scatter", "tp", what, rows, of_rows),
            Collective("all-gather", "tp", "gradients of the weights of experts", weights, size),
            Collective("all-reduce", "tp", "activations that all tokens share, and gradients", shared, shared * unit),
        ]

    @staticmethod
    def _fewer(c: Collective, count: int) -> Collective:
        return replace(c, count=c.count - count, bytes=c.bytes - count * (c.bytes // max(1, c.count)))

    def _joint(self, joint: Collective, rank: Any) -> Collective:
        """Return the sums over each piece of the columns of all heads, of each token: of squares, and in backward."""
        norms = [p for p in rank.parameters if p.role is Role.JOINT_NORM]
        pieces = sum(self._pieces(p.shape[0]) for p in norms)
        what = "mean squares of each piece of the heads, fp32"
        return replace(joint, kind="all-gather", what=what, bytes=joint.bytes * pieces // max(1, len(norms)))

    def _pieces(self, size: int) -> int:
        return pieces_of_size(size, values_of(self.settings).pieces)

    def _loss(self, loss: Collective, rank: Any) -> Collective:
        """Return the terms of each row and piece of the vocabulary, which all ranks get, in chunks of rows."""
        settings, columns = self.settings, self.settings.model.padded_vocab_size
        tokens = rows_of(settings).number * rows_of(settings).length
        chunks = math.ceil(tokens / chunk_rows(tokens, columns, settings.dtype.itemsize))
        count = settings.micro_batches * chunks * rank.place.holds_last
        what = f"{loss.what} and piece"
        return Collective("all-gather", "tp", what, count, loss.bytes * self._pieces(columns))

    def _in_trees(self, c: Collective, looked_up: int) -> Iterator[Collective]:
        """Yield the messages that take the place of others beyond two ranks, where an order counts: not of embeddings,
        of which all addends but one are zero."""
        if self.settings.plan.tp == 2 or not c.count or not c.what.startswith("activations"):
            yield c
        elif c.kind == "reduce-scatter":
            each, looked_up = c.bytes // c.count, 0 if "experts" in c.what else looked_up
            yield replace(c, kind="all-to-all", count=c.count - looked_up, bytes=c.bytes - looked_up * each)
            yield replace(c, what="token embeddings", count=looked_up, bytes=looked_up * each)
        elif c.kind == "all-reduce":
            cut = c.bytes // c.count // self.settings.dtype.itemsize % self.settings.plan.tp == 0
            yield replace(c, kind="all-to-all", count=c.count * cut)
            yield replace(c, kind="all-gather", bytes=c.bytes * (1 if cut else self.settings.plan.tp))
        else:
            yield c

    def _vectors(self, rank: Any) -> Collective:
        """Return the sums over the rows of each piece of the positions, for norms and the biases of branches, where
        ranks have parts of them."""
        settings = self.settings
        own = [p for p in rank.parameters if len(p.shape) == 1]
        norms = [p for p in own if p.role is Role.NORM and p.name.endswith(".weight")]
        biases = [p for p in own if p.role is Role.ROW]
        passes = settings.micro_batches * settings.plan.sequence_parallel
        numbers = 2 * sum(p.shape[0] for p in norms) + sum(p.shape[0] for p in biases)
        size = 4 * passes * self._pieces(settings.local_length) * numbers
        what = "gradients of norms and biases of each piece, fp32"
        return Collective("all-gather", "tp", what, passes * len([*norms, *biases]), size)

    def _heads(self, rank: Any) -> Collective:
        """Return the sums over each piece of the heads, for the norms of these: one of queries and one of keys."""
        settings, config = self.settings, self.settings.model
        norms = [p for p in rank.parameters if p.role is Role.HEAD_NORM]
        pieces = sum(map(self._pieces, (config.num_heads, config.num_kv_heads))) if norms else 0
        count = settings.micro_batches * len(norms)
        size = 4 * settings.micro_batches * pieces * sum(p.shape[0] for p in norms)  # of two vectors, and half of them
        return Collective("all-gather", "tp", "gradients of norms of heads of each piece, fp32", count, size)

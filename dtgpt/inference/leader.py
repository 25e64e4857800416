"""Rank 0 leads: it sends each command of the runner to the other ranks, and executes it as they do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice

import torch
from torch import Tensor

from dtgpt.inference.messages import Channel, Kind
from dtgpt.inference.results import Pending
from dtgpt.inference.runner import ModelRunner
from dtgpt.ops.sampling.scores import Scores
from dtgpt.ops.sampling.sequences import Sampled, Variant
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.peers import peers

FAILURE = "inference failure"  # the name under which the rank that fails first leaves its reason


class Leader:
    """The commands of a `ModelRunner`, on rank 0. Each is executed by all ranks."""

    def __init__(self, runner: ModelRunner, channel: Channel):
        self._runner, self._channel = runner, channel

    def prefill(self, slot: int, ids: Sequence[int], first: int = 0) -> None:
        self._channel.send(Kind.PREFILL, [slot, first, *ids])
        self._runner.prefill(slot, ids, first)

    def prefill_batch(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        lengths, ids = [len(prompt) for prompt in prompts], [token for prompt in prompts for token in prompt]
        self._channel.send(Kind.PREFILL_BATCH, [len(slots), *slots, *lengths, *ids])
        self._runner.prefill_batch(slots, prompts)

    def score(self, slot: int, ids: Sequence[int], first: int = 0, alternatives: int = 0) -> Pending[Scores]:
        self._channel.send(Kind.SCORE, [slot, first, alternatives, *ids])
        return self._runner.score(slot, ids, first, alternatives)

    def start(self, slot: int, payload: Tensor) -> None:
        self._channel.send(Kind.START, torch.cat([torch.tensor([slot]), payload]))
        self._runner.start(slot, payload)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        self._channel.send(Kind.COPY, [length, *sources, *targets])
        self._runner.copy(sources, targets, length)

    def set_keys(self, slots: Sequence[int], keys: Sequence[tuple[int, int]]) -> None:
        self._channel.send(Kind.KEYS, [*slots, *chain.from_iterable(keys)])
        self._runner.set_keys(slots, keys)

    def assign(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        self._channel.send(Kind.ASSIGN, [*slots, *tokens])
        self._runner.assign(slots, tokens)

    def decode(self, slots: Sequence[int], steps: int, variant: Variant) -> Pending[Sampled]:
        self._channel.send(Kind.DECODE, [steps, *map(int, variant), *slots])
        return self._runner.decode(slots, steps, variant)

    def ping(self) -> None:
        """Wait until all other ranks have answered: sending alone tells nothing of a rank that hangs. Where one has
        ended, raise."""
        self._channel.send(Kind.PING)
        self._channel.meet()

    def release(self) -> None:
        """Let the other ranks return from `follow`, and leave the stages as they were until the next command."""
        self._channel.send(Kind.RELEASE)
        self._runner.detach()

    def fail(self) -> None:
        """Make the other ranks raise UserError, where this one cannot go on; leave the stages as they were."""
        self._runner.detach()
        self._channel.close()


def follow(runner: ModelRunner, channel: Channel) -> None:
    """Execute the commands of rank 0, until it releases this rank."""
    while True:
        kind, payload = channel.receive()
        if kind is Kind.RELEASE:
            return runner.detach()
        if kind is Kind.PING:
            channel.meet()
        _execute(runner, kind, payload)


def _execute(runner: ModelRunner, kind: Kind, payload: list[int]) -> None:
    half = len(payload) // 2
    match kind:
        case Kind.PREFILL:
            slot, first, *ids = payload
            runner.prefill(slot, ids, first)
        case Kind.PREFILL_BATCH:
            count, *rest = payload
            tokens = iter(rest[2 * count :])
            runner.prefill_batch(rest[:count], [list(islice(tokens, length)) for length in rest[count : 2 * count]])
        case Kind.SCORE:
            slot, first, alternatives, *ids = payload
            runner.score(slot, ids, first, alternatives)
        case Kind.START:
            runner.start(payload[0], torch.tensor(payload[1:], dtype=torch.int64))
        case Kind.COPY:
            length, *slots = payload
            runner.copy(slots[:half], slots[half:], length)
        case Kind.KEYS:
            slots, words = payload[: len(payload) // 3], payload[len(payload) // 3 :]
            runner.set_keys(slots, list(zip(words[::2], words[1::2], strict=True)))
        case Kind.ASSIGN:
            runner.assign(payload[:half], payload[half:])
        case Kind.DECODE:
            steps, filters, edits, ngram, alternatives, beams, *slots = payload
            variant = Variant(bool(filters), bool(edits), ngram, alternatives, bool(beams))
            runner.decode(slots, steps, variant)


@contextmanager
def failures_shared(mesh: Mesh, channel: Channel, timeout: float) -> Iterator[None]:
    """Where this rank fails, leave its reason for the other ranks, and close the channel, for which they wait. Where
    another rank failed first, raise a UserError with the reason of that one. `timeout`: seconds that collectives of the
    mesh wait."""

    def remedy() -> str:
        reason = mesh.posted(FAILURE)
        return f"start all of them again{f' ({reason})' if reason else ''}"

    try:
        with peers(mesh.world).losses_as_user_errors(timeout, remedy):
            yield
    except BaseException as error:
        if mesh.world > 1:
            if mesh.posted(FAILURE) is None:
                mesh.post(FAILURE, f"rank {mesh.rank}: {error or repr(error)}")
            channel.close()
        raise

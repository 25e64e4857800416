"""Which part of a tensor of a traced run stands beside which part of its reference: the same samples, and of these the
same tokens and columns.

Two runs may cut the same batch into micro-batches of other sizes. Samples are therefore counted over the whole batch:
micro-batch m of b samples begins with sample m b, on whichever rank it is.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtgpt.compare.trace import Cut, Key, Trace


class Piece(NamedTuple):
    """The same samples in a run, in its reference and, where it was computed, in float64."""

    ours: Tensor
    theirs: Tensor
    exact: Tensor | None
    first: int  # row of the whole batch with which it begins


class Pairing:
    """The traces of all ranks of a run beside that of one process, and that in float64."""

    def __init__(self, traces: Sequence[Trace], reference: Trace, exact: Trace):
        self.traces, self.reference, self.exact = traces, reference, exact

    def counts(self) -> tuple[int, int]:
        """Return how many samples the step of the run has, and that of the reference."""
        ours = {key.micro_batch for trace in self.traces for key in trace.keys}
        theirs = {key.micro_batch for key in self.reference.keys}
        return len(ours) * self.traces[0].samples, len(theirs) * self.reference.samples

    def pieces(self, trace: Trace, key: Key, name: str) -> Iterator[Piece]:
        """Yield the pieces of a tensor of one rank, which the reference calls `name`."""
        own = key._replace(name=name)
        if trace.samples == self.reference.samples:
            if own in self.reference.keys:
                exact = self.exact[own] if own in self.exact.keys else None
                yield Piece(trace[key], self.reference[own], exact, key.micro_batch * trace.samples)
            return
        other = own._replace(micro_batch=key.micro_batch * trace.samples // self.reference.samples)
        if other not in self.reference.keys:
            return
        each = trace.rows_of_a_sample(key)
        if each is not None and each == self.reference.rows_of_a_sample(other):
            yield from self._by_sample(trace, key, name, each)
        elif key.kind == "activation" and trace.shape(key):  # the same for all samples
            exact = self.exact[other] if other in self.exact.keys else None
            yield Piece(trace[key], self.reference[other], exact, 0)
        else:
            yield from self._together(trace, key, name)

    def _by_sample(self, trace: Trace, key: Key, name: str, each: int) -> Iterator[Piece]:
        """Yield the rows that a tensor has in common with each of the reference; each: rows of a sample."""
        size = trace.samples * each
        begin = key.micro_batch * size
        end = begin + trace.shape(key)[0]
        for other, start, stop in kept(self.reference, key._replace(name=name), each, begin, end):
            exact = None
            for known, first, last in kept(self.exact, key._replace(name=name), each, start, stop):
                if first == start and self.exact.rows_of_a_sample(known) == each:
                    exact, stop = rows(self.exact, known, each, first, last), last
                    break
            theirs = rows(self.reference, other, each, start, stop)
            yield Piece(trace.part(key, start - begin, stop - begin), theirs, exact, start)

    def _together(self, trace: Trace, key: Key, name: str) -> Iterator[Piece]:
        """Yield what micro-batches that are the same samples together make: the mean of losses, the sum of gradients of
        what their samples share. The first of these micro-batches stands for all of them."""
        size = math.lcm(trace.samples, self.reference.samples)
        block, rest = divmod(key.micro_batch * trace.samples, size)
        if rest:
            return
        alike = [trace, *(other for other in self.traces if other.cut == trace.cut)]
        ours = whole(alike, key, block * size, size)
        theirs = whole([self.reference], key._replace(name=name), block * size, size)
        same = self.exact.samples == self.reference.samples
        exact = whole([self.exact], key._replace(name=name), block * size, size) if same else None
        if ours is not None and theirs is not None:
            yield Piece(ours, theirs, exact, block * size)


def kept(trace: Trace, key: Key, each: int, start: int, stop: int) -> Iterator[tuple[Key, int, int]]:
    """Yield (key, first row, row after the last) of each micro-batch of a trace that has some of these rows."""
    size = trace.samples * each
    for micro_batch in range(start // size, (stop - 1) // size + 1):
        other = key._replace(micro_batch=micro_batch)
        if other in trace.keys:
            begin = micro_batch * size
            first, last = max(start, begin), min(stop, begin + trace.shape(other)[0])
            if first < last:
                yield other, first, last


def rows(trace: Trace, key: Key, each: int, start: int, stop: int) -> Tensor:
    """Return rows of the whole batch from a tensor of one micro-batch."""
    begin = key.micro_batch * trace.samples * each
    return trace.part(key, start - begin, stop - begin)


def whole(traces: Sequence[Trace], key: Key, first: int, count: int) -> Tensor | None:
    """Return the mean of the scalars, or the sum of the tensors, of the micro-batches of `count` samples, each of the
    first trace that has it; None where none has one."""
    size = traces[0].samples
    found = []
    for micro_batch in range(first // size, (first + count) // size):
        own = key._replace(micro_batch=micro_batch)
        trace = next((trace for trace in traces if own in trace.keys), None)
        if trace is None:
            return None
        found.append(trace[own].double())
    stacked = torch.stack(found)
    return stacked.sum(0) if stacked.dim() > 1 else stacked.mean()


def part_of(whole: Tensor, shape: torch.Size, place: Cut) -> tuple[slice, ...] | None:
    """Return which part of a tensor the rank at `place` has, by what its piece lacks; None where the shapes do not fit.
    The first dimension of several is that of samples, of which either may have fewer, and the second that of tokens.
    """
    if whole.dim() != len(shape):
        return None
    cut = []
    for dim, (size, length) in enumerate(zip(whole.shape, shape, strict=True)):
        if size == length or (dim == 0 and len(shape) > 1):
            cut.append(slice(None))
            continue
        parts, rest = divmod(size, length) if length else (0, 1)
        index = place.tp
        if dim == 1 and place.slices > 1 and parts % place.slices == 0:
            index = place.cp * (parts // place.slices) + (place.tp if parts > place.slices else 0)
        if rest or index >= parts:
            return None
        cut.append(slice(index * length, (index + 1) * length))
    return tuple(cut)


def norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64))


def distance(a: Tensor, b: Tensor) -> float:
    return norm(a.double() - b.double())

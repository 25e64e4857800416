"""Digests of tensors: sums, over their elements, of a hash of the tensor's name, the element's index and its bits.

A sum of integers modulo 2^64 has no order: each rank adds what it holds, wherever a plan puts an element, and no rank
gathers anything. Two elements that are exchanged change it, since each is hashed with its index. Values are hashed as
fp32, and -0 as 0, as `torch.equal` compares them.

`hashes` defines the hash, two 32-bit mixes (MurmurHash3's, and one of Wellons' "lowbias32" family) of which the second
mixes the first one's result once more with the index. `dtgpt.receipts.sums` adds up whole lists
of tensors.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

Region = tuple[range, ...]
MASK = (1 << 32) - 1
CHUNK = 8192  # elements that a program of the kernel reads at a time
PIECE = 1 << 17  # elements that the definition hashes at a time: what it makes of them stays in a CPU's cache


def signed(number: int) -> int:
    """Return the int32 of the same bits."""
    return number - (1 << 32) if number >> 31 else number


FIRST, SECOND = 0x9E3779B1, 0x27D4EB2F  # factors of the index
MIXES = ((16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), (15, 0x2C1B3C6D, 12, 0x297A2D39, 15))  # shifts and factors


def key_of(label: str) -> tuple[int, int]:
    """Return the key of the hashes of a tensor, two numbers of 32 bits."""
    found = hashlib.sha256(label.encode()).digest()
    return int.from_bytes(found[:4], "little"), int.from_bytes(found[4:8], "little")


def _mixed(x: Tensor, mix: tuple[int, ...]) -> Tensor:
    for place, number in enumerate(mix):
        x = x * signed(number) if place % 2 else x ^ ((x >> number) & ((1 << 32 - number) - 1))
    return x


def hashes(bits: Tensor, index: Tensor, key: tuple[int, int]) -> Tensor:
    """Return the hash of each element, int64 `[N]`, from its bits, int32 `[N]`, and its index, int64 `[N]`."""
    place = (index ^ (index >> 32)).to(torch.int32)
    first = _mixed(bits + (place * signed(FIRST) + signed(key[0])), MIXES[0])
    second = _mixed(first ^ (place * signed(SECOND) + signed(key[1])), MIXES[1])
    return (first.long() & MASK) + (second.long() << 32)


def bits_of(values: Tensor) -> Tensor:
    """Return the bits of each value as fp32, int32 `[N]`."""
    return (values.reshape(-1).to(torch.float32) + 0.0).view(torch.int32)


@dataclass(frozen=True)
class Piece:
    """What one rank adds to the digest of a tensor: the elements `region` of a whole of this shape."""

    label: str  # kind and name of the whole tensor, which is its key
    slot: int  # in which the digest is added up
    part: int  # of all tensors
    shape: tuple[int, ...]
    region: Region

    @property
    def numel(self) -> int:
        return math.prod(map(len, self.region))

    def index(self, device: torch.device) -> Tensor:
        """Return the index in the whole of each element, int64 `[N]`."""
        found = torch.zeros((), dtype=torch.int64, device=device)
        for size, own in zip(self.shape, self.region, strict=True):
            found = found[..., None] * size + torch.arange(own.start, own.stop, device=device)
        return found.flatten()

    def runs(self) -> tuple[Tensor, int]:
        """Return the index of the first element of each run of neighbours in the whole, int64 `[R]`, and the length of
        a run. Runs lie one behind the other in the memory of a rank."""
        inner = len(self.shape)
        while inner > 1 and len(self.region[inner - 1]) == self.shape[inner - 1]:
            inner -= 1
        rest = math.prod(self.shape[inner:])
        outer = Piece(self.label, 0, 0, self.shape[:inner], (*self.region[: inner - 1], self.region[inner - 1][:1]))
        return outer.index(torch.device("cpu")) * rest, len(self.region[inner - 1]) * rest


def digest(values: Tensor, piece: Piece) -> Tensor:
    """Return what the elements add to the digest, int64 scalar: the definition."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    key, begin = key_of(piece.label), 0
    index = piece.index(values.device)
    for some in values.reshape(-1).split(PIECE):
        total += hashes(bits_of(some), index[begin : begin + len(some)], key).sum()
        begin += len(some)
    return total

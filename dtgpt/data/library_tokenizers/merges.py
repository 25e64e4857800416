"""What tokens that rank by their ids make of bytes, as tiktoken and SentencePiece merge them: the adjacent pair whose
union ranks first."""

from collections.abc import Mapping
from itertools import pairwise
from typing import TypeVar

Piece = TypeVar("Piece", bytes, str)


def last_parts(tokens: Mapping[Piece, float], union: Piece) -> list[Piece]:
    """Return what the tokens that rank before `union` leave of it: two parts or more."""
    own, rank = tokens[union], tokens.get
    splits = [i for i in range(1, len(union)) if union[:i] in tokens and union[i:] in tokens]
    if len(splits) == 1:
        return [union[: splits[0]], union[splits[0] :]]
    edges = list(range(len(union) + 1))
    ranks = [rank(union[i : i + 2], own) for i in range(len(union) - 1)]
    while len(ranks) > 1:
        best = min(ranks)
        if best >= own:
            break
        i = ranks.index(best)
        del ranks[i], edges[i + 1]
        # Of the other pairs, only those beside the merged one are new.
        if i < len(ranks):
            ranks[i] = rank(union[edges[i] : edges[i + 2]], own)
        if i:
            ranks[i - 1] = rank(union[edges[i - 1] : edges[i + 1]], own)
    return [union[begin:end] for begin, end in pairwise(edges)]


def merges_of(tokens: Mapping[Piece, float]) -> tuple[list[tuple[Piece, Piece]], bool]:
    """Return the list of merges that does the same where merges apply by their place in a list. And whether a token is
    not made so of its own bytes, but only as a whole word."""
    merges, whole_words = [], False
    for union in sorted((token for token in tokens if len(token) > 1), key=tokens.__getitem__):
        parts = last_parts(tokens, union)
        if len(parts) == 2 and all(part in tokens for part in parts):
            merges.append((parts[0], parts[1]))
            continue
        whole_words = True
        splits = ((union[:i], union[i:]) for i in range(1, len(union)))
        merges += [pair for pair in splits if pair[0] in tokens and pair[1] in tokens]
    return merges, whole_words

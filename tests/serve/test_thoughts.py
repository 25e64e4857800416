"""Thoughts apart from answers, however the text is cut into pieces."""

import itertools

import pytest

from dtgpt.serve.thoughts import Thoughts, ends_within

TEXTS = {  # text, whether the prompt ends within a thought -> thought, what is said
    ("<think>\n\na\nb\n</think>\n\nHi\n", False): ("a\nb", "Hi\n"),
    ("\n <think>a</think>b<think>c</think>", False): ("a", "b<think>c</think>"),
    ("\na < b </thin\n\n</think>c", True): ("a < b </thin", "c"),
    ("\n Hi </think>", False): ("", "\n Hi </think>"),
    ("<think>on and on</thi", False): ("on and on</thi", ""),
    ("on\n", True): ("on", ""),
    ("<thin", False): ("", "<thin"),
    ("</think>", True): ("", ""),
    ("", False): ("", ""),
}


@pytest.mark.parametrize(("text", "inside"), TEXTS, ids=str)
def test_pieces_are_the_whole(text, inside):
    cuts = [c for n in range(3) for c in itertools.combinations(range(1, len(text)), n)] + [tuple(range(1, len(text)))]
    for cut in cuts:
        thoughts, places = Thoughts(inside), [0, *cut, len(text)]
        parts = [thoughts.take(text[a:b], b == len(text)) for a, b in itertools.pairwise(places)]
        assert ("".join(thought for thought, _ in parts), "".join(said for _, said in parts)) == TEXTS[text, inside]


def test_a_thought_is_sent_as_soon_as_nothing_can_change_it():
    thoughts = Thoughts(inside=False)
    pieces = ("<", "think>", "\n", "so", "\n", "\n", "it <", "/", "b", "</think>", "\n", "Yes", "\n")
    found = [thoughts.take(piece, last=False) for piece in pieces]
    assert [thought for thought, _ in found] == ["", "", "", "so", "", "", "\n\nit ", "", "</b", "", "", "", ""]
    assert [said for _, said in found] == [""] * 11 + ["Yes", "\n"]


def test_where_a_prompt_ends():
    assert ends_within("a <think> b") and not ends_within("<think> a </think> b") and not ends_within("a")

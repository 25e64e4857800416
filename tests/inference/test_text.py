"""Pieces of text, however tokens arrive: nothing is lost, nothing is shown that a later token changes."""

from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtgpt.inference.library.jobs import segments
from dtgpt.inference.prompts import text_stream
from dtgpt.inference.rules.options import check_stop_strings
from dtgpt.inference.rules.special import token_of
from dtgpt.inference.rules.stop_strings import StopSearch
from dtgpt.util.errors import UserError
from tests.support.vocabularies import KINDS, of_every_kind

PROPERTY = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(alphabet="the quick fox 12é€🎈\n\ufffd", max_size=12)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return of_every_kind(tmp_path_factory.mktemp("vocabularies"))


def ids_of(tokenizer):
    """Ids of texts, of parts of them, and any others."""
    some = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6)
    return st.lists(some | TEXT.map(tokenizer.encode).map(lambda ids: ids[:7]), max_size=5).map(
        lambda parts: list(chain(*parts))
    )


@pytest.mark.slow(3)
@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(data=st.data())
def test_the_pieces_are_the_text_that_the_ids_add_to_the_prompt(tokenizers, kind, data):
    tokenizer = tokenizers[kind]
    prompt, ids = data.draw(TEXT.map(tokenizer.encode)), data.draw(ids_of(tokenizer))
    stream = text_stream(tokenizer, prompt)
    joined = "".join([stream.extend([i]) for i in ids]) + stream.finish()
    whole = tokenizer.decode(prompt + ids)
    if kind == "byte fallback" and whole.count("\ufffd") != joined.count("\ufffd"):
        return  # the library makes all of a run of bytes U+FFFD where one is wrong
    assert joined == whole[len(tokenizer.decode(prompt)) :]


@pytest.mark.slow(3)
@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(data=st.data())
def test_several_ids_at_once_add_what_each_of_them_adds(tokenizers, kind, data):
    tokenizer = tokenizers[kind]
    prompt = data.draw(TEXT.map(tokenizer.encode))
    together, single = text_stream(tokenizer, prompt), text_stream(tokenizer, prompt)
    for ids in data.draw(st.lists(ids_of(tokenizer), max_size=4)):
        before = dict(vars(together))
        piece = "".join(single.extend([i]) for i in ids)
        assert together.extend(ids) == piece
        vars(together).update(before)
        assert together.extend(ids) == piece
    assert together.finish() == single.finish()


@pytest.mark.slow(1)
@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(prompt=TEXT, text=TEXT)
def test_no_piece_has_half_a_character(tokenizers, kind, prompt, text):
    tokenizer = tokenizers[kind]
    opening, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    whole = tokenizer.decode(opening + ids)[len(tokenizer.decode(opening)) :]
    stream, seen = text_stream(tokenizer, opening), ""
    for i in ids:
        seen += stream.extend([i])
        assert whole.startswith(seen)
    assert seen + stream.finish() == whole


def test_a_character_appears_with_its_last_byte_and_a_broken_one_with_what_follows(tokenizers):
    stream = text_stream(tokenizers["bytes"], list("é".encode()))
    assert [stream.extend([b]) for b in "a€".encode()] == ["a", "", "", "€"]
    assert [stream.extend([b]) for b in b"\xe2\x82b\xe2"] == ["", "", "\ufffdb", ""]
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_a_prompt_that_the_tokenizer_does_not_have_are_no_text(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("the fox")
    stream = text_stream(tokenizer, [tokenizer.vocab_size, *ids, 10**6])
    text = "".join(stream.extend([i]) for i in tokenizer.encode(" quick")) + stream.finish()
    assert text.removeprefix("<s>") == " quick"


def spelled_by(tokenizer, byte):
    """The token that is a single byte."""
    for i in range(tokenizer.vocab_size):
        if tokenizer.bytes_of(i) == bytes([byte]) or tokenizer.byte_of(i) == byte:
            return i


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "characters"])
def test_wrong_bytes_appear_within_four_tokens_and_take_no_more_time_when_they_are_many(tokenizers, kind, monkeypatch):
    tokenizer = tokenizers[kind]
    wrong, newline = spelled_by(tokenizer, 0xFF), spelled_by(tokenizer, 10)
    decoded, decode = [], type(tokenizer)._decode
    monkeypatch.setattr(type(tokenizer), "_decode", lambda own, ids: decoded.append(len(ids)) or decode(own, ids))
    for ids in ([wrong] * 400, [spelled_by(tokenizer, 0xE2)] * 400, [newline] * 400):
        stream = text_stream(tokenizer, tokenizer.encode("the fox") * 100)
        for number, i in enumerate(ids):
            before = len(decoded)
            piece = stream.extend([i])
            assert sum(decoded[before:]) < 500 and len(decoded) - before < 6
            assert piece or number == 0
    stream = text_stream(tokenizer, tokenizer.encode("the"))
    pieces = [stream.extend([spelled_by(tokenizer, byte)]) for byte in "€".encode() + b"\xff\xe2A"]
    assert pieces == ["", "", "€", "\ufffd", "", "\ufffdA"]


def test_words_keep_their_blanks_with_a_tokenizer_that_drops_the_first(tokenizers):
    for kind in ("sentencepiece", "byte fallback"):
        tokenizer = tokenizers[kind]
        prompt, ids = tokenizer.encode("the quick"), tokenizer.encode("brown fox")
        for stream, text in ((text_stream(tokenizer, prompt), " brown fox"), (text_stream(tokenizer), "brown fox")):
            assert "".join(stream.extend([i]) for i in ids) == text


def expected_end(text, strings):
    """Where the first match is complete, reading character by character."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in strings if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None


@PROPERTY
@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=8),
    strings=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_ends_before_the_first_match_however_it_is_cut(pieces, strings):
    search, shown = StopSearch(strings), ""
    for piece in pieces:
        ends = search.ends(piece)
        shown += search.add(piece)
        assert search.found == ends
        assert expected_end(shown, strings) is None
        if search.found:
            break
    end = expected_end("".join(pieces), strings)
    assert search.found == (end is not None)
    assert shown + search.finish() == "".join(pieces)[:end]


def test_what_may_become_a_match_is_held_back_and_no_more():
    search = StopSearch(["\n\nQ:", "END"])
    assert [search.add(piece) for piece in ("A.\n", "\n", "Q", "uestion E", "N")] == ["A.", "", "", "\n\nQuestion ", ""]
    assert not search.found and search.finish() == "EN"
    assert search.add("x END y") == "x " and search.found


def test_a_line_end_that_ends_a_text_is_part_of_it():
    search = StopSearch(["stop"], endings=["\n"])
    assert search.add("line") + search.add(" one\nline two") == "line one\n" and search.found


@pytest.mark.parametrize("strings, words", [
    (["x"] * 17, ["17 stop strings", "16"]), ([""], ["''", "1 to 256"]), (["x" * 257], ["1 to 256"]), ([7], ["7"]),
])  # fmt: skip
def test_stop_strings_that_are_none_are_refused(strings, words):
    with pytest.raises(UserError) as error:
        check_stop_strings("stop_strings", tuple(strings))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("kind, found", [
    ("gpt2", [198, 628, 25]), ("bytes", [10, None, 58]), ("tokenizer.json", [True, None, True]),
    ("characters", [True, None, None]), ("sentencepiece", [None, None, True]),
])  # fmt: skip
def test_line_ends_and_the_colon_are_looked_up(tokenizers, kind, found):
    tokenizer = tokenizers[kind]
    for text, expected in zip(("\n", "\n\n", ":"), found, strict=True):
        token = token_of(tokenizer, text)
        assert (token is not None) if expected is True else token == expected
        if token is not None:
            assert segments(tokenizer, [token]) == [text]


def test_segments_show_each_token_alone(tokenizers):
    ids = tokenizers["gpt2"].encode("Hello 🎈")
    assert segments(tokenizers["gpt2"], ids)[0] == "Hello" and "\ufffd" in segments(tokenizers["gpt2"], ids)[-1]

"""Jobs on an engine that writes what it is told to: text, stop strings, order, cancelling."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.beams.search import Beams
from dtgpt.inference.library.jobs import run_jobs
from dtgpt.inference.options import Options
from dtgpt.inference.prompts import special_ids
from dtgpt.inference.request import PromptJob
from tests.support.scripted_engine import ScriptedEngine
from tests.support.vocabularies import KINDS, of_every_kind

BYTES = make_tokenizer("bytes", [], 0)
END = BYTES.end_of_text
ALPHABET = "the quick fox12é€🎈\n\ufffd"
LONG = "the quick brown fox jumps over it, again and again"


def engine_of(texts, **sizes):
    """An engine that writes the text of each (prompt index, choice), or the only text; "|" ends it."""

    def script(request, choice):
        text = texts if isinstance(texts, str) else texts[request.prompt_index][choice]
        return [END if b == ord("|") else b for b in text.encode()]

    return ScriptedEngine(script, **sizes, tokenizer=BYTES, special=special_ids(BYTES, [BYTES.end_of_text]))


def job(index=0, prompt="x", **options):
    return PromptJob(list(prompt.encode()), Options(**{"max_new_tokens": 20, **options}), index)


def only(engine, asked):
    ((completion,),) = run_jobs(engine, [asked])
    return completion


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_completion_has_its_text_its_ids_and_the_reason_of_its_end(steps):
    whole = only(engine_of(LONG, steps=steps), job())
    assert (whole.text, whole.finish_reason, len(whole.ids)) == (LONG[:20], "length", 20)
    assert whole.logprobs == [-float(i) for i in range(20)]
    ended = only(engine_of("é€ end|more", steps=steps), job())
    assert (ended.text, ended.finish_reason, ended.ids[-1]) == ("é€ end", "stop", END)
    broken = only(engine_of("ab€", steps=steps), job(max_new_tokens=4))
    assert broken.text == "ab\ufffd" and broken.ids == [97, 98, 0xE2, 0x82]


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_stop_string_ends_the_text_before_it_and_the_ids_with_the_token_that_completes_it(steps):
    engine = engine_of(LONG, steps=steps)
    found = only(engine, job(stop_strings=("brown", "quick b")))
    assert (found.text, found.finish_reason) == ("the ", "stop")
    assert bytes(found.ids) == b"the quick b" and len(found.logprobs) == len(found.ids)
    assert not engine.running  # it was cancelled


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return of_every_kind(tmp_path_factory.mktemp("vocabularies"))


@pytest.mark.slow(3)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25)
@given(data=st.data(), steps=st.integers(2, 9), text=st.text(ALPHABET, min_size=1, max_size=30))
def test_a_sequence_is_the_same_however_many_tokens_come_at_once(tokenizers, kind, data, steps, text):
    """Stop strings are parts of the text, so that matches begin and end within tokens and events."""
    tokenizer = tokenizers[kind]
    begin = data.draw(st.lists(st.integers(0, len(text) - 1), max_size=2))
    stops = tuple(text[at : at + data.draw(st.integers(1, 5))] for at in begin)
    some = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=3))
    script = [*tokenizer.encode(text), *some, *tokenizer.encode("the fox")]
    most = data.draw(st.integers(1, len(script)))
    options = Options(
        max_new_tokens=most, min_new_tokens=data.draw(st.integers(0, most)), stop_strings=stops, top_logprobs=1,
        stop_on_eol=data.draw(st.booleans()),
    )  # fmt: skip
    found = []
    for at_once in (1, steps):
        special = special_ids(tokenizer, [tokenizer.end_of_text])
        engine = ScriptedEngine(lambda request, choice: script, steps=at_once, tokenizer=tokenizer, special=special)
        found.append(only(engine, PromptJob(tokenizer.encode("the"), options)))
    assert found[0] == found[1]
    assert len(found[0].ids) == len(found[0].logprobs) == len(found[0].alternatives)


def test_a_stop_string_in_the_last_token_counts_and_half_of_one_is_text():
    assert only(engine_of("abcd"), job(max_new_tokens=3, stop_strings=("bc",))).finish_reason == "stop"
    half = only(engine_of("abcd"), job(max_new_tokens=3, stop_strings=("bcd",)))
    assert (half.text, half.finish_reason) == ("abc", "length")


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("least, stops, text", [
    (0, ("ab",), ""), (1, ("ab",), ""), (2, ("ab",), "ab-"), (5, ("ab",), "ab-ab-"), (3, ("abc", "b"), "ab-a"),
    (6, ("b-ab-x", "b"), "ab-ab-a"), (5, ("b-ab-a",), "a"), (20, ("a",), "ab-ab-abcdefghijklmn"),
])  # fmt: skip
def test_a_stop_string_that_is_complete_before_min_new_tokens_is_text(steps, least, stops, text):
    engine = engine_of("ab-ab-abcdefghijklmnopqrs", steps=steps)
    found = only(engine, job(min_new_tokens=least, stop_strings=stops))
    assert (found.text, found.finish_reason) == (text, "length" if least == 20 else "stop")
    assert len(found.ids) > least or least == 20


def test_pieces_are_the_text_and_hold_back_what_may_become_a_stop():
    engine = engine_of("one\n\ntwo\nQ: three|", steps=1)
    pieces = [update.text for update in engine.stream(job(stop_strings=("\nQ:",)))]
    assert "".join(pieces) == "one\n\ntwo"
    assert pieces[2:6] == ["e", "", "\n", "\nt"]  # a line end is shown with what tells that it is not the stop


@pytest.mark.parametrize("rule, text, expected", [
    ("stop_on_eol", "a|b\nc", "a<|endoftext|>b\n"), ("stop_on_double_eol", "a\nb\n\nc", "a\nb\n\n"),
    ("stop_on_double_eol", "\nb", "\n"),
])  # fmt: skip
@pytest.mark.parametrize("newline", [True, False])
def test_line_ends_that_end_a_text_are_in_it_with_and_without_a_token_for_them(rule, text, expected, newline):
    engine = engine_of(text + "x" * 30)
    if not newline:
        engine.special = special_ids(BYTES, [BYTES.end_of_text])._replace(newline=None, double_newline=None)
    prompt = "x\n" if text == "\nb" else "x"
    found = only(engine, job(prompt=prompt, **{rule: True}))
    if not newline and text == "\nb":
        assert found.finish_reason == "length"  # the text of the prompt is not searched
    else:
        assert (found.text, found.finish_reason) == (expected, "stop")


@settings(deadline=None, max_examples=30)
@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=12), steps=st.integers(1, 5), data=st.data(),
)  # fmt: skip
def test_results_come_in_the_order_of_the_jobs_whatever_ends_first(counts, steps, data):
    texts = [[data.draw(st.text("ab", max_size=9)) + "|" for _ in range(count)] for count in counts]
    engine = engine_of(texts, slots=3, steps=steps)
    jobs = [job(i, num_return_sequences=count) for i, count in enumerate(counts)]
    found = list(run_jobs(engine, jobs))
    assert [[c.text for c in own] for own in found] == [[text[:-1] for text in own] for own in texts]
    assert not engine.busy and not engine.running


def test_jobs_are_submitted_as_others_finish():
    engine = engine_of("ab|", slots=2)
    taken = []

    def jobs():
        for index in range(100):
            taken.append(index)
            yield job(index)

    results = run_jobs(engine, jobs())
    next(results)
    assert len(taken) < 10
    assert len(list(results)) == 99 and len(engine.requests) == 100


def test_a_cancelled_job_has_what_it_has():
    engine = engine_of(LONG, steps=4)
    number = engine.submit(job())
    assert "".join(update.text for update in engine.step()) == LONG[:4]
    engine.cancel(number)
    (update,) = [update for update in engine.step() if update.completions]
    assert update.completions[0].text == LONG[:4] and update.completions[0].finish_reason == "cancelled"
    assert not engine.busy


def test_closing_ends_all_jobs_and_lets_the_engine_go():
    engine = engine_of(LONG, slots=1)
    engine.submit(job())
    engine.submit(job(1))
    engine.step()
    engine.release()
    assert engine.released and not engine.running and not engine.waiting


def test_without_a_tokenizer_there_are_ids_alone():
    engine = engine_of("abc|")
    engine.tokenizer, engine.special = None, SpecialIds(ends=(END,))
    found = only(engine, job(prompt_logprobs=True, prompt="xyz"))
    assert found.text is None and found.ids == [97, 98, 99, END]
    assert found.prompt_logprobs == [-1.0, -1.0] and found.prompt.total == -2.0


def test_a_job_searches_by_the_rules_of_its_options():
    assert job().options.search is None and job(num_return_sequences=3).rows == 3
    own = job(search=Beams(width=4, length_penalty=2.0, early_stopping=True))
    assert own.rows == 4 and own.options.search == Beams(width=4, length_penalty=2.0, early_stopping=True)
    megatron = Beams(width=1, ended_bound=True)  # one beam is a search, too
    asked = job(search=megatron)
    assert asked.rows == 1 and asked.options.search is megatron


def test_updates_hold_the_log_probabilities_the_reason_of_the_end_and_the_scores_of_the_prompt():
    engine = engine_of("abcd|", steps=3)
    updates = list(engine.stream(job(prompt="xyz", prompt_logprobs=True, top_logprobs=1)))
    assert [update.ids for update in updates] == [list(b"abc"), [*b"d", END]]
    assert [update.logprobs for update in updates] == [[0.0, -1.0, -2.0], [-3.0, -4.0]]
    assert [update.alternatives for update in updates] == [[[], [], []], [[], []]]
    assert [update.finish for update in updates] == [None, "stop"]
    assert all(update.prompt.logprobs == [-1.0, -1.0] for update in updates)

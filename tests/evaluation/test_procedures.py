"""The procedures of Megatron-LM and llm.c: recorded cases, and independent computations."""

import json
import math

import numpy as np
import pytest

from dtgpt.data.library_tokenizers.files import from_files
from dtgpt.data.megatron.ids import Ids
from dtgpt.data.tokenizers.open import make_tokenizer, open_tokenizer
from dtgpt.evaluation import lambada, wikitext
from dtgpt.evaluation.batches import Sample
from dtgpt.evaluation.catalog import asked_for, prepare, tasks_and_files
from dtgpt.evaluation.scoring import TokenScores
from dtgpt.evaluation.tasks import TaskOptions
from dtgpt.util.errors import UserError
from tests.support.serving import serving_cases
from tests.support.vocabularies import gpt2_files, rank_file


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return from_files(*gpt2_files(tmp_path_factory.mktemp("gpt2")))


BYTES = make_tokenizer("bytes", [], 0)
SHORT = 110  # characters of a case's name


@pytest.mark.slow(1)
@pytest.mark.parametrize("case", serving_cases("lambada"), ids=lambda case: case["text"][:SHORT])
@pytest.mark.parametrize("name, strict", [("strict", True), ("last_token", False)])
def test_context_and_target_of_lambada(case, gpt2, name, strict):
    ((context, target),) = lambada.word_ids([case["text"]], gpt2, strict)
    recorded = case[name]
    assert (context, target) == (recorded["context"], recorded["target"])
    counted = {place for place, flag in enumerate(recorded["mask"]) if flag}
    assert counted == {len(context) - 1 + place for place in range(len(target))} - {-1}


@pytest.mark.parametrize("case", serving_cases("language_model_windows"), ids=lambda case: json.dumps(case)[:SHORT])
def test_windows_of_wikitext(case):
    tokens, length, step = case["tokens"], case["seq_length"], case["overlapping_eval"]
    windows = wikitext.overlapping_windows(tokens, length, step)
    assert len(windows) == len(case["windows"])
    for (first, counted, end), recorded in zip(windows, case["windows"], strict=True):
        assert list(range(first, end)) == [i for i in recorded["text"] if i < tokens][: length + 1]
        predicted = {first + 1 + place for place, flag in enumerate(recorded["mask"]) if flag}
        assert predicted == set(range(counted, end))


@pytest.mark.parametrize("case", serving_cases("wikitext_detokenizer"), ids=lambda case: case["text"][:SHORT])
def test_the_detokenizer(case):
    assert wikitext.detokenize(case["text"]) == case["detokenized"]


@pytest.mark.parametrize("text, expected", [
    ("the s ' x", "the s' x"), ("x /' 5/ y", "x /'[0-9]/ y"), ("a ; b : c ! d ? e . f , g", "a; b: c! d? e. f, g"),
    ("he ' said ' 's", "he'said''s"), ("= = = x = = =", "=== x ==="),
])  # fmt: skip
def test_rules_of_the_detokenizer_in_their_order(text, expected):
    assert wikitext.detokenize(text) == expected


@pytest.mark.parametrize("tokens", [2, 5, 6, 11, 12, 23])
@pytest.mark.parametrize("step", [None, 1, 2, 5])
def test_every_token_but_the_first_is_counted_once(tokens, step):
    windows = wikitext.overlapping_windows(tokens, 5, step)
    counted = [place for window in windows for place in range(window.counted, window.end)]
    assert counted == list(range(1, tokens))
    assert all(end - first <= 6 for first, _, end in windows)


def scores_of(samples: list[Sample], weight: float = 0.01) -> list[TokenScores]:
    """Made-up scores that depend on each token and on the number of ids before it."""
    found = []
    for ids, context in samples:
        numbers = np.array([-weight * (ids[at] % 97 + 1) - at * 1e-3 for at in range(context, len(ids))], np.float32)
        found.append(TokenScores(numbers, np.array([ids[at] % 3 > 0 for at in range(context, len(ids))])))
    return found


def measured(tmp_path, name: str, content: str, positions: int = 32, file: str = "data.txt", **options):
    (tmp_path / file).write_text(content)
    (asked,) = asked_for([name], [str(tmp_path / file)], TaskOptions(**options))
    _, (samples, measure) = prepare(asked, BYTES, positions)
    return samples, measure(scores_of(samples))


ARTICLES = " \n = One = \n \n He 's here , isn 't he ? 20 ° C \n = = Part = = \n more \n = Two = \n \n the rest \n"


@pytest.mark.parametrize("step", [None, 3, 32])
def test_perplexity_of_the_whole_text(tmp_path, step):
    samples, result = measured(tmp_path, "WIKITEXT103", ARTICLES, overlapping_eval=step)
    ids = BYTES.encode(wikitext.detokenize(ARTICLES))
    assert sum(len(s.ids) - s.context for s in samples) == len(ids) - 1 == result.samples
    assert [i for s in samples for i in s.ids[s.context :]] == ids[1:]
    words = len(ARTICLES.strip().split(" "))
    total = -sum(own.logprob for own in scores_of(samples))
    loss, ratio = total / (len(ids) - 1), (len(ids) - 1) / (words - 1)
    assert result.metrics == pytest.approx({
        "adjusted_ppl": math.exp(loss * ratio), "ppl": math.exp(loss), "loss": loss, "token_ratio": ratio,
    })  # fmt: skip
    assert result.line == (
        f" validation results on WIKITEXT103 | avg loss: {loss:.4E} | ppl: {math.exp(loss):.4E} | "
        f"adjusted ppl: {math.exp(loss * ratio):.4E} | token ratio: {ratio} |"
    )


def test_exponents_of_megatron_are_capped(tmp_path):
    (tmp_path / "data.txt").write_text(ARTICLES)
    (asked,) = asked_for(["wikitext103"], [str(tmp_path / "data.txt")], TaskOptions())
    _, (samples, measure) = prepare(asked, BYTES, 32)
    metrics = measure(scores_of(samples, weight=10.0)).metrics
    assert metrics["ppl"] == metrics["adjusted_ppl"] == math.exp(20) and metrics["loss"] > 20


ROWS = ["", " = One = \n", "", ' He said , " no " . \n']
JOINED = ' \n = One = \n \n He said , " no " . \n'


@pytest.mark.parametrize("name, content", [
    ("wiki.txt", JOINED),
    ("rows.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in ROWS)),
    ("stripped.jsonl", "".join(json.dumps({"text": row.rstrip("\n")}) + "\n" for row in ROWS)),
    ("rows.json", json.dumps([{"text": row} for row in ROWS])),
    ("rows.jsonl", "".join(json.dumps({"page": None, "text": row}) + "\n" for row in ROWS)),
    ("whole.jsonl", json.dumps({"text": JOINED})), ("crlf.txt", JOINED.replace("\n", "\r\n")),
])  # fmt: skip
def test_every_form_of_wikitext_is_the_same_text(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode())
    (asked,) = tasks_and_files(f"wikitext103:{tmp_path / name}", TaskOptions())
    expected = BYTES.encode(wikitext.detokenize(JOINED))
    assert prepare(asked, BYTES, 999)[1].samples == [Sample(expected, 1)]


def test_lambada_of_megatron(tmp_path):
    texts = ["I saw the cat", "a dog", "one"]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    samples, result = measured(tmp_path, "lambada", content, file="data.jsonl", strict=True)
    assert samples[0] == Sample(BYTES.encode("I saw the cat"), len("I saw the"))
    assert samples[2] == Sample([BYTES.end_of_text, *BYTES.encode(" one")], 1)
    correct = sum(own.all_greedy for own in scores_of(samples))
    assert result.metrics["correct"] == correct and result.metrics["acc"] == correct / 3
    assert result.line == (
        f" validation results on LAMBADA | number correct: {correct:.4E} | total examples: {3:.4E} | "
        f"avg accuracy: {correct / 3:.4E}"
    )
    last, _ = measured(tmp_path, "lambada", content, file="data.jsonl")
    assert [len(s.ids) - s.context for s in last] == [1, 1, 1]


@pytest.mark.parametrize("name, content", [
    ("x.jsonl", '{"text": "one two"}\n\n{"text": "three four"}\n'), ("x.txt", "one two\nthree four\n"),
    ("x.json", '[{"text": "one two"}, {"text": "three four"}]'),
    ("lambada", '{"text": "one two"}\n{"text": "three four"}'),
])  # fmt: skip
def test_every_form_of_lambada_is_the_same_data(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    (asked,) = tasks_and_files(f"lambada:{tmp_path / name}", TaskOptions())
    expected = [Sample(BYTES.encode("one two"), 6), Sample(BYTES.encode("three four"), 9)]
    assert prepare(asked, BYTES, 99)[1].samples == expected


ITEM = {
    "ind": 0, "activity_label": "Roof", "ctx_a": "A man sits. [header] x", "ctx_b": "he [title] it",
    "ctx": "A man sits. [header] x he [title] it", "label": 2,
    "endings": ["is  one.", "is [step] two", "is three, longer", "four"],
}  # fmt: skip


def items(**changes) -> str:
    return json.dumps(ITEM | changes) + "\n"


def test_hellaswag_of_llmc(tmp_path):
    samples, result = measured(tmp_path, "hellaswag", items() + items(label="0"), 99, "data.jsonl")
    for sample, ending in zip(samples, ITEM["endings"] * 2, strict=True):
        assert sample == Sample(BYTES.encode(f"{ITEM['ctx']} {ending}"), len(ITEM["ctx"]))
    sums = np.array([own.logprob for own in scores_of(samples[:4])])
    means = sums / [len(s.ids) - s.context for s in samples[:4]]
    expected = {"acc": sums, "acc_norm": means}
    for name, values in expected.items():
        assert result.metrics[name] == ((values.argmax() == 2) + (values.argmax() == 0)) / 2
    assert result.samples == 2 and result.line is None


def test_a_hellaswag_of_plain_text_has_the_same_items(tmp_path):
    (tmp_path / "x.txt").write_text(f"Roof: {ITEM['ctx']}\n2\n" + "\n".join(ITEM["endings"]) + "\n")
    expected, _ = measured(tmp_path, "hellaswag", items(), 99, "data.jsonl")
    (asked,) = tasks_and_files(f"hellaswag:{tmp_path / 'x.txt'}", TaskOptions())
    assert prepare(asked, BYTES, 99)[1].samples == expected


def test_halves_of_surrogate_pairs_are_no_characters_in_any_field(tmp_path, gpt2):
    path = tmp_path / "x.jsonl"
    item = {"ctx_a": "x", "ctx_b": "a\ud83c", "endings": ["b\udf88", "c", "d", "e"], "label": 0}
    path.write_text(json.dumps(item))
    (asked,) = tasks_and_files(f"hellaswag:{path}", TaskOptions())
    samples = prepare(asked, gpt2, 99)[1].samples
    assert gpt2.decode(samples[0].ids) == "x a\ufffd b\ufffd" and gpt2.decode(samples[1].ids) == "x a\ufffd c"


def test_a_long_context_loses_its_beginning(tmp_path):
    samples, _ = measured(tmp_path, "hellaswag", items(), 20, "data.jsonl")
    for sample, ending in zip(samples, ITEM["endings"], strict=True):
        assert len(sample.ids) == 21 and BYTES.decode(sample.ids).endswith(f" {ending}")
        assert len(sample.ids) - sample.context == len(ending) + 1


def test_a_begin_of_text_stands_only_before_the_first_text(tmp_path):
    """With a tokenizer that opens each text, as Llama's, samples are those of a tokenizer without, and one token."""
    rank_file(tmp_path / "tokenizer.model")
    bare, opens = (open_tokenizer(str(tmp_path / "tokenizer.model"), begin=begin) for begin in (False, True))
    begin = opens.begin_of_text
    contents = {"hellaswag": items(), "lambada": '{"text": "the quick brown fox"}\n'}
    for name, content in contents.items():
        path = tmp_path / "data.jsonl"
        path.write_text(content)
        (asked,) = asked_for([name], [str(path)], TaskOptions(strict=name == "lambada"))
        expected, found = (prepare(asked, tokenizer, 500)[1].samples for tokenizer in (bare, opens))
        for theirs, (ids, context) in zip(expected, found, strict=True):
            assert ids == [begin, *theirs.ids] and context == theirs.context + 1


def test_a_limit_measures_the_first_ones(tmp_path):
    samples, result = measured(tmp_path, "hellaswag", items() * 3, 99, "data.jsonl", limit=2)
    assert len(samples) == 8 and result.samples == 2
    samples, result = measured(tmp_path, "wikitext103", ARTICLES, 8, limit=3)
    assert len(samples) == 3 and result.samples == 24 and result.metrics["loss"] > 0


def test_numbers_that_have_no_perplexity():
    assert lambada.perplexity([TokenScores(np.full(9, -1e3, np.float32), np.zeros(9, bool))] * 2) == math.inf


def test_a_tokenizer_that_does_not_encode_text_is_refused(tmp_path):
    (tmp_path / "x").write_text("one two")
    (asked,) = tasks_and_files(f"lambada:{tmp_path / 'x'}", TaskOptions())
    with pytest.raises(UserError, match="does not encode text"):
        prepare(asked, Ids(9), 99)

"""Tokenizers of other libraries: the same ids as these give, whichever way a vocabulary is read."""

import json
import pickle
import random
import time
import unicodedata

import numpy as np
import pytest

from dtgpt.data.library_tokenizers.bpe_files import from_merges
from dtgpt.data.library_tokenizers.byte_level import PATTERN, ByteLevel, letter_bytes
from dtgpt.data.library_tokenizers.files import from_files
from dtgpt.data.library_tokenizers.libraries import TokenizerJson
from dtgpt.data.tokenizers.open import (
    make_tokenizer,
    open_tokenizer,
    read_saved,
)
from dtgpt.util.errors import UserError
from tests.support.vocabularies import gpt2_files, normalized, sentencepiece_model, tokenizer_json

tokenizers = pytest.importorskip("tokenizers")
HELLO = "Grüße, 世界! 🎈👩‍👩‍👧 \u2028 zero\x00byte\r\n\ttabs   spaces don't\n\n\n"
LITERAL = [27, 91, 437, 1659, 5239, 91, 29]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return gpt2_files(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def gpt2(files):
    return from_files(*files)


@pytest.fixture(scope="module")
def reference(files):
    """The same two files in Hugging Face's library."""
    tokenizer = tokenizers.ByteLevelBPETokenizer(*map(str, files))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def random_texts(count: int, seed: int = 1) -> list[str]:
    """Words, blanks, digits, marks of many scripts, and any code point at all."""
    rng = random.Random(seed)
    pools = [
        "abcdefgh THE of ing",
        "  \t\n\r\u00a0\u3000",
        "0123456789.,-",
        "äöüßéñ",
        "日本語한국어",
        "🙂👩‍👩‍👧",
        "'s't'll''ve",
    ]
    texts = []
    for _ in range(count):
        text = "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randrange(60)))
        anything = "".join(chr(c) for c in (rng.randrange(0x110000) for _ in range(8)) if not 0xD800 <= c < 0xE000)
        texts.append(text + anything)
    return texts


@pytest.mark.slow(2)
def test_gpt2_from_its_files_has_the_ids_of_the_files(gpt2, reference):
    assert isinstance(gpt2, ByteLevel)
    assert (gpt2.vocab_size, gpt2.end_of_text) == (50257, 50256)
    for text in [HELLO, "", *random_texts(200)]:
        ids = gpt2.encode(text)
        assert ids == reference.encode(text).ids
        assert gpt2.decode(ids) == text


def test_the_end_of_text_is_text_unless_asked_for(gpt2):
    text = "a<|endoftext|>"
    assert gpt2.encode(text) == [64, *LITERAL]
    assert gpt2.encode(text, special=True) == [64, 50256]
    assert gpt2.encode_batch(["", text], special=True)[1].tolist() == [64, 50256]


def test_bytes_of_tokens_add_up_to_the_text(gpt2):
    assert gpt2.token_bytes()[gpt2.encode(HELLO)].sum() == len(HELLO.encode())
    assert gpt2.token_bytes()[50256] == 0


def make(kind: str, folder, files):
    """One vocabulary of each kind of file."""
    if kind == "files":
        return from_files(*files)
    if kind == "tokenizer.json":
        return open_tokenizer(str(tokenizer_json(folder)))
    if kind == "tokenizers":
        return open_tokenizer(str(normalized(tokenizer_json(folder))))
    if kind == "trained":
        make_tokenizer("bpe", ["abc abd " * 99], 300).save(folder / "own.json")
        return open_tokenizer(str(folder / "own.json"))
    if kind == "sentencepiece":
        return open_tokenizer(str(sentencepiece_model(folder)))
    return open_tokenizer("bytes")


@pytest.mark.slow(2)
@pytest.mark.parametrize("kind", ["files", "tokenizer.json", "tokenizers", "trained", "sentencepiece", "bytes"])
def test_every_kind_survives_pickling(kind, tmp_path, files):
    vocabulary = make(kind, tmp_path, files)
    copy = pickle.loads(pickle.dumps(vocabulary))
    for text in ("the quick brown fox", HELLO):
        ids = vocabulary.encode(text)
        assert len(ids) and max(ids) < vocabulary.vocab_size
        assert copy.encode(text) == ids
    assert (copy.vocab_size, copy.end_of_text) == (vocabulary.vocab_size, vocabulary.end_of_text)
    assert "quick brown fox" in copy.decode(copy.encode("the quick brown fox"))


@pytest.mark.slow(3)
def test_a_plain_tokenizer_json_is_encoded_by_tiktoken_others_by_their_library(tmp_path, reference, gpt2):
    path = tmp_path / "tokenizer.json"
    path.write_text(reference.to_str())
    plain = open_tokenizer(str(path))
    assert isinstance(plain, ByteLevel) and plain.end_of_text == 50256
    other = open_tokenizer(str(normalized(path)))
    assert isinstance(other, TokenizerJson) and other.end_of_text == 50256
    assert other.encode("a<|endoftext|>") == [64, *LITERAL]
    assert other.encode("a<|endoftext|>", special=True) == [64, 50256]
    assert open_tokenizer(str(tmp_path)).encode(HELLO) == gpt2.encode(HELLO)


def test_the_end_of_text_that_a_config_names_is_taken(tmp_path):
    path = tokenizer_json(tmp_path)
    saved = json.loads(path.read_text())
    saved["added_tokens"].append(saved["added_tokens"][0] | {"id": 280, "content": "<|stop|>"})
    path.write_text(json.dumps(saved))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|stop|>"}}')
    assert open_tokenizer(str(path)).end_of_text == 280


def test_sentencepiece_gives_the_ids_of_its_library(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    path = sentencepiece_model(tmp_path)
    vocabulary = open_tokenizer(str(path))
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in [HELLO, "the quick </s> fox", *random_texts(50)]:
        assert vocabulary.encode(text) == library.encode(text)
    assert (vocabulary.begin_of_text, vocabulary.end_of_text, vocabulary.vocab_size) == (1, 2, 300)


def test_merges_that_tiktoken_would_apply_otherwise_go_to_the_library(tmp_path):
    letters = sorted(letter_bytes())
    ids = {letter: i for i, letter in enumerate(letters)}
    # "abc" is made of a and bc, but ab comes first: no text is ever cut so, while tiktoken would join ab and c.
    merges = [["a", "b"], ["b", "c"], ["a", "bc"]]
    ids |= {"".join(pair): 256 + i for i, pair in enumerate(merges)}
    assert from_merges(ids, merges, {}) is None
    assert from_merges(ids, [["a", "b"], ["b", "c"], ["ab", "c"]], {}) is not None
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    vocabulary = from_files(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert isinstance(vocabulary, TokenizerJson)
    assert vocabulary.encode("abc") == [256, ids["c"]]
    assert vocabulary.end_of_text == 259


def test_random_trainings_agree_with_the_library():
    rng = random.Random(3)
    text = " ".join("".join(rng.choice("abcd") for _ in range(rng.randrange(1, 9))) for _ in range(3000))
    vocabulary = make_tokenizer("bpe", [text], 600)
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator([text], vocab_size=599, min_frequency=0, special_tokens=[], show_progress=False)
    saved = json.loads(trained.to_str())
    pairs = [m if isinstance(m, list) else m.split(" ") for m in saved["model"]["merges"]]
    assert from_merges(saved["model"]["vocab"], pairs, {}) is not None
    samples = ["".join(rng.choice("abcd ") for _ in range(40)) for _ in range(300)]
    for sample in samples:
        ids = [vocabulary.decode([i]) for i in vocabulary.encode(sample)]
        assert ids == [trained.decode([i]) for i in trained.encode(sample).ids]


def test_long_runs_and_odd_characters_are_encoded(gpt2):
    for text in ("a" * 100_000, " " * 100_000 + "a", "\n" * 100_000, "日本" * 20_000, "\x00\x1c\x85\ufeff\ufffd"):
        assert gpt2.decode(gpt2.encode(text)) == text
    assert gpt2.encode_batch(["x"])[0].dtype == np.uint32


def test_a_million_blanks_are_refused_in_one_sentence_and_without_a_panic(gpt2, capfd):
    blanks = " " * 1_050_000
    for encode in (gpt2.encode, lambda text: gpt2.encode(text, special=True), lambda text: gpt2.encode_batch([text])):
        with pytest.raises(UserError, match="a run of blanks that is too long"):
            encode(blanks)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name, content, words", [
    ("nowhere", None, ["tokenizer nowhere", "cl100k_base", "vocab.json"]), ("a.json", "{", ["a.json", "not JSON"]),
    ("a.json", "[1]", ["a.json", "not a tokenizer"]),
    ("a.json", '{"model": {"type": "what"}}', ["a.json", "not a tokenizer.json"]),
    ("a.json", '{"ranks": 1}', ["a.json", "dtgpt tokenizer train"])
])  # fmt: skip
def test_what_is_no_tokenizer_is_refused_in_one_sentence(tmp_path, monkeypatch, name, content, words):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        open_tokenizer(name)
    assert all(word in str(error.value) for word in words)


def test_a_sentencepiece_model_that_is_none_is_refused(tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "a.model").write_bytes(b"no model")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        open_tokenizer(str(tmp_path / "a.model"))


@pytest.mark.parametrize("vocab, merges, words", [
    ("{", "", "not a vocabulary"), ("[]", "", "not a vocabulary"), ('{"a": 1}', "a b c\n", "not a pair"),
])  # fmt: skip
def test_damaged_files_of_a_vocabulary_are_named(tmp_path, vocab, merges, words):
    (tmp_path / "v.json").write_text(vocab)
    (tmp_path / "m.txt").write_text(merges)
    with pytest.raises(UserError, match=words):
        from_files(tmp_path / "v.json", tmp_path / "m.txt")
    with pytest.raises(UserError, match="belong together"):
        open_tokenizer(vocab_file=str(tmp_path / "v.json"))
    with pytest.raises(UserError, match=r"missing\.json cannot be read"):
        from_files(tmp_path / "missing.json", tmp_path / "m.txt")


def test_a_tokenizer_json_is_encoded_with_what_its_post_processor_adds(tmp_path):
    path = tokenizer_json(tmp_path, bos=True)
    vocabulary, library = open_tokenizer(str(path)), tokenizers.Tokenizer.from_file(str(path))
    assert isinstance(vocabulary, TokenizerJson) and vocabulary.begin_of_text == 0
    for text in ("", "the quick", HELLO):
        assert vocabulary.encode(text) == library.encode(text).ids
    assert vocabulary.encode("") == [0] and [len(ids) for ids in vocabulary.encode_batch(["", "the"])] == [1, 2]


@pytest.mark.parametrize("after, fast", [
    (None, True),
    ({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
      "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
      "special_tokens": {}}, True),
    ({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
      "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
      "special_tokens": {}}, False),
    ({"type": "RobertaProcessing", "sep": ["<|endoftext|>", 1], "cls": ["<s>", 0], "trim_offsets": True,
      "add_prefix_space": False}, False),
])  # fmt: skip
def test_a_post_processor_that_adds_nothing_leaves_encoding_to_tiktoken(tmp_path, after, fast):
    path = tokenizer_json(tmp_path)
    saved = json.loads(path.read_text())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if after is not None:
        saved["post_processor"] = {"type": "Sequence", "processors": [byte_level, after]}
    path.write_text(json.dumps(saved))
    vocabulary = open_tokenizer(str(path))
    assert isinstance(vocabulary, ByteLevel) is fast
    assert vocabulary.encode("the fox") == tokenizers.Tokenizer.from_file(str(path)).encode("the fox").ids


def test_whole_words_that_merges_are_ignored_for_have_the_ids_of_the_library(tmp_path):
    path = tokenizer_json(tmp_path)
    saved = json.loads(path.read_text())
    saved["model"]["vocab"]["xyz"] = 280  # no merge makes it
    saved["model"]["ignore_merges"] = True
    path.write_text(json.dumps(saved))
    assert open_tokenizer(str(path)).encode("xyz") == [280]


def test_a_post_processor_with_an_id_of_no_token_is_refused(tmp_path):
    path = tokenizer_json(tmp_path, bos=True)
    saved = json.loads(path.read_text())
    saved["post_processor"]["special_tokens"]["<s>"]["ids"] = [999]
    path.write_text(json.dumps(saved))
    with pytest.raises(UserError, match="puts the id 999 around texts"):
        open_tokenizer(str(path))


@pytest.mark.parametrize("content", ["<s>", "<new>"])
def test_added_tokens_have_the_ids_of_the_library(tmp_path, content):
    path = tokenizer_json(tmp_path)
    saved = json.loads(path.read_text())
    saved["added_tokens"] = [{**saved["added_tokens"][0], "content": content, "id": 500}]
    path.write_text(json.dumps(saved))
    expected = tokenizers.Tokenizer.from_file(str(path)).encode(f"a{content}").ids
    assert open_tokenizer(str(path)).encode(f"a{content}", special=True) == expected


def test_merges_that_are_left_out_at_random_are_refused(tmp_path):
    path = tokenizer_json(tmp_path)
    saved = json.loads(path.read_text())
    saved["model"]["dropout"] = 0.1
    path.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"at random \(dropout=0\.1\)"):
        open_tokenizer(str(path))


def test_a_tokenizer_json_that_truncates_takes_texts_whole(tmp_path):
    path = tokenizer_json(tmp_path, bos=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    vocabulary = open_tokenizer(str(path))
    assert len(vocabulary.encode("x" * 50)) == 51 and len(vocabulary.encode("x")) == 2


def test_llama_2_opens_every_text_with_its_begin(tmp_path):
    path = str(sentencepiece_model(tmp_path))
    plain, llama = open_tokenizer(path), open_tokenizer(path, begin=True)
    assert llama.encode("") == [1] and llama.encode("the fox") == [1, *plain.encode("the fox")]


def test_the_size_of_a_vocabulary_with_holes_is_the_number_of_its_tokens(tmp_path):
    ids = {letter: i for i, letter in enumerate(sorted(letter_bytes()))} | {"<|endoftext|>": 70_000}
    (tmp_path / "v.json").write_text(json.dumps(ids))
    (tmp_path / "m.txt").write_text("")
    vocabulary = from_files(tmp_path / "v.json", tmp_path / "m.txt")
    assert (vocabulary.num_tokens, vocabulary.vocab_size, vocabulary.end_of_text) == (257, 70_001, 70_000)
    (tmp_path / "v.json").write_text(json.dumps(ids | {"far": 1 << 40}))
    with pytest.raises(UserError, match="gives 'far' the id 1099511627776"):
        from_files(tmp_path / "v.json", tmp_path / "m.txt")


def test_without_tiktokens_cache_the_remedies_are_told(monkeypatch):
    def offline(name):
        raise ConnectionError("no route")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(UserError, match=r"ConnectionError.*TIKTOKEN_CACHE_DIR.*vocab.json and merges.txt"):
        open_tokenizer("gpt2")


def cut_lines(path, keep):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:keep]))


@pytest.mark.slow(1)
@pytest.mark.parametrize("keep", [0, -1])
def test_merges_that_were_cut_at_the_end_of_a_line_are_refused(tmp_path, keep):
    vocab, merges = gpt2_files(tmp_path)
    cut_lines(merges, keep)
    with pytest.raises(
        UserError, match=r"merges\.txt lacks the merges of [\d,]+ tokens? of .*vocab\.json.*fetch it again"
    ):
        from_files(vocab, merges)


def test_a_vocabulary_that_was_cut_under_its_merges_is_refused(tmp_path):
    vocab, merges = gpt2_files(tmp_path)
    ids = json.loads(vocab.read_text())
    vocab.write_text(json.dumps({token: i for token, i in ids.items() if i < 50_000}))
    with pytest.raises(UserError, match=r"merges\.txt merges .*, but .*vocab\.json has no token .*fetch them again"):
        from_files(vocab, merges)


@pytest.mark.parametrize("changes, words", [
    (lambda model: model["merges"].pop(), "lacks the merges of 1 token of"),
    (lambda model: model["merges"].clear(), "lacks the merges of"),
    (lambda model: model.update(merges=[" ".join(pair) for pair in model["merges"][:-3]]), "lacks the merges of 3"),
    (lambda model: model["vocab"].pop("".join(model["merges"][-1])), "has no token"),
])  # fmt: skip
def test_merges_and_tokens_that_a_tokenizer_json_lacks_are_refused(tmp_path, changes, words):
    path = tokenizer_json(tmp_path)
    saved = json.loads(path.read_text())
    changes(saved["model"])
    path.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=words):
        open_tokenizer(str(path))


@pytest.mark.parametrize("changes", [
    {"merges": [7]}, {"merges": [["a", "b", "c"]]}, {"merges": [["a", 7]]}, {"unk_token": [7]}, {"vocab": {"a": 0}},
    {"end_of_word_suffix": 7}, {"continuing_subword_prefix": [7]}, {"merges": {"a": "b"}},
])  # fmt: skip
def test_a_damaged_model_is_one_sentence(tmp_path, changes):
    with pytest.raises(UserError, match=r"tokenizer\.json") as error:
        open_tokenizer(str(tokenizer_json(tmp_path, **changes)))
    assert "\n" not in str(error.value)


@pytest.mark.slow(1)
def test_tokens_that_no_merge_makes_on_purpose_are_taken(tmp_path, capsys):
    vocab, merges = gpt2_files(tmp_path)
    ids = json.loads(vocab.read_text())
    for token in ("<pad>", "<|im_start|>", "<0x0A>", "[MASK]", "</s>"):
        ids[token] = len(ids)
    vocab.write_text(json.dumps(ids))
    assert from_files(vocab, merges).encode("Hello world") == [15496, 995] and capsys.readouterr().err == ""
    vocab.write_text(json.dumps(ids | {"madeupword0000": len(ids)}))  # as in the vocabulary of RoBERTa
    assert from_files(vocab, merges).encode("Hello world") == [15496, 995]
    assert capsys.readouterr().err == ""


def test_a_token_for_whole_words_alone_is_taken(tmp_path):
    path = tokenizer_json(tmp_path, ignore_merges=True)
    saved = json.loads(path.read_text())
    saved["model"]["merges"].pop()
    path.write_text(json.dumps(saved))
    assert open_tokenizer(str(path)).num_tokens


@pytest.mark.parametrize("where", ["vocab", "added_tokens"])
@pytest.mark.parametrize("wrong", [2_000_000_000, -1, 1.5, True, "7", None])
@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
def test_an_id_that_would_claim_all_memory_is_refused(tmp_path, where, wrong, normalizer):
    path = tokenizer_json(tmp_path)
    saved = json.loads(path.read_text()) | {"normalizer": normalizer}
    if where == "vocab":
        saved["model"]["vocab"]["far"] = wrong
    else:
        saved["added_tokens"][0]["id"] = wrong
    path.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"tokenizer\.json gives '(far|<s>)' the id .* not in 0 to 16777215"):
        open_tokenizer(str(path))


HOSTILE = {"deep": "[" * 100_000, "deep object": '{"a":' * 100_000, "digits": '{"model": ' + "9" * 5000 + "}"}


@pytest.mark.parametrize("kind", HOSTILE)
def test_json_that_python_cannot_follow_is_told_in_one_sentence(tmp_path, kind):
    for name in ("tokenizer.json", "vocab.json"):
        (tmp_path / name).write_text(HOSTILE[kind])
    (tmp_path / "merges.txt").write_text("")
    for work in (
        lambda: open_tokenizer(str(tmp_path / "tokenizer.json")),
        lambda: from_files(tmp_path / "vocab.json", tmp_path / "merges.txt"),
        lambda: read_saved(tmp_path / "tokenizer.json", "copy it"),
    ):
        with pytest.raises(UserError, match=r"(tokenizer|vocab)\.json .*(nested too deeply|too many digits)") as error:
            work()
        assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_messages_name_the_files_of_a_tokenizer():
    for words in (["nowhere"], ["gpt2", "v"], ["bytes", "v", "m"]):
        with pytest.raises(UserError, match=r"vocab\.json and merges\.txt|the vocab file v"):
            open_tokenizer(*words)


def test_a_run_of_marks_is_brought_into_its_normal_form_in_linear_time():
    """Python sorts combining marks by insertion; two seconds for 40,000 of them, and a minute for a megabyte."""
    tokenizer = ByteLevel("composed", PATTERN, make_tokenizer("bytes", [], 0).ranks, composed=True)
    draw = random.Random(1)
    marks = "\u0301\u0316\u0344\u0f73\u0f71\u3099\u05b0é가\u1100\u1161→☃"
    for size in (10, 100, 300):
        text = draw.choice(["a", "é", "ক"]) + "".join(draw.choices(marks, k=size)) + "b"
        assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)
    begin = time.process_time()
    assert len(tokenizer.encode("a" + "\u0301\u0316" * 20_000)) > 40_000
    assert time.process_time() - begin < 1

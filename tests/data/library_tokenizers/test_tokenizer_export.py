"""The tokenizer of an exported model: transformers gives the ids and the text that dtgpt gives."""

import json
import os
from dataclasses import replace
from unicodedata import category

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtgpt.checkpoint.open import tokenizer_beside
from dtgpt.data.library_tokenizers.byte_level import PATTERN, PATTERNS, ByteLevel
from dtgpt.data.library_tokenizers.characters import Char
from dtgpt.data.library_tokenizers.export import begin_token, export_note, first_token, transformers_files
from dtgpt.data.library_tokenizers.libraries import SentencePiece
from dtgpt.data.megatron.ids import Ids
from dtgpt.data.tokenizers.open import make_tokenizer, open_tokenizer
from dtgpt.inference.library.load import load
from dtgpt.interop.convert import ConvertOptions, convert
from dtgpt.interop.hf.model import save_huggingface
from dtgpt.interop.weights_alone import save_weights
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.util.errors import UserError
from dtgpt.util.storage import write_json
from tests.data.library_tokenizers.test_tokenizers import HELLO, random_texts
from tests.interop.test_interop_huggingface import InMemory
from tests.support.vocabularies import (
    cut_by_pattern,
    gpt2_files,
    normalized,
    rank_file,
    sentencepiece_model,
    tokenizer_json,
)
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(9)

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
CL100K = "|".join((
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+", r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]",
    r"\s+(?!\S)|\s",
))  # fmt: skip
KINDS = (
    "gpt2 of tiktoken", "trained", "bytes", "with a begin", "normalized", "cl100k",
    "whole words", "sentencepiece", "unigram", "llama 2", "llama 3", "qwen3", "ranks of llama 3", "ranks of qwen",
    "symbols",
)  # fmt: skip
MODEL_TYPES = {
    "llama 2": "mistral",
    "symbols": "mistral",
    "llama 3": "llama",
    "qwen3": "qwen3",
    "ranks of llama 3": "llama",
}


def make(kind, folder):
    if kind == "gpt2 of tiktoken":
        known = make("trained", folder)
        return ByteLevel("gpt2", PATTERNS[1], known.ranks, known.specials)
    if kind == "trained":
        return make_tokenizer("bpe", ["Grüße, the quick brown fox don't 12345 " * 99, HELLO * 9], 400)
    if kind == "bytes":
        return make_tokenizer("bytes", [], 0)
    if kind == "cl100k":  # every pair of bytes is a token, so that ids tell where a text is cut
        ranks = [bytes([a]) for a in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
        specials = {"<|endoftext|>": 70_000, "<|fim prefix|>": 70_001}
        return ByteLevel("cl100k_base", CL100K, ranks, specials)
    if kind == "whole words":  # "abcd" is no union of others, so only the word alone is this token
        ranks = [bytes([a]) for a in range(256)] + [b"abcd", b"ab", b"bc", b"aaa", b"aa"]
        return ByteLevel("own", PATTERN, ranks)
    if kind in ("sentencepiece", "llama 2"):
        return open_tokenizer(str(sentencepiece_model(folder)), begin=kind == "llama 2")
    if kind == "unigram":
        import sentencepiece

        (folder / "u.txt").write_text("".join(f"the quick brown fox number {i} jumps\n" for i in range(300)))
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "u.txt"), model_prefix=str(folder / "u"), vocab_size=80, minloglevel=2,
            hard_vocab_limit=False, normalization_rule_name="identity",
        )  # fmt: skip
        return open_tokenizer(str(folder / "u.model"))
    if kind == "symbols":  # of the user, which no merge makes, as in Mistral's third vocabulary
        symbols = {"user_defined_symbols": ["[REF_1]", "[REF_10]"], "control_symbols": ["[INST]"]}
        return open_tokenizer(str(sentencepiece_model(folder, normalization_rule_name="identity", **symbols)))
    if kind in ("llama 3", "qwen3"):
        return open_tokenizer(str(cut_by_pattern(folder, kind.replace(" ", ""))))
    if kind.startswith("ranks of"):
        path = folder / ("tokenizer.model" if kind.endswith("3") else "qwen.tiktoken")
        rank_file(path)
        return open_tokenizer(str(path), begin=True)
    if kind == "normalized":
        return open_tokenizer(str(normalized(tokenizer_json(folder))))
    return open_tokenizer(str(tokenizer_json(folder, bos=True)))


def exported(tokenizer, folder, model_type="gpt2"):
    """As transformers opens it beside a model of this kind."""
    folder.mkdir()
    for name, content in transformers_files(tokenizer, 64).items():
        write_json(folder / name, content)
    write_json(folder / "config.json", {"model_type": model_type, "vocab_size": tokenizer.vocab_size})
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", [*KINDS])
def test_transformers_gives_the_same_ids_and_text(tmp_path, kind):
    known = make(kind, tmp_path)
    theirs = exported(known, tmp_path / "out", MODEL_TYPES.get(kind, "gpt2"))
    opening = known.encode("") if isinstance(known, SentencePiece) else []
    joined = isinstance(known, SentencePiece) and export_note(known)

    def check(text):
        if joined:  # see export_note
            text = "".join(c for c in text if c.isascii() or c in "Grüße世界🎈äöéñ日本한국어")
        if kind == "unigram" and any(piece in text for piece in ("<unk>", "<s>", "</s>")):
            return  # a Unigram model of the library takes its own special pieces wherever they are spelled
        ids = known.encode(text)
        assert theirs(text, split_special_tokens=True).input_ids == ids
        assert theirs.decode(ids[len(opening) :]) == known.decode(ids)

    composing = "e\u0301 \u00e9 12345 <think><|eot_id|><|im_end|> [REF_10]x[REF_1] [INST]"
    for text in ["", HELLO, composing, "ab abcd aaaa aaaaa abcdabcd xabcd", *random_texts(60)]:
        check(text)
    settings(max_examples=25, deadline=None, database=None)(given(st.text())(check))()
    assert theirs.eos_token_id == known.end_of_text
    assert first_token(known) == (known.encode("") or [known.end_of_text])[0]
    begin = None if kind in ("qwen3", "ranks of qwen", "cl100k") else theirs.bos_token_id  # they have none
    assert begin == begin_token(known) and begin in (None, known.begin_of_text, first_token(known))
    assert theirs.bos_token_id == begin
    assert theirs.model_max_length == 64 and len(theirs) > 256 - 200 * (kind == "unigram")


def is_edge(code: int) -> bool:
    """Whether a neighbour is of another category: long runs of one category, as of ideographs, are cut alike."""
    return len({category(chr(c)) for c in range(max(0, code - 1), code + 2)}) > 1


@pytest.mark.parametrize("pattern", [*PATTERNS, CL100K])
def test_every_character_is_cut_alike(pattern):
    ranks = [bytes([a]) for a in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    known = ByteLevel("pairs", pattern, ranks)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(transformers_files(known, 64)["tokenizer.json"]))
    characters = [chr(c) for c in range(0x30000) if not 0xD800 <= c < 0xE000 and (c % 64 == 0 or is_edge(c))]
    texts = [
        "".join(f"a{c}b {c}{c} 1{c}2 {c}x '{c}s\n{c}" for c in characters[i : i + 64])
        for i in range(0, len(characters), 64)
    ]
    for ours, encoding in zip(known.encode_batch(texts), theirs.encode_batch(texts), strict=True):
        assert ours.tolist() == encoding.ids


@pytest.mark.parametrize("kind", ["words", "lost byte", "pattern"])
def test_what_transformers_cannot_do_is_said(tmp_path, kind):
    if kind == "words":
        import sentencepiece

        (tmp_path / "w.txt").write_text("the quick brown fox\n" * 99)
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "w.txt"), model_prefix=str(tmp_path / "w"), vocab_size=8, model_type="word",
            minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip
        known = open_tokenizer(str(tmp_path / "w.model"))
    elif kind == "lost byte":
        known = ByteLevel("t", PATTERN, [bytes([b]) for b in range(256) if b != ord("e")])
    else:  # these letters are others in the other library
        known = ByteLevel("t", r"[a-z&&[^aeiou]]+|\h+|(?s:.)", [bytes([b]) for b in range(256)] + [b"ll", b"ab"])
    with pytest.raises(UserError) as error:
        transformers_files(known, 16)
    assert "tokenizer" in str(error.value) and "\n" not in str(error.value)


def test_a_folder_without_a_tokenizer_gives_no_empty_one(tmp_path):
    config = GPT2Config(num_layers=1, hidden_size=8, num_heads=2, seq_length=8, vocab_size=300)
    model = build_model(config, torch.device("cpu"), torch.float32, root_key(0))
    save_huggingface(InMemory(model), tmp_path / "hf")
    with pytest.raises(ValueError, match="tokenizer"):
        transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model with a trained BPE, as a checkpoint of weights with its tokenizer."""
    config = GPT2Config(num_layers=1, hidden_size=16, num_heads=2, seq_length=16, vocab_size=320, init_std=0.5)
    model = build_model(config, torch.device("cpu"), torch.float32, root_key(1))
    folder = tmp_path_factory.mktemp("run") / "weights"
    save_weights(InMemory(model), folder, "here", make_tokenizer("bpe", ["the quick brown fox " * 99], 300))
    return folder


def test_a_pipeline_continues_texts_offline_and_as_dtgpt_does(run, tmp_path, capsys):
    convert(run, tmp_path / "hf", ConvertOptions(to="hf"))
    assert capsys.readouterr().err == ""
    pipeline = transformers.pipeline("text-generation", str(tmp_path / "hf"))
    (found,) = pipeline("")
    assert found["generated_text"]
    long = "a prompt that is longer than what this model can see at once, by far"
    (found,) = pipeline(long, truncation=True, max_new_tokens=1)
    assert found["generated_text"].startswith("a prompt")
    (found,) = pipeline("the quick", max_new_tokens=6, do_sample=False)
    greedy = {"max_new_tokens": 6, "do_sample": False, "return_full_text": True}
    for folder in (tmp_path / "hf", run):
        assert load(folder).generate("the quick", **greedy) == found["generated_text"]
    known = tokenizer_beside(run)
    for name in ("config.json", "generation_config.json"):
        saved = json.loads((tmp_path / "hf" / name).read_text())
        assert saved["eos_token_id"] == saved["bos_token_id"] == known.end_of_text == 299 - (300 - known.vocab_size)


def test_files_have_the_mode_of_the_umask(run, tmp_path):
    for umask, mode in ((0o022, 0o644), (0o027, 0o640)):
        before = os.umask(umask)
        try:
            convert(run, tmp_path / oct(umask), ConvertOptions(to="hf"))
            convert(run, tmp_path / f"ours{umask}", ConvertOptions())
        finally:
            os.umask(before)
        for folder in (tmp_path / oct(umask), tmp_path / f"ours{umask}"):
            assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {mode}


def test_a_tokenizer_goes_along_through_all_formats(run, tmp_path):
    convert(run, tmp_path / "hf", ConvertOptions(to="hf"))
    convert(tmp_path / "hf", tmp_path / "ours", ConvertOptions())
    convert(tmp_path / "ours", tmp_path / "again", ConvertOptions(to="hf"))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_text() == (tmp_path / "again" / name).read_text(), name
    known = tokenizer_beside(run)
    assert tokenizer_beside(tmp_path / "ours").ranks == known.ranks


def test_a_tokenizer_is_named_for_a_model_that_has_none(run, tmp_path, capsys):
    (tmp_path / "bare").mkdir()
    for path in run.iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / "bare" / path.name).symlink_to(path)
    convert(tmp_path / "bare", tmp_path / "none", ConvertOptions(to="hf"))
    assert "no tokenizer is saved with" in (said := capsys.readouterr().out) and "--tokenizer" in said
    named = ConvertOptions(to="hf", tokenizer=str(run / "tokenizer.json"))
    convert(tmp_path / "bare", tmp_path / "hf", named)
    assert capsys.readouterr().err == "" and (tmp_path / "hf" / "tokenizer.json").is_file()
    convert(run, tmp_path / "tree_of_run", ConvertOptions(to="megatron"))
    assert f"name that of {run} by --tokenizer" in capsys.readouterr().out
    with pytest.raises(UserError, match="a Megatron-LM tree cannot hold the tokenizer"):
        convert(tmp_path / "bare", tmp_path / "tree", replace(named, to="megatron"))
    vocab, merges = gpt2_files(tmp_path)
    with pytest.raises(UserError, match="has 50257 tokens, the model 320"):
        convert(
            tmp_path / "bare", tmp_path / "x", ConvertOptions(to="hf", vocab_file=str(vocab), merge_file=str(merges))
        )
    assert not (tmp_path / "x").exists()


def save_with(tokenizer, folder):
    config = GPT2Config(num_layers=1, hidden_size=32, num_heads=2, seq_length=16, vocab_size=64)
    save_weights(InMemory(build_model(config, torch.device("cpu"), torch.float32, root_key(1))), folder, "", tokenizer)


CHARACTERS = "\n\r \t\x00'abcdefghijZé\u0301日🎈▁\ufeff\ufffd\u2028"


@pytest.mark.parametrize("unused", [False, True])
def test_characters_are_exported_and_come_back(tmp_path, capsys, unused):
    known = Char([*CHARACTERS[:5], *[""] * unused, *CHARACTERS[5:]])
    save_with(known, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hf", ConvertOptions(to="hf"))
    assert capsys.readouterr().err == ""
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ["", "a", "\r\n\n\n  \r", *(CHARACTERS[i:] + CHARACTERS[:i] * 9 for i in range(len(CHARACTERS)))]:
        assert theirs(text).input_ids == known.encode(text) and theirs.decode(known.encode(text)) == text
        assert theirs.decode(known.encode(text), skip_special_tokens=True) == text
    with pytest.raises(Exception, match="UNK"):
        theirs("X")
    pipeline = transformers.pipeline("text-generation", str(tmp_path / "hf"))
    for prompt in ("a b", ""):
        (found,) = pipeline(prompt, max_new_tokens=4, do_sample=False)
        assert found["generated_text"].startswith(prompt)
    exported, own = (load(tmp_path / name).generate("", max_new_tokens=4) for name in ("hf", "ours"))
    assert exported == own and len(own) == 4
    back = tokenizer_beside(tmp_path / "hf")
    assert isinstance(back, Char) and back.is_same(known)
    settings = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (0, None)
    with pytest.raises(UserError, match="does not know the character 'X'"):
        load(tmp_path / "hf").generate("X", max_new_tokens=1)


def test_ids_alone_are_no_tokenizer_and_that_is_said(tmp_path, capsys):
    save_with(Ids(64), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hf", ConvertOptions(to="hf"))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "token ids alone" in said and "written without a tokenizer" in said
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    with pytest.raises(ValueError, match="tokenizer"):
        transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")


def test_what_a_foreign_tokenizer_cannot_encode_is_one_sentence(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    write_json(tmp_path / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": model})
    with pytest.raises(UserError, match=r"cannot encode 'xy' \(.*UNK.*; use other characters"):
        open_tokenizer(str(tmp_path)).encode("xy")

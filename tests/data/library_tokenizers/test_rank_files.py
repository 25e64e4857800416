"""Files of tiktoken's ranks, and the tokenizer of a folder."""

import base64
import json
import pickle
import unicodedata
from itertools import product

import pytest
import tiktoken

from dtgpt.checkpoint.open import tokenizer_beside
from dtgpt.data.library_tokenizers.libraries import SentencePiece, TokenizerJson
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.util.storage import write_json
from tests.commands.test_cli import in_process
from tests.data.library_tokenizers.test_tokenizers import HELLO, random_texts
from tests.support.sources import refused
from tests.support.vocabularies import LLAMA3, QWEN, cut_by_pattern, gpt2_files, rank_file, sentencepiece_model


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken"])
def test_ids_are_those_of_tiktoken_with_the_pattern_of_the_family(tmp_path, name):
    tokens = rank_file(tmp_path / name)
    ranks = {token: i for i, token in enumerate(tokens)}
    pattern = LLAMA3 if name == "tokenizer.model" else QWEN
    theirs = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours = open_tokenizer(str(tmp_path / name))
    for text in (HELLO, "1234 e\u0301 \u00e9 the quick abcd", *random_texts(100)):
        given = text if name == "tokenizer.model" else unicodedata.normalize("NFC", text)
        assert ours.encode(text) == theirs.encode_ordinary(given)
        assert [ids.tolist() for ids in ours.encode_batch([text, "a"])] == [ours.encode(text), ours.encode("a")]
        assert ours.decode(ours.encode(text)) == given
    ours.save(tmp_path / "saved.json")
    for copy in (open_tokenizer(str(tmp_path / "saved.json")), pickle.loads(pickle.dumps(ours))):
        assert copy.is_same(ours) and copy.encode(HELLO) == ours.encode(HELLO)
        assert copy.begin_of_text == ours.begin_of_text


@pytest.mark.slow(1)
def test_special_tokens_of_llama_3_and_qwen_have_their_ids(tmp_path):
    tokens = [bytes([a]) for a in range(256)]
    tokens += [bytes(pair) for pair in product(range(256), repeat=2)]
    tokens += [bytes([a, b, c]) for a, b, c in product(range(256), range(256), range(2))]
    for name, size in (("llama3.tiktoken", 128_000), ("tokens.tiktoken", 151_643)):
        lines = (base64.b64encode(token) + b" %d" % i for i, token in enumerate(tokens[:size]))
        (tmp_path / name).write_bytes(b"\n".join(lines))
    llama, qwen = (open_tokenizer(str(tmp_path / name)) for name in ("llama3.tiktoken", "tokens.tiktoken"))
    assert (llama.vocab_size, llama.begin_of_text, llama.end_of_text) == (128_256, 128_000, 128_001)
    named = ("start_header_id", "end_header_id", "eot_id", "reserved_special_token_0", "reserved_special_token_250")
    assert [llama.specials[f"<|{name}|>"] for name in named] == [128_006, 128_007, 128_009, 128_002, 128_255]
    assert llama.encode("<|eot_id|>", special=True) == [128_009] and len(llama.encode("<|eot_id|>")) > 1
    assert (qwen.vocab_size, qwen.begin_of_text, qwen.end_of_text) == (151_851, None, 151_643)
    assert qwen.specials["<|im_end|>"] == 151_645
    assert qwen.token_bytes()[[0, 300, 151_642, 151_643]].tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize(("change", "words"), [
    (lambda lines: [*lines[:9], b"QQ 9", *lines[10:]], "on line 10"),
    (lambda lines: [*lines[:9], b"Q=Q= 9"], "on line 10"), (lambda lines: [*lines, b"abc"], "on line"),
    (lambda lines: [*lines, b"QUJD " + b"9" * 5000], "on line"), (lambda lines: [*lines, b"QUJD 99999999"], "on line"),
    (lambda lines: [*lines, b"QUJD -1"], "on line"), (lambda lines: [*lines, lines[7]], "twice"),
    (lambda lines: [*lines, b"QUJD 7"], "one id to two tokens"),
    (lambda lines: lines[:100], "no token for the byte 0x64"), (lambda lines: [*lines, b"\xff\xfe"], "on line")
])  # fmt: skip
def test_damaged_files_are_one_sentence(tmp_path, change, words):
    path = tmp_path / "tokenizer.model"
    rank_file(path)
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())))
    refused(lambda: open_tokenizer(str(path)), str(path), words)


def test_line_ends_of_windows_and_empty_lines_are_read(tmp_path):
    path = tmp_path / "tokenizer.model"
    tokens = rank_file(path)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\n\n")
    assert open_tokenizer(str(path)).ranks == tokens


def test_names_that_are_pieces_of_text_too_are_not_special(tmp_path):
    """ "<s>" is a token of Qwen's that texts are cut into."""
    path = cut_by_pattern(tmp_path, "qwen3")
    saved = json.loads(path.read_text())
    saved["model"]["vocab"]["<s>"] = 305
    path.write_text(json.dumps(saved))
    found = open_tokenizer(str(path))
    assert found.begin_of_text is None and found.decode([found.end_of_text]) == "<|endoftext|>"


def test_an_unknown_family_is_refused_with_what_is_known(tmp_path):
    rank_file(tmp_path / "o200k_base.tiktoken")
    refused(lambda: open_tokenizer(str(tmp_path / "o200k_base.tiktoken")), "268 ranks", "151,643", "tokenizer.json")
    more = b"".join(base64.b64encode(b"%06d" % i) + b" %d\n" % i for i in range(268, 128_002))
    (tmp_path / "tokenizer.model").write_bytes((tmp_path / "o200k_base.tiktoken").read_bytes() + more)
    refused(lambda: open_tokenizer(str(tmp_path / "tokenizer.model")), "128,002 ranks")  # of a later LLaMA


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "gpt2", None])
@pytest.mark.parametrize("asked", [True, False, None])
def test_a_vocabulary_in_a_folder_opens_texts_as_its_model_was_trained(tmp_path, model_type, asked):
    if model_type:
        write_json(tmp_path / "config.json", {"model_type": model_type})
    if asked is not None:
        write_json(tmp_path / "tokenizer_config.json", {"add_bos_token": asked, "eos_token": "<|eot_id|>"})
    opens = asked if asked is not None else model_type in ("llama", "mistral")
    path = tmp_path / "tokenizer.model"
    rank_file(path)
    ranks = tokenizer_beside(tmp_path)
    assert ranks.encode("the") == [ranks.begin_of_text] * opens + [257]
    assert ranks.end_of_text == ranks.specials["<|end_of_text|>" if asked is None else "<|eot_id|>"]
    sentencepiece_model(tmp_path).rename(path)
    for found in (tokenizer_beside(tmp_path), open_tokenizer(str(tmp_path))):
        assert isinstance(found, SentencePiece) and found.encode("")[:1] == [1] * opens
    assert open_tokenizer(str(path)).encode("") == []  # a file alone says nothing of a begin


@pytest.mark.slow(1)
def test_the_first_kind_of_file_in_a_folder_is_its_tokenizer(tmp_path):
    refused(lambda: open_tokenizer(str(tmp_path)), "has no tokenizer", "qwen.tiktoken")
    rank_file(tmp_path / "qwen.tiktoken")
    assert tokenizer_beside(tmp_path).specials["<|im_end|>"] == 270
    (tmp_path / "vocab.json").write_text("{}")
    assert tokenizer_beside(tmp_path).vocab_size == 476  # vocab.json alone is not a tokenizer
    gpt2_files(tmp_path)
    assert open_tokenizer(str(tmp_path)).vocab_size == 50257
    write_json(tmp_path / "config.json", {"model_type": "qwen3"})
    refused(lambda: tokenizer_beside(tmp_path), "model_type='qwen3'", "tokenizer.json")
    cut_by_pattern(tmp_path, "llama3")
    found = tokenizer_beside(tmp_path)
    assert isinstance(found, TokenizerJson) and found.encode("")[:1] == [found.begin_of_text]


@pytest.mark.slow(2)
@pytest.mark.parametrize("kind", ["file", "folder", "tokenizer.json"])
def test_prepare_takes_these_tokenizers(tmp_path, capsys, kind):
    (tmp_path / "t").mkdir()
    rank_file(tmp_path / "t" / "tokenizer.model")
    write_json(tmp_path / "t" / "config.json", {"model_type": "llama"})
    if kind == "tokenizer.json":
        cut_by_pattern(tmp_path / "t", "llama3")
    given = tmp_path / "t" / ("tokenizer.model" if kind == "file" else "" if kind == "folder" else kind)
    (tmp_path / "text.txt").write_text("the quick 12345\n")
    command = ["prepare", tmp_path / "text.txt", "--output-prefix", tmp_path / "out", "--tokenizer", given]
    code, _, err = in_process([*command, "--append-eod"], capsys)
    assert code == 0, err
    known = open_tokenizer(str(given))
    assert (known.encode("")[:1] == []) == (kind == "file")
    assert pickle.loads(pickle.dumps(known)).encode("the quick 12345") == known.encode("the quick 12345")  # for workers
    ids = (tmp_path / "out_text_document.bin").read_bytes()
    written = [int.from_bytes(ids[i : i + 2], "little") for i in range(0, len(ids), 2)]
    assert written[-1] == known.end_of_text and written[:-1] in (
        known.encode("the quick 12345\n"), known.encode("the quick 12345"),
    )  # fmt: skip

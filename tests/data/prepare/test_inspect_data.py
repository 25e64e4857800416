"""`dtgpt inspect` of token files."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from dtgpt.cli import main
from dtgpt.data.megatron.indexed import IndexedWriter
from dtgpt.data.prepare.job import PrepareConfig, prepare
from tests.data.megatron.test_tokenizer_beside import nanogpt
from tests.support.prepared import write_lines

FACTS = json.loads((Path(__file__).parents[2] / "fixtures" / "megatron_samples.json").read_text())


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Prefixes of the fixtures' corpora, made as their README says."""
    folder, made = tmp_path_factory.mktemp("corpora"), {}
    for name, corpus in FACTS["corpora"].items():
        rng, end = np.random.default_rng(corpus["seed"]), corpus["vocab"] - 1
        with IndexedWriter(folder / name, corpus["dtype"]) as writer:
            for length in rng.integers(corpus["lo"], corpus["hi"], corpus["n_docs"]):
                writer.append(np.append(rng.integers(0, end, int(length)), end))
                writer.end_document()
        made[name] = str(folder / name)
    return made


def said(capsys, *words) -> str:
    with pytest.raises(SystemExit) as done:
        main(["inspect", *map(str, words)])
    out, err = capsys.readouterr()
    assert done.value.code == 0, err
    return out


def refused(capsys, *words) -> str:
    """The one sentence with which the command ends."""
    with pytest.raises(SystemExit) as done:
        main(["inspect", *map(str, words)])
    out, err = capsys.readouterr()
    assert done.value.code == 2 and out == "" and err.count("\n") == 1, err
    return err


def test_statistics_and_beginnings(corpora, capsys):
    out = said(capsys, corpora["a"], "--samples", "1")
    assert "15,163 tokens (uint16) in 500 sequences, 500 documents" in out
    assert "tokens of a sequence: 2 to" in out
    assert "  sequence 0: 46463 5439 4008" in out
    assert re.search(r"  split 969,30,1: train 484 sequences, 14,\d+ tokens; valid 16 .*; test 0 sequences, 0 t", out)


def test_the_tokenizer_beside_the_data_decodes(tmp_path, capsys):
    chars = nanogpt(tmp_path / "chars", "to be\nor not " * 30) / "train.bin"
    out = said(capsys, chars, "--samples", "1")
    assert f"  tokenizer char, 8 tokens, of {chars.parent / 'meta.pkl'}" in out and "'to be\\nor not" in out
    texts = write_lines(tmp_path / "in.jsonl", [{"text": "the quick brown fox"}])
    prepare(PrepareConfig(input=texts, tokenizer="bytes", output_prefix=tmp_path / "out", append_eod=True, workers=1))
    for ending in ("", ".bin", ".idx"):
        out = said(capsys, str(tmp_path / "out_text_document") + ending)
        assert "  tokenizer bytes, 257 tokens, of " in out and "'the quick brown fox<|endoftext|>'" in out
    out = said(capsys, "0.5", chars, "0.5", tmp_path / "out_text_document")
    assert "tokenizer char" in out and "tokenizer bytes" in out
    (tmp_path / "out_text_document.tokenizer.json").unlink()
    assert "  sequence 0: 116 104 101" in said(capsys, tmp_path / "out_text_document")


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_options_may_stand_anywhere_and_a_prefix_may_have_an_ending(corpora, capsys, ending):
    path = corpora["a"] + ending
    assert said(capsys, "--split", "949,50,1", path) == said(capsys, corpora["a"], "--split=949,50,1")


@pytest.mark.parametrize("weights", [("1e-1", "+0.3"), (".1", "3e-1"), ("0.1", "0.3")])
def test_weights_are_any_numbers(corpora, capsys, weights):
    told = said(capsys, weights[0], corpora["a"], weights[1], corpora["b"])
    assert "  0.25 of the samples of the blend" in told and "  0.75 of the samples of the blend" in told


SHARDS = ([256, 72, 105, 256, 33], [256, 72, 111, 256])
LLMC_HEADER = np.array([20240520, 1], "<i4").tobytes()


@pytest.fixture
def shards(tmp_path):
    """A glob of two shards of llm.c, which are text of bytes."""
    for i, tokens in enumerate(SHARDS):
        header = LLMC_HEADER + np.array([len(tokens), *[0] * 253], "<i4").tobytes()
        (tmp_path / f"shard_{i}.bin").write_bytes(header + np.array(tokens, "<u2").tobytes())
    return str(tmp_path / "shard_*.bin")


def test_statistics_of_shards(shards, capsys):
    whole, cut = said(capsys, shards), said(capsys, shards, "--tokenizer", "bytes")
    assert "9 tokens (uint16) in 2 sequences, 2 shards of 0.0 MiB; documents not separated" in whole
    assert "9 tokens (uint16) in 4 sequences, 2 shards of 0.0 MiB\n" in cut and "not separated" not in cut
    assert r"  sequence 0: '<|endoftext|>Hi'" in cut
    one = shards.replace("*", "0")
    assert "5 tokens (uint16) in 1 sequence, 1 shard" in said(capsys, one)
    assert said(capsys, shards, "--eot", "256", "--samples", "0") == said(
        capsys, shards, "--samples", "0", "--tokenizer", "bytes"
    )


def test_a_model_of_llmc_is_no_shard(tmp_path, capsys):
    (tmp_path / "model.bin").write_bytes(np.array([20240326, 99], "<i4").tobytes())
    assert "tokens" not in refused(capsys, tmp_path / "model.bin")


def test_one_help_tells_of_both_kinds(capsys):
    for words in (["--help"], ["P", "-h"], ["--show", "--help"]):
        out = said(capsys, *words)
        assert "--tensors on|off" in out and "--samples INT" in out and "a run, a checkpoint" in out


def test_what_lies_near_is_suggested(corpora, tmp_path, capsys):
    for ending in (".bin", ".idx"):
        Path(f"{tmp_path}/own_text_document{ending}").write_bytes(Path(f"{corpora['a']}{ending}").read_bytes())
    assert f"did you mean {tmp_path}/own_text_document?" in refused(capsys, tmp_path / "own")
    Path(f"{tmp_path}/own_text_document.idx").unlink()
    sentence = refused(capsys, tmp_path / "own_text_document")
    assert "(no " in sentence and "own_text_document.idx again, or give" in sentence
    assert "there is no dataset" in refused(capsys, tmp_path / "none_*.bin")
    assert "there is no dataset" in refused(capsys, tmp_path / "none.idx")


@pytest.mark.parametrize("words, sentence", [
    (["--tensors"], "--tensors applies to models, and"), (["--eot", "3"], "--eot applies to shards, and"),
    (["--eot", "99999999"], "--eot=99999999 is out of range; use 0 or more and at most 16777215"),
    (["--samples=-1"], "--samples=-1 is out of range; use 0 or more"),
    (["--tokenizer", "bytes"], "holds token 46463, but the tokenizer bytes has 257 tokens; give the tokenizer"),
    (["--vocab-file", "vocab.json"], "belong together"),
])  # fmt: skip
def test_wrong_words_are_one_sentence(corpora, capsys, words, sentence):
    assert sentence.format(corpora["a"]) in refused(capsys, corpora["a"], *words)


def test_digests_of_lengths_and_of_tokens_are_told(corpora, tmp_path, capsys):
    before = said(capsys, corpora["a"]).splitlines()
    for ending in (".bin", ".idx"):
        (tmp_path / f"a{ending}").write_bytes(Path(f"{corpora['a']}{ending}").read_bytes())
    same = said(capsys, tmp_path / "a").splitlines()
    with (tmp_path / "a.bin").open("r+b") as file:
        file.seek(20_000)
        file.write(b"\x01\x02")
    other = said(capsys, tmp_path / "a").splitlines()
    lengths, tokens = (next(i for i, x in enumerate(before) if f"of the {w} " in x) for w in ("lengths", "tokens"))
    assert before[lengths] == same[lengths] == other[lengths]
    assert before[tokens] == same[tokens] != other[tokens]

"""Tokens that files beside vocab.json and merges.txt add: the ids of transformers, and of the files."""

import json

import pytest

from dtgpt.checkpoint.open import tokenizer_beside
from dtgpt.data.megatron.indexed import IndexedDataset
from dtgpt.data.prepare.config import PrepareConfig
from dtgpt.data.prepare.job import prepare
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.interop.convert import ConvertOptions, convert
from dtgpt.util.errors import UserError
from tests.support.vocabularies import sentencepiece_model, tokenizer_json

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow(8)

TEXT = "the fox <|user|>don't   stop<|end|><mark> 12 "
PLAIN = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)


def vocabulary(folder):
    """Write vocab.json and merges.txt without special tokens; return the first id that is free."""
    model = json.loads(tokenizer_json(folder).read_text())["model"]
    (folder / "tokenizer.json").unlink()
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ids = {token: i for i, token in enumerate(t for t in model["vocab"] if t not in ("<|endoftext|>", "<s>"))}
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return len(ids)


def add(folder, tokens, form, **settings):
    """Write tokens, (name, id, special) each, in one of two forms."""
    settings |= {"tokenizer_class": "GPT2Tokenizer"}
    if form == "decoder":
        own = {str(i): {"content": name, "special": special, **PLAIN} for name, i, special in tokens}
        settings["added_tokens_decoder"] = own
    else:
        (folder / "added_tokens.json").write_text(json.dumps({name: i for name, i, _ in tokens}))
        names = [name for name, _, special in tokens if special]
        (folder / "special_tokens_map.json").write_text(json.dumps({"extra_special_tokens": names}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')


@pytest.mark.parametrize("form", ["decoder", "older"])
@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_transformers(tmp_path, form, special):
    free = vocabulary(tmp_path)
    names = ("<|user|>", "<|endoftext|>", "<|end|>", "<mark>")
    tokens = [(name, free + i, special or i < 3) for i, name in enumerate(names)]
    add(tmp_path, tokens, form, eos_token="<|end|>")
    ours, theirs = open_tokenizer(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.end_of_text == theirs.eos_token_id == free + 2 and ours.vocab_size == free + 4
    assert ours.encode(TEXT, special=True) == theirs(TEXT).input_ids
    assert {free, free + 2, free + 3} <= set(ours.encode(TEXT, special=True))
    assert ours.encode(TEXT) == theirs(TEXT, split_special_tokens=True).input_ids
    assert ours.decode(ours.encode(TEXT, special=True)) == TEXT
    assert set(ours.special_names) == {name for name, _, own in tokens if own}


@pytest.mark.parametrize("form", ["decoder", "older"])
def test_numbers_with_a_gap_are_kept_by_prepare_and_convert(tmp_path, form):
    folder = tmp_path / "theirs"
    folder.mkdir()
    free = vocabulary(folder)
    add(folder, [("<|user|>", free + 3, True), ("<|end|>", free + 5, True)], form, eos_token="<|end|>")
    (tmp_path / "in.jsonl").write_text('{"text": "the fox"}\n')
    given = {"input": (str(tmp_path / "in.jsonl"),), "output_prefix": str(tmp_path / "x"), "append_eod": True}
    prepare(PrepareConfig(**given, tokenizer=str(folder), workers=1))
    assert IndexedDataset(tmp_path / "x_text_document").window(0)[-1] == free + 5
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=16, vocab_size=free + 8)
    )
    model.save_pretrained(folder)
    convert(folder, tmp_path / "out", ConvertOptions(to="hf"))
    for exported in (transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), tokenizer_beside(tmp_path / "out")):
        end = exported.eos_token_id if hasattr(exported, "eos_token_id") else exported.end_of_text
        assert end == free + 5
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("<|user|>a<|end|>").input_ids == [free + 3, *theirs("a").input_ids, free + 5]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == free + 8


@pytest.mark.parametrize(("tokens", "words"), [
    ([("<|end|>", 5, True)], "give '<|end|>' the id 5, which vocab.json has as"),
    ([("a", 500, True)], "give 'a' the id 500, which vocab.json has as"),
    ([("<|end|>", 700, True), ("<|user|>", 700, True)], "the id 700"),
    ([("<|end|>", -1, True)], "is not an object of token: id")
])  # fmt: skip
def test_ids_that_contradict_each_other_are_refused(tmp_path, tokens, words):
    vocabulary(tmp_path)
    add(tmp_path, tokens, "older")
    with pytest.raises(UserError) as error:
        open_tokenizer(str(tmp_path))
    assert words in str(error.value) and str(error.value).endswith("fetch the folder again")


@pytest.mark.parametrize("decoder", [[], {"x": {"content": "a"}}, {"5": "a"}, {"5": {"content": 3}}])
def test_a_decoder_that_is_none_is_refused(tmp_path, decoder):
    vocabulary(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    with pytest.raises(UserError, match="added_tokens_decoder that is not an object of id: token"):
        open_tokenizer(str(tmp_path))


def test_tokens_beyond_a_sentencepiece_model_are_refused(tmp_path):
    path = sentencepiece_model(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<unk>": 0, "<|im_end|>": 300}')
    with pytest.raises(UserError, match=r"add tokens that it does not have, such as '<\|im_end\|>'; put the tokenizer"):
        open_tokenizer(str(path))
    (tmp_path / "added_tokens.json").write_text('{"<unk>": 0}')
    assert open_tokenizer(str(path)).vocab_size == 300


def test_tokens_that_a_tokenizer_json_lacks_are_refused(tmp_path):
    """transformers adds these to it; saved anew by it, the file has them."""
    free = max(json.loads(tokenizer_json(tmp_path).read_text())["model"]["vocab"].values()) + 1
    settings = {"added_tokens_decoder": {str(free): {"content": "<|user|>", "special": True, **PLAIN}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        UserError, match=r"add tokens that it does not have, such as '<\|user\|>'; put the tokenizer.json"
    ):
        open_tokenizer(str(tmp_path))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    assert open_tokenizer(str(tmp_path)).encode_prompt(TEXT) == theirs(TEXT).input_ids

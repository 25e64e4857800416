import json

import pytest
import torch

from dtgpt.cli import main
from dtgpt.commands.generate import GenerateOptions, generate_from
from dtgpt.data.tokenizers.open import from_files, make_tokenizer, open_tokenizer
from dtgpt.inference.generate import Sampling, choose, generate, logits_of, sample_text, tokenizer_of
from dtgpt.interop.hf.model import save_huggingface
from dtgpt.models.decoder import build_model
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.util.errors import UserError
from tests.interop.test_interop_huggingface import InMemory
from tests.support.vocabularies import gpt2_files, sentencepiece_model, tokenizer_json

CONFIG = GPT2Config(num_layers=1, hidden_size=16, num_heads=2, seq_length=8, vocab_size=300, init_std=0.5)
KEY = root_key(4)


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG, torch.device("cpu"), torch.float32, root_key(1))


def test_a_draw_picks_the_token_whose_share_holds_it():
    logits = torch.log(torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64))
    draws = torch.linspace(0.001, 0.999, 1000)
    chosen = [choose(logits, d.item(), 1.0, 0) for d in draws]
    assert [chosen.count(i) for i in range(3)] == pytest.approx([200, 500, 300], abs=2)
    assert {choose(logits, d.item(), 1.0, 2) for d in draws} == {1, 2}
    assert {choose(logits, d.item(), t, 0) for d in draws for t in (0.0, 1e-310, 1e-9)} == {1}
    assert {choose(logits, d.item(), 1.0, 99) for d in draws} == {0, 1, 2}


def test_greedy_text_follows_the_model_token_by_token(model):
    ids = [5, 6, 7]
    for token in generate(logits_of(model), CONFIG, ids, Sampling(12, temperature=0), KEY):
        window = torch.tensor([ids[-8:]])
        assert token == int(model(window)[0, -1, :300].argmax())
        ids.append(token)
    assert len(ids) == 15


def test_samples_repeat_with_the_key_and_differ_with_another(model):
    assert generate(logits_of(model), CONFIG, [1], Sampling(20), KEY) == generate(
        logits_of(model), CONFIG, [1], Sampling(20), KEY
    )
    assert generate(logits_of(model), CONFIG, [1], Sampling(20), KEY) != generate(
        logits_of(model), CONFIG, [1], Sampling(20), fold(KEY, 1)
    )
    assert generate(logits_of(model), CONFIG, [1], Sampling(20), KEY)[:7] == generate(
        logits_of(model), CONFIG, [1], Sampling(7), KEY
    )


def test_ids_stay_inside_the_tokenizers_vocabulary_and_end_where_told(model):
    assert max(generate(logits_of(model), CONFIG, [1], Sampling(50), KEY, vocab_size=257)) < 257
    new = generate(logits_of(model), CONFIG, [1], Sampling(50), KEY, stop=lambda token: token % 2 == 0)
    assert new[-1] % 2 == 0 and all(t % 2 for t in new[:-1])
    assert generate(logits_of(model), CONFIG, [1], Sampling(0), KEY) == []


def test_a_sample_begins_with_its_prompt(model):
    tokenizer = make_tokenizer("bytes", [], 0)
    for prompt in ("", "héllo 🎈", "a prompt that is longer than the window of the model"):
        assert sample_text(logits_of(model), CONFIG, tokenizer, prompt, Sampling(10), KEY).startswith(prompt)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A model of transformers without a tokenizer, whose vocabulary is not GPT-2's."""
    folder = tmp_path_factory.mktemp("foreign") / "model"
    save_huggingface(InMemory(build_model(CONFIG, torch.device("cpu"), torch.float32, root_key(1))), folder)
    (folder / "tokenizer_config.json").unlink()
    return folder


def own_vocabulary(folder):
    """vocab.json and merges.txt of a small BPE whose end of text a file beside them names."""
    saved = json.loads(tokenizer_json(folder, end="</s>").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(saved["vocab"]))
    (folder / "merges.txt").write_text("".join(" ".join(pair) + "\n" for pair in saved["merges"]))
    (folder / "tokenizer.json").unlink()
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')


@pytest.mark.parametrize("kind", ["tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model"])
def test_a_foreign_folder_is_sampled_with_its_own_tokenizer(foreign, tmp_path, kind, monkeypatch):
    monkeypatch.setattr("tiktoken.get_encoding", None)  # nothing is fetched
    folder = tmp_path / "model"
    folder.mkdir()
    for path in foreign.iterdir():
        (folder / path.name).symlink_to(path)
    if kind == "tokenizer.json":
        tokenizer_json(folder)
    elif kind == "vocab.json":
        own_vocabulary(folder)
    else:
        (tmp_path / "sp").mkdir()
        sentencepiece_model(tmp_path / "sp").rename(folder / kind)
    known = tokenizer_of(folder, CONFIG)
    assert 270 < known.vocab_size <= CONFIG.vocab_size and known.end_of_text is not None
    assert len(known.encode("the quick fox")) < 13
    for prompt in ("the quick", ""):
        assert generate_from(folder, GenerateOptions(prompt=prompt, tokens=5)).startswith(prompt)


def test_a_tokenizer_is_named_on_the_command_line(foreign, tmp_path, capsys):
    (tmp_path / "own").mkdir()
    own_vocabulary(tmp_path / "own")
    vocab, merges = tmp_path / "own" / "vocab.json", tmp_path / "own" / "merges.txt"
    for options in (
        ["--vocab_file", vocab, "--merge_file", merges], [f"--vocab-file={vocab}", "--merge-file", merges],
        ["--tokenizer", "bytes"], ["--tokenizer", tokenizer_json(tmp_path)],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as exit:
            main(["generate", str(foreign), "--prompt", "the quick", "--tokens", "3", *map(str, options)])
        assert exit.value.code == 0 and capsys.readouterr().out.startswith("the quick")


@pytest.mark.parametrize("options, words", [
    ([], ["no tokenizer is saved with", "300 tokens are not GPT-2's", "vocab.json and merges.txt"]),
    (["--tokenizer", "nowhere"], ["tokenizer nowhere", "vocab.json"]),
    (["--vocab_file", "v"], ["the vocab file and the merge file belong together"]),
    (["--tokenizer", "bytes", "--vocab_file", "v", "--merge_file", "m"], ["bytes and the vocab file v are both given"]),
    (["--vocab_file", "V", "--merge_file", "M"], ["has 50257 tokens, the model 300"]),
])  # fmt: skip
def test_what_is_wrong_with_a_tokenizer_names_the_options_of_this_command(foreign, tmp_path, capsys, options, words):
    places = dict(zip("VM", map(str, gpt2_files(tmp_path)), strict=True))
    with pytest.raises(SystemExit) as exit:
        main(["generate", str(foreign), *(places.get(word, word) for word in options)])
    said = capsys.readouterr().err
    assert exit.value.code == 2 and said.count("\n") == 1 and all(word in said for word in words), said
    assert "--vocab-file" not in said and "--data" not in said


def test_prompts_that_the_model_cannot_take_are_refused(model, tmp_path):
    wide = from_files(*gpt2_files(tmp_path))
    with pytest.raises(UserError, match=r"has token \d+ of vocab\.json, but the model has 300 tokens"):
        sample_text(logits_of(model), CONFIG, wide, "Hello", Sampling(3), KEY)
    endless = open_tokenizer(str(tokenizer_json(tmp_path, end="[STOP]")))
    with pytest.raises(UserError, match="has no end of text to begin a document with; give --prompt"):
        sample_text(logits_of(model), CONFIG, endless, "", Sampling(3), KEY)

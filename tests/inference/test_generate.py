"""`Model.generate` with one process: forms of prompts and results, options, tokenizers of foreign folders."""

import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dtgpt
from dtgpt.cli import main
from dtgpt.data.library_tokenizers.files import from_files
from dtgpt.data.tokenizers.open import make_tokenizer, open_tokenizer
from dtgpt.evaluation.batches import Sample
from dtgpt.evaluation.scoring import scorer_of
from dtgpt.inference.engine import Engine
from dtgpt.inference.options import ELSEWHERE, NAMES, read_options
from dtgpt.inference.prompts import special_ids, tokenizer_of
from dtgpt.inference.request import Completion, PromptJob
from dtgpt.interop.hf.model import save_huggingface
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.util.errors import UserError
from tests.interop.test_interop_huggingface import InMemory
from tests.support.vocabularies import gpt2_files, sentencepiece_model, tokenizer_json
from tests.support.whole_model import build_model

CONFIG = GPT2Config(num_layers=1, hidden_size=16, num_heads=2, seq_length=32, vocab_size=300, init_std=0.5)
BYTES = make_tokenizer("bytes", [], 0)


def whole_model():
    return build_model(CONFIG, torch.device("cpu"), torch.float32, root_key(1))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A model of transformers without a tokenizer, whose vocabulary is not GPT-2's."""
    folder = tmp_path_factory.mktemp("foreign") / "model"
    save_huggingface(InMemory(whole_model()), folder)
    (folder / "tokenizer_config.json").unlink()
    return folder


@pytest.fixture(scope="module")
def model(foreign):
    return dtgpt.load(foreign, device="cpu", tokenizer=BYTES)


@pytest.mark.parametrize("greedy", [{"do_sample": False}, {"temperature": 0}, {"top_p": 0, "top_p_decay": 0.5}])
def test_greedy_text_follows_the_model_token_by_token(model, greedy):
    ids, whole = [5, 6, 7], whole_model()
    for token in model.generate([5, 6, 7], max_new_tokens=12, **greedy):
        logits = whole(torch.tensor([ids]))[0, -1, :257]
        assert token == int(logits.argmax())
        ids.append(token)
    assert len(ids) == 15


def test_score_generation_beams_and_evaluation_have_one_rule_of_log_probabilities(model):
    """Over the 300 tokens of the model, of which its tokenizer has 257."""
    prompt = list(b"hello")
    (scored,) = scorer_of(model).score([Sample(prompt)])
    score = model.score(prompt)
    assert score.logprobs == pytest.approx(scored.logprobs.tolist(), abs=1e-5)
    assert score.greedy == scored.greedy.tolist()
    for options in ({}, {"num_beams": 3}):
        found = model.generate(prompt, max_new_tokens=5, ends=False, details=True, **options)
        (again,) = scorer_of(model).score([Sample([*prompt, *found.ids], len(prompt))])
        assert found.logprobs == pytest.approx(again.logprobs.tolist(), abs=1e-5)


def test_results_have_the_form_of_the_prompts(model):
    options = {"max_new_tokens": 5, "ends": False}
    ids, other = model.generate([[104, 105], [7]], **options)
    assert len(ids) == 5 and model.generate([104, 105], **options) == ids
    assert model.generate(torch.tensor([[104, 105], [7, 8]]), **options)[0] == ids
    assert model.generate(torch.tensor([104, 105]), **options) == ids
    text = model.generate("hi", **options)
    assert text == BYTES.decode([*b"hi", *ids])[2:] and model.generate(["hi"], **options) == [text]
    assert model.generate("hi", return_full_text=True, **options) == "hi" + text
    assert model.generate([[104, 105], [7]], return_full_text=True, **options) == [[104, 105, *ids], [7, *other]]
    first, second = model.generate(["hi", "x"], num_return_sequences=3, **options)
    assert first[0] == text and len(set(first)) == len(first) == len(second) == 3


def test_a_text_depends_on_its_seed_and_its_index_and_not_on_its_neighbours(model):
    options = {"max_new_tokens": 20, "ends": False}
    alone = model.generate([[1]], **options)[0]
    assert model.generate([[1], [2], [3, 4]], **options)[0] == alone
    assert model.generate([[2], [1]], **options)[1] != alone
    assert model.generate([1], seed=1, **options) != alone
    assert model.generate([1], max_new_tokens=7, ends=False) == alone[:7]
    small = dtgpt.load(model.path, tokenizer=BYTES, slots=1)
    prompts = [[i] for i in range(9)]
    assert small.generate(prompts, **options) == model.generate(prompts, **options) and small.slots == 1


def test_slots_grow_with_the_calls_and_a_number_of_slots_is_kept(foreign):
    model = dtgpt.load(foreign)
    seen = []
    for prompts in ([1], [[1]] * 3, [1], [[1]] * 9):
        model.generate(prompts, max_new_tokens=1)
        seen.append(model.slots)
    assert seen == [1, 4, 4, 16]
    cache = weakref.ref(model.engine._rank_step.cache.layers[0].keys)
    model.generate([[1]] * 17, max_new_tokens=1)
    assert cache() is None and model.slots == 32
    few = dtgpt.load(foreign, slots=2)
    with pytest.raises(UserError, match="3 sequences of a prompt need as many slots of the cache, which has 2"):
        few.generate([1], num_return_sequences=3)
    for wrong in (0, 513, "many"):
        with pytest.raises(UserError, match=r"slots=.*use 1 to 512, or auto"):
            dtgpt.load(foreign, slots=wrong)


def test_slots_that_do_not_fit_are_told_before_they_are_made(foreign, monkeypatch):
    model = dtgpt.load(foreign)
    one = model.bytes_per_slot
    monkeypatch.setattr("dtgpt.parallel.cache_sizes.free_memory", lambda *_: 8 * one)
    assert len(model.generate([[1]] * 9, max_new_tokens=2)) == 9 and model.slots < 8
    with pytest.raises(UserError, match=r"20 slots of the cache, .*KiB each, do not fit .* but \d do"):
        model.generate([1], num_return_sequences=20)
    monkeypatch.setattr("dtgpt.parallel.cache_sizes.free_memory", lambda *_: one)
    with pytest.raises(UserError, match="MiB are free"):
        dtgpt.load(foreign).generate([1])


def test_details_tell_ids_scores_and_reasons(model):
    found = model.generate("hi", max_new_tokens=6, details=True, top_logprobs=3, prompt_logprobs=True, ends=False)
    assert isinstance(found, Completion) and found.text == model.generate("hi", max_new_tokens=6, ends=False)
    assert found.finish_reason == "length" and len(found.ids) == len(found.logprobs) == len(found.alternatives) == 6
    rows = whole_model()(torch.tensor([[*b"hi", *found.ids]]))[0, :, : CONFIG.vocab_size].log_softmax(-1)
    expected = [rows[1 + i, token].item() for i, token in enumerate(found.ids)]
    assert found.logprobs == pytest.approx(expected, abs=1e-4)
    assert found.prompt_logprobs == pytest.approx([rows[0, 105].item()], abs=1e-4)
    for i, row in enumerate(found.alternatives):
        best = rows[1 + i].topk(3)
        assert [token for token, _ in row] == best.indices.tolist()
        assert [logprob for _, logprob in row] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert found.segments == [BYTES.decode([i]) for i in found.ids]


def test_scores_are_those_of_the_model(model):
    """Of all of its 300 tokens, as those of transformers and of `dtgpt eval`; its tokenizer has 257."""
    score = model.score("hello", top_logprobs=2)
    rows = whole_model()(torch.tensor([list(b"hello")]))[0, :-1, : CONFIG.vocab_size].log_softmax(-1)
    assert score.ids == list(b"hello")
    expected = [row[token].item() for row, token in zip(rows, b"ello", strict=True)]
    assert score.logprobs == pytest.approx(expected, abs=1e-4)
    assert score.greedy == [token == best for token, best in zip(b"ello", rows.argmax(-1).tolist(), strict=True)]
    assert score.total == pytest.approx(sum(score.logprobs)) and len(score.alternatives) == 4
    assert [one.logprobs for one in model.score([[7], list(b"hello")])] == [[], score.logprobs]
    whole = model.score(list(range(CONFIG.seq_length)))
    assert len(whole.logprobs) == CONFIG.seq_length - 1


def test_stop_strings_end_the_text_and_a_stream_is_the_text(model):
    options = {"max_new_tokens": 24, "seed": 5, "ends": False}
    whole = model.generate("x", **options)
    stop = whole[6:8]
    first = whole[: whole.index(stop)]
    assert model.generate("x", stop_strings=stop, **options) == first
    assert model.generate("x", stop_strings=["no such text", stop], **options) == first
    pieces = list(model.generate("x", stream=True, **options))
    assert "".join(pieces) == whole and len(pieces) > 2
    assert "".join(model.generate("x", stream=True, stop_strings=[stop], **options)) == first
    assert list(model.generate([120], stream=True, **options)) == model.generate([120], **options)


def test_two_streams_at_once_do_not_mix(model):
    options = {"max_new_tokens": 20, "ends": False}
    expected = model.generate("yz", **options)
    one, other = (model.generate(prompt, stream=True, **options) for prompt in ("x", "yz"))
    next(one)
    text = next(other)
    with pytest.raises(UserError, match="read it to its end"):
        next(one)
    assert text + "".join(other) == expected
    one = model.generate("x", stream=True, **options)
    next(one)
    assert model(torch.tensor([[1, 2]])).isfinite().all()
    with pytest.raises(UserError, match="read it to its end"):
        next(one)


def test_a_failure_in_the_midst_leaves_the_model_usable(model, monkeypatch):
    options = {"max_new_tokens": 9, "ends": False}
    expected, step, calls = model.generate(["x", "y", "z"], **options), Engine.step, []

    def failing(engine):
        calls.append(engine)
        if len(calls) % 2 == 0:
            raise MemoryError
        return step(engine)

    monkeypatch.setattr(Engine, "step", failing)
    waiting = model.generate("x", stream=True, **options)
    with pytest.raises(MemoryError):
        model.generate("x", **options)
    with pytest.raises(UserError, match="the model has failed"):
        next(waiting)
    with pytest.raises(MemoryError):
        list(model.generate("x", stream=True, **options))
    monkeypatch.undo()
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 300)
    assert model.generate(["x", "y", "z"], **options) == expected


@pytest.mark.parametrize("name, value", [
    ("path", None), ("path", b"x"), ("plan", 2), ("plan", {"tp": 2}), ("tokenizer", 5), ("slots", torch.ones(2)),
    ("slots", True), ("device", 0), ("precision", torch.float32),
])  # fmt: skip
def test_what_load_cannot_use_is_one_sentence(foreign, name, value):
    with pytest.raises(UserError, match=rf"^{name}=[^\n]*; (give|use)[^\n]*$"):
        dtgpt.load(**{"path": foreign, name: value})


def test_a_tokenizer_may_be_given_by_its_name(foreign, model):
    named = dtgpt.load(foreign, device="cpu", tokenizer="bytes")
    assert named.generate("x", max_new_tokens=5) == model.generate("x", max_new_tokens=5)
    with pytest.raises(UserError, match="neither a file nor one of"):
        dtgpt.load(foreign, tokenizer="nothing")


@pytest.mark.parametrize("prompt", [torch.tensor([1, 0]).to_sparse(), torch.zeros(2, dtype=torch.long, device="meta")])
def test_tensors_without_numbers_in_order_are_refused(model, prompt):
    for prompts in (prompt, [prompt]):
        with pytest.raises(UserError, match="give a plain tensor of ids"):
            model.generate(prompts)


def test_threads_wait_for_each_other(model):
    expected = model.generate("x", max_new_tokens=20)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: model.generate("x", max_new_tokens=20), range(6)))
    assert found == [expected] * 6


@pytest.mark.parametrize("tokens", [
    [[1]], None, torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.complex64),
    torch.zeros(1, 2, dtype=torch.int64, device="meta"), torch.zeros(2, dtype=torch.int64),
])  # fmt: skip
def test_tokens_that_are_none_are_refused(model, tokens):
    with pytest.raises(UserError, match="give whole numbers"):
        model(tokens)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_tokens_may_have_any_type_of_whole_numbers(model, dtype):
    tokens = torch.tensor([[1, 2]])
    assert torch.equal(model(tokens.to(dtype)), model(tokens))


def test_the_end_of_text_ends_a_sequence_and_is_not_in_the_text(model):
    end = BYTES.end_of_text
    found = model.generate("x", details=True, logit_bias={end: 100.0}, min_new_tokens=3)
    assert found.ids[-1] == end and len(found.ids) == 4 and found.finish_reason == "stop"
    assert found.text == BYTES.decode([120, *found.ids[:-1]])[1:]
    on = model.generate("x", logit_bias={str(end): 100}, ends=False, max_new_tokens=2)
    assert on == "<|endoftext|>" * 2


NUMBERS = st.integers() | st.floats() | st.integers(-2, 3)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=3) | st.just("9" * 5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("0123a", max_size=3), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.slow(1)
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
def test_any_value_of_any_option_is_taken_or_refused_in_one_sentence(model, options):
    try:
        model.check(PromptJob([1, 2], read_options(options, 2, CONFIG)))
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 400


def test_names_of_other_programs_lead_to_options_that_exist():
    assert set(ELSEWHERE.values()) <= set(NAMES) and not set(ELSEWHERE) & set(NAMES)


@pytest.mark.slow(2)
def test_a_model_with_gpt2s_vocabulary_ends_without_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr("tiktoken.get_encoding", None)  # nothing is fetched
    config = replace(CONFIG, vocab_size=50257)
    whole = build_model(config, torch.device("cpu"), torch.float32, root_key(1))
    save_huggingface(InMemory(whole), tmp_path / "gpt2")
    (tmp_path / "gpt2" / "tokenizer_config.json").unlink()
    model = dtgpt.load(tmp_path / "gpt2")
    assert model.generate([1], logit_bias={50256: 100}) == [50256]
    assert model.generate([1], logit_bias={628: 100}, stop_on_double_eol=True) == [628]
    assert model.generate([1], max_new_tokens=2, details=True).text is None
    assert model.special == special_ids(from_files(*gpt2_files(tmp_path)), [50256])


def test_the_default_number_of_tokens_is_what_the_positions_leave(model):
    assert len(model.generate([1] * 30, ends=False)) == 2
    assert len(model.generate([1], ends=False)) == 31
    with pytest.raises(UserError, match=r"32 tokens .* need 33 positions, but the model has 32"):
        model.generate([1] * 32)


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
    model = dtgpt.load(folder)
    for prompt in ("the quick", ""):
        ids = known.encode(prompt) or [known.opening]
        found = model.generate(prompt, max_new_tokens=5, details=True, ends=False)
        assert found.text == known.decode([*ids, *found.ids])[len(known.decode(ids)) :]


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
    ([], ["no tokenizer is saved with", "300 tokens are not GPT-2's", "or --tokenizer ", "merges.txt"]),
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


@pytest.mark.slow(1)
def test_prompts_that_the_model_cannot_take_are_refused(foreign, tmp_path):
    wide = from_files(*gpt2_files(tmp_path))
    with pytest.raises(UserError, match="has 50257 tokens, the model 300"):
        dtgpt.load(foreign, tokenizer=wide)
    endless = open_tokenizer(str(tokenizer_json(tmp_path, end="[STOP]")))
    with pytest.raises(UserError, match="has no end of text to begin a document with; give a prompt"):
        dtgpt.load(foreign, tokenizer=endless).generate("")

"""Logits that are not finite end a text or a task in one sentence, wherever they come up."""

import math
import shutil

import pytest
import torch

import dtgpt
from dtgpt.config.plan import Plan
from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.evaluation.batches import Sample
from dtgpt.evaluation.scoring import scorer_of
from dtgpt.inference.beams.search import Beams
from dtgpt.inference.options import Options
from dtgpt.inference.prompt_sources.terminal import converse
from dtgpt.inference.request import LOGITS, NOT_FINITE, NotFinite, PromptJob, SequenceUpdate
from dtgpt.interop.hf.model import save_huggingface
from dtgpt.interop.weights_alone import save_weights
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.mesh import Mesh
from dtgpt.serve.weights import has_finite_weights
from tests.commands.test_cli import in_process
from tests.interop.test_interop_huggingface import InMemory
from tests.support import bodies_inference as bodies
from tests.support.engines import CPU, drain, engine_of
from tests.support.ranks import pool, several
from tests.support.requests import make_request
from tests.support.whole_model import build_model

CONFIG = GPT2Config(num_layers=2, hidden_size=16, num_heads=2, seq_length=32, vocab_size=257, init_std=0.5)
BYTES = make_tokenizer("bytes", [], 0)


def broken_model(value: float = math.nan):
    """A model that fails where it reads the position 5, or later: not at once."""
    model = build_model(CONFIG, CPU, torch.float32, root_key(1))
    with torch.no_grad():
        model.embedding.wpe.weight[5] = value
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "broken"
    save_huggingface(InMemory(broken_model()), path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return dtgpt.load(folder, device="cpu", tokenizer=BYTES)


@pytest.mark.slow(1)
@pytest.mark.parametrize("value, changes", [
    (math.nan, {}), (math.inf, {}), (-math.inf, {"choices": 2}), (math.nan, {"search": Beams(width=2)}),
    (math.inf, {"ids": [1] * 6}), (math.nan, {"ids": [1] * 7, "score_prompt": True}),
], ids=str)  # fmt: skip
def test_a_request_ends_where_its_logits_are_not_finite_and_others_go_on(value, changes):
    model = broken_model(value)
    good = make_request(ids=[2], sampling=Options(max_new_tokens=4, temperature=0.0))

    def ids_of(events: list[SequenceUpdate], handle: int) -> list[int]:
        return [token for event in events if event.job == handle for token in event.ids]

    with engine_of(model, 4) as engine:
        alone = engine.submit(good)
        expected = ids_of(drain(engine), alone)
        assert len(expected) == 4
        bad = make_request(**{"ids": [3, 4], "sampling": Options(max_new_tokens=9), **changes})
        handle, other = engine.submit(bad), engine.submit(good)
        events = drain(engine)
        assert {e.finish for e in events if e.job == handle} - {None} == {NOT_FINITE}
        assert ids_of(events, other) == expected
        again = engine.submit(good)  # in a slot that has held NaN
        assert ids_of(drain(engine), again) == expected


@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 2}, {"num_beams": 2}, {"do_sample": False},
                                     {"top_k": 3}, {"prompt_logprobs": True, "details": True}], ids=str)  # fmt: skip
def test_generation_raises_one_sentence_and_the_model_goes_on(model, options):
    before = model.generate([1, 2], max_new_tokens=3)
    with pytest.raises(NotFinite) as caught:
        model.generate([[1, 2], [1, 2, 3]], max_new_tokens=9, ends=False, **options)
    assert str(caught.value) == LOGITS and "\n" not in LOGITS
    assert model.generate([1, 2], max_new_tokens=3) == before


def test_scores_and_streams_raise_it_too(model):
    for work in (
        lambda: model.score([1] * 9), lambda: model.score([1] * 9, top_logprobs=2),
        lambda: list(model.generate([1, 2], max_new_tokens=9, ends=False, stream=True)),
        lambda: scorer_of(model).score([Sample([1, 2]), Sample([1] * 9)]),
    ):  # fmt: skip
        with pytest.raises(NotFinite):
            work()
        assert len(model.generate([1, 2], max_new_tokens=3, ends=False)) == 3
    assert len(model.score([1] * 5).logprobs) == 4


@pytest.mark.slow(2)
def test_all_ranks_raise_it_and_go_on(folder):
    calls = [(bodies.not_finite, folder, plan) for plan in ("tp2", "pp2")]
    assert pool().run(2, several, calls) == [[[LOGITS] * 3 + [3]] * 2] * 2


def test_weights_are_told_apart_from_what_pads_them(tmp_path):
    mesh = Mesh(Plan().for_world(1), CPU)
    model = build_model(CONFIG, CPU, torch.float32, root_key(1))
    assert has_finite_weights([model], mesh, CONFIG) and not has_finite_weights([broken_model()], mesh, CONFIG)
    with torch.no_grad():
        model.embedding.wte.weight[CONFIG.vocab_size :] = math.nan
    assert len(model.embedding.wte.weight) > CONFIG.vocab_size and has_finite_weights([model], mesh, CONFIG)
    save_weights(InMemory(model), tmp_path / "padded", "a test")
    with torch.no_grad():
        model.embedding.wte.weight[CONFIG.vocab_size - 1, 0] = math.nan  # of the last rank under tp
    save_weights(InMemory(model), tmp_path / "broken", "a test")
    models = [tmp_path / "padded", tmp_path / "broken"]
    assert pool().run(2, bodies.finite_weights, models, "tp2") == [[True, True], [True, False]]


def test_dtgpt_generate_ends_with_the_sentence(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "model")
    words = ["--tokenizer", "bytes", "--prompt", "hello", "--max-new-tokens", "9"]
    for more in ([], ["--num-samples", "2"], ["--num-beams", "2"], ["--output", tmp_path / "out.jsonl"]):
        code, _, err = in_process(["generate", tmp_path / "model", *words, *more], capsys)
        assert code == 2 and err.count(LOGITS) == 1 and "Traceback" not in err


def test_dtgpt_serve_does_not_begin(folder, capsys):
    code, _, err = in_process(["serve", folder, "--tokenizer", "bytes", "--port", "0"], capsys)
    assert code == 2 and err.count("weights are not finite") == 1 and "Traceback" not in err


def test_a_conversation_goes_on_after_the_sentence(capsys):
    class Typed:
        stopped = staticmethod(lambda: False)

        def prompts(self):
            return iter(["hello", "a"])

    with engine_of(broken_model(), 2) as engine:
        engine.tokenizer = BYTES
        converse(engine, Typed(), lambda text, turn: PromptJob(list(text.encode()), Options(max_new_tokens=3)))
    out, err = capsys.readouterr()
    assert err == f"dtgpt: {LOGITS}\n" and out.startswith("hello") and "\na" in out

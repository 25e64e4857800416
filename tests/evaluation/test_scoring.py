"""Scores of given tokens: those of transformers on the same weights, under every plan, in training too."""

import numpy as np
import pytest
import torch

import dtgpt
from dtgpt.config.plan import Plan
from dtgpt.evaluation import scoring
from dtgpt.evaluation.batches import FlatSamples, Sample, fitted, pack
from dtgpt.evaluation.scoring import Scorer, scorer_of
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.mesh import Mesh
from tests.inference.test_inference import LENGTH, VOCABULARY, their_model
from tests.support import bodies_evaluation as bodies
from tests.support import families
from tests.support.ranks import pool, several
from tests.support.runs import change
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(9)

PLANS = {"dp2": 2, "tp2_pp2": 4, "dp2_tp2": 4, "pp2_zbv": 2}
TRAINING = {"dp2_zero3": 2, "pp2_zbv": 2, "tp2_sp_pp2": 4}


def samples(vocab_size: int = VOCABULARY, length: int = LENGTH) -> list[Sample]:
    """Return samples of all lengths, from two tokens to one more than the model has positions."""
    generator = np.random.default_rng(0)
    sizes = [2, length + 1, 5, 5, 9, length, 3, length + 1, 12, 2, 7]
    ids = [generator.integers(vocab_size, size=size).tolist() for size in sizes]
    contexts = [1, 1, 4, 1, 3, 8, 2, length, 1, 1, 6]
    return [Sample(*pair) for pair in zip(ids, contexts, strict=True)]


@pytest.fixture(scope="module")
def theirs():
    return their_model(VOCABULARY)


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "gpt2"
    theirs.save_pretrained(path)
    return path


@torch.no_grad()
def expected(model, given: list[Sample]):
    """Log-probabilities and greedy flags in float64, a sample at a time."""
    for ids, context in given:
        logits = model(torch.tensor([ids[:-1]])).logits[0, context - 1 :].double()
        targets = torch.tensor(ids[context:])
        logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        yield logprobs.numpy(), (logits.argmax(-1) == targets).numpy()


def likely(model, given: list[Sample]) -> list[Sample]:
    """The samples, of which every third gets the likeliest token at its end."""
    changed = []
    for number, (ids, context) in enumerate(given):
        with torch.no_grad():
            best = int(model(torch.tensor([ids[:-1]])).logits[0, -1].argmax())
        changed.append(Sample([*ids[:-1], best] if number % 3 == 0 else ids, context))
    return changed


@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_scores_are_those_of_transformers(theirs, folder, tokens, monkeypatch):
    monkeypatch.setattr(scoring, "PIECE_LOGITS", 7 * 1100)
    given = likely(theirs, samples())
    found = scorer_of(dtgpt.load(folder, device="cpu"), tokens).score(given)
    assert found is not None and len(found) == len(given)
    for own, (logprobs, greedy) in zip(found, expected(theirs, given), strict=True):
        np.testing.assert_allclose(own.logprobs, logprobs, rtol=1e-5, atol=1e-5)
        assert own.greedy.tolist() == greedy.tolist() and own.all_greedy == greedy.all()
        assert own.logprob == pytest.approx(logprobs.sum(), rel=1e-5)
    assert sum(own.greedy[-1] for own in found) >= 4


@pytest.mark.parametrize("family", ["gpt_neo", "gemma3", "gpt_oss"])  # positions, windows, sinks
def test_scores_of_other_families_are_those_of_transformers(family, tmp_path):
    model = families.their_model(family, max_position_embeddings=LENGTH)
    model.save_pretrained(tmp_path / "model")
    given = likely(model, samples(131))
    found = scorer_of(dtgpt.load(tmp_path / "model", device="cpu"), 40).score(given)
    for own, (logprobs, greedy) in zip(found, expected(model, given), strict=True):
        np.testing.assert_allclose(own.logprobs, logprobs, rtol=1e-5, atol=1e-5)
        assert own.greedy.tolist() == greedy.tolist()


@pytest.mark.parametrize("plan", PLANS)
def test_every_rank_of_a_plan_has_the_scores(theirs, folder, plan):
    given = likely(theirs, samples())
    alone, _ = bodies.score(folder, "single", given, 40)
    results = pool().run(PLANS[plan], bodies.score, folder, plan, given, 40)
    for found, _ in results:
        for own, single in zip(found, alone, strict=True):
            np.testing.assert_allclose(own[0], single[0], rtol=1e-6, atol=1e-6)
            assert own[1].tolist() == single[1].tolist()
    replicas = 2 if plan.startswith("dp2") else 1
    assert sum(done for _, done in results) == len(given) * PLANS[plan] // replicas


def test_no_samples_have_no_scores(folder):
    assert bodies.score(folder, "single", [], 40) == ([], 0)


def test_a_sample_that_cannot_be_scored_is_refused_on_every_rank(folder):
    wrong = {
        "1 token": Sample([5], 1), "context of 2": Sample([5, 6], 2), "context of 0": Sample([5, 6], 0),
        f"{LENGTH + 1} positions": Sample([5] * (LENGTH + 2)), f"0 to {VOCABULARY - 1}": Sample([5, VOCABULARY]),
        "ids -1": Sample([-1, 5]),
    }  # fmt: skip
    calls = [(bodies.refusal, folder, "dp2", [Sample([1, 2]), sample]) for sample in wrong.values()]
    for rank in pool().run(2, several, calls):
        assert all(words in said for words, said in zip(wrong, rank, strict=True)), rank


def test_the_head_makes_logits_of_the_asked_positions_alone(folder):
    model = dtgpt.load(folder, device="cpu")
    head, rows = model.stages[-1].head, []
    hook = head.lm_head.register_forward_hook(lambda module, inputs, logits: rows.append(logits[..., 0].numel()))
    given = samples()
    scorer_of(model).score(given)
    hook.remove()
    assert sum(rows) == sum(len(ids) - context for ids, context in given)
    assert "forward" not in vars(head)
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, VOCABULARY)


def test_a_request_to_end_leaves_the_rest_out(folder):
    scorer, asked = scorer_of(dtgpt.load(folder, device="cpu"), tokens=1), []
    given = [Sample([1, 2])] * 30
    assert scorer.score(given, interrupted=lambda: asked.append(1) or len(asked) > 2) is None
    assert len(asked) == 3 and scorer.score(given[:1]) is not None


def test_a_failure_gives_the_head_back(folder, monkeypatch):
    model = dtgpt.load(folder, device="cpu")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="broken"):
        patch.setattr(scoring, "token_scores", lambda *_: (_ for _ in ()).throw(ValueError("broken")))
        scorer_of(model).score([Sample([1, 2])])
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, VOCABULARY)


def test_padding_of_the_vocabulary_does_not_count():
    config = GPT2Config(num_layers=1, hidden_size=16, num_heads=2, seq_length=8, vocab_size=5, init_std=0.3)
    device = torch.device("cpu")
    model = build_model(config, device, torch.float32, root_key(0))
    ids = [0, 4, 2, 1]
    (found,) = Scorer([model], Mesh(Plan().for_world(1), device), config, torch.float32).score([Sample(ids)])
    logits = model(torch.tensor([ids]))[0, :-1, :5]
    np.testing.assert_allclose(found.logprobs, torch.log_softmax(logits, -1).detach()[range(3), ids[1:]], rtol=1e-6)


def test_batches_hold_each_sample_once_and_waste_little():
    lengths = np.random.default_rng(1).integers(2, 500, size=2000)
    flat = FlatSamples(np.zeros(lengths.sum(), np.int32), lengths, np.ones_like(lengths))
    batches = pack(flat, tokens=8192, multiple=16, longest=1024)
    assert sorted(i for indices, _ in batches for i in indices) == list(range(2000))
    for indices, length in batches:
        assert len(indices) * length <= 8192 and length % 16 == 0
        assert lengths[indices].max() - 1 <= length < lengths[indices].max() + 16
    assert sum(len(indices) * length for indices, length in batches) < 1.1 * lengths.sum()
    assert next(length for _, length in pack(flat, tokens=10, multiple=16, longest=499)) == 499


@pytest.mark.parametrize("length, context, kept", [(6, 3, (5, 2)), (9, 5, (5, 1)), (5, 4, (5, 4)), (2, 1, (2, 1))])
def test_the_beginning_of_a_long_sample_is_left_out(length, context, kept):
    ids = list(range(length))
    found = fitted(ids[:context], ids[context:], 4)
    assert (len(found.ids), found.context) == kept and found.ids[-1] == length - 1


@pytest.fixture
def recipe(recipe):
    return change(recipe, model={"num_layers": 4, "seq_length": 32}, micro_batch_size=2, log={"sample_tokens": 0})


def test_training_stages_score_alike_under_every_plan_and_no_loss_changes(recipe):
    given = samples(256, 32)
    (alone, losses), (_, without) = (bodies.score_in_training(recipe, given, scoring) for scoring in (True, False))
    assert losses == without
    for plan, world in TRAINING.items():
        calls = [(bodies.score_in_training, change(recipe, plan=plan), given, True)]
        calls += [(*calls[0][:-1], False)] * (plan == "dp2_zero3")
        for (found, own), *rest in pool().run(world, several, calls):
            assert own == pytest.approx(losses, rel=1e-5) and all(own == without for _, without in rest)
            for step, single in zip(found, alone, strict=True):
                for (logprobs, _), (expected, _) in zip(step, single, strict=True):
                    np.testing.assert_allclose(logprobs, expected, rtol=1e-4, atol=1e-4)

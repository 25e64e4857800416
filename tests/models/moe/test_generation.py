"""Generation, scores and evaluation of mixtures of experts: transformers' tokens and beams, requests beside each other,
plans, and decode steps that read the chosen experts alone."""

import math
from dataclasses import replace

import pytest
import torch

import dtgpt
from dtgpt.inference.options import Options
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.models.moe.mixture import Experts, routers
from dtgpt.ops.experts.routing import choose
from dtgpt.ops.random.philox import root_key
from tests.models.moe.test_mixture import MANY
from tests.models.moe.test_plans import OLMOE
from tests.support import bodies_engine as bodies
from tests.support.families import their_model
from tests.support.ranks import pool
from tests.support.requests import make_request
from tests.support.whole_model import build_model

LENGTH = 128
PROMPT = [5, 3, 8, 130, 2, 77, 9, 9]
CONFIG = replace(OLMOE, seq_length=24, vocab_size=131, init_std=0.3, dropout=0.0)
PROMPTS = [[5], [5, 90, 17], list(range(14)), [3, 4, 5, 6, 7, 8]]
GREEDY = Options(max_new_tokens=6, temperature=0, ends=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of transformers, and its folder."""
    twin, folder = their_model("olmoe", max_position_embeddings=LENGTH), tmp_path_factory.mktemp("olmoe")
    twin.save_pretrained(folder)
    return twin, folder


def theirs(twin, **options) -> torch.Tensor:
    given = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    return twin.generate(torch.tensor([PROMPT]), **given)[:, len(PROMPT) :]


def test_beams_are_those_of_transformers(saved):
    twin, folder = saved
    expected = theirs(twin, max_new_tokens=20, num_beams=3, num_return_sequences=2).tolist()
    found = dtgpt.load(folder).generate(PROMPT, max_new_tokens=20, num_beams=3, num_return_sequences=2)
    assert found == expected


def test_scores_of_a_prompt_are_those_of_transformers(saved):
    twin, folder = saved
    with torch.no_grad():
        logprobs = twin(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = [logprobs[at, token].item() for at, token in enumerate(PROMPT[1:])]
    found = dtgpt.load(folder).score(PROMPT)
    assert [x for x in found.logprobs if x is not None] == pytest.approx(expected, rel=1e-5)


def greedy_text(ids: list[int], config: ExpertsConfig = CONFIG) -> list[int]:
    """By the whole model, which computes each token anew."""
    model, whole = build_model(config, bodies.CPU, torch.float32, bodies.KEY), list(ids)
    for _ in range(GREEDY.max_new_tokens):
        whole.append(int(bodies.whole_logits(model, whole)[-1].argmax()))
    return whole[len(ids) :]


@pytest.mark.slow(2)
@pytest.mark.parametrize(("plan", "world"), [("single", 1), ("pp2", 2), ("pp2_zbv", 2), ("tp2", 2)])
def test_requests_beside_each_other_have_the_texts_that_they_have_alone(plan, world):
    requests = [make_request(ids=ids, sampling=GREEDY) for ids in PROMPTS]
    events = pool().run(world, bodies.generate, CONFIG, plan, requests, 3, False)[0]
    assert bodies.texts(events) == {(index, 0): greedy_text(ids) for index, ids in enumerate(PROMPTS)}


def test_a_step_of_one_token_reads_the_chosen_experts_alone():
    """The weights of the others are not a number, and nobody sees it."""
    model = build_model(CONFIG, bodies.CPU, torch.float32, root_key(1))
    experts = next(each for each in model.modules() if isinstance(each, Experts))
    (router, *_) = routers(model)
    x = torch.randn(1, 1, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        choice = router(x)
        expected = experts(x, choice)
        for expert in set(range(CONFIG.num_experts)) - set(choice.experts.flatten().tolist()):
            experts.gate_up.weight[expert] = experts.down.weight[expert] = math.nan
        assert torch.equal(experts(x, choice), expected) and expected.any()


def test_choices_of_a_prompt_read_at_once_are_those_of_its_tokens():
    model = build_model(CONFIG, bodies.CPU, torch.float32, root_key(1))
    (router, *_) = routers(model)
    x = torch.randn(1, 50, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = router(x).experts
        alone = torch.cat([router(x[:, at : at + 1]).experts for at in range(50)], dim=1)
    assert torch.equal(whole, alone)
    assert torch.equal(choose(torch.zeros(1, 1, 6), router.rule), torch.tensor([[[0, 1]]]))


def test_ranks_that_share_experts_add_biases_once():
    """Beside an MLP that all tokens share, and a block without experts."""
    config = replace(MANY, seq_length=24, vocab_size=131, init_std=0.3, dropout=0.0)
    requests = [make_request(ids=ids, sampling=GREEDY) for ids in PROMPTS]
    events = pool().run(2, bodies.generate, config, "tp2", requests, 3, False)[0]
    assert bodies.texts(events) == {(index, 0): greedy_text(ids, config) for index, ids in enumerate(PROMPTS)}

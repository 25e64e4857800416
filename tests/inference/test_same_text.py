"""A request gets the same text whatever is beside it: other requests, cancellations, slots used before, chunks of the
prompt, lengths of rounds, plans. Searched by hypothesis, in fp32 on the CPU."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.beams.search import Beams
from dtgpt.inference.options import Options
from dtgpt.inference.request import PromptJob
from dtgpt.models.config import ModelConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from tests.support.plays import PROMPT, Cancel, Outcome, Outcomes, Steps, Submit, play
from tests.support.ranks import pool
from tests.support.requests import make_request

pytestmark = pytest.mark.slow(6)

CONFIG = GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=32, vocab_size=61, init_std=0.3)
LLAMA = LlamaConfig(
    num_layers=2, hidden_size=32, num_heads=8, num_kv_heads=2, head_dim=8, ffn_hidden_size=48, seq_length=32,
    vocab_size=61, rope_theta=500000.0, rope_factor=8.0, rope_original_length=16, qk_norm=True, init_std=0.3,
)  # fmt: skip
SLOTS = 4
SPECIAL = SpecialIds(ends=(60,), newline=10, double_newline=11, colon=12)
TOLERANCE = 1e-4  # of log-probabilities, relative and absolute

tokens = st.integers(0, CONFIG.vocab_size - 1)
samplings = st.builds(
    Options, max_new_tokens=st.integers(1, 12), min_new_tokens=st.integers(0, 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]), top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([0.0, 0.6, 1.0]), top_p_decay=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 1.5]), presence_penalty=st.sampled_from([0.0, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, 2.0]), max_size=2),
    no_repeat_ngram_size=st.sampled_from([0, 1, 2]), seed=st.integers(0, 3),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple), ends=st.booleans(), stop_on_eol=st.booleans(),
    prevent_newline_after_colon=st.booleans(),
)  # fmt: skip
searches = st.builds(
    Beams, width=st.integers(1, SLOTS), length_penalty=st.sampled_from([0.0, 1.0, 2.0]), early_stopping=st.booleans()
)


sizes = st.tuples(st.integers(1, 9), st.integers(1, 8))  # of chunks, of rounds
batches = st.sampled_from([0, 256])  # tokens of a pass over several prompts; 0: one prompt a pass


@st.composite
def requests(draw) -> PromptJob:
    beams = draw(st.none() | searches)
    return make_request(
        ids=draw(st.lists(tokens, min_size=1, max_size=20)), sampling=draw(samplings), special=SPECIAL,
        prompt_index=draw(st.integers(0, 2)), choices=draw(st.integers(1, beams.width if beams else 3)),
        score_prompt=draw(st.booleans()), alternatives=0 if beams else draw(st.integers(0, 3)), search=beams,
    )  # fmt: skip


@st.composite
def plays(draw) -> list[Submit | Cancel | Steps]:
    """Two to six requests, steps between them, and cancellations of some."""
    actions: list[Submit | Cancel | Steps] = []
    for handle in range(draw(st.integers(2, 6))):
        actions.append(Submit(draw(requests())))
        actions.append(Steps(draw(st.integers(0, 4))))
        if draw(st.integers(0, 3)) == 0:
            actions.append(Cancel(draw(st.integers(0, handle))))
    return actions


def check(config: ModelConfig, outcomes: Outcomes, actions: list[Submit | Cancel | Steps]) -> None:
    """Compare with each request alone in a cache of its own."""
    submitted = [action.request for action in actions if isinstance(action, Submit)]
    for handle, request in enumerate(submitted):
        alone = play(config, "single", request.rows, (config.seq_length, 8), [Submit(request)])
        for (_, choice), wanted in alone.items():
            never_scored = Outcome(finish="cancelled")  # a prompt of which all choices were cancelled before
            found = outcomes.get((handle, choice), never_scored) if choice == PROMPT else outcomes[handle, choice]
            count = len(found.ids)
            if found.finish != "cancelled":
                assert (found.finish, count) == (wanted.finish, len(wanted.ids))
                assert (found.score or 0.0) == pytest.approx(wanted.score or 0.0, rel=TOLERANCE)
            assert found.ids == wanted.ids[:count]
            assert found.logprobs == pytest.approx(wanted.logprobs[:count], rel=TOLERANCE, abs=TOLERANCE)
            for ours, theirs in zip(found.alternatives, wanted.alternatives, strict=False):
                assert [i for i, _ in ours] == [i for i, _ in theirs]
                assert [x for _, x in ours] == pytest.approx([x for _, x in theirs], rel=TOLERANCE, abs=TOLERANCE)


@settings(max_examples=16, deadline=None)
@given(plays(), sizes, batches)
def test_in_company_as_alone(actions, sizes, batch_tokens):
    check(CONFIG, play(CONFIG, "single", SLOTS, sizes, actions, batch_tokens), actions)


@pytest.mark.parametrize(
    "plan, world", [("tp2_pp2", 4), *(pytest.param(plan, 2, marks=pytest.mark.long) for plan in ("tp2", "pp2"))]
)
@settings(
    max_examples=3, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(actions=plays(), sizes=sizes, batch_tokens=batches)
def test_under_a_plan_as_alone(plan, world, actions, sizes, batch_tokens):
    check(LLAMA, pool().run(world, play, LLAMA, plan, SLOTS, sizes, actions, batch_tokens)[0], actions)

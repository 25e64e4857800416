"""Options against its definition, row by row, and against exact distributions."""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.options import Options
from dtgpt.inference.rules.edits import ban_repeated_ngrams
from dtgpt.inference.scores import tokens as scores
from dtgpt.inference.scores.tokens import token_scores
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.ops.sampling.sample import sample
from dtgpt.ops.sampling.sequences import SIZES, Sampled, Sequences, Variant
from tests.support.bodies_sampling import (
    Row,
    check_broken_rows,
    distribution,
    log_probabilities,
    measured,
    oracle,
    state_of,
    variant_for,
)
from tests.support.serving import serving_cases

pytestmark = pytest.mark.slow(8)

POSITIONS = 12
DRAWS = 20_000


def draw(rows: list[Row], variant: Variant | None = None, padding: int = 3) -> Sampled:
    """What `sample` chooses, of rows whose logits are followed by columns that are not tokens."""
    logits = torch.stack([row.logits for row in rows])
    padded = torch.cat([logits, logits.new_full((len(rows), padding), 1e4)], dim=1)
    state = state_of(rows, POSITIONS)
    return sample(padded, state.sequences, torch.arange(len(rows)), logits.shape[1], variant or variant_for(rows))


@st.composite
def sampling_of(draw, size: int) -> Options:
    """Any combination of options for a vocabulary of this size; each is neutral often."""
    token = st.integers(0, size - 1)

    def often(neutral, other):
        return draw(st.one_of(st.just(neutral), other))

    top_p = often(1.0, st.sampled_from([0.0, 0.1, 0.5, 0.75, 0.9, 0.999]))
    decay = often(0.0, st.sampled_from([0.5, 0.9, 1.0]))
    return Options(
        temperature=often(1.0, st.sampled_from([0.0, 0.5, 2.0])),
        top_k=often(0, st.integers(1, size + 2)),
        top_p=top_p,
        top_p_decay=decay,
        top_p_bound=often(0.0, st.just(top_p / 4)),
        min_p=often(0.0, st.sampled_from([0.03, 0.3, 1.0])),
        frequency_penalty=often(0.0, st.sampled_from([-0.5, 1.0])),
        presence_penalty=often(0.0, st.sampled_from([-0.5, 1.0])),
        repetition_penalty=often(1.0, st.sampled_from([0.5, 1.3])),
        logit_bias=often({}, st.dictionaries(token, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3)),
        no_repeat_ngram_size=often(0, st.integers(1, 4)),
        min_new_tokens=often(0, st.integers(1, 4)),
        stop_token_ids=tuple(often([], st.lists(token, max_size=2))),
        ends=draw(st.booleans()),
        stop_on_eol=often(False, st.just(True)),
        stop_on_double_eol=often(False, st.just(True)),
        prevent_newline_after_colon=often(False, st.just(True)),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def row_of(draw, size: int) -> Row:
    """Logits have ties, and sums that are exact."""
    token = st.integers(0, size - 1)
    special = draw(st.lists(st.one_of(st.none(), token), min_size=4, max_size=4))
    logit = st.one_of(st.sampled_from([-1.0, 0.0, 0.0, math.log(2), 2.0]), st.floats(-4, 4, width=16))
    return Row(
        torch.tensor(draw(st.lists(logit, min_size=size, max_size=size))),
        draw(sampling_of(size)),
        prompt=draw(st.lists(token, min_size=1, max_size=6)),
        generated=draw(st.lists(token, max_size=5)),
        special=SpecialIds((special[0],) if special[0] is not None else (), *special[1:]),
        prompt_index=draw(st.integers(0, 2)),
        choice=draw(st.integers(0, 2)),
    )


@st.composite
def rows_of(draw, sizes=(2, 5, 9)) -> list[Row]:
    size = draw(st.sampled_from(sizes))
    return draw(st.lists(row_of(size), min_size=1, max_size=4))


@settings(max_examples=50, deadline=None)
@given(rows_of())
def test_tokens_and_log_probabilities_are_those_of_the_definition(rows):
    found = draw(rows)
    assert found.tokens.tolist() == [oracle(row) for row in rows]
    for i, row in enumerate(rows):
        expected, values = log_probabilities(row), measured(row)
        top = sorted(range(len(values)), key=lambda token: (-values[token], token))[:2]
        assert found.top_ids[i].tolist() == top
        np.testing.assert_allclose(found.top_logprobs[i], expected[top], atol=1e-5)
        np.testing.assert_allclose(found.logprobs[i], expected[found.tokens[i]], atol=1e-5)
        for token, logprob in zip(top, found.top_logprobs[i], strict=True):
            assert token != found.tokens[i] or logprob == found.logprobs[i]


@settings(max_examples=25, deadline=None)
@given(st.data(), rows_of(sizes=(9, 40)))
def test_a_row_is_the_same_alone_and_in_company(data, rows):
    """Bit for bit, under every variant that suffices, in any slot and place of the batch."""
    together = draw(rows)
    order = data.draw(st.permutations(range(len(rows))))
    more = Variant(filters=True, edits=True, ngram=8, alternatives=2)
    shuffled = draw([rows[i] for i in order], more, padding=0)
    for place, i in enumerate(order):
        alone = draw([rows[i]], padding=7)
        for kind in Sampled._fields:
            one = getattr(alone, kind)[0]
            assert torch.equal(one, getattr(together, kind)[i]) and torch.equal(one, getattr(shuffled, kind)[place])


def test_a_large_vocabulary_is_the_same_alone_and_in_company():
    torch.manual_seed(0)
    options = [Options(seed=7), Options(top_k=50, seed=7), Options(top_p=0.9, temperature=0.8), Options(seed=9)]
    rows = [Row(3 * torch.randn(5003), options[i % 4], prompt_index=i) for i in range(9)]
    together = draw(rows)
    for i, row in enumerate(rows):
        alone = draw([row])
        assert alone.tokens[0] == together.tokens[i] == oracle(row)
        assert alone.logprobs[0] == together.logprobs[i]


def test_dtypes_and_no_alternatives():
    torch.manual_seed(0)
    logits = torch.randn(4, 33)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        rows = [Row(line.to(dtype), Options(seed=i)) for i, line in enumerate(logits)]
        found = draw(rows, Variant())
        assert found.tokens.tolist() == [oracle(row) for row in rows]
        assert found.tokens.dtype == torch.int64 and found.top_ids.dtype == torch.int64
        assert found.top_ids.shape == found.top_logprobs.shape == (4, 0)
        assert found.logprobs.dtype == found.top_logprobs.dtype == torch.float32


def test_rows_that_are_not_finite_have_no_log_probability():
    check_broken_rows("cpu")


@pytest.mark.parametrize("candidates", [False, True])
def test_log_probabilities_are_over_all_columns_and_draws_over_fewer(candidates):
    """As where a model has more tokens than its tokenizer."""
    torch.manual_seed(0)
    rows = [Row(torch.randn(12), Options(seed=i, no_repeat_ngram_size=1), [i % 5]) for i in range(40)]
    logits, expected = torch.stack([row.logits for row in rows]), torch.stack([row.logits for row in rows])
    expected = expected[:, :10].log_softmax(-1)
    variant = variant_for(rows, 10)._replace(candidates=candidates)
    found = sample(logits, state_of(rows, POSITIONS).sequences, torch.arange(40), 5, variant, 10)
    assert set(found.tokens.tolist()) == set(range(5))
    torch.testing.assert_close(found.logprobs, expected.gather(1, found.tokens[:, None])[:, 0])
    places = found.top_logprobs > -math.inf  # those that are not banned
    torch.testing.assert_close(found.top_logprobs[places], expected.gather(1, found.top_ids)[places])
    assert found.top_ids.max() == (4 if candidates else 9)


def test_extreme_logits_give_a_token():
    inf = math.inf
    for line in ([-inf, -inf, 3.0], [1e30, -1e30, 0.0], [-inf, -inf, -inf], [-3e38, 3e38, 3e38]):
        for option in (Options(), Options(top_p=0.5), Options(top_k=2, temperature=1e-4), Options(temperature=0)):
            assert draw([Row(torch.tensor(line), option)]).tokens[0] in range(3)
            if line[0] == -inf and line[2] > 0:
                assert draw([Row(torch.tensor(line), option)]).tokens[0] == 2


def many(row: Row) -> Tensor:
    """Tokens of DRAWS choices of one sequence, which differ in their keys alone."""
    state = state_of([row], POSITIONS)
    token, position, history, parameters, allowed = (tensor[:1] for tensor in state.sequences)
    parameters = parameters.repeat(DRAWS, 1)
    parameters[:, 1:3] = fold(root_key(row.sampling.seed), "text", 0, torch.arange(DRAWS))
    state = token.repeat(DRAWS), position.repeat(DRAWS), history.repeat(DRAWS, 1), parameters, allowed
    rows = Sequences(*state)
    logits = row.logits.expand(DRAWS, -1)
    return sample(logits, rows, torch.arange(DRAWS), len(row.logits), variant_for([row], 0)).tokens


def check_frequencies(tokens: Tensor, expected: np.ndarray) -> None:
    """The chi-square statistic lies within five standard deviations of its mean; nothing else is drawn."""
    counts = np.bincount(tokens.numpy(), minlength=len(expected))
    possible = expected > 0
    assert counts[~possible].sum() == 0
    cells = expected[possible] * len(tokens)
    freedom = len(cells) - 1
    statistic = ((counts[possible] - cells) ** 2 / cells).sum()
    assert abs(statistic - freedom) <= 5 * math.sqrt(2 * freedom)


LOGITS = torch.tensor([2.0, 1.5, 1.5, 0.3, 0.0, -0.5, -1.0, 1.0])
OPTIONS = {
    "plain": Options(),
    "temperature": Options(temperature=0.6),
    "hot": Options(temperature=3.0),
    "top_k": Options(top_k=4),
    "top_k with a tie": Options(top_k=2),
    "top_p": Options(top_p=0.8),
    "top_p and temperature": Options(top_p=0.8, temperature=1.7),
    "top_k and top_p": Options(top_k=5, top_p=0.7),
    "decay": Options(top_p=0.95, top_p_decay=0.8),
    "min_p": Options(min_p=0.3),
    "min_p and the others": Options(min_p=0.25, top_k=6, top_p=0.9, temperature=0.8),
    "bound": Options(top_p=0.95, top_p_decay=0.5, top_p_bound=0.6),
    "penalties": Options(frequency_penalty=0.7, presence_penalty=-0.4),
    "repetitions": Options(repetition_penalty=1.6),
    "logit bias": Options(logit_bias={6: 2.5, 0: -100.0}),
    "n-grams": Options(no_repeat_ngram_size=2),
    "min tokens": Options(min_new_tokens=4, stop_token_ids=(0, 3)),
    "end of text": Options(min_new_tokens=4),
    "newlines": Options(min_new_tokens=4, stop_on_double_eol=True),
    "colon": Options(prevent_newline_after_colon=True),
}


@pytest.mark.parametrize("sampling", OPTIONS.values(), ids=OPTIONS)
def test_draws_follow_the_exact_distribution(sampling):
    row = Row(LOGITS, replace(sampling, seed=11), [5, 1, 2], [1, 7, 1], SpecialIds((0,), 1, 2, 1))
    check_frequencies(many(row), distribution(row))


def test_choices_prompts_positions_and_seeds_are_independent():
    """Pairs of draws that differ in one of these have the product of two distributions."""
    logits = torch.tensor([0.5, 0.0, -0.5])
    one = distribution(Row(logits, Options()))
    base = many(Row(logits, Options(seed=3)))
    later = many(Row(logits, Options(seed=3), generated=[0]))
    other = many(Row(logits, Options(seed=4)))
    for pair in ((base, later), (base, other), (base[:-1], base[1:])):
        check_frequencies(pair[0] * 3 + pair[1], np.outer(one, one).flatten())


@pytest.mark.parametrize("case", serving_cases("filters"), ids=str)
def test_filters_of_megatron(case):
    """`serving.json`: the distribution that Megatron-LM's filters leave."""
    options = {name: case[name] for name in ("temperature", "top_k", "top_p") if name in case}
    row = Row(torch.tensor(case["probabilities"]).log(), Options(seed=5, **options))
    np.testing.assert_allclose(distribution(row), case["distribution"], atol=1e-6)
    check_frequencies(many(row), distribution(row))


def test_top_p_at_equality_keeps_one_more():
    row = Row(torch.tensor([0.5, 0.25, 0.125, 0.125]).log2() * math.log(2), Options(top_p=0.75))
    assert set(many(row).tolist()) == {0, 1, 2}  # the sum before the third is 0.75


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=POSITIONS), st.integers(1, 6))
def test_ngrams_are_those_of_transformers(ids, n):
    from transformers import NoRepeatNGramLogitsProcessor

    values = torch.zeros(1, 5)
    expected = NoRepeatNGramLogitsProcessor(n)(torch.tensor([ids]), values.clone())
    history = torch.tensor([ids + [4] * (POSITIONS - len(ids))])
    position, size = torch.tensor([len(ids) - 1]), torch.tensor([n])
    for longest in (8, 1 << (n - 1).bit_length()):
        assert torch.equal(ban_repeated_ngrams(values, history, position, size, longest), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_tokens(dtype):
    torch.manual_seed(0)
    logits = torch.randn(11, 40).to(dtype)
    logits[3, 7] = logits[3, 30] = 9.0
    targets = torch.randint(37, (11,))
    targets[3:5] = torch.tensor([30, int(logits[4, :37].argmax())])
    with mock.patch.object(scores, "PIECE", 100):  # pieces of two rows
        found = token_scores(logits, targets, 37, 3)
    expected = torch.log_softmax(logits[:, :37].double(), dim=-1)
    torch.testing.assert_close(found.logprobs.double(), expected.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=0)
    assert torch.equal(found.greedy, logits[:, :37].float().argmax(1) == targets)
    assert not found.greedy[3] and found.greedy[4] and found.top_ids[3, :2].tolist() == [7, 30]
    torch.testing.assert_close(found.top_logprobs.double(), expected.gather(1, found.top_ids), atol=1e-5, rtol=0)
    assert (found.top_logprobs[:, :-1] >= found.top_logprobs[:, 1:]).all()
    for i in range(11):  # a row's numbers do not depend on the others
        alone = token_scores(logits[i : i + 1], targets[i : i + 1], 37, 3)
        assert all(torch.equal(one[0], whole[i]) for one, whole in zip(alone, found, strict=True))
    assert [len(x) for x in token_scores(logits[:0], targets[:0], 37, 3)] == [0] * 4


def test_the_layout_of_parameters_is_as_the_draws_above_assume():
    state = state_of([Row(LOGITS, Options(seed=5), choice=3)], POSITIONS)
    assert sum(SIZES) == state.parameters.shape[1]
    assert torch.equal(state.parameters[0, 1:3], fold(root_key(5), "text", 0, 3))

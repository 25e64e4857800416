"""Options from the definition, one row at a time, and what tests do on a CPU, in Triton's interpreter and on a GPU."""

import importlib
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.cache import SlotState
from dtgpt.inference.grammar.engine import allow_ids
from dtgpt.inference.grammar.masks import mask
from dtgpt.inference.options import Options
from dtgpt.inference.request import variant_of
from dtgpt.inference.rules.edits import edit
from dtgpt.ops.random.philox import fold, root_key, uniform
from dtgpt.ops.sampling import sample as op
from dtgpt.ops.sampling.sample import kept, record_reference, sample_reference
from dtgpt.ops.sampling.sequences import Sampled, Variant, unpack
from tests.support.interpreter import first_kernels_of

NO_IDS = SpecialIds()


@dataclass
class Row:
    """A sequence and the logits of its next token."""

    logits: Tensor  # [V]
    sampling: Options
    prompt: list[int] = field(default_factory=lambda: [0])
    generated: list[int] = field(default_factory=list)
    special: SpecialIds = NO_IDS
    prompt_index: int = 0
    choice: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.generated


def state_of(rows: list[Row], positions: int, device: str = "cpu") -> SlotState:
    """Slot i has row i."""
    state = SlotState(len(rows), positions, device)
    for slot, row in enumerate(rows):
        state.set(slot, SlotState.encode(row.prompt, row.sampling, row.special, row.prompt_index, row.choice))
        state.history[slot, : len(row.ids)] = torch.tensor(row.ids)
        state.token[slot], state.position[slot] = row.ids[-1], len(row.ids) - 1
    return state


def variant_for(rows: list[Row], alternatives: int = 2) -> Variant:
    return variant_of([row.sampling for row in rows], alternatives)


def measured(row: Row) -> np.ndarray:
    """Logits as log-probabilities are measured of, float32."""
    values = row.logits.float().numpy().copy()
    if (
        row.sampling.prevent_newline_after_colon
        and row.ids[-1] == row.special.colon
        and row.special.newline is not None
    ):
        values[row.special.newline] = -math.inf
    return values


def banned(row: Row) -> set[int]:
    """Ids that n-grams and the smallest number of new tokens ban."""
    s, ids, special, found = row.sampling, row.ids, row.special, set()
    if n := s.no_repeat_ngram_size:
        grams = {tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)}
        found |= {token for token in range(len(row.logits)) if (*ids[len(ids) - n + 1 :], token) in grams}
    if len(row.generated) < s.min_new_tokens:
        found |= set(s.stop_token_ids)
        if s.stop_on_double_eol:
            found |= {special.double_newline, *([special.newline] if ids[-1] == special.newline else [])}
        elif s.stop_on_eol:
            found |= {special.newline, special.double_newline}
        elif s.ends:
            found |= {*special.ends}
    return found - {None}


def edited(row: Row) -> np.ndarray:
    """Logits as a token is chosen of, float32."""
    s, values = row.sampling, measured(row)
    for token in {*row.prompt, *row.generated}:
        penalty = np.float32(s.repetition_penalty)
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, bias in s.logit_bias.items():
        values[token] += np.float32(bias)
    for token in set(row.generated):
        values[token] -= np.float32(row.generated.count(token)) * np.float32(s.frequency_penalty)
        values[token] -= np.float32(s.presence_penalty)
    for token in banned(row):
        values[token] = -math.inf
    return values


def kept_ids(row: Row) -> list[int]:
    """What top-k, top-p and min-p keep, the likeliest first."""
    s, values = row.sampling, edited(row)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if s.top_k:
        order = [i for i in order if values[i] >= values[order[min(s.top_k, len(order)) - 1]]]
    p = s.top_p
    if p and s.top_p_decay:
        for _ in row.generated:
            p = max(p * s.top_p_decay, s.top_p_bound)
    chances = np.exp((values.astype(np.float64) - values.max()) / s.temperature)  # relative to the likeliest
    likely = {token for token in order if chances[token] >= s.min_p}
    if not 0 < p < 1:
        return [token for token in order if token in likely]
    shares = torch.softmax(torch.tensor(values[order]) / torch.tensor(s.temperature), dim=-1).tolist()
    order = [token for place, token in enumerate(order) if np.float32(math.fsum(shares[:place])) <= np.float32(p)]
    return [token for token in order if token in likely]


def is_greedy(s: Options) -> bool:
    return s.temperature == 0 or s.top_k == 1


def oracle(row: Row) -> int:
    """The token."""
    values = edited(row)
    if (values == -math.inf).all():
        return 0
    if is_greedy(row.sampling):
        return int(values.argmax())
    key = fold(root_key(row.sampling.seed), "text", row.prompt_index, row.choice)
    position = len(row.ids) - 1
    draws = uniform(key, [range(position, position + 1), len(values)])[0]
    scores = values / np.float32(row.sampling.temperature) + (-torch.log(-torch.log(draws))).float().numpy()
    return max(sorted(kept_ids(row)), key=lambda token: scores[token])


def distribution(row: Row) -> np.ndarray:
    """The probability of each token, float64."""
    values, result = edited(row).astype(np.float64), np.zeros(len(row.logits))
    if is_greedy(row.sampling):
        result[values.argmax()] = 1
        return result
    ids = kept_ids(row)
    weights = np.exp((values[ids] - values.max()) / row.sampling.temperature)
    result[ids] = weights / weights.sum()
    return result


def log_probabilities(row: Row) -> np.ndarray:
    """In float64."""
    values = measured(row).astype(np.float64)
    return values - values.max() - np.log(np.exp(values - values.max()).sum())


FILTERS = [
    {}, {"temperature": 0}, {"temperature": 0.3}, {"top_k": 1}, {"top_k": 7}, {"top_k": 40, "temperature": 0.2},
    {"top_k": 10**6}, {"top_p": 0.62}, {"top_p": 0.93, "temperature": 2.5}, {"top_p": 1e-7}, {"top_p": 0.9999},
    {"top_p": 0.97, "top_p_decay": 0.83, "top_p_bound": 0.31}, {"top_k": 30, "top_p": 0.58},
    {"top_k": 5, "top_p": 0.99, "temperature": 7}, {"top_k": 400, "top_p": 0.17},
    {"min_p": 0.21}, {"min_p": 0.047, "temperature": 2.1, "top_p": 0.93}, {"top_k": 9, "min_p": 0.31}, {"min_p": 1.0},
    {"min_p": 1e-4, "temperature": 0.4},
]  # fmt: skip
EDITS = [
    {"logit_bias": {3: 2.0, 4: -100.0, 0: 0.5}}, {"frequency_penalty": 0.4, "presence_penalty": -0.2},
    {"no_repeat_ngram_size": 2}, {"prevent_newline_after_colon": True}, {"no_repeat_ngram_size": 1},
    {"repetition_penalty": 1.7, "logit_bias": {1: -0.5}, "prevent_newline_after_colon": True},
    {"repetition_penalty": 0.6},
    {"min_new_tokens": 9, "stop_token_ids": (5, 7)}, {"min_new_tokens": 9, "stop_on_double_eol": True},
    {"no_repeat_ngram_size": 3, "presence_penalty": 1.5, "logit_bias": {1: 3.0}, "prevent_newline_after_colon": True},
]  # fmt: skip


def random_rows(size: int, seed: int, edits: bool, filters: bool = True) -> list[Row]:
    """A row for each choice of filters; logits are wide, narrow, have many ties, or are all equal."""
    choose, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    kinds = (lambda x: 3 * x, lambda x: x / 5, lambda x: (2 * x).round() / 2, torch.zeros_like, lambda x: x.exp() - 4)
    rows = []
    for place, options in enumerate(FILTERS if filters else FILTERS[:4]):
        logits = kinds[(place + seed) % len(kinds)](torch.randn(size, generator=noise))
        if size > 9:
            logits[choose.randrange(size)] = -math.inf
        more = EDITS[(place + seed) % len(EDITS)] if edits and size > 9 else {}
        ids = [choose.randrange(min(size, 3)) for _ in range(11)]
        special = SpecialIds((0,), ids[-1] if place % 3 else 8, 2, ids[-1])
        rows.append(Row(logits, Options(seed=seed, **options, **more), ids[:3], ids[3:], special, place))
    return rows


@contextmanager
def watched() -> Iterator[dict[str, Tensor]]:
    """Collect what the kernels hand on to each other."""
    seen: dict[str, Tensor] = {}

    def watch(module: str, name: str):
        kernels = importlib.import_module(f"dtgpt.ops.kernels.sampling.{module}")
        original = getattr(kernels, name)

        def function(*arguments):
            seen[name] = original(*arguments)
            return seen[name]

        return mock.patch.object(kernels, name, function)

    with watch("edit_kernels", "launch_edits"), watch("filter_kernels", "find_edges"):
        yield seen


def compare_with_reference(
    rows: list[Row],
    dtype: torch.dtype,
    device: str,
    alternatives: int,
    padding: int,
    more: int = 0,
    masks: bool = False,
) -> Sampled:
    """What `sample` makes of the rows on the device, after a comparison with the reference on the CPU. `more`: of the
    columns that pad the logits, those that log-probabilities are over, too. `masks`: all rows but the first may choose
    some ids alone."""
    size, variant = len(rows[0].logits), variant_for(rows, alternatives)._replace(masks=masks)
    logits = torch.nn.functional.pad(torch.stack([row.logits for row in rows]), (0, padding), value=90.0).to(dtype)
    slots, expected_state, state = torch.arange(len(rows)), state_of(rows, 16), state_of(rows, 16, device)
    logits[:, size : size + more] = logits[:, :1]
    if masks:
        words = torch.randint(-(2**31), 2**31, (len(rows) - 1, -(-size // 32)), dtype=torch.int32)
        for one in (expected_state, state):
            allow_ids(one, range(1, len(rows)), words, size)
    expected = sample_reference(logits, expected_state.sequences, slots, size, variant, size + more)
    with watched() as seen:
        found = op.sample(logits.to(device), state.sequences, slots.to(device), size, variant, size + more)
    parameters = unpack(expected_state.parameters[: len(rows)])
    values = logits[:, :size].float()
    _, edited = edit(values, values, expected_state.sequences, slots, variant)
    if masks:
        _, allowed = _, edited = mask(values, edited, expected_state.sequences, slots, variant)
        assert all(allowed[i, token] > -math.inf for i, token in enumerate(expected.tokens.tolist()))
        assert allowed[0].isfinite().any() and allowed[1:].isinf().any()
    elif variant.edits or variant.ngram:
        assert torch.equal(seen["launch_edits"][:, :size].cpu(), edited)
    if variant.filters:
        scaled = edited / parameters.floats.temperature.float().clamp_min(1e-4)[:, None]
        stays = kept(edited, scaled, expected_state.position[: len(rows)], parameters)
        edge, last = (column[:, None] for column in seen["find_edges"].cpu().unbind(1))
        bits = (edited + 0.0).view(torch.int32)
        bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        inside = (bits > edge) | ((bits == edge) & (torch.arange(size) <= last))
        shares = torch.softmax(scaled, dim=-1)
        for i, row in enumerate(rows):
            apart = shares[i][inside[i] ^ stays[i]]
            # The reference sums the exponentials of a row in fp32, the kernels do not: the nucleus may end elsewhere.
            rounding = size > 1000 and row.sampling.top_p < 1 and (len(apart) == 1 or apart.sum() <= 1e-4)
            assert not row.sampling.variant.filters or not len(apart) or rounding, row
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.top_ids.tolist() == expected.top_ids.tolist()
    whole = logits[:, : size + more].float()
    measured, _ = edit(whole, whole, expected_state.sequences, slots, variant)
    exact = measured.double().log_softmax(-1)  # the reference sums a row in fp32
    for one, ids in ((found.logprobs[:, None], found.tokens[:, None]), (found.top_logprobs, found.top_ids)):
        torch.testing.assert_close(one.cpu(), exact.gather(1, ids.cpu()).float(), atol=1e-5, rtol=1e-6)
    return found


def check_broken_rows(device: str) -> None:
    """A row with NaN, of either sign, or plus infinity in any chunk has no log-probability; its neighbours do."""
    size, columns = 150, 170
    negative = torch.tensor([-4194304], dtype=torch.int32).view(torch.float32)[0]  # 0xFFC00000
    for options in ({}, {"temperature": 0}, {"top_k": 7, "top_p": 0.9}, {"presence_penalty": 1.0}):
        for place, value in ((3, math.nan), (140, negative), (149, math.inf), (columns - 1, math.nan)):
            rows = [Row(torch.randn(size + 30), Options(**options)) for _ in range(3)]
            logits = torch.stack([row.logits for row in rows])
            logits[1, place], logits[:, columns:] = value, math.nan  # padding is never looked at
            state, slots = state_of(rows, 16, device), torch.arange(3, device=device)
            found = op.sample(logits.to(device), state.sequences, slots, size, variant_for(rows, 2), columns)
            assert found.logprobs.isnan().tolist() == [False, True, False]
            assert found.top_logprobs.isnan().any(1).tolist() == [False, True, False]
            assert all(0 <= token < size for token in found.tokens.tolist())


def check_record(device: str) -> None:
    """The fast path of `record` changes what the reference changes, also at the last position."""
    rows = [Row(torch.zeros(9), Options(), [1] * length) for length in (3, 15, 16, 1)]
    slots = torch.tensor([3, 1, 0, 2])
    expected, found = state_of(rows, 16), state_of(rows, 16, device)
    for first in (5, 50, 500):
        tokens = torch.arange(first, first + 4)
        record_reference(tokens, slots, expected.sequences)
        found.record(slots.to(device), tokens.to(device))
    assert all(torch.equal(one, other.cpu()) for one, other in zip(expected.sequences, found.sequences, strict=True))


def interpret() -> None:
    """In a process with TRITON_INTERPRET=1: the kernels on the CPU in place of the reference."""
    with first_kernels_of("sample", "record"):
        _interpret()


def _interpret() -> None:
    check_record("cpu")
    names = ("kernels", "filter_kernels", "edit_kernels")
    kernels, filters, edits = (importlib.import_module(f"dtgpt.ops.kernels.sampling.{name}") for name in names)
    kernels.CHUNK = filters.CHUNK = filters.BLOCK = 64
    filters.SEARCH, edits.BLOCK, edits.COMPARED = 16, 4, 2
    for seed, (size, padding) in enumerate([(1, 0), (63, 2), (150, 10), (64, 0), (20, 3)]):
        dtype = torch.float16 if seed == 1 else torch.float32
        compare_with_reference(
            random_rows(size, seed, edits=seed in (2, 4), filters=seed != 3), dtype, "cpu", seed, padding, padding // 2,
            masks=seed in (1, 4),
        )  # fmt: skip
    check_broken_rows("cpu")

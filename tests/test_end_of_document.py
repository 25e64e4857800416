"""Documents within a window: positions, attention and loss, against the definitions token by token."""

import pytest
import torch

from dtgpt.data.end_of_document import Options, mark, number_documents, reset_positions
from dtgpt.data.samples import PADDING

EOD = 7
CASES = 60


def random_windows(generator):
    """Many EODs, also side by side and at both ends."""
    batch, width = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 5), (2, 20)))
    windows = torch.randint(0, 30, (batch, width), generator=generator)
    return torch.where(torch.rand(batch, width, generator=generator) < 0.3, EOD, windows)


def naive(tokens):
    """Of one sample: where each token stands in its document, and its document's number."""
    positions, numbers, position, number = [], [], 0, 0
    for token in tokens:
        positions.append(position)
        numbers.append(number)
        position += 1
        if token == EOD:
            position, number = 0, number + 1
    return positions, numbers


def test_any_window_is_marked_token_by_token():
    generator = torch.Generator().manual_seed(0)
    for case in range(CASES):
        windows = random_windows(generator)
        options = Options(case % 2 == 0, case // 2 % 2 == 0, case // 4 % 2 == 0)
        batch = mark(windows, EOD, options)
        assert torch.equal(batch.tokens, windows[:, :-1]) and torch.equal(batch.labels, windows[:, 1:])
        positions, numbers = zip(*map(naive, batch.tokens.tolist()), strict=True)
        for found, expected, wanted in (
            (batch.position_ids, positions, options.reset_position_ids),
            (batch.document_ids, numbers, options.reset_attention_mask),
        ):
            assert (found is not None) == wanted
            assert found is None or (found.dtype == torch.int64 and found.tolist() == list(map(list, expected)))
        assert (batch.loss_mask is not None) == options.eod_mask_loss
        if batch.loss_mask is not None:
            assert batch.loss_mask.dtype == torch.float32
            assert torch.equal(batch.loss_mask == 0, batch.tokens == EOD)


def test_attention_stays_within_documents():
    """Megatron-LM masks, for each EOD at i, the rows after i in the columns up to i."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(CASES):
        tokens = random_windows(generator)[:, :-1]
        length = tokens.shape[1]
        numbers = number_documents(tokens == EOD)
        allowed = (numbers[:, :, None] == numbers[:, None]) & torch.ones(length, length, dtype=torch.bool).tril()
        for row, expected in zip(tokens.tolist(), allowed, strict=True):
            mask = torch.ones(length, length).tril()
            for i in (i for i, token in enumerate(row) if token == EOD):
                mask[i + 1 :, : i + 1] = 0
            assert torch.equal(expected, mask > 0)


def test_a_window_without_an_end_is_one_document():
    is_eod = torch.zeros(2, 5, dtype=torch.bool)
    assert (
        reset_positions(is_eod).tolist() == [[0, 1, 2, 3, 4]] * 2 and number_documents(is_eod).tolist() == [[0] * 5] * 2
    )
    assert reset_positions(~is_eod).tolist() == [[0] * 5] * 2
    assert number_documents(~is_eod).tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize(("eod_mask_loss", "loss"), [(False, [1, 1, 1, 0, 0]), (True, [1, 0, 1, 0, 0])])
def test_padding_has_no_loss(eod_mask_loss, loss):
    batch = mark(
        torch.tensor([[3, EOD, 5, 6, PADDING, PADDING]]), EOD, Options(eod_mask_loss=eod_mask_loss), padded=True
    )
    assert batch.tokens.tolist() == [[3, EOD, 5, 6, 0]] and batch.labels.tolist() == [[EOD, 5, 6, 0, 0]]
    assert batch.loss_mask.tolist() == [loss]

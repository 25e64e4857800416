"""Cross-entropy over a vocabulary in one piece and in several, against PyTorch's on whole logits."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dtgpt.ops.loss.cross_entropy
from dtgpt.ops.loss.cross_entropy import cross_entropy, local_terms, reference
from dtgpt.parallel.layout import chunk
from tests.support.bodies_cross_entropy import Case, losses
from tests.support.ranks import pool

WIDTHS = [(257, 384), (384, 384), (130, 256), (3, 128), (1000, 1024)]  # (vocabulary, padded)


def make_case(vocab: int, width: int, dtype=torch.float32, scale: float = 3.0, shape=(3, 7)) -> Case:
    """Padding holds what must never count: the largest logits of all, and none that is a number."""
    generator = torch.Generator().manual_seed(vocab + width)
    logits = scale * torch.randn(*shape, width, generator=generator)
    logits[..., vocab:] = 3 * scale
    logits[..., (vocab + width) // 2 + 1 :] = math.nan
    return Case(logits.to(dtype), torch.randint(vocab, shape, generator=generator), vocab)


def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the gradient of 3 x loss."""
    whole = case.logits.clone().requires_grad_()
    loss = reference(whole, case.targets, case.vocab_size)
    (3 * loss).backward()
    return loss.detach(), whole.grad


def check(case: Case, results: list) -> None:
    """Equal losses on all ranks, and a gradient in one piece: the tolerance is the rounding of the logits' dtype."""
    loss, gradient = expected(case)
    assert len({result.loss.item() for result in results}) == 1
    assert [i for result in results for i in result.columns] == list(range(case.logits.shape[-1]))
    found = torch.cat([result.gradient for result in results], dim=-1)
    assert found.dtype == case.logits.dtype and results[0].loss.dtype == torch.float32
    torch.testing.assert_close(results[0].loss, loss, rtol=1e-6, atol=1e-7)
    rtol = 2e-5 if found.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, gradient, rtol=rtol, atol=1e-8)
    assert (found[..., case.vocab_size :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_cut_vocabulary_has_the_loss_and_gradient_of_the_whole(world, dtype):
    cases = [make_case(*widths, dtype) for widths in WIDTHS]
    for case, results in zip(cases, zip(*pool().run(world, losses, cases), strict=True), strict=True):
        check(case, list(results))


@pytest.mark.parametrize("world, width", [(5, 384), (4, 390), (3, 256), (4, 128)])
def test_an_uneven_cut_is_no_special_case(world, width):
    case = make_case(width - 100, width)
    results = [answer[0] for answer in pool().run(world, losses, [case])]
    assert len({len(result.columns) for result in results}) == (1 if width % world == 0 else 2)
    check(case, results)


def test_a_rank_with_padding_alone_takes_part():
    """257 tokens in 384 columns over 4 ranks: the last one holds columns 288 to 383."""
    case = make_case(257, 384)
    *_, last = results = [answer[0] for answer in pool().run(4, losses, [case])]
    assert last.columns == range(288, 384) and not last.gradient.any()
    check(case, results)


def test_targets_at_both_ends_of_every_shard_are_found():
    ends = [end for i in range(4) for end in (96 * i, min(96 * i + 95, 256)) if end < 257]
    targets = torch.tensor([ends])
    case = make_case(257, 384, shape=(1, len(ends)))._replace(targets=targets)
    assert 95 in ends and 96 in ends and 256 in ends
    check(case, [answer[0] for answer in pool().run(4, losses, [case])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_very_large_logits_do_not_overflow(dtype):
    case = make_case(257, 384, dtype, scale=1e4)
    shifted = make_case(300, 384, scale=1.0)  # and a large common offset costs no accuracy
    shifted = shifted._replace(logits=(shifted.logits - 1e4).to(dtype))
    for one, results in zip((case, shifted), zip(*pool().run(3, losses, [case, shifted]), strict=True), strict=True):
        assert math.isfinite(results[0].loss) and all(result.gradient.isfinite().all() for result in results)
        check(one, list(results))


def test_a_gradient_sums_to_zero_over_the_vocabulary():
    """In every row, whoever holds the target."""
    case = make_case(257, 384)
    parts = [answer[0].gradient for answer in pool().run(4, losses, [case])]
    assert torch.cat(parts, dim=-1).sum(dim=-1).abs().max() < 1e-7


@pytest.mark.parametrize("elements", [1, 384, 5 * 384, 1 << 30])
def test_the_size_of_chunks_changes_nothing(monkeypatch, elements):
    case = make_case(257, 384)
    whole = case.logits.clone().requires_grad_()
    cross_entropy(whole, case.targets, 257).backward()
    monkeypatch.setattr(dtgpt.ops.loss.cross_entropy, "CHUNK", elements)
    chunked = case.logits.clone().requires_grad_()
    loss = cross_entropy(chunked, case.targets, 257)
    loss.backward()
    assert loss == cross_entropy(whole, case.targets, 257)
    assert torch.equal(chunked.grad, whole.grad)


def test_the_local_terms_of_pieces_make_the_whole():
    """What the ranks exchange, by hand: the largest logit, the sum of exponentials and the target's logit."""
    case = make_case(257, 384)
    rows, targets = case.logits.flatten(0, 1), case.targets.flatten()
    pieces = [chunk(range(384), 5, index) for index in range(5)]
    terms = [
        local_terms(rows[:, r.start : r.stop], targets, r.start, min(max(257 - r.start, 0), len(r))) for r in pieces
    ]
    largest, total, target = (torch.stack(parts) for parts in zip(*terms, strict=True))
    log_sum = torch.logsumexp(largest + total.log(), dim=0)
    assert torch.equal(target.sum(0), rows.gather(1, targets[:, None])[:, 0])
    assert ((target != 0).sum(0) <= 1).all()  # one rank holds the target
    torch.testing.assert_close((log_sum - target.sum(0)).mean(), expected(case)[0], rtol=1e-6, atol=0)


class LargestFloat(TorchDispatchMode):
    """Watches the number of elements of the largest fp32 tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.elements, self.operations = max(self.elements, tensor.numel()), self.operations + 1
        return output


def test_fp32_logits_of_full_size_never_exist(monkeypatch):
    """In forward and backward of bf16 logits; the reference makes them, so that the watch is seen to see."""
    monkeypatch.setattr(dtgpt.ops.loss.cross_entropy, "CHUNK", 1 << 14)
    case = make_case(257, 384, torch.bfloat16, shape=(4, 256))
    sizes = []
    for function in (cross_entropy, reference):
        logits = case.logits.clone().requires_grad_()
        with LargestFloat() as watch:
            loss = function(logits, case.targets, case.vocab_size)
            forward = watch.operations
            loss.backward()
        assert 0 < forward < watch.operations
        sizes.append(watch.elements)
    assert sizes[0] <= 1 << 14 and sizes[1] >= 4 * 256 * 257


def test_only_bf16_logits_and_two_numbers_per_row_are_saved_for_backward():
    case, sizes = make_case(257, 384, torch.bfloat16), []
    logits = case.logits.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        cross_entropy(logits, case.targets, 257)
    assert sorted(sizes) == sorted([logits.nbytes, case.targets.nbytes, 21 * 4, 21 * 4])

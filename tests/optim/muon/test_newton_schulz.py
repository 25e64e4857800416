"""Newton-Schulz iterations: singular values near 1, singular vectors kept, the values of torch.optim.Muon."""

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from dtgpt.optim.muon.newton_schulz import orthogonalize


@pytest.mark.parametrize("shape", [(5, 64, 32), (2, 32, 96), (1, 48, 48), (3, 1, 7)])
def test_singular_values_come_near_one_and_vectors_stay(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    found = orthogonalize(matrices, 5)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    inner = u.mT @ found @ v.mT
    values = inner.diagonal(dim1=1, dim2=2)
    assert ((values > 0.65) & (values < 1.25))[s > 0.05 * s.amax(dim=1, keepdim=True)].all()
    torch.testing.assert_close(inner, torch.diag_embed(values), rtol=0, atol=1e-6)


def test_zeros_and_single_precision():
    assert not orthogonalize(torch.zeros(2, 8, 4), 5).any()
    matrices = torch.randn(4, 40, 24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        orthogonalize(matrices, 5).double(), orthogonalize(matrices.double(), 5), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_sixteen_bits_are_those_of_torch_up_to_their_rounding(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    theirs = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    ours = orthogonalize(matrix.bfloat16()[None], 5)[0]
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0.02)

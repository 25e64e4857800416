"""A linear map in fp8, and functions of the local tensors of a linear map."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dtgpt.ops.fp8.linear import fp8_linear
from dtgpt.ops.fp8.sites import FORWARD, GRADIENT
from dtgpt.ops.linear import linear
from dtgpt.ops.operation import split_backward
from tests.support import bodies_fp8 as bodies
from tests.support.ranks import pool


def gradients(function, inputs: bodies.Inputs) -> list[Tensor]:
    """Return the result and the gradients of x, weight and bias."""
    x, weight, bias, dy = inputs
    y = function(x, weight, bias)
    return [y, *torch.autograd.grad(y, [t for t in (x, weight, bias) if t is not None], dy)]


def rounded(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (value.double() * scale.double()).to(dtype).double() / scale.double()


@pytest.mark.parametrize("has_bias", [True, False])
def test_while_scales_are_unknown_the_values_are_those_of_16_bits_and_their_amaxes_are_recorded(has_bias):
    inputs, sites = bodies.inputs(has_bias), bodies.sites()
    expected = gradients(linear, inputs)
    assert all(map(torch.equal, gradients(partial(fp8_linear, sites=sites), inputs), expected))
    for site, value in ((sites.input, inputs.x), (sites.weight, inputs.weight), (sites.gradient, inputs.dy)):
        assert site.amax.item() == value.abs().max().item()


@pytest.mark.parametrize("has_bias", [True, False])
def test_products_are_those_of_the_rounded_values(has_bias):
    inputs, sites = bodies.inputs(has_bias), bodies.known_sites()
    x = rounded(inputs.x.detach(), sites.input.scale, FORWARD).flatten(0, 1)
    weight = rounded(inputs.weight.detach(), sites.weight.scale, FORWARD)
    dy = rounded(inputs.dy, sites.gradient.scale, GRADIENT).flatten(0, 1)
    expected = [x @ weight.t(), dy @ weight, dy.t() @ x]
    if inputs.bias is not None:
        expected[0] = expected[0] + inputs.bias.detach().double()
        expected.append(inputs.dy.double().sum((0, 1)))
    found = gradients(partial(fp8_linear, sites=sites), inputs)
    for made, right in zip(found, expected, strict=True):
        assert made.dtype == torch.bfloat16
        torch.testing.assert_close(made.double(), right.view_as(made), rtol=2**-7, atol=1e-3 * right.abs().max().item())
    assert [site.amax.item() for site in (sites.input, sites.weight, sites.gradient)] == [
        value.abs().max().item() for value in (inputs.x, inputs.weight, inputs.dy)
    ]


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_schedule_that_splits_backward_has_the_same_products(has_bias):
    inputs, one, other = bodies.inputs(has_bias), bodies.known_sites(), bodies.known_sites()
    expected = gradients(partial(fp8_linear, sites=one), inputs)
    with split_backward():
        found = gradients(partial(fp8_linear, sites=other), inputs)
    for made, right in zip(found, expected, strict=True):
        torch.testing.assert_close(made, right, rtol=2**-7, atol=1e-3 * right.abs().max().item())
    assert all(torch.equal(a.amax, b.amax) for a, b in zip(bodies.cells(one), bodies.cells(other), strict=True))


@pytest.mark.parametrize("known", [True, False])
def test_evaluation_records_nothing(known):
    inputs, sites = bodies.inputs(), bodies.known_sites() if known else bodies.sites()
    with torch.no_grad():
        fp8_linear(inputs.x, inputs.weight, inputs.bias, sites)
    assert all(site.amax.item() == 0 for site in bodies.cells(sites))


def test_where_fp8_is_disabled_the_values_are_those_of_16_bits_and_nothing_is_recorded():
    inputs, sites = bodies.inputs(), bodies.known_sites()
    sites.calibration.enabled = False
    expected = gradients(linear, inputs)
    assert all(map(torch.equal, gradients(partial(fp8_linear, sites=sites), inputs), expected))
    assert all(site.amax.item() == 0 for site in bodies.cells(sites))


def test_backward_keeps_the_input_in_8_bits_and_no_copy_of_the_weight():
    inputs, sites, kept = bodies.inputs(), bodies.known_sites(), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        fp8_linear(inputs.x, inputs.weight, inputs.bias, sites)
    copies = [t for t in kept if t.data_ptr() != inputs.weight.data_ptr()]
    assert [(t.dtype, t.numel()) for t in copies] == [(FORWARD, inputs.x.numel())]


@pytest.mark.parametrize("cut", ["columns", "rows", "whole"])
def test_a_function_of_local_tensors_is_that_of_the_whole_ones(cut):
    """Of two tp ranks; the gradient of a replicated input is the sum over them."""
    for found, expected in pool().run(2, bodies.linear_on_local_tensors, cut):
        for made, right in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(made), torch.tensor(right), rtol=1e-5, atol=1e-5)

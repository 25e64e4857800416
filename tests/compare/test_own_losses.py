"""Losses that dtgpt does not know: that of docs/seams.md, one of a recipe's own, and an objective's. One process is
held against the same loss in float64, so that a right one is called right, and a fault in it is found."""

import os
import re
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch.nn import functional as F

from dtgpt.compare.float64 import idle_cores
from dtgpt.compare.gate import Reference, problem_of_reference
from dtgpt.compare.record import Tracing, read_record, save_record
from dtgpt.models.gpt2 import GPT2Config, Head
from dtgpt.models.layers import Output
from tests.promises.test_library import SEAMS
from tests.support import example_objective
from tests.support.example_objective import FocalLoss, SmoothingConfig, SmoothingRecipe, in_use
from tests.support.runs import change, traced_record

pytestmark = pytest.mark.slow(20)

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 257, "dropout": 0.1}
PAGE = re.search(r"```python\n(.*?)```", SEAMS, re.S)[1]
WRONG = "one process is further from float64 than fp32 explains"


def smooth_config(old: str = "", new: str = "") -> GPT2Config:
    """Return the config of the page's example, with a change of its text."""
    assert old in PAGE
    names: dict = {"__name__": __name__}
    exec(PAGE.replace(old, new), names)
    return names["SmoothConfig"](**SIZES)


def verdict(recipe, tmp_path) -> str:
    """Return what is wrong with one process, empty: nothing."""
    file = tmp_path / "one"
    record = traced_record(recipe, Tracing(file, tmp_path / "shared", is_reference=True))
    save_record(record, file)
    return problem_of_reference(Reference(file, read_record(file)), None)[1] if record.far or record.unrepeated else ""


@pytest.mark.parametrize("micro_batch_size", [4, 8])
def test_the_loss_of_the_page_is_right(tiny, tmp_path, micro_batch_size):
    assert verdict(replace(tiny, model=smooth_config(), micro_batch_size=micro_batch_size), tmp_path) == ""


def test_only_the_first_sample_of_a_large_step_is_held_against_float64(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("dtgpt.compare.float64.OPERATIONS", 0)
    assert verdict(replace(tiny, model=smooth_config()), tmp_path) == ""
    rounded = smooth_config(".vocab_size].float()", ".vocab_size].bfloat16()")
    assert verdict(replace(tiny, model=rounded), tmp_path).startswith(WRONG)


FAULTS = {
    "no weight of a micro-batch": ("return loss if scale is None else", "return loss #"),
    "weight in the value, too": ("loss.detach() + scale * (loss - loss.detach())", "scale * loss"),
    "rounded logits": (".vocab_size].float()", ".vocab_size].bfloat16().float()"),
    "other smoothing in training": (
        "label_smoothing=0.1", "label_smoothing=0.1 if self.lm_head.bound.gradient_scale is None else 0.11"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_loss_of_the_page_is_found(tiny, tmp_path, name):
    assert verdict(replace(tiny, model=smooth_config(*FAULTS[name])), tmp_path).startswith(WRONG)


def with_head(head_class) -> GPT2Config:
    @dataclass(frozen=True, kw_only=True)
    class Config(GPT2Config):
        def make_head(self):
            return head_class(self)

    return Config(**SIZES)


class OwnProjection(Head):
    """A head that uses dtgpt's projection for logits alone, and writes the loss out, with a mask of its own."""

    share = 1.0

    def compute(self, x, targets=None, loss_weights=None):
        logits = super().compute(x)
        if targets is None:
            return logits
        logits = logits[..., : self.lm_head.vocab_size].to(dtype=torch.float32)
        rest = torch.logsumexp(logits, -1)
        losses = rest - logits.gather(-1, targets[..., None])[..., 0] + 1e-2 * rest.square()
        loss = (losses if loss_weights is None else losses * loss_weights).mean()
        scale = self.lm_head.bound.gradient_scale
        return loss if scale is None else loss.detach() + self.share * scale * (loss - loss.detach())


class Slack(OwnProjection):
    share = 1.01


@pytest.mark.parametrize(("head", "words"), [(OwnProjection, ""), (Slack, WRONG)])
def test_a_loss_with_a_term_of_its_own_is_held_against_itself(tiny, tmp_path, head, words):
    masked = change(tiny, data={"eod_mask_loss": True})
    assert verdict(replace(masked, model=with_head(head)), tmp_path)[: len(WRONG)] == words


class Tilted(FocalLoss):
    def __call__(self, losses, about):
        value, weights = super().__call__(losses, about)
        return value, weights * 1.01


class Detached(FocalLoss):
    """The same loss, of which autograd is told nothing."""

    def __call__(self, losses, about):
        value, weights = super().__call__(losses.detach(), about)
        return value.detach(), weights


@pytest.mark.parametrize(("loss", "words"), [(FocalLoss, ""), (Detached, ""), (Tilted, WRONG)])
def test_the_loss_of_an_objective_is_held_against_itself(tiny, tmp_path, monkeypatch, loss, words):
    monkeypatch.setattr(example_objective, "FocalLoss", loss)
    values = {field.name: getattr(tiny, field.name) for field in fields(tiny)}
    with in_use():
        recipe = SmoothingRecipe(**values, smoothing=SmoothingConfig(share=0.25))
        assert verdict(recipe, tmp_path)[: len(WRONG)] == words


class Biased(Output):
    """A kind of output layer whose own loss is right."""

    def forward(self, x, targets=None, loss_weights=None):
        if targets is None:
            return super().forward(x)
        logits = super().forward(x)[..., : self.vocab_size].float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + logits.square().mean() / 10
        scale = self.bound.gradient_scale
        return loss if scale is None else loss.detach() + scale * (loss - loss.detach())


def test_a_kind_of_output_layer_has_its_own_loss(tiny, tmp_path):
    class Ends(Head):
        def __init__(self, config):
            super().__init__(config)
            self.lm_head = Biased(config.hidden_size, config.padded_vocab_size, config.vocab_size)

    assert verdict(replace(tiny, model=with_head(Ends)), tmp_path) == ""


@pytest.mark.cuda
@pytest.mark.parametrize(("loss", "words"), [(FocalLoss, ""), (Tilted, WRONG)])
def test_the_loss_of_an_objective_on_a_gpu_is_held_against_itself_on_the_cpu(tiny, tmp_path, monkeypatch, loss, words):
    monkeypatch.setattr(example_objective, "FocalLoss", loss)
    values = {field.name: getattr(tiny, field.name) for field in fields(tiny)} | {"device": "cuda", "precision": "fp32"}
    with in_use():
        recipe = SmoothingRecipe(**values, smoothing=SmoothingConfig(share=0.25))
        assert verdict(recipe, tmp_path)[: len(WRONG)] == words


def test_float64_takes_the_cores_that_a_gpu_leaves_idle():
    threads = torch.get_num_threads()
    for device, wanted in (("cuda", len(os.sched_getaffinity(0))), ("cpu", threads)):
        with idle_cores(torch.device(device)):
            assert torch.get_num_threads() == wanted
        assert torch.get_num_threads() == threads

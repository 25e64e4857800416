"""Prompts that training computes once for all of their answers: the losses and gradients of samples apart."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from dtgpt.config.plan_choice import parse_plan
from dtgpt.models.decoder import unique_parameters
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.attention.shared import shared_tokens
from dtgpt.ops.random.philox import root_key
from dtgpt.planning.gpus import find_gpu
from dtgpt.planning.memory import memory_of
from dtgpt.planning.operation_time import Operations
from dtgpt.planning.traffic import sent_bytes
from dtgpt.posttrain.demands import rows_of
from dtgpt.posttrain.grpo.answers import Answer, shared_rows, weighted_rows
from dtgpt.posttrain.grpo.config import GrpoConfig, shares_prompts, why_not_shared
from dtgpt.train.setup import open_trainer
from dtgpt.util.errors import UserError
from tests.support.bodies_grpo import Low, train_answers
from tests.support.families import OURS
from tests.support.ranks import pool, several
from tests.support.runs import change, constant, on_cuda
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(9)

LENGTH, NEW, VOCABULARY = 40, 12, 131
SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": LENGTH, "vocab_size": VOCABULARY}
MODELS = {
    "gpt2": GPT2Config(**SIZES, dropout=0.0),
    "llama": LlamaConfig(**SIZES, num_kv_heads=2, head_dim=8, ffn_hidden_size=48),
}
PROMPTS = (1, 2, 17, LENGTH - NEW)  # tokens; a sample has room for no more


def answers_of(group: int = 3, prompts: tuple[int, ...] = PROMPTS, new: int = NEW) -> list[Answer]:
    """Return a group of answers of 1 to `new` tokens to a prompt of each length."""
    generator = torch.Generator().manual_seed(4)

    def ids(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    made = []
    for prompt in map(ids, prompts):
        for index in range(group):
            count = (new, 1, 1 + index * (new - 1) // group)[index % 3]
            made.append(Answer("", prompt, ids(count), [], "", False, torch.rand((), generator=generator).item()))
    return made


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in unique_parameters(model).items()}


@pytest.mark.parametrize("family, loss", [
    *(("gpt2", loss) for loss in ("dr_grpo", "grpo", "dapo")),
    ("llama", "dapo"), ("gemma3", "grpo"), ("gpt_oss", "dapo"),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_samples_apart(family, loss):
    """Positions that are learned and rotary, windows, sinks; prompts of one token and of as many as fit."""
    config = MODELS.get(family) or replace(OURS[family], seq_length=LENGTH)
    model = build_model(config, torch.device("cpu"), torch.float32, root_key(3))
    grpo, answers = GrpoConfig(group=3, max_new_tokens=NEW, loss=loss), answers_of()
    part = slice(3, 12)  # advantages are those of whole groups, the mean length that of all
    apart, shared = (make(answers, part, grpo, LENGTH) for make in (weighted_rows, shared_rows))
    assert apart.tokens.shape == (9, LENGTH) and shared.tokens.shape == (3, LENGTH + 2 * (NEW + 1))
    (expected, wanted), (found, gradients) = (loss_and_gradients(model, batch) for batch in (apart, shared))
    assert found == pytest.approx(expected, abs=1e-6) and expected != 0
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_rows_and_samples_are_those_of_plain_indexing():
    """With gradients, of tensors whose rows do not lie one after the other."""
    batch = shared_rows(answers_of(), slice(None), GrpoConfig(group=3, max_new_tokens=NEW), LENGTH)
    shared, count = shared_tokens(batch.copies, batch.tokens.shape[1]), len(batch.tokens)
    packed = torch.randn(count, batch.tokens.shape[1], 4, 3, requires_grad=True)
    x, row = packed[:, :, 1:3], torch.arange(count)[:, None]
    samples, expected = shared.samples(x), x[row, batch.copies.flatten(1)].view(3 * count, LENGTH, 2, 3)
    assert torch.equal(samples, expected)
    weights = torch.randn(expected.shape) * counted(batch)[..., None, None]
    (found,), (wanted,) = (torch.autograd.grad((y * weights).sum(), packed) for y in (samples, expected))
    torch.testing.assert_close(found, wanted)
    made = torch.randn(3 * count, LENGTH, 5, requires_grad=True)
    whole = made.view(count, 3 * LENGTH, 5)[row, torch.tensor([origins(size) for size in PROMPTS])]
    assert torch.equal(shared.rows(made), whole)
    there = torch.randn(whole.shape) * (batch.loss_weights != 0)[..., None]  # no gradient comes from other places
    (found,), (wanted,) = (torch.autograd.grad((y * there).sum(), made) for y in (shared.rows(made), whole))
    assert torch.equal(found, wanted)


def origins(prompt: int) -> list[int]:
    """Return the token, of three samples, that counts for each place of a row: those of the first where all share."""
    own = range(prompt - 1, prompt + NEW)
    return [*range(LENGTH - NEW - 1), *(sample * LENGTH + place for sample in range(3) for place in own)]


def counted(batch) -> torch.Tensor:
    """Return whether a token of a sample `[B G, T]` is not behind its end."""
    last = batch.copies[:, :, -1:]
    behind = (batch.copies == last) & (torch.arange(LENGTH) > (batch.copies == last).int().argmax(2, keepdim=True))
    return ~behind.flatten(0, 1)


@pytest.fixture
def grpo(recipe):
    """Two groups of four answers in each step; a micro-batch is a group."""
    return change(
        recipe, model={"dropout": 0.0}, grpo=Low(group=4, max_new_tokens=6), steps=5, optimizer=constant(1e-2),
        micro_batch_size=4, global_batch_size=8, log={"interval": 1, "eval_interval": 0, "sample_tokens": 0},
    )  # fmt: skip


def test_a_run_has_the_answers_and_losses_of_samples_apart(grpo, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # traced as ever, quicker
    with open_trainer(grpo) as trainer:
        assert shares_prompts(trainer.settings) and trainer.batch(0).tokens.shape == (2, 16 + 3 * 7)
    apart = replace(grpo, grpo=replace(grpo.grpo, share_prompts="off"))
    losses, ids, norms = train_answers(apart, 2)
    for run in (grpo, replace(grpo, compile="on"), replace(grpo, recompute="full", micro_batch_size=8)):
        found = train_answers(run, 2)
        assert found[1] == ids
        assert found[0] == pytest.approx(losses, abs=1e-6)
        assert found[2] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("plans", [("dp2_zero3", "tp2"), ("dp2_tp2_sp",)])
def test_plans_share_prompts_and_follow_one_process(grpo, plans):
    grpo = replace(grpo, grpo=replace(grpo.grpo, max_new_tokens=7, share_prompts="on"))  # 16 + 3 * 8 is even
    losses, ids, norms = train_answers(replace(grpo, micro_batch_size=8), 2)
    calls = [(train_answers, replace(grpo, plan=plan), 2) for plan in plans]
    for rank in pool().run(parse_plan(plans[0]).world, several, calls):
        for found in rank:
            assert found[1] == ids
            assert found[0] == pytest.approx(losses, abs=1e-6)
            assert found[2] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize(
    ("plan", "changes", "words"),
    [
        ("pp2", {}, "plan=pp2 hands samples of one length on"), ("cp2", {}, "plan=cp2 hands samples"),
        ("single", {"micro_batch_size": 2}, "micro_batch_size=2 is not a multiple of grpo.group=4"),
        ("tp2_sp", {}, "tp=2 does not divide the 37 tokens of a group"), ("dp2", {"reduce": "exact"}, "reduce=exact"),
        ("dp2_zero3", {}, None),
    ],
)  # fmt: skip
def test_what_cannot_share_prompts_says_why(grpo, plan, changes, words):
    settings = replace(grpo, plan=plan, **changes).planned(parse_plan(plan).world)
    reason = why_not_shared(settings)
    assert reason is None if words is None else words in reason


def test_prompts_that_must_be_shared_and_cannot_are_refused(grpo):
    wanted = replace(grpo, micro_batch_size=2, grpo=replace(grpo.grpo, share_prompts="on"))
    with pytest.raises(UserError, match=r"share_prompts=on, but micro_batch_size=2 .*use --grpo.share_prompts auto"):
        open_trainer(wanted).__enter__()


@pytest.mark.parametrize(
    ("share", "size", "slots", "measured"),
    [("on", 64, 256, 47.12), ("on", 64, 512, 49.63), ("off", 64, 512, 52.34), ("off", 16, 256, 30.90),
     ("on", 16, 256, 30.09)],
)  # fmt: skip
def test_the_memory_planned_is_that_of_steps_of_the_1b(recipe, share, size, slots, measured):
    """GiB of `benchmarks/grpo.py --model llama32_1b` on an H200, torch 2.11: 64 prompts of 64 tokens, 512 answers."""
    model = LlamaConfig(
        num_layers=16, hidden_size=2048, num_heads=32, num_kv_heads=8, head_dim=64, ffn_hidden_size=8192,
        vocab_size=128256, seq_length=320, tied=True,
    )  # fmt: skip
    large = replace(
        recipe, model=model, device="cuda", precision="bf16", attention="flash", graph="on", global_batch_size=512,
        micro_batch_size=size, grpo=Low(group=8, max_new_tokens=256, slots=slots, share_prompts=share),
    )  # fmt: skip
    settings = large.planned(1)
    assert shares_prompts(settings) == (share == "on")
    assert memory_of(settings, 0).total / 2**30 == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("plan", ["single", "tp2_sp"])
def test_the_plan_counts_the_tokens_of_a_prompt_once(grpo, plan):
    """In time and messages, too: rows of 16 + 3 x 8 tokens for four samples of 16."""
    found = []
    for share in ("on", "off"):
        run = replace(grpo, device="cuda", plan=plan, grpo=replace(grpo.grpo, max_new_tokens=7, share_prompts=share))
        settings = run.planned(parse_plan(plan).world)
        tokens = Operations(settings, find_gpu("H200").rates).tokens
        found.append(
            (rows_of(settings).number * rows_of(settings).length, tokens, sent_bytes(settings, 0).get("tp", 0))
        )
    (tokens, counted, sent), (apart, counted_apart, sent_apart) = found
    assert (tokens, counted, apart, counted_apart) == (40, 40, 64, 64)
    assert sent < sent_apart if plan == "tp2_sp" else sent == sent_apart == 0


@pytest.mark.cuda
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("size", [64, 128])
def test_shared_prompts_have_the_losses_of_samples_apart_to_the_bit(family, size):
    """Losses of each token of the answers, and gradients to the rounding of bf16."""
    length, new = 320, 200
    sizes = {"hidden_size": 4 * size, "head_dim": size} if family == "llama" else {"hidden_size": 4 * size}
    config = replace(MODELS[family], seq_length=length, **sizes)
    model = build_model(config, torch.device("cuda"), torch.bfloat16, root_key(3))
    grpo, answers = GrpoConfig(group=4, max_new_tokens=new), answers_of(4, (1, 63, 64, length - new), new)
    batches = [
        type(batch)._make(None if field is None else field.cuda() for field in batch)
        for batch in (make(answers, slice(None), grpo, length) for make in (weighted_rows, shared_rows))
    ]
    losses = []
    for batch in batches:
        logits = model(*batch._replace(targets=None, loss_weights=None)).detach().float().flatten(0, 1)
        each = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="none")
        losses.append(each[batch.loss_weights.flatten() != 0])
    assert len(losses[0]) > 1000 and torch.equal(*losses)
    (_, wanted), (_, found) = (loss_and_gradients(model, batch) for batch in batches)
    for name, gradient in wanted.items():
        assert (found[name].float() - gradient.float()).norm() <= 2e-2 * gradient.float().norm(), name
    (_, again) = loss_and_gradients(model, batches[1])
    assert all(torch.equal(again[name], gradient) for name, gradient in found.items())


@pytest.mark.cuda
def test_captured_steps_share_prompts(grpo):
    cuda = replace(on_cuda(grpo), precision="bf16", compile="off")
    captured, plain = (train_answers(replace(cuda, graph=graph), 5) for graph in ("on", "off"))
    assert captured[1] == plain[1]
    assert captured[0] == pytest.approx(plain[0], abs=1e-6)

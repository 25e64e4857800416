"""Chats that share a sample have the loss and the gradients that they have alone."""

import json
import random
from dataclasses import replace

import pytest
import torch
import transformers

from dtgpt.config.sections import OptimizerConfig
from dtgpt.data.prepare.config import PrepareConfig
from dtgpt.data.prepare.job import prepare
from dtgpt.models.decoder import unique_parameters
from dtgpt.optim.balance.config import BalanceConfig
from dtgpt.posttrain.chats.packed import BEGINS, COUNTS, packed_batch
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.setup import open_trainer
from tests.models.moe.test_plans import OLMOE
from tests.support.bodies_balance import balanced_steps
from tests.support.chats import conversation, write_tokenizer
from tests.support.families import OURS, their_model
from tests.support.ranks import pool
from tests.support.runs import change

pytest.importorskip("jinja2")

LENGTHS = (5, 6, 6)  # of chats, which fill a sample of 16 + 1 tokens


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "gemma3", "gpt_oss", "qwen2", "olmoe"])
def test_packed_chats_have_the_loss_and_gradients_of_chats_alone(recipe, family):
    tokens = torch.randint(256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    marks = torch.tensor([BEGINS if i == 0 else COUNTS * (i > 2) for n in LENGTHS for i in range(n)])
    packed = torch.stack([tokens, marks], -1)
    alone = torch.zeros(len(LENGTHS), *packed.shape, dtype=torch.int64)
    for row, chat in enumerate(packed.split(LENGTHS)):
        alone[row, : len(chat)] = chat
    results = []
    model = replace({**OURS, "olmoe": OLMOE}.get(family, recipe.model), dropout=0.0)
    with open_trainer(replace(recipe, model=model)) as trainer:
        for windows in (packed[None], alone):
            batch = packed_batch(windows)
            (model,), weights = trainer.stages, batch.loss_weights
            model.zero_grad()
            loss = model(*batch) * weights.numel() / weights.sum()
            loss.backward()
            results.append((loss.item(), {name: p.grad.clone() for name, p in unique_parameters(model).items()}))
    (loss, gradients), (loss_alone, gradients_alone) = results
    assert loss == pytest.approx(loss_alone, rel=1e-6)
    for name, gradient in gradients.items():
        atol = 1e-6 * gradient.abs().max().item() + 1e-9
        torch.testing.assert_close(gradient, gradients_alone[name], rtol=0, atol=atol)


@pytest.mark.slow(2)
def test_fifty_steps_are_those_of_transformers_on_each_chat_alone(recipe, tmp_path):
    """Of all weights, by torch's AdamW: the loss is the mean over the answers of a whole batch."""
    config = transformers.LlamaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model, base = transformers.LlamaForCausalLM(config), tmp_path / "base"
    model.save_pretrained(base)
    write_tokenizer(base)
    rates = OptimizerConfig(lr=1e-3, warmup=0, schedule="constant", eps=1e-5, weight_decay=0.0)
    recipe = replace(prepared(recipe, base, tmp_path), steps=50, optimizer=rates)
    rule = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    with open_trainer(recipe) as trainer:
        for step in range(50):
            windows = trainer.dataset.windows(4 * step + torch.arange(4), 64, trainer.objective.data_key)
            alone = [chat for window in windows for chat in window.tensor_split(starts_in(window)) if len(chat)]
            padded = torch.nn.utils.rnn.pad_sequence(alone, batch_first=True)  # at the end, which no token sees
            counts = (padded[:, 1:, 1] & COUNTS).bool()
            logits = model(padded[:, :-1, 0]).logits
            theirs = torch.nn.functional.cross_entropy(logits[counts], padded[:, 1:, 0][counts])
            rule.zero_grad()
            theirs.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rule.step()
            assert trainer.mean_loss(trainer.train_step()) == pytest.approx(theirs.item(), rel=1e-5), step
    assert theirs < 4.5


def prepared(recipe, base, folder, length=64):
    """A run on chats, in samples of `length` tokens, of the model and the tokenizer in the folder `base`."""
    chats, draw = folder / "chats.jsonl", random.Random(3)
    chats.write_text("".join(json.dumps({"messages": conversation(draw)}) + "\n" for _ in range(80)))
    prepare(PrepareConfig(input=str(chats), chat=True, output_prefix=folder / "x", tokenizer=str(base), workers=1))
    data = {"path": str(folder / "x_chat_document"), "tokenizer": "auto"}
    recipe = replace(recipe, model=replace(open_config(base), seq_length=length), init_from=str(base))
    return change(recipe, micro_batch_size=2, global_batch_size=4, data=data)


@pytest.mark.slow(8)
@pytest.mark.parametrize("rank", [0, 4])
def test_mixtures_learn_chats_under_every_plan_and_count_no_filling(recipe, tmp_path, rank):
    base = tmp_path / "base"
    their_model("olmoe", vocab_size=384, num_hidden_layers=2, num_experts=6).save_pretrained(base)
    write_tokenizer(base)
    rates = OptimizerConfig(lr=1e-2 if rank else 1e-3, warmup=0, schedule="constant", eps=1e-5)
    chats = replace(prepared(recipe, base, tmp_path, 128), steps=3, optimizer=rates)
    balance, lora = BalanceConfig(loss=0.5, z_loss=0.1), LoraConfig(rank=rank) if rank else LoraConfig()
    chats = replace(chats, balance=balance, lora=lora)
    whole = balanced_steps(chats)
    assert whole.losses[-1] < whole.losses[0]
    with open_trainer(chats) as trainer:
        counted = []
        for step, loads in enumerate(whole.loads):
            windows = trainer.dataset.windows(4 * step + torch.arange(4), 128, trainer.objective.data_key)
            parts = [part for window in windows for part in window[:-1].tensor_split(starts_in(window[:-1]))]
            counted.append(sum(len(part) for part in parts if (part[:, 1] & COUNTS).any()))
            assert [sum(layer) for layer in loads] == [3 * counted[-1]] * 2
        assert 0 < min(counted) < 4 * 128
    for plan in ("dp2_zero3", "pp2", "cp2"):
        found = pool().run(2, balanced_steps, replace(chats, plan=plan))[0]
        assert found.loads == whole.loads and found.losses == pytest.approx(whole.losses, abs=1e-6), plan
        assert found.figures[-1] == pytest.approx(whole.figures[-1], rel=1e-5), plan


def starts_in(window: torch.Tensor) -> list[int]:
    """Return where chats begin in a window `[T + 1, 2]`, and where its filling does."""
    return torch.nonzero(window[:, 1] & BEGINS)[:, 0].tolist()

"""An oracle for each capability that runs in a moment: its formula, written here in plain torch, against dtgpt's step.

Slow tests hold capabilities to other programs and to one process. These find, among the first tests, what changes a
number: `benchmarks/planted_faults.py` plants such faults.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtgpt.inference.rules.edits import penalize
from dtgpt.models.binding import bind
from dtgpt.models.families.gemma3 import Gemma3Config
from dtgpt.models.llama import MLP, LlamaConfig
from dtgpt.ops.fp8.products import Fp8Product
from dtgpt.ops.sampling.sample import kept
from dtgpt.optim.muon import MuonConfig
from dtgpt.posttrain.grpo.answers import Answer, weighted_rows
from dtgpt.posttrain.grpo.config import GrpoConfig
from dtgpt.posttrain.lora.config import LoraConfig
from tests.support import bodies_fp8
from tests.support.bodies_context import two_steps
from tests.support.families import OURS
from tests.support.ranks import pool
from tests.support.runs import change, training

GENERATOR = 5


def draw(*shape: int, seed: int = GENERATOR) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("per_head", [False, True])
def test_muon_scales_each_packed_matrix_by_its_own_size(recipe, per_head, adjust_lr):
    """W (1 - lr decay) - lr s U V^T for the singular vectors of each of q, k, v, gate and up, s by its own rows."""
    model = LlamaConfig(
        num_layers=1, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden_size=24, seq_length=16,
        vocab_size=257,
    )  # fmt: skip
    own = MuonConfig(
        lr=0.5, weight_decay=0.1, momentum=0.0, newton_schulz="convergent", newton_schulz_steps=20, per_head=per_head,
        adjust_lr=adjust_lr,
    )  # fmt: skip
    trainer = training(replace(recipe, model=model, optimizer=own))
    held = {s.name: (s.local, s.local.clone(), draw(*s.local.shape, seed=i)) for i, s in enumerate(trainer.shards)}
    trainer.optimizer.rule.step([gradient for *_, gradient in held.values()], torch.tensor(0.5), torch.tensor(1.0))
    for name, heads in (("attn.qkv", True), ("mlp.gate_up", False)):
        made, before, gradient = held[f"blocks.0.{name}.weight"]
        # q, k, v: for each of 2 groups 2 heads of queries, one of keys and one of values; gate and up take turns.
        shape = (2, 4, 8, 16) if heads else (24, 2, 16)
        wholes = [t.view(shape) for t in (made, before, gradient)]
        if not heads:
            parts = [[t[:, i] for t in wholes] for i in range(2)]
        elif per_head:
            parts = [[t[g, i] for t in wholes] for g in range(2) for i in range(4)]
        else:
            parts = [[t[:, i].reshape(-1, 16) for t in wholes] for i in (slice(0, 2), 2, 3)]
        for after, old, direction in parts:
            u, _, v = torch.linalg.svd(direction, full_matrices=False)
            rows, columns = direction.shape
            size = 0.2 * max(rows, columns) ** 0.5 if adjust_lr == "match_rms_adamw" else max(1, rows / columns) ** 0.5
            torch.testing.assert_close(after, old * (1 - 0.5 * 0.1) - 0.5 * size * (u @ v), rtol=0, atol=2e-3)


def test_adapters_have_the_gradients_of_the_weights_that_they_add_to(recipe):
    """W + s B A, of a packed weight for each matrix: dA = s B^T dW and dB = s dW A^T, dW of a run of all weights."""
    recipe, rank = change(recipe, model={"dropout": 0.0}, global_batch_size=4), 3
    adapted = training(replace(recipe, lora=LoraConfig(rank=rank, alpha=6.0)))
    for index, shard in enumerate(adapted.shards):
        shard.local.copy_(0.1 * draw(*shard.local.shape, seed=index))
    adapted.shards.publish()
    factors = {shard.name: shard.local.double() for shard in adapted.shards}
    whole, scale, packed = training(recipe), 6.0 / rank, {}
    for frozen, shard in zip(adapted.shards.frozen, whole.shards, strict=True):
        assert frozen.name == shard.name
        shard.local.copy_(frozen.local)
        module = shard.name.removesuffix(".weight")
        if f"{module}.lora.a" in factors:
            a, b = factors[f"{module}.lora.a"], factors[f"{module}.lora.b"]
            rows = torch.arange(len(b))
            # q, k, v of each of two heads of 16 take turns in GPT-2's fused weight.
            matrix = rows // 16 % 3 if module.endswith("qkv") else torch.zeros_like(rows)
            packed[shard.name] = a, b, a.view(-1, rank, a.shape[1])[matrix]  # A of each row
            shard.local.add_(scale * torch.einsum("or,ori->oi", b, packed[shard.name][2]))
    whole.shards.publish()
    assert len(packed) == 8
    loss, wanted = adapted.gradients(), whole.gradients()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    found = {shard.name: adapted.gradient(shard).double() for shard in adapted.shards}
    for shard in whole.shards:
        if shard.name in packed:
            gradient, (a, b, of_row) = whole.gradient(shard).double(), packed[shard.name]
            module = shard.name.removesuffix("weight")
            matrix = torch.arange(len(b)) // 16 % 3 if len(a) > rank else torch.zeros(len(b), dtype=torch.int64)
            of_b = scale * torch.einsum("oi,ori->or", gradient, of_row)
            of_a = torch.zeros(len(a) // rank, rank, a.shape[1], dtype=torch.float64)
            of_a.index_add_(0, matrix, scale * torch.einsum("or,oi->ori", b, gradient))
            for name, right in (("lora.b", of_b), ("lora.a", of_a.flatten(0, 1))):
                torch.testing.assert_close(found[module + name], right, rtol=0, atol=1e-5 * right.abs().max().item())


@pytest.mark.parametrize("loss", ["dr_grpo", "grpo", "dapo"])
def test_answers_weigh_as_the_formula_of_grpo_has_it(loss):
    """The mean of weight x -log p over all tokens, against the sum over answers written out."""
    rewards, lengths, length, new = [1.0, 0.0, 0.5, 3.0, 2.0, 2.5], [2, 5, 1, 3, 4, 2], 12, 5
    answers = [
        Answer("", [7, 8, 9], list(range(n)), [0.0] * n, "", True, reward)
        for reward, n in zip(rewards, lengths, strict=True)
    ]
    nats = draw(len(answers), length).abs().double()
    wanted = 0.0
    for index, (reward, n) in enumerate(zip(rewards, lengths, strict=True)):
        group = torch.tensor(rewards[index // 3 * 3 : index // 3 * 3 + 3], dtype=torch.float64)
        advantage = reward - group.mean().item()
        if loss != "dr_grpo":
            advantage /= group.std().item() + 1e-4
        share = {"dr_grpo": len(answers) * new, "grpo": len(answers) * n, "dapo": sum(lengths)}[loss]
        wanted += advantage * nats[index, 2 : 2 + n].sum().item() / share
    batch = weighted_rows(answers, slice(None), GrpoConfig(group=3, max_new_tokens=new, loss=loss), length)
    assert (batch.loss_weights * nats).mean().item() == pytest.approx(wanted, rel=1e-6)
    assert batch.targets[1, 2:7].tolist() == [0, 1, 2, 3, 4]


def test_an_mlp_in_8_bits_has_the_activation_of_its_model():
    """GeGLU, which no fused kernel of fp8 knows."""
    config = Gemma3Config(
        num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, ffn_hidden_size=48, vocab_size=257
    )
    mlp, x = MLP(config), draw(2, 16, 32)
    for index, part in enumerate((mlp.gate_up, mlp.down)):
        part.weight.data.copy_(0.2 * draw(*part.weight.shape, seed=index))
        sites = bodies_fp8.sites(2.0**3, 2.0**6, 2.0**10)
        sites.calibration.known = True
        bind(part, quantised=Fp8Product(sites))
    gate, up = (x.double() @ mlp.gate_up.weight.double().t()).unflatten(-1, (-1, 2)).unbind(-1)
    right = (F.gelu(gate, approximate="tanh") * up) @ mlp.down.weight.double().t()
    with torch.no_grad():
        found = mlp(x.bfloat16()).product.double()
    assert ((found - right).norm() / right.norm()).item() < 0.1
    swiglu = (F.silu(gate) * up) @ mlp.down.weight.double().t()
    share = ((found - right) * (swiglu - right)).sum() / (swiglu - right).square().sum()
    assert abs(share.item()) < 0.2  # 1: the result is SwiGLU's, but for rounding


@pytest.mark.parametrize("heads", [4, 1])
def test_slices_of_samples_keep_documents_apart(recipe, documents, heads):
    """Where ranks exchange heads, and where they exchange queries: each of many documents in a sample."""
    masks = {"reset_attention_mask": True, "reset_position_ids": True, "path": str(documents)}
    recipe = change(recipe, model={"num_heads": heads, "seq_length": 64, "dropout": 0.0}, data=masks, steps=2)
    expected, _ = two_steps(recipe)
    apart, _ = two_steps(change(recipe, data={"reset_attention_mask": False}))
    assert abs(apart[0] - expected[0]) > 1e-5 * expected[0]  # which the text shows
    for found, _ in pool().run(2, two_steps, replace(recipe, plan="cp2")):
        assert found == pytest.approx(expected, rel=1e-5)


def test_ranks_that_share_heads_draw_the_masks_of_one_process(recipe):
    """Four ranks, two of which have the same head."""
    recipe = change(recipe, model={"dropout": 0.3}, steps=2)
    expected, _ = two_steps(recipe)
    for found, _ in pool().run(4, two_steps, replace(recipe, plan="cp4")):
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_tied_table_of_four_stages_has_the_sum_of_both_gradients(recipe):
    """Where the stages between hold none."""
    recipe = change(recipe, model={"num_layers": 4, "dropout": 0.0}, micro_batch_size=2, steps=2)
    expected, _ = two_steps(recipe)
    for found, _ in pool().run(4, two_steps, replace(recipe, plan="pp4")):
        assert found == pytest.approx(expected, rel=1e-5)


def test_norms_over_all_heads_have_the_mean_square_of_all_ranks(recipe):
    """OLMo 3's, of queries and keys, where each rank has some of the heads."""
    recipe = replace(recipe, model=OURS["olmo3"], micro_batch_size=2, steps=2)
    expected, _ = two_steps(recipe)
    for found, _ in pool().run(2, two_steps, replace(recipe, plan="tp2")):
        assert found == pytest.approx(expected, rel=1e-5)


def test_filters_and_penalties_of_sampling_are_those_of_the_definition():
    """min_p against the likeliest token, top_p with the token that crosses it, a presence that does not count."""
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.08, 0.02]], dtype=torch.float64)
    logits, position = probabilities.log().float(), torch.tensor([3])

    def rules(**given: float) -> Any:
        floats = {"top_p": 1.0, "min_p": 0.0, "top_p_decay": 1.0, "top_p_bound": 0.0, "frequency_penalty": 0.0}
        floats |= {"presence_penalty": 0.0, "temperature": 1.0}
        integers = {"top_k": torch.tensor([0]), "prompt_length": torch.tensor([1])}
        numbers = {name: torch.tensor([value]) for name, value in (floats | given).items()}
        return SimpleNamespace(floats=SimpleNamespace(**numbers), integers=SimpleNamespace(**integers))

    for given, wanted in (
        ({"min_p": 0.45}, [True, True, True, False, False]),  # 0.2 / 0.4 is enough
        ({"top_p": 0.65}, [True, True, False, False, False]),
        ({"top_p": 0.75}, [True, True, True, False, False]),
    ):
        assert kept(logits, logits, position, rules(**given))[0].tolist() == wanted, given
    history = torch.tensor([[4, 1, 1, 2, 0]])  # a token of the prompt, three generated ones, one to come
    found = penalize(logits, history, position, rules(presence_penalty=0.5, frequency_penalty=0.25))
    penalties = torch.tensor([0.0, 0.5 + 2 * 0.25, 0.5 + 0.25, 0.0, 0.0])
    torch.testing.assert_close(found[0], logits[0] - penalties)

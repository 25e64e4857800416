import math
from dataclasses import replace

import pytest
import torch

from dtgpt.compare.rounding import comparable
from dtgpt.models.decoder import Decoder, fill_weight, unique_parameters
from dtgpt.models.families.gpt_neo import GPTNeoConfig
from dtgpt.models.families.gpt_oss import GptOssConfig
from dtgpt.models.gpt2 import GPT2_124M, GPT2_345M, GPT2_774M, GPT2_1558M, GPT3_175B, GPT2Config
from dtgpt.models.shared.flops import flops_per_token
from dtgpt.ops.loss.cross_entropy import cross_entropy
from dtgpt.ops.random.dropout import dropout_keys
from dtgpt.ops.random.philox import fold, normal, root_key
from dtgpt.util.errors import UserError
from tests.support.whole_model import build_model

CPU = torch.device("cpu")
TINY = GPT2Config(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=100, dropout=0.2)


def build(config=TINY, seed=1, dtype=torch.float32) -> Decoder:
    return build_model(config, CPU, dtype, root_key(seed))


@pytest.mark.parametrize(
    "config, millions",
    [(GPT2_124M, 124), (GPT2_345M, 355), (GPT2_774M, 774), (GPT2_1558M, 1558), (GPT3_175B, 174_605)],
)
def test_named_sizes_have_the_published_number_of_parameters(config, millions):
    assert round(config.num_parameters / 1e6) == millions
    if config is GPT2_345M:
        assert config.padded_vocab_size == 50304
    with torch.device("meta"):
        small = replace(config, num_layers=2)
        assert sum(p.numel() for p in Decoder(small).parameters()) == small.num_parameters


def test_flops_count_weights_and_full_attention():
    assert flops_per_token(GPT2_124M, 1024) == pytest.approx(855e6, rel=1e-3)
    assert flops_per_token(GPT2_345M, 1024) == pytest.approx(2425e6, rel=1e-3)


def test_output_embedding_is_the_input_embedding():
    model = build()
    assert model.head.lm_head.weight is model.embedding.wte.weight
    assert "head.lm_head.weight" not in dict(model.named_parameters())


def test_a_position_sees_no_later_token():
    model, tokens = build(), torch.randint(100, (2, 16))
    keys = dropout_keys(root_key(2), torch.arange(2), TINY.num_sites)
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 100
    for k in (None, keys):
        torch.testing.assert_close(model(tokens, k)[:, :9], model(changed, k)[:, :9])
        assert not torch.allclose(model(tokens, k)[:, 9:], model(changed, k)[:, 9:])


def test_padded_vocabulary_stays_outside_the_softmax():
    model, tokens = build(), torch.randint(100, (2, 17))
    logits = model(tokens[:, :-1])
    loss = cross_entropy(logits, tokens[:, 1:], 100)
    exact = torch.nn.functional.cross_entropy(logits[..., :100].flatten(0, 1), tokens[:, 1:].flatten())
    assert logits.shape == (2, 16, 128)
    torch.testing.assert_close(loss, exact, rtol=3e-7, atol=0)  # two units in the last place
    loss.backward()
    assert model.embedding.wte.weight.grad[100:].abs().max() == 0


def test_weights_are_a_function_of_key_name_and_index():
    model = build()
    weight = dict(model.named_parameters())["blocks.1.mlp.fc.weight"]
    part = 0.02 * normal(fold(root_key(1), "blocks.1.mlp.fc.weight"), (range(40, 70), range(3, 9)))
    assert torch.equal(weight[40:70, 3:9], part.float())


@pytest.mark.parametrize(
    "name", ["embedding.wte.weight", "blocks.1.attn.proj.weight", "blocks.0.ln_1.weight", "head.ln_f.bias"]
)
def test_any_part_of_a_weight_is_drawn_alone(name):
    """Also one that is empty."""
    whole = dict(build().named_parameters())[name]
    for rows in (range(5, 30), range(1), range(32, 32)):
        index = (rows, range(3, 20))[: whole.dim()]
        part = torch.full([len(r) for r in index], math.nan)
        fill_weight(part, name, index, TINY, root_key(1))
        assert torch.equal(part, whole[tuple(slice(r.start, r.stop) for r in index)])


@pytest.mark.parametrize("removed", ["embedding", "head"])
def test_a_part_of_the_model_gets_its_part_of_the_weights(removed):
    """A model without its first block and without one end; the tied table has one name in both ends."""
    whole = dict(build().named_parameters())
    with torch.device("meta"):
        part = Decoder(TINY)
    part.keep(range(1, 2), embedding=removed != "embedding", head=removed != "head")
    part.allocate(CPU)
    kept = unique_parameters(part)
    for name, parameter in kept.items():
        fill_weight(parameter, name, list(map(range, parameter.shape)), TINY, root_key(1))
    assert {"embedding.wte.weight", "blocks.1.attn.qkv.weight"} <= set(kept)
    assert "blocks.0.attn.qkv.weight" not in kept
    for name, parameter in kept.items():
        assert torch.equal(parameter, whole[name]), name


def test_a_broken_tie_is_noticed():
    model = build()
    model.head.lm_head.weight = torch.nn.Parameter(torch.zeros(128, 32))
    with pytest.raises(ValueError, match=r"wte\.weight is two parameters.*tie_weights"):
        unique_parameters(model)


def test_initial_weights_have_the_stated_spread():
    config = replace(TINY, num_layers=8, hidden_size=128)
    for name, p in build(config).named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        elif ".ln_" in name:
            assert (p == 1).all()
        else:
            std = 0.02 / math.sqrt(16) if name.endswith("proj.weight") else 0.02
            assert abs(p.std() / std - 1) < 5 / math.sqrt(2 * p.numel()), name
            assert abs(p.mean()) < 5 * std / math.sqrt(p.numel()), name


def gradient(model: Decoder, tokens: torch.Tensor, micro_batch_size: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    batch = len(tokens)
    for rows in torch.arange(batch).split(micro_batch_size):
        keys = dropout_keys(root_key(9), rows + 1000, model.config.num_sites)
        loss = cross_entropy(model(tokens[rows, :-1], keys), tokens[rows, 1:], model.config.vocab_size)
        (loss * len(rows) / batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_one_batch_of_eight_and_eight_of_one_give_the_same_gradient_with_dropout():
    model, tokens = build(), torch.randint(100, (8, 17), generator=torch.Generator().manual_seed(0))
    together, alone = gradient(model, tokens, 8), gradient(model, tokens, 1)
    for name, g in together.items():
        assert (g - alone[name]).norm() <= 2e-6 * max(g.norm().item(), 1e-4), name
    without = gradient(build(replace(TINY, dropout=0.0)), tokens, 8)
    name = "blocks.0.mlp.fc.weight"
    assert (together[name] - without[name]).norm() > 0.1 * without[name].norm()  # dropout was really on


def test_every_dropout_site_has_a_mask_of_its_own():
    keys = dropout_keys(root_key(9), torch.arange(5), TINY.num_sites)
    assert keys.shape == (5, 7, 2)
    assert len(torch.unique(keys.reshape(-1, 2), dim=0)) == 35


def test_attention_with_dropout_agrees_with_the_fused_kernel_where_nothing_is_dropped():
    tokens = torch.randint(100, (2, 16))
    keys = dropout_keys(root_key(9), torch.arange(2), TINY.num_sites)
    config = replace(TINY, dropout=1e-9)  # rounds to no dropped value, but takes the explicit path
    torch.testing.assert_close(build(config)(tokens, keys), build(config)(tokens), rtol=1e-5, atol=1e-6)


SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 100, "window": 1}


@pytest.mark.parametrize(
    "config, compared",
    [
        (GPTNeoConfig(window_pattern="LG", **SIZES), [1 / 3, 1]),
        (GptOssConfig(window_pattern="LG", ffn_hidden_size=32, num_kv_heads=2, head_dim=8, **SIZES), [1, 1]),
    ],
)
def test_where_a_token_attends_to_itself_alone_queries_and_keys_are_not_compared(config, compared):
    """Their gradient is rounding, but where a sink stands beside the one score."""
    model, tokens = build(config), torch.randint(100, (2, 17))
    loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], 100)
    loss.mean().backward()
    for index, share in enumerate(compared):
        name = f"blocks.{index}.attn.qkv.weight"
        gradient = model.get_parameter(name).grad
        part = comparable(config, name, gradient)
        assert part.numel() == share * gradient.numel()
        assert part.norm().item() == pytest.approx(gradient.norm().item(), rel=1e-5)
    adapter = torch.zeros(8, 32)
    assert comparable(config, "blocks.0.attn.qkv.lora_A", adapter) is adapter


def test_bf16_activations_keep_fp32_weights():
    model, tokens = build(dtype=torch.bfloat16), torch.randint(100, (2, 17))
    keys = dropout_keys(root_key(9), torch.arange(2), TINY.num_sites)
    logits = model(tokens[:, :-1], keys)
    assert logits.dtype == torch.bfloat16
    loss = cross_entropy(logits, tokens[:, 1:], 100)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    exact = cross_entropy(build()(tokens[:, :-1], keys), tokens[:, 1:], 100)
    assert abs(loss - exact) < 1e-2


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_heads": 5}, ["hidden_size=32", "num_heads=5", "4"]),
        ({"num_layers": 0}, ["num_layers=0", "1 or more and at most 1000000"]),
        ({"dropout": 1.0}, ["dropout=1.0", "less than 1"]),
    ],
)
def test_impossible_shapes_are_refused_with_a_remedy(change, words):
    with pytest.raises(UserError) as error:
        replace(TINY, **change).validate()
    assert all(word in str(error.value) for word in words)

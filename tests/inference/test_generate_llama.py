"""Generation with LLaMA and Qwen3: text of transformers, the same text under every plan and in company, a cache that
grows with the heads of keys and values alone, slots that are shorter than the model, and the commands."""

import json
from dataclasses import replace

import pytest
import torch

import dtgpt
from dtgpt.cli import main
from dtgpt.config.plan import Plan
from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.inference.commands import read
from dtgpt.interop.weights_alone import save_weights
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel import cache_sizes
from dtgpt.parallel.cache_sizes import bytes_per_slot, core_sizes
from dtgpt.serve.app import make_app
from dtgpt.util.errors import UserError
from tests.interop.test_interop_huggingface import InMemory
from tests.support.engines import CPU, engine_of
from tests.support.families import OURS, twin_of
from tests.support.runs import change, training
from tests.support.server import client, served
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(6)

LLAMA = LlamaConfig(
    num_layers=2, hidden_size=32, num_heads=8, num_kv_heads=2, head_dim=8, ffn_hidden_size=48, seq_length=48,
    vocab_size=61, rope_theta=500000.0, rope_factor=8.0, rope_original_length=16, init_std=0.3,
)  # fmt: skip
QWEN = replace(LLAMA, num_heads=4, head_dim=16, tied=True, qk_norm=True, norm_eps=1e-6, rope_factor=1.0)
FAMILIES = {"llama": LLAMA, "qwen3": QWEN}
PROMPTS = [[3], [3, 1, 4, 1, 5], [60, 0, 60], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [27, 18] * 9, [27, 18, 28]]
NEW = 20


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family, tmp_path):
    """Six prompts share three slots, which are shorter than the model."""
    twin = twin_of(build_model(FAMILIES[family], CPU, torch.float32, root_key(1)))
    twin.save_pretrained(tmp_path)
    model = dtgpt.load(tmp_path, device="cpu", slots=3, max_length=40)
    found = model.generate(PROMPTS, do_sample=False, max_new_tokens=NEW, ends=False)
    for text, ids in zip(found, PROMPTS, strict=True):
        theirs = twin.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), do_sample=False,
            max_new_tokens=NEW, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        assert text == theirs[0, len(ids) :].tolist()


def test_the_cache_keeps_rotated_keys_of_the_heads_of_keys_alone():
    model = build_model(replace(LLAMA, num_layers=1), CPU, torch.float32, root_key(1))
    rows = []
    with engine_of(model, slots=1) as engine:
        for ids in ([5, 7, 7], [7, 5, 7]):
            engine.command(read, [0], [ids], 0)
            rows.append(engine._rank_step.cache.layers[0].keys[0].clone())
    first, second = rows
    assert first.shape == (2, 48, 8)
    assert torch.equal(first[:, 2], second[:, 2]) and not torch.allclose(first[:, 1], first[:, 2])
    torch.testing.assert_close(first[:, :2].norm(dim=-1), second[:, :2].flip(1).norm(dim=-1))
    assert core_sizes(LLAMA, 0, 2) == [(1, 8, LLAMA.seq_length)]
    whole = replace(LLAMA, num_kv_heads=8)
    plan = Plan().for_world(1)
    per_head = bytes_per_slot(whole, plan, torch.bfloat16) - bytes_per_slot(LLAMA, plan, torch.bfloat16)
    assert per_head == 6 * LLAMA.num_layers * LLAMA.seq_length * 2 * LLAMA.head_dim * 2


BYTES = make_tokenizer("bytes", [], 0)
WITH_TEXT = {"llama": replace(LLAMA, vocab_size=257), "gpt2": GPT2Config(num_layers=2, hidden_size=16, num_heads=2,
             seq_length=48, vocab_size=257, init_std=0.5)}  # fmt: skip


@pytest.fixture(scope="module", params=WITH_TEXT)
def folder(request, tmp_path_factory):
    """The weights of a model, with a tokenizer."""
    path = tmp_path_factory.mktemp("model") / "weights"
    save_weights(InMemory(build_model(WITH_TEXT[request.param], CPU, torch.float32, root_key(1))), path, "here", BYTES)
    return path


def test_shorter_slots_change_no_text_and_take_less_memory(folder):
    whole, short = dtgpt.load(folder, device="cpu"), dtgpt.load(folder, device="cpu", max_length=12)
    assert short.config == replace(whole.config, seq_length=12)
    assert short.generate("ab", max_new_tokens=10, seed=1) == whole.generate("ab", max_new_tokens=10, seed=1)
    assert len(short.generate([1, 2], ends=False)) == 10
    tokens = torch.arange(12)[None]
    assert torch.equal(short(tokens), whole(tokens))
    position = 8 + 4 * whole.config.num_layers * sum(
        2 * size.heads * size.dim for size in core_sizes(whole.config, 0, 1)
    )
    assert whole.bytes_per_slot - short.bytes_per_slot == 36 * position
    with pytest.raises(UserError, match="max_new_tokens=11 need 13 positions, but the model has 12"):
        short.generate("ab", max_new_tokens=11)


def test_lengths_that_the_model_does_not_have_are_refused(folder):
    for length in (0, -1, 49, 10**30, True, 12.0, "12"):
        with pytest.raises(UserError, match="is not a number of the model's positions; use 1 to 48, or leave it out"):
            dtgpt.load(folder, device="cpu", max_length=length)


def test_a_user_is_told_where_memory_has_room_for_few(folder, monkeypatch, capsys):
    model = dtgpt.load(folder, device="cpu", max_length=40)
    monkeypatch.setattr(cache_sizes, "free_memory", lambda device: 5 * model.bytes_per_slot)
    model.generate("ab", max_new_tokens=1)
    assert "room" not in capsys.readouterr().err
    model.generate(["ab"] * 9, max_new_tokens=1)
    assert "room for 3 sequences at the same time, of 40 positions" in capsys.readouterr().err


def test_generate_and_eval(folder, tmp_path, capsys):
    def run(*words) -> None:
        with pytest.raises(SystemExit, match=r"^0$"):
            main([*map(str, words), "--device", "cpu", "--max-length", "24"])

    run("generate", folder, "--prompt", "ab", "--temperature", 0, "--max-new-tokens", 9)
    expected = dtgpt.load(folder, device="cpu").generate("ab", temperature=0.0, max_new_tokens=9)
    assert capsys.readouterr().out == f"ab{expected}\n"
    data, output = tmp_path / "lambada.jsonl", tmp_path / "eval.json"
    data.write_text("".join(json.dumps({"text": f"{i} and {i}"}) + "\n" for i in range(3)))
    run("eval", folder, "--task", "lambada", "--data", data, "--output", output)
    results = json.loads(output.read_text())
    assert results["model"]["positions"] == 24 and len(results["results"]) == 1


OTHERS = {name: replace(OURS[name], seq_length=48) for name in ("gpt_neo", "gemma3", "gpt_oss")}
SERVED = {"llama": WITH_TEXT["llama"], **OTHERS}


@pytest.mark.parametrize("family", SERVED)
def test_a_server_and_samples_of_training(recipe, family):
    from dtgpt.train.texts.generate import generate_text

    model = build_model(SERVED[family], CPU, torch.float32, root_key(0))
    with served(model) as service, client(make_app(service)) as http:
        answer = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "ignore_eos": True}).json()
        assert answer["usage"]["completion_tokens"] == 5
    recipe = replace(change(recipe, log={"prompt": "7 and"}), model=replace(SERVED[family], dropout=0.1))
    trainer = training(recipe)
    for _ in range(2):
        assert generate_text(trainer).startswith("7 and")
        trainer.train_step()

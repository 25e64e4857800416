import pytest
import torch

from dtgpt.generate import choose, generate, logits_of, sample_text
from dtgpt.model import GPTConfig, build_model
from dtgpt.ops.random import fold, root_key
from dtgpt.tokenizers.open import make_tokenizer

CONFIG = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, seq_length=8, vocab_size=300, init_std=0.5)
KEY = root_key(4)


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG, torch.device("cpu"), torch.float32, root_key(1))


def test_a_draw_picks_the_token_whose_share_holds_it():
    logits = torch.log(torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64))
    draws = torch.linspace(0.001, 0.999, 1000)
    chosen = [choose(logits, d.item(), 1.0, 0) for d in draws]
    assert [chosen.count(i) for i in range(3)] == pytest.approx([200, 500, 300], abs=2)
    assert {choose(logits, d.item(), 1.0, 2) for d in draws} == {1, 2}
    assert {choose(logits, d.item(), t, 0) for d in draws for t in (0.0, 1e-310, 1e-9)} == {1}
    assert {choose(logits, d.item(), 1.0, 99) for d in draws} == {0, 1, 2}


def test_greedy_text_follows_the_model_token_by_token(model):
    ids = [5, 6, 7]
    for token in generate(logits_of(model), CONFIG, ids, 12, KEY, temperature=0):
        window = torch.tensor([ids[-8:]])
        assert token == int(model(window)[0, -1, :300].argmax())
        ids.append(token)
    assert len(ids) == 15


def test_samples_repeat_with_the_key_and_differ_with_another(model):
    assert generate(logits_of(model), CONFIG, [1], 20, KEY) == generate(logits_of(model), CONFIG, [1], 20, KEY)
    assert generate(logits_of(model), CONFIG, [1], 20, KEY) != generate(logits_of(model), CONFIG, [1], 20, fold(KEY, 1))
    assert generate(logits_of(model), CONFIG, [1], 20, KEY)[:7] == generate(logits_of(model), CONFIG, [1], 7, KEY)


def test_ids_stay_inside_the_tokenizers_vocabulary_and_end_where_told(model):
    assert max(generate(logits_of(model), CONFIG, [1], 50, KEY, vocab_size=257)) < 257
    new = generate(logits_of(model), CONFIG, [1], 50, KEY, stop=lambda token: token % 2 == 0)
    assert new[-1] % 2 == 0 and all(t % 2 for t in new[:-1])
    assert generate(logits_of(model), CONFIG, [1], 0, KEY) == []


def test_a_sample_begins_with_its_prompt(model):
    tokenizer = make_tokenizer("bytes", [], 0)
    for prompt in ("", "héllo 🎈", "a prompt that is longer than the window of the model"):
        assert sample_text(logits_of(model), CONFIG, tokenizer, prompt, 10, KEY, 1.0, 0).startswith(prompt)

"""lm_eval's `local-completions`, as docs/lm_eval.md runs it for a tokenizer that opens texts: it gives the scores and
texts of lm_eval's own `hf` back end."""

import pytest
import torch

import dtgpt
from dtgpt.data.tokenizers.open import open_tokenizer
from tests.support.chats import NAMES, write_tokenizer
from tests.support.huggingface_llamas import their_model
from tests.support.server import http_client, live_server, served, tiny_model

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow(8)

POSITIONS, TOKENS = 96, 296
PAIRS = [
    ("Hello", " world"), ("", "Hello"), ("Hello ", "world"), ("user and " * 30, " Hello"), ("a [INST] b", " c</s>"),
    ("  ", "Hello"),
]  # fmt: skip
TEXTS = ["Hello world", "user and assistant " * 4]
CONTEXTS = ["Hello", "", "user " * 90, "  ", "été"]
GREEDY = {"until": ["STOP"], "max_gen_toks": 10, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A LLaMA that never draws special tokens, whose names are in the texts of a server."""
    folder = tmp_path_factory.mktemp("lm_eval") / "llama"
    model = their_model("llama 2", vocab_size=TOKENS, max_position_embeddings=POSITIONS)
    with torch.no_grad():
        model.lm_head.weight[: len(NAMES)] = 0
    model.save_pretrained(folder)
    return write_tokenizer(folder, "mistral")


@pytest.fixture(scope="module")
def address(folder):
    with served(dtgpt.load(folder)) as service, live_server(service) as address:
        yield address


def through(address: str, **arguments):
    """lm_eval's client of a server."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    url = f"{address}/v1/completions"
    return LocalCompletionsAPI(base_url=url, model="tiny", max_length=POSITIONS, max_retries=1, **arguments)


def asked(kind: str, arguments: list[tuple]):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


def answers(model) -> tuple[list, list, list]:
    return (
        model.loglikelihood(asked("loglikelihood", PAIRS)),
        model.loglikelihood_rolling(asked("loglikelihood_rolling", [(text,) for text in TEXTS])),
        model.generate_until(asked("generate_until", [(context, dict(GREEDY)) for context in CONTEXTS])),
    )


def test_scores_and_texts_are_those_of_the_hf_back_end(folder, address, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setenv("NO_PROXY", "*")
    scores, rolling, texts = answers(HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1))
    own = through(address, tokenizer_backend="huggingface", tokenizer=str(folder), add_bos_token=True)
    found = answers(own)
    assert found[0] == [(pytest.approx(score, abs=1e-3), likeliest) for score, likeliest in scores]
    assert found[1] == pytest.approx(rolling, abs=1e-3)
    assert found[2] == texts and all(texts)


def test_the_remote_tokenizer_ends_no_run_at_an_empty_context(address, monkeypatch):
    """Which becomes a list without ids, since that tokenizer asks for no begin of text."""
    monkeypatch.setenv("NO_PROXY", "*")
    own = through(address)
    assert own.tokenizer_backend == "remote"
    assert (own.prefix_token_id, own.eot_token_id) == (NAMES.index("<s>"), NAMES.index("</s>"))
    texts = own.generate_until(asked("generate_until", [(context, dict(GREEDY)) for context in ("Hello", "")]))
    assert len(texts) == 2 and all(texts)


def test_chats_have_the_answers_that_another_client_gets(tmp_path, monkeypatch):
    """By its `local-chat-completions`."""
    from lm_eval.models.openai_completions import LocalChatCompletion

    monkeypatch.setenv("NO_PROXY", "*")
    model = tiny_model(seq_length=256, vocab_size=320, init_std=0.3)
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path)))
    chats = [[{"role": "user", "content": question}] for question in ("Hello", "Who wrote été?")]
    keys = {"max_tokens": GREEDY["max_gen_toks"], "temperature": 0, "stop": GREEDY["until"], "model": "tiny"}
    with served(model, tokenizer) as service, live_server(service) as address, http_client(address) as client:
        url = f"{address}/v1/chat/completions"
        own = LocalChatCompletion(base_url=url, model="tiny", max_length=256, max_retries=1)
        given = [(own.apply_chat_template(chat), dict(GREEDY)) for chat in chats]
        texts = own.generate_until(asked("generate_until", given))
        answers = [client.post("/v1/chat/completions", json={"messages": chat, **keys}).json() for chat in chats]
    assert texts == [answer["choices"][0]["message"]["content"] for answer in answers]

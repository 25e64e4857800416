"""Chats with OpenAI's own client against a live server, and `dtgpt chat`."""

import io
import json
import time

import httpx
import openai
import pytest

from dtgpt.data.library_tokenizers.chat_template import template_of
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.inference.model import Need
from dtgpt.inference.options import Options
from dtgpt.inference.request import PromptJob
from dtgpt.posttrain.chats.command import RESET, Chat, talk
from dtgpt.posttrain.chats.prompts import MARK, ChatPrompts
from dtgpt.serve.openai_chat import _token
from dtgpt.serve.openai_logprobs import TokenNames
from dtgpt.serve.problems import bad_request
from dtgpt.serve.worker import EngineFailed
from dtgpt.util.errors import UserError
from tests.inference.test_text import spelled_by
from tests.support.chats import FAMILIES, write_tokenizer
from tests.support.server import generator_of, live_server, served, tiny_model
from tests.support.vocabularies import KINDS, of_every_kind
from tests.support.vocabularies import tokenizer_json as vocabulary_file

pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow(1)

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def model():
    return tiny_model(seq_length=256, vocab_size=320, init_std=0.3)


@pytest.fixture(scope="module")
def client(model, tokenizer):
    with (
        served(model, tokenizer, slots=4) as service,
        live_server(service) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def create(client, messages=MESSAGES, **options):
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 12, "seed": 1, **options}
    return client.chat.completions.create(**asked)


def test_an_answer_has_the_form_of_openais_and_the_text_of_the_rendered_prompt(client, tokenizer, model):
    answer = create(client, n=2)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert [choice.message.role for choice in answer.choices] == ["assistant"] * 2
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
    ids = ChatPrompts(tokenizer, model.config).encode(MESSAGES)
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n") and answer.usage.prompt_tokens == len(ids)
    same = client.completions.create(model="tiny", prompt=ids, max_tokens=12, seed=1, n=2)
    assert [choice.text for choice in same.choices] == [choice.message.content for choice in answer.choices]
    assert create(client, n=2, max_completion_tokens=None, max_tokens=12).choices == answer.choices
    (stop,) = create(client, stop=same.choices[0].text[2:4]).choices
    assert stop.message.content == same.choices[0].text[:2] and stop.finish_reason == "stop"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_is_begun_has_the_prompt_of_transformers(tmp_path, model, family):
    twin = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, family))
    prompts = ChatPrompts(open_tokenizer(str(tmp_path)), model.config)
    for content in ("Well, ", f"  two\nlines {MARK}", "<think>so</think> yes"):
        messages = [MESSAGES[1], {"role": "assistant", "content": content}]
        wanted = twin.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        assert prompts.render(messages, begun=True) == wanted and content.strip() in wanted
    for wrong in (MESSAGES, [MESSAGES[1], {"role": "assistant", "content": " "}]):
        with pytest.raises(UserError, match="the last message is no answer that is begun; add one"):
            prompts.render(wrong, begun=True)
    prompts.close()


def test_an_answer_goes_on_with_the_last_message(client):
    whole = create(client).choices[0].message.content
    begun = [*MESSAGES, {"role": "assistant", "content": whole[:4]}]
    found = create(client, messages=begun, extra_body={"continue_final_message": True}, temperature=0)
    ids = client.post("/../tokenize", body={"prompt": whole[:4], "add_special_tokens": False}, cast_to=object)
    assert found.usage.prompt_tokens == create(client).usage.prompt_tokens + len(ids["tokens"])
    assert (
        found.choices
        == create(
            client,
            messages=begun,
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
            temperature=0,
        ).choices
    )


def test_thoughts_are_apart_from_answers(model, tmp_path):
    """Where the template has thoughts: the answer that is begun is one whose end never comes."""
    begun = [MESSAGES[1], {"role": "assistant", "content": "<think>so"}]
    more = {"extra_body": {"continue_final_message": True}}
    with (
        served(model, open_tokenizer(str(write_tokenizer(tmp_path, "qwen3"))), slots=4) as service,
        live_server(service) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        message = create(client, messages=begun, **more).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in create(client, messages=begun, stream=True, **more)]
        plain = create(client, messages=[{"role": "user", "content": "what is <think>"}]).choices[0].message
    assert message.content == "" and message.reasoning_content.strip()
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning_content
    assert not any(delta.content for delta in deltas)
    assert plain.content and not hasattr(plain, "reasoning_content")


@pytest.mark.parametrize("name, spelled", [
    ("bytes:\\xe2\\x80", b"\xe2\x80"), ("bytes:", b"bytes:"), ("bytes:0", b"bytes:0"), ("token_id:5", None),
    ("token_id:", b"token_id:"), ("é", "é".encode()),
])  # fmt: skip
def test_a_token_whose_text_looks_like_a_name_is_spelled_by_its_text(name, spelled):
    assert _token(name, -1.0) == {"token": name, "logprob": -1.0, "bytes": None if spelled is None else list(spelled)}


def test_a_long_chat_is_refused_by_its_length_before_it_is_rendered(client, monkeypatch):
    messages = [{"role": "user", "content": "x" * 480_000}] + [{"role": "user", "content": "abc"}] * 12_500
    body = json.dumps({"messages": messages}).encode()

    def ask():
        headers = {"Content-Type": "application/json"}
        return httpx.post(f"{client.base_url}chat/completions", content=body, headers=headers, timeout=60)

    ask()  # starts what renders long chats
    monkeypatch.setattr("dtgpt.posttrain.chats.template.Renderer.render_each", None)
    begin = time.process_time()
    answer = ask()
    assert time.process_time() - begin < 1.5  # 0.2 s on an idle machine; each message in the whole text: 15 s
    error = answer.json()["error"]
    assert answer.status_code == 400 and "maximum context length is 256 tokens" in error["message"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_a_long_prompt_is_refused_before_all_of_it_is_encoded(client, tokenizer, monkeypatch):
    encoded, encode = [], type(tokenizer).encode
    monkeypatch.setattr(
        type(tokenizer), "encode", lambda own, text, *more: encoded.append(len(text)) or encode(own, text, *more)
    )
    for prompt in ("word " * 100_000, ["ok", "word " * 50_000, "x"], ["word " * 400] * 128, [["a"] * 9, [5] * 100_000]):
        encoded.clear()
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
        assert sum(encoded) < 20_000, encoded
        assert caught.value.code == "context_length_exceeded" or prompt[1:] == [[5] * 100_000]
    answer = client.completions.with_raw_response
    blanks = answer.create(model="tiny", prompt="a" + "\n" * 200, max_tokens=1)  # long in characters alone is no fault
    assert blanks.parse().usage.completion_tokens == 1


def test_a_stream_has_the_text_of_the_answer(client):
    whole = create(client, n=2)
    chunks = list(create(client, n=2, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and chunks[-1].usage == whole.usage
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    for choice in whole.choices:
        own = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(delta.delta.content for delta in own) == choice.message.content
        assert [delta.delta.role for delta in own] == ["assistant", *[None] * (len(own) - 1)]
        assert own[-1].finish_reason == choice.finish_reason


def test_log_probabilities_are_those_of_completions(client, tokenizer, model):
    content = create(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    ids = ChatPrompts(tokenizer, model.config).encode(MESSAGES)
    lists = client.completions.create(model="tiny", prompt=ids, max_tokens=12, seed=1, logprobs=3).choices[0].logprobs
    assert [token.logprob for token in content] == lists.token_logprobs
    assert [token.token for token in content] == lists.tokens
    for token in content:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob >= token.top_logprobs[-1].logprob
    text = create(client).choices[0].message.content
    assert b"".join(bytes(token.bytes) for token in content).decode(errors="replace").startswith(text)
    assert create(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize(("options", "wrong"), [
    ({"messages": []}, "not a list of messages"), ({"messages": [{"role": "boss", "content": "x"}]}, "role 'boss'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "template are not known; leave tools"),
    ({"top_logprobs": 2}, "needs logprobs=true"), ({"logprobs": True, "top_logprobs": 21}, "not 0 to 20"),
    ({"tool_choice": "auto"}, "tool_choice=auto needs tools"), ({"modalities": ["audio"]}, "modalities=.* is not"),
    ({"store": True}, "does not support store=True"), ({"verbosity": "low"}, "does not support verbosity='low'"),
    ({"metadata": "x"}, "metadata='x' is not an object"), ({"stop": [str(i) for i in range(17)]}, "17 stop strings"),
    ({"extra_body": {"prompt": "x"}}, "for completions"),
    ({"response_format": {"type": "xml"}}, "response_format=.* is not a form of answers; use text, json_object or"),
    ({"max_completion_tokens": 0}, "max_completion_tokens=0 generates nothing; use 1 or more$"),
    ({"max_tokens": 11}, "max_completion_tokens=12 and max_tokens=11 differ; leave one out"),
    ({"extra_body": {"continue_final_message": True}}, "the last message is no answer that is begun"),
    ({"extra_body": {"continue_final_message": True, "add_generation_prompt": True}}, "give one of them as true"),
    ({"extra_body": {"add_generation_prompt": False}}, "give one of them as true"),
    ({"max_completion_tokens": 1000}, "maximum context length"), ({"temperature": -1}, "temperature"),
    ({"max_completion_tokens": -3}, "^Error code: 400 - max_completion_tokens=-3 is"),
])  # fmt: skip
def test_wrong_requests_are_a_sentence(client, options, wrong):
    with pytest.raises(openai.BadRequestError, match=wrong):
        create(client, **options)


NEUTRAL = {
    "store": False, "metadata": {"run": "7"}, "service_tier": "auto", "safety_identifier": "somebody",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "verbosity": "medium", "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "x"},
}  # fmt: skip
OF_CHATS = {"tool_choice": "none", "tools": [], "modalities": ["text"], "response_format": {"type": "text"}}


def test_keys_that_change_nothing_are_taken(client):
    assert create(client, extra_body=NEUTRAL | OF_CHATS).choices == create(client).choices
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, "seed": 1}
    assert client.completions.create(**asked, extra_body=NEUTRAL).choices == client.completions.create(**asked).choices


def test_paths_without_v1_are_the_same(client):
    bare = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    assert create(bare).choices == create(client).choices
    assert bare.models.list().data == client.models.list().data == [bare.models.retrieve("tiny")]


def test_sixteen_stop_strings_stand_beside_the_templates_own(client):
    never = [f"never in it {number}" for number in range(16)]
    end = {"logit_bias": {str(open_end(client)): 100}}
    found = create(client, stop=never, **end).choices[0]
    assert (found.finish_reason, found.message.content) == ("stop", "")
    text = create(client).choices[0].message.content
    assert create(client, stop=[*never[1:], text[3:6]]).choices[0].message.content == text[: text.find(text[3:6])]


def open_end(client):
    """The id with which the template ends an answer."""
    return client.post("/../tokenize", body={"prompt": "<|im_end|>", "add_special_tokens": False}, cast_to=object)[
        "tokens"
    ][0]


def test_twenty_likeliest_tokens(client):
    for token in create(client, logprobs=True, top_logprobs=20).choices[0].logprobs.content:
        assert len({other.token for other in token.top_logprobs}) == 20


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "characters"])
def test_bytes_of_parts_of_characters_are_known_for_every_tokenizer(vocabularies, kind):
    names = TokenNames(vocabularies[kind])
    for byte in (0xE2, 0x80, 0xFF):
        name = names[spelled_by(vocabularies[kind], byte)]
        assert name == f"bytes:\\x{byte:02x}" and _token(name, -1.0)["bytes"] == [byte]


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    return of_every_kind(tmp_path_factory.mktemp("vocabularies"))


def test_no_answer_tells_how_folders_of_the_server_are_called(tmp_path):
    from dtgpt.serve.app import make_app
    from tests.support.server import client as local

    (tmp_path / "secret" / "model").mkdir(parents=True)
    tokenizer = open_tokenizer(str(vocabulary_file(tmp_path / "secret" / "model", end="nothing")))
    assert "secret" in tokenizer.name
    with served(tiny_model(vocab_size=100), tokenizer) as service:
        http = local(make_app(service))
        answers = [
            http.post("/v1/chat/completions", json={"messages": MESSAGES}), http.get("/tokenizer_info"),
            http.post("/v1/completions", json={}), http.put("/api", json={"prompts": ["x"], "add_BOS": True}),
            http.post("/v1/completions", json={"prompt": "the quick brown fox"}),
            http.post("/detokenize", json={"tokens": [999]}),
        ]  # fmt: skip
    assert [answer.status_code for answer in answers] == [400, 200, 400, 400, 400, 400]
    assert not [answer.text for answer in answers if "secret" in answer.text]
    assert all("tokenizer.json" in answer.text for answer in answers[:4])
    cause = f"[Errno 5] Input/output error: '{tmp_path}/secret/weights.bin'"
    assert EngineFailed(cause).message == (
        "the engine has failed ([Errno 5] Input/output error: 'weights.bin'); the server ends"
    )
    assert bad_request(UserError(f"no tokenizer is saved with {tmp_path}/secret; use and/or")).message == (
        "no tokenizer is saved with secret; use and/or"
    )


def test_a_tokenizer_without_a_template_is_a_sentence(model):
    from dtgpt.serve.app import make_app
    from tests.support.server import client as local

    with served(tiny_model()) as service:
        answer = local(make_app(service)).post("/v1/chat/completions", json={"messages": MESSAGES})
    assert answer.status_code == 400 and "has no chat template" in answer.json()["error"]["message"]


def test_a_terminal_keeps_the_chat_until_it_is_reset(monkeypatch, capsys, model, tokenizer):
    """The second question follows the first answer; after /reset only the message of the system is left."""
    prompts, asked = ChatPrompts(tokenizer, model.config), []

    def make(ids):
        asked.append(tokenizer.decode(ids))
        return PromptJob(ids, Options(max_new_tokens=4, temperature=0.0))

    monkeypatch.setattr("sys.stdin", io.StringIO(f"Hello\nHow?\n{RESET}\nAgain\n"))
    generator = generator_of(model, tokenizer)
    generator.run(lambda: (Need(1, 1), None), lambda engine, _: talk(engine, Chat(prompts, make, "Be brief.")))
    first, second, third = asked
    start = "<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\n"
    assert first == f"{start}Hello<|im_end|><|im_start|>assistant\n"
    assert second.startswith(first) and second.endswith("<|im_start|>user\nHow?<|im_end|><|im_start|>assistant\n")
    assert third == first.replace("Hello", "Again")
    assert capsys.readouterr().out.count("\n") >= 3
    prompts.close()


def test_answers_end_where_the_template_ends_them(tmp_path):
    prompts = ChatPrompts(
        open_tokenizer(str(write_tokenizer(tmp_path / "gemma", "gemma"))), tiny_model(vocab_size=320).config
    )
    assert prompts.stops == ("<end_of_turn>",)
    prompts.close()


@pytest.mark.parametrize("stop", [[], ["\n\n", "STOP"]])
def test_what_lm_eval_sends_is_answered(client, stop):
    """The body of its `local-chat-completions`."""
    messages = [{"role": "user", "content": "Hello", "type": "text"}]
    asked = {"messages": messages, "max_tokens": 8, "temperature": 0, "stop": stop, "seed": 1234}
    answers = [client.chat.completions.create(model="tiny", **asked).choices for _ in range(2)]
    assert answers[0] == answers[1] and answers[0][0].message.content is not None


def test_an_export_has_the_template(tokenizer):
    from dtgpt.data.library_tokenizers.export import transformers_files

    settings = transformers_files(tokenizer, 64)["tokenizer_config.json"]
    assert settings["chat_template"] == template_of(tokenizer).source and settings["eos_token"] == "<|im_end|>"

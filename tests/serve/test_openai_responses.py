"""OpenAI's responses with their own client against a live server: the text is that of a chat."""

import openai
import pytest
from pydantic import BaseModel, Field

from dtgpt.data.tokenizers.open import open_tokenizer
from tests.support.chats import QWEN3, write_tokenizer
from tests.support.server import live_server, served, tiny_model

pytest.importorskip("jinja2")
pytestmark = pytest.mark.slow(2)

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("model"), "qwen3", QWEN3)))
    model = tiny_model(seq_length=256, vocab_size=320, init_std=0.3)
    with (
        served(model, tokenizer, slots=4) as service,
        live_server(service) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def respond(client, given="Hello", **options):
    more = {"seed": 1, **options.pop("extra_body", {})}
    return client.responses.create(
        **{"model": "tiny", "input": given, "max_output_tokens": 12, "instructions": "Be brief.", **options},
        extra_body=more,
    )


def text_of_chat(client, messages=CHAT, **options):
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, seed=1, **options)
    return chat.choices[0].message.content


def test_a_response_has_the_text_of_a_chat(client):
    response = respond(client)
    assert response.output_text == text_of_chat(client) and response.id.startswith("resp_")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 12 and response.usage.total_tokens == response.usage.input_tokens + 12
    stopped = respond(client, extra_body={"stop": response.output_text[3]})
    assert stopped.status == "completed" and stopped.incomplete_details is None
    assert stopped.output_text == response.output_text[: response.output_text.index(response.output_text[3])]


def test_an_input_is_a_text_or_messages(client):
    wanted = respond(client).output_text
    parts = [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo"}]
    for given in ([{"role": "user", "content": "Hello"}], [{"type": "message", "role": "user", "content": parts}]):
        assert respond(client, given).output_text == wanted
    assert respond(client, CHAT, instructions=None).output_text == wanted
    first = respond(client)
    later = [{"role": "user", "content": "Hello"}, *first.output, {"role": "user", "content": "And?"}]
    answer = {"role": "assistant", "content": first.output_text}
    messages = [*CHAT, answer, {"role": "user", "content": "And?"}]
    assert respond(client, later).output_text == text_of_chat(client, messages)


def test_the_events_of_a_stream_are_the_response(client):
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"} and events[0].response.status == "in_progress"
    whole = respond(client)
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage
    stop = {"seed": 1, "stop": whole.output_text[3]}
    asked = {"model": "tiny", "input": "Hello", "instructions": "Be brief.", "extra_body": stop}
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == client.responses.create(**asked).output_text


def test_a_thought_is_apart(client):
    begun = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "<think>so"}]
    (item,) = respond(client, begun, extra_body={"continue_final_message": True}).output
    assert item.reasoning_content.strip() and item.content[0].text == ""


def test_a_response_is_parsed(client):
    pytest.importorskip("llguidance")

    class Few(BaseModel):
        numbers: list[bool] = Field(max_length=2)

    *_, think = client.post("/../tokenize", body={"prompt": "<think>"}, cast_to=object)["tokens"]
    more = {"seed": 1, "logit_bias": {str(think): -100}}
    parsed = client.responses.parse(model="tiny", input="Hello", text_format=Few, extra_body=more)
    assert isinstance(parsed.output_parsed, Few) and parsed.status == "completed"


@pytest.mark.parametrize("options, wrong", [
    ({"previous_response_id": "resp_1"}, "previous_response_id='resp_1': nothing is stored here; send the whole"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools are for chats here"),
    ({"background": True}, "background=True: this server does not support it; leave it out"),
    ({"input": []}, r"input=\[\] is not an input; give a text"), ({"instructions": 5}, "instructions=5 is not a text"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "which is no message; leave it out"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "is not all text"),
    ({"input": [{"role": "boss", "content": "x"}]}, "role 'boss'"),
    ({"max_output_tokens": 0}, "max_output_tokens=0 generates nothing; use 1 or more"),
    ({"max_output_tokens": 1000}, "max_output_tokens=1000 need"), ({"store": True}, "does not support store=True"),
    ({"text": {"format": {"type": "xml"}}}, "is not a form of answers"), ({"extra_body": {"n": 2}}, "n=2 is not for"),
    ({"extra_body": {"nonsense": 1}}, "there is no key 'nonsense'"),
])  # fmt: skip
def test_wrong_requests_are_a_sentence(client, options, wrong):
    with pytest.raises(openai.BadRequestError, match=wrong):
        respond(client, **{"given": options.pop("input", "Hello"), **options})

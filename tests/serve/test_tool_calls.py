"""Calls of tools in three forms, however the text of an answer is cut, and in answers to OpenAI's own client."""

import itertools

import openai
import pytest

from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.posttrain.chats.prompts import ChatPrompts
from dtgpt.posttrain.chats.tools import read_tools
from dtgpt.serve.thoughts import Thoughts
from dtgpt.serve.tool_calls import Channels, Tagged, TagReader, Whole, form_of, reader_of
from dtgpt.util.errors import UserError
from tests.support.chats import FAMILIES, HERMES, write_tokenizer
from tests.support.model_by_rules import model_by_rules
from tests.support.server import live_server, served

pytestmark = pytest.mark.slow(2)

CALL = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
ADD = ("add", '{"a": 1, "b": [2]}')
NOW = ("now", "{}")


def hermes():
    return TagReader(Thoughts(inside=False), Tagged())


def llama():
    return TagReader(None, Whole())


def harmony(begun=False):
    return Channels(begun, calls=True)


ANSWERS = [  # reader, text -> thought, what is said, calls
    (hermes, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "", "Let me see.", [ADD]),
    (hermes, f'<think>\nhm\n</think>\n\n<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>',
     "hm", "", [ADD, NOW]),
    (hermes, "a < b <tool_call>no</tool_call>\n", "", "a < b <tool_call>no</tool_call>\n", []),
    (hermes, f"<tool_call>{CALL[:-1]}", "", f"<tool_call>{CALL[:-1]}", []),
    (hermes, f"<tool_call>{CALL}", "", "", [ADD]),
    (hermes, "Hi\n<tool", "", "Hi\n<tool", []),
    (llama, ' {"name": "add", "parameters": {"a": 1, "b": [2]}}', "", "", [ADD]),
    (llama, '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now"}', "", "", [NOW, NOW]),
    (llama, '{"name": "now"} or so', "", '{"name": "now"} or so', []),
    (llama, '{"a": 1}', "", '{"a": 1}', []),
    (llama, "Hi {", "", "Hi {", []),
    (harmony, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi", "hm", "Hi", []),
    (harmony, "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>commentary to=functions.add "
     '<|constrain|>json<|message|>{"a": 1, "b": [2]}<|call|>', "a < b", "", [ADD]),
    (harmony, "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant to=functions.now<|channel|>commentary"
     "<|message|>", "", "Wait.", [NOW]),
    (lambda: harmony(begun=True), "on<|e", "", "on<|e", []),
    (harmony, "No message.", "", "No message.", []),
    (harmony, "<|channel|>final", "", "", []),
]  # fmt: skip


@pytest.mark.parametrize("reader, text, thought, said, calls", ANSWERS, ids=range(len(ANSWERS)))
def test_pieces_are_the_whole(reader, text, thought, said, calls):
    every = range(1, len(text))
    for cut in [(), *((place,) for place in every), tuple(every), *itertools.combinations(every[::9], 2)]:
        own, places = reader(), [0, *cut, len(text)]
        parts = [own.take(text[a:b], b == len(text)) for a, b in itertools.pairwise(places)]
        assert "".join(part.thought for part in parts) == thought
        assert "".join(part.said for part in parts) == said
        assert [tuple(call) for part in parts for call in part.calls] == calls


def test_calls_of_any_depth_are_text():
    deep = '{"name": "f", "arguments": ' + "[" * 200_000
    assert hermes().take(f"<tool_call>{deep}</tool_call>", True).calls == [] == llama().take(deep, True).calls
    with pytest.raises(UserError, match="is not JSON; give a list"):
        read_tools(deep)


def test_the_template_says_the_form():
    assert form_of(HERMES) is Tagged and form_of(FAMILIES["chatml"][0]) is None
    assert form_of("{{ '<|python_tag|>' }}") is Whole
    assert reader_of(FAMILIES["chatml"][0], tools=False, thinks=False, begun=False) is None
    assert reader_of(HERMES, tools=False, thinks=False, begun=False) is None


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]
QUESTIONS = {
    "Add": f"I will.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    "Say" + "?" * 400: "Hello",
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A model that answers QUESTIONS with the tools."""
    pytest.importorskip("jinja2")
    folder = write_tokenizer(tmp_path_factory.mktemp("model"), "qwen3", HERMES)
    tokenizer, shape = open_tokenizer(str(folder)), {"vocab_size": 320, "seq_length": 1024}
    end = tokenizer.encode_bare("<|im_end|>")[0]
    prompts = ChatPrompts(tokenizer, model_by_rules([], **shape).config)
    rules = []
    for question, answer in QUESTIONS.items():
        begin = len(prompts.encode([{"role": "user", "content": question}], {"tools": TOOLS})) - 1
        ids = [*tokenizer.encode_bare(answer), end]
        rules += [{"position": begin + i, "logits": {token: 20.0}} for i, token in enumerate(ids)]
    with (
        served(model_by_rules([*rules, {"logits": {end: 20.0}}], **shape), tokenizer) as service,
        live_server(service) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def ask(client, question, **options):
    asked = {"model": "tiny", "temperature": 0, "tools": TOOLS, **options}
    return client.chat.completions.create(messages=[{"role": "user", "content": question}], **asked)


def test_calls_of_an_answer(client):
    add, say = QUESTIONS
    (choice,) = ask(client, add).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I will.")
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [("function", *ADD)] * 2
    assert len({call.id for call in calls}) == 2
    assert len(ask(client, add, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    (choice,) = ask(client, say).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "Hello", None)


def test_calls_of_a_stream(client):
    chunks = [chunk.choices[0] for chunk in ask(client, next(iter(QUESTIONS)), stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I will."
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [(0, *ADD), (1, *ADD)]
    assert chunks[-1].finish_reason == "tool_calls"


def test_results_go_on_with_the_chat(client):
    message = ask(client, next(iter(QUESTIONS))).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
    messages = [{"role": "user", "content": "Add"}, message, *results]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    without = client.chat.completions.create(model="tiny", messages=messages[:1], temperature=0)
    chosen = ask(client, "Add", tool_choice="none")
    assert chosen.usage.prompt_tokens == without.usage.prompt_tokens < answer.usage.prompt_tokens


@pytest.mark.parametrize("options, wrong", [
    ({"tool_choice": "any"}, "tool_choice='any' is not a choice; use auto, none, required, or "),
    ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "names 'no', which is none of the tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice=required needs tools"),
    ({"tools": [{"type": "function"}]}, "tool 0 is .* which is no function with a name"),
    ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tool 0 has the type 'web'; use function"),
    ({"tools": [], "tool_choice": "auto"}, "tool_choice=auto needs tools"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls='no' is not a switch"),
])  # fmt: skip
def test_wrong_tools_are_a_sentence(client, options, wrong):
    with pytest.raises(openai.BadRequestError, match=wrong):
        ask(client, "Add", **options)


def test_calls_that_are_no_json_are_a_sentence(client):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{"}}
    messages = [{"role": "user", "content": "Add"}, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError, match=r"arguments of a call in message 1='\{' is not JSON"):
        client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)

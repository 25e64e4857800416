"""Tools through clients that are no part of OpenAI's own: LangChain, and agents that call until they can answer."""

import asyncio
import json

import openai
import pytest

from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.posttrain.chats.messages import read_messages
from dtgpt.posttrain.chats.prompts import ChatPrompts
from tests.support.chats import HERMES, write_tokenizer
from tests.support.model_by_rules import model_by_rules
from tests.support.server import live_server, served

pytestmark = pytest.mark.slow(2)
pytest.importorskip("jinja2")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
TURNS = [
    [{"role": "user", "content": "What is it?"}],
    [{"role": "assistant", "tool_calls": CALLS}, {"role": "tool", "content": "3"}],
]


def address_of(folder, tools):
    """Yield the address of a model that calls add(1, 2), and says Three to its result, with these tools."""
    tokenizer = open_tokenizer(str(write_tokenizer(folder, "qwen3", HERMES)))
    shape = {"vocab_size": 320, "seq_length": 2048}
    end = tokenizer.encode_bare("<|im_end|>")[0]
    prompts, rules, messages = ChatPrompts(tokenizer, model_by_rules([], **shape).config), [], []
    for turn, answer in zip(TURNS, (CALL, "Three"), strict=True):
        messages += turn
        begin = len(prompts.encode(read_messages(messages), {"tools": tools})) - 1
        ids = [*tokenizer.encode_bare(answer), end]
        rules += [{"position": begin + i, "logits": {token: 20.0}} for i, token in enumerate(ids)]
    with (
        served(model_by_rules([*rules, {"logits": {end: 20.0}}], **shape), tokenizer) as service,
        live_server(service) as address,
    ):
        yield f"{address}/v1"


def test_langchain_binds_tools(tmp_path):
    langchain, tool = pytest.importorskip("langchain_openai"), pytest.importorskip("langchain_core.tools").tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    form = pytest.importorskip("langchain_core.utils.function_calling").convert_to_openai_tool(add)
    for address in address_of(tmp_path, [form]):
        model = langchain.ChatOpenAI(base_url=address, api_key="none", model="tiny", temperature=0)
        bound = model.bind_tools([add])
        answer = bound.invoke("What is it?")
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2})
        whole = None
        for chunk in bound.stream("What is it?"):
            whole = chunk if whole is None else whole + chunk
        assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("add", {"a": 1, "b": 2})]
        result = add.invoke(call)
        assert bound.invoke([("user", "What is it?"), answer, result]).content == "Three"


def test_an_agent_calls_and_answers(tmp_path):
    agents = pytest.importorskip("agents")

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    function = {"name": add.name, "description": add.description, "parameters": add.params_json_schema}
    form = {"type": "function", "function": function | {"strict": True}}
    agents.set_tracing_disabled(True)
    for address in address_of(tmp_path, [json.loads(json.dumps(form))]):
        client = openai.AsyncOpenAI(base_url=address, api_key="none")
        model = agents.OpenAIChatCompletionsModel("tiny", client)
        settings = agents.ModelSettings(temperature=0)
        agent = agents.Agent(name="adder", model=model, tools=[add], model_settings=settings)
        result = asyncio.run(agents.Runner.run(agent, "What is it?"))
        assert result.final_output == "Three" and len(result.raw_responses) == 2

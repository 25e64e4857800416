"""Answers that keep to JSON or to a call of a tool, with OpenAI's own client and LangChain against a live server."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.inference.grammar.one_of import one_of_is_any_of
from dtgpt.serve.answer_grammar import FINAL, call_grammar, free_text, grammar_of
from dtgpt.serve.problems import HttpProblem
from tests.support.chats import HERMES, LLAMA3, QWEN3, write_tokenizer
from tests.support.server import live_server, served, tiny_model

pytest.importorskip("jinja2")
pytest.importorskip("llguidance")
pytestmark = pytest.mark.slow(5)

MESSAGES = [{"role": "user", "content": "Who?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/digit"}},
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ann", "Bo"]
    ages: list[Literal[1, 2]] = Field(max_length=2)
    more: bool | None


FORMAT = {
    "type": "json_schema", "json_schema": {"name": "Person", "strict": True, "schema": Person.model_json_schema()},
}  # fmt: skip


@contextmanager
def address_of(folder, family="chatml", template=None):
    tokenizer = open_tokenizer(str(write_tokenizer(folder, family, template)))
    model = tiny_model(seq_length=1024, vocab_size=320, init_std=0.3, num_layers=1)
    with served(model, tokenizer, slots=8) as service, live_server(service) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with address_of(tmp_path_factory.mktemp("model")) as address:
        yield address


def client_of(address):
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(address):
    with client_of(address) as client:
        yield client


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    with address_of(tmp_path_factory.mktemp("hermes"), "qwen3", HERMES) as address, client_of(address) as client:
        yield client


def create(client, **options):
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 1, "max_completion_tokens": 300, **options}
    return client.chat.completions.create(**asked)


def create_all(client, each):
    """Return the answers to requests with these options, which share the steps of the engine."""
    with ThreadPoolExecutor(len(each)) as threads:
        return list(threads.map(lambda options: create(client, **options), each))


def test_an_answer_keeps_to_a_schema_also_in_a_stream(client):
    answer = create(client, response_format=FORMAT, n=2)
    for choice in answer.choices:
        assert Person.model_validate_json(choice.message.content) and choice.finish_reason == "stop"
    chunks = list(create(client, response_format=FORMAT, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content and chunks[-1].choices[0].finish_reason == "stop"
    cut = create(client, response_format=FORMAT, max_completion_tokens=7).choices[0]
    assert cut.finish_reason == "length" and text.startswith(cut.message.content)


def test_an_answer_is_an_object(client):
    asked = {"response_format": {"type": "json_object"}, "logit_bias": {"0": -100}}
    for answer in create_all(client, [{**asked, "seed": seed} for seed in range(3)]):
        choice = answer.choices[0]
        assert choice.message.content.startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def test_a_prompt_without_a_chat_is_continued_by_a_schema(client):
    schema = FORMAT["json_schema"]["schema"]
    answer = client.completions.create(
        model="tiny", prompt=["Ann: ", "Bo: "], max_tokens=300, seed=1, extra_body={"json_schema": schema}, logprobs=1
    )
    for choice in answer.choices:
        assert Person.model_validate_json(choice.text)
    assert min(answer.choices[0].logprobs.token_logprobs) < -1  # before the mask


def test_openais_client_parses_an_answer(client):
    parsed = client.chat.completions.parse(model="tiny", messages=MESSAGES, seed=1, response_format=Person)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Person, max_completion_tokens=3)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_has_structured_output(address, hermes, method):
    langchain = pytest.importorskip("langchain_openai")
    where = str(hermes.base_url) if method == "function_calling" else address
    model = langchain.ChatOpenAI(base_url=where, api_key="none", model="tiny", seed=1, max_tokens=400)
    found = model.with_structured_output(Person, method=method, include_raw=True).invoke("Who?")
    if method == "json_mode":  # any object
        assert found["raw"].content.startswith("{")
    else:
        assert isinstance(found["parsed"], Person) and found["parsing_error"] is None


def test_an_answer_must_call_a_tool(hermes):
    asked = {"tools": [ADD, NOW], "parallel_tool_calls": False}
    named = {**asked, "tool_choice": {"type": "function", "function": {"name": "add"}}}
    required = [{**asked, "tool_choice": "required", "seed": seed} for seed in range(5)]
    free = {"tools": [ADD], "tool_choice": "required", "logit_bias": {"10": 9}, "seed": 8}
    *choices, several = (answer.choices[0] for answer in create_all(hermes, [named, *required, free]))
    called = []
    for choice in choices:
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        called.append([(one.function.name, json.loads(one.function.arguments)) for one in choice.message.tool_calls])
    ((name, arguments),), *others = called
    assert name == "add" and 0 <= arguments["a"] <= 9
    assert {name for calls in others for name, _ in calls} == {"add", "now"}
    assert len(several.message.tool_calls) > 1


def test_an_answer_keeps_to_a_schema_or_calls_a_tool(hermes):
    """As agents ask whose last answer has a type."""
    kinds, asked = set(), {"tools": [ADD, NOW], "response_format": FORMAT}
    each = [{**asked, "seed": seed, "logit_bias": {"60": 6} if seed % 2 else {}} for seed in range(6)]
    forced = {"tools": [NOW], "response_format": FORMAT, "tool_choice": "required", "parallel_tool_calls": False}
    first, *others = (answer.choices[0] for answer in create_all(hermes, [forced, *each]))
    for choice in others:
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            assert not choice.message.content
            assert {call.function.name for call in choice.message.tool_calls} <= {"add", "now"}
        elif choice.finish_reason == "stop":
            assert Person.model_validate_json(choice.message.content) and not choice.message.tool_calls
    assert {"tool_calls", "stop"} <= kinds
    assert first.message.tool_calls[0].function.name == "now"


class Cat(BaseModel, extra="forbid"):
    kind: Literal["cat"]
    lives: Literal[1, 9]


class Dog(BaseModel, extra="forbid"):
    kind: Literal["dog"]
    good: bool


class Pets(BaseModel, extra="forbid"):
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = Field(min_length=1, max_length=2)


def test_tagged_unions(client):
    """Pydantic's schema of them, as it is: oneOf."""
    schema = Pets.model_json_schema()
    assert "oneOf" in json.dumps(schema)
    form = {"type": "json_schema", "json_schema": {"name": "Pets", "schema": schema}}
    answers = create_all(client, [{"response_format": form, "seed": seed} for seed in range(6)])
    found = [Pets.model_validate_json(answer.choices[0].message.content) for answer in answers]
    assert {type(pet) for each in found for pet in each.pets} == {Cat, Dog}


@pytest.mark.parametrize("alternatives, apart", [
    ([{"type": "string"}, {"type": "integer"}, {"type": "null"}], True),
    ([{"type": "number"}, {"type": "integer"}], False),
    ([{"const": 1}, {"const": 2}, {"enum": ["1", None]}], True),
    ([{"const": 1}, {"enum": [1.0, 3]}], False),
    ([{"const": True}, {"const": 1}], True),
    ([{"const": "a"}, {"type": "object"}], True),
    ([{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}], False),
    ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
    ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], False),
    ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/none"}], False),
    ([{"$ref": "#/$defs/a"}, {"type": "object", "properties": {"kind": {"const": "b"}}}], True),
    ([{"type": "object", "properties": {"kind": {"const": k}}} for k in "ab"], False),  # neither has to have it
    ([{"properties": {"kind": {"const": k}}, "required": ["kind"]} for k in "ab"], False),  # a text is both
    ([{}, {"type": "string"}], False),
    ([True, {"type": "string"}], False),
    ([{"const": i} for i in range(200)], False),
])  # fmt: skip
def test_alternatives_that_exclude_each_other(alternatives, apart):
    both = {k: {"type": "object", "properties": {"kind": {"const": k}}, "required": ["kind"]} for k in "ab"}
    schema = {"type": "array", "items": {"oneOf": alternatives}, "$defs": both}
    assert one_of_is_any_of(schema) is apart
    assert not one_of_is_any_of({"anyOf": alternatives})
    loop = {"oneOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "$defs": {"x": {"$ref": "#/$defs/x"}}}
    assert not one_of_is_any_of(loop)


def test_a_thought_may_come_before_an_answer(tmp_path):
    """The token that begins one is likelier here than any other, as is the end of it behind it."""
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path, "qwen3", QWEN3)))
    begin, end = (tokenizer.encode_bare(name) for name in ("<think>", "</think>"))
    with address_of(tmp_path, "qwen3", QWEN3) as address, client_of(address) as client:
        free = {"logit_bias": {str(begin[0]): 50, str(end[0]): 100}, "response_format": FORMAT}
        message = create(client, **free).choices[0].message
        assert Person.model_validate_json(message.content) and not hasattr(message, "reasoning_content")
        hidden = create(client, **free, logprobs=True).choices[0].logprobs.content
        assert [one.token for one in hidden[:2]] == ["<think>", "</think>"]
        begun = [*MESSAGES, {"role": "assistant", "content": "<think>so"}]
        more = {"extra_body": {"continue_final_message": True}}
        thought = create(client, messages=begun, **more, response_format=FORMAT, logit_bias={str(end[0]): 5})
        assert Person.model_validate_json(thought.choices[0].message.content)
        assert thought.choices[0].message.reasoning_content


def test_what_comes_before_a_grammar():
    harmony = "{{ '<|channel|>' }}"
    assert free_text(harmony, "<|start|>assistant", False, False) == {"free_until": FINAL}
    assert free_text(harmony, "<|start|>assistant", False, True) == {} == free_text(LLAMA3, "x", False, False)
    assert free_text(QWEN3, "<think>\n", True, False) == {"free_until": "</think>"}
    assert free_text(QWEN3, "<think>\n\n</think>\n\n", False, False) == {} == free_text(QWEN3, "x", False, True)
    assert free_text(QWEN3, "x", False, False) == {"free_until": "</think>", "free_from": "<think>"}
    assert grammar_of(QWEN3, None, [], True) == {}
    with pytest.raises(HttpProblem, match="tool_choice cannot ask for a call from this model"):
        grammar_of(harmony, None, [ADD["function"]], True)
    with pytest.raises(HttpProblem, match=r"response_format leaves this model no calls of tools; .* tool_choice=none"):
        grammar_of(harmony, {}, [], True, [ADD])


def test_calls_of_llama_have_parameters():
    assert '"parameters": {"type": "object"}' in call_grammar("", [NOW["function"]], False)
    assert "<tool_call>" in call_grammar(HERMES, [NOW["function"]], False)


@pytest.mark.parametrize("given, wrong", [
    ("json", "response_format='json' is not a form of answers; use text, json_object or json_schema"),
    ({"type": "json_schema"}, "json_schema=None has no schema; give such as"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}, "has no schema; give such as"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}},
     "the JSON schema cannot be kept to .Invalid type: thing.; change it"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}},
     "uniqueItems"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"oneOf": [{"type": "number"}, {"const": 1}]}}},
     "oneOf constraints are not supported"),
])  # fmt: skip
def test_a_form_that_cannot_be_kept_to_is_a_sentence(client, given, wrong):
    with pytest.raises(openai.BadRequestError, match=wrong):
        create(client, response_format=given)


def test_other_keys_that_a_schema_does_not_go_with_are_a_sentence(client):
    with pytest.raises(openai.BadRequestError, match=r"json_schema ends a text .* leave min_tokens out"):
        create(client, response_format=FORMAT, extra_body={"min_tokens": 3})

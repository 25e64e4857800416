"""What the text of a chat's answer keeps to: a `response_format`, and a `tool_choice` that asks for a call.

A grammar begins where an answer does; behind a thought, where the model thinks first.
"""

import json
from collections.abc import Sequence
from typing import Any

from dtgpt.inference.grammar.vocabulary import settings_of
from dtgpt.posttrain.chats.messages import THOUGHT_BEGIN, THOUGHT_END
from dtgpt.serve.problems import HttpProblem
from dtgpt.serve.tool_calls import Tagged, form_of, is_harmony
from dtgpt.util.errors import shown

FORMAT, CHOICE = "response_format", "tool_choice"
ANY_OBJECT = {"type": "object"}
FORMS = "text, json_object or json_schema"
FINAL = r"<\|channel\|>final[^<]*(<\|constrain\|>[^<]*)?<\|message\|>"  # where GPT-OSS's answer begins
KEYWORDS = ("$defs", "definitions")  # to which a reference in a schema points from its root


def read_format(given: Any) -> dict[str, Any] | None:
    """Return the schema of a `response_format`; None where an answer is any text. Raise HttpProblem 400."""
    kind = given.get("type") if isinstance(given, dict) else given
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise HttpProblem(400, f"{FORMAT}={shown(given)} is not a form of answers; use {FORMS}", FORMAT)
    named = given.get("json_schema") if isinstance(given, dict) else None
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        example = '{"name": "answer", "schema": {"type": "object"}}'
        raise HttpProblem(400, f"json_schema={shown(named)} has no schema; give such as {example}", FORMAT)
    return schema


def read_choice(given: Any, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions of which an answer must call one; none where it need not. Raise HttpProblem 400 for a choice
    that cannot be kept."""
    functions = [tool.get("function", tool) for tool in tools]
    name = given.get("function", given).get("name") if isinstance(given, dict) else None
    if given not in (None, "auto", "none", "required") and not isinstance(name, str):
        rule = 'use auto, none, required, or {"type": "function", "function": {"name": "f"}}'
        raise HttpProblem(400, f"{CHOICE}={shown(given)} is not a choice; {rule}", CHOICE)
    if given not in (None, "none") and not tools:
        named = given if isinstance(given, str) else shown(given)
        raise HttpProblem(400, f"{CHOICE}={named} needs tools; give some, or leave it out", CHOICE)
    found = [one for one in functions if given == "required" or one["name"] == name]
    if name is not None and not found:
        raise HttpProblem(400, f"{CHOICE} names {shown(name)}, which is none of the tools; use one of them", CHOICE)
    return found


def grammar_of(
    template: str,
    schema: dict[str, Any] | None,
    calls: list[dict[str, Any]],
    one_call: bool,
    tools: Sequence[dict[str, Any]] = (),
) -> dict[str, str]:
    """Return the fields of `GrammarOptions` that keep an answer to calls of one of `calls` if there are any, or to a
    schema, in whose place a model may call `tools`; none of another answer. Raise HttpProblem 400 for what a chat
    template has no form for."""
    if not calls and (schema is None or not tools):
        return {} if schema is None else {"json_schema": json.dumps(schema)}
    if is_harmony(template):
        if calls:
            raise HttpProblem(400, f"{CHOICE} cannot ask for a call from this model; use auto or none", CHOICE)
        raise HttpProblem(
            400, f"{FORMAT} leaves this model no calls of tools; leave it out, or use {CHOICE}=none", FORMAT
        )
    if calls:
        return {"grammar": call_grammar(template, calls, one_call)}
    return {"grammar": call_grammar(template, [tool.get("function", tool) for tool in tools], one_call, schema)}


def free_text(template: str, end: str, thinks: bool, begun: bool) -> dict[str, str]:
    """Return the fields of `GrammarOptions` that say what comes before a grammar. end: of the prompt. thinks: it ends
    within a thought; begun: with an answer that goes on."""
    if is_harmony(template):
        return {} if begun else {"free_until": FINAL}
    if thinks:
        return {"free_until": THOUGHT_END}
    if begun or THOUGHT_END not in template or end.rstrip().endswith(THOUGHT_END):
        return {}
    return {"free_until": THOUGHT_END, "free_from": THOUGHT_BEGIN}


def call_grammar(
    template: str, functions: list[dict[str, Any]], one_call: bool, answer: dict[str, Any] | None = None
) -> str:
    """Return a grammar of calls of functions, in the form that a chat template shows a model, or of an answer that
    keeps to a schema."""
    tagged = form_of(template) is Tagged
    lines = [f"tool_{i}: %json {json.dumps(_call_schema(one, tagged))}" for i, one in enumerate(functions)]
    tool = " | ".join(f"tool_{i}" for i in range(len(functions)))
    other = ""
    if answer is not None:
        other = " | answer"
        lines.append(f"answer: %json {json.dumps({**answer, 'x-guidance': settings_of(answer)})}")
    if not tagged:
        return "\n".join([f"start: {tool}{other}", *lines])
    several = "" if one_call else ' ("\\n" call)*'
    call = f'call: "{Tagged.begin}\\n" ({tool}) "\\n{Tagged.end}"'
    return "\n".join([f"start: call{several}{other}", call, *lines])


def _call_schema(function: dict[str, Any], tagged: bool) -> dict[str, Any]:
    """Return the schema of a call, with what references in that of its arguments point to."""
    arguments = function.get("parameters") or ANY_OBJECT
    name = "arguments" if tagged else "parameters"
    return {
        **{word: arguments[word] for word in KEYWORDS if word in arguments},
        "x-guidance": settings_of(arguments),
        "type": "object",
        "properties": {"name": {"const": function["name"]}, name: arguments},
        "required": ["name", name],
        "additionalProperties": False,
    }

"""OpenAI's chat completions: a request as one to completions, and its answer in the form of chats."""

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from dtgpt.inference.base_options import MOST_ALTERNATIVES
from dtgpt.posttrain.chats.messages import ARGUMENTS, THOUGHT_BEGIN, read_arguments, read_messages
from dtgpt.posttrain.chats.prompts import ChatPrompts
from dtgpt.posttrain.chats.tools import TOOLS, read_tools
from dtgpt.serve.answer_grammar import CHOICE, FORMAT, free_text, grammar_of, read_choice, read_format
from dtgpt.serve.openai_answer import CompletionAnswer
from dtgpt.serve.openai_keys import SWITCH, read_kind
from dtgpt.serve.openai_request import CompletionRequest, read_request, text_of
from dtgpt.serve.problems import HttpProblem, bad_request
from dtgpt.serve.service import Service, client_has_left
from dtgpt.serve.thoughts import ends_within
from dtgpt.serve.tool_calls import Reader, form_of, is_harmony, openai_call, reader_of
from dtgpt.util.errors import UserError, shown

NOT_OF_CHATS = ("prompt", "echo", "suffix", "best_of", "return_token_ids", "split_special_tokens")
UNSUPPORTED = {  # keys, and what changes nothing there
    "functions": [],
    "function_call": "none",
    "audio": None,
    "modalities": ["text"],
}
LENGTHS = ("max_completion_tokens", "max_tokens")  # names of one number
END = 32  # tokens at the end of a prompt that tell whether it ends within a thought
BEGUN, PROMPTED = "continue_final_message", "add_generation_prompt"  # vLLM's
PARALLEL = "parallel_tool_calls"
OWN = {
    "messages",
    ARGUMENTS,
    BEGUN,
    PROMPTED,
    TOOLS,
    CHOICE,
    FORMAT,
    PARALLEL,
    *LENGTHS,
    "logprobs",
    "top_logprobs",
    *NOT_OF_CHATS,
    *UNSUPPORTED,
}


class Rendered(NamedTuple):
    """The prompt of a chat, and what decides how its answer is read."""

    ids: list[int]
    template: str
    stops: tuple[str, ...]
    last: str  # message
    tools: list[dict[str, Any]]
    calls: list[dict[str, Any]]  # functions of which it must call one; none: it need not


def read_chat_request(body: dict[str, Any], service: Service, prompts: Callable[[], ChatPrompts]) -> CompletionRequest:
    """Return the request in a JSON object. Raise HttpProblem where it cannot be served."""
    _check_keys(body)
    length, tokens = _length(body)
    likeliest, begun = _logprobs(body), _begun(body)
    one_call = read_kind(PARALLEL, True if body.get(PARALLEL) is None else body[PARALLEL], SWITCH) is False
    schema, chat = read_format(body.get(FORMAT)), _render(body, prompts, begun)
    end = text_of(service.model.known_tokenizer, chat.ids[-END:])
    # What a user wrote may have the tag, too: the end of the prompt tells, or the answer that is begun.
    thinks = end.rstrip().endswith(THOUGHT_BEGIN) or (begun and ends_within(chat.last))
    one_call = one_call or isinstance(body.get(CHOICE), dict)  # of the tool that is named
    grammar = grammar_of(chat.template, schema, chat.calls, one_call, chat.tools)
    if grammar:
        grammar |= free_text(chat.template, end, thinks, begun)
    room = max(1, service.config.seq_length - len(chat.ids))
    asked = {name: value for name, value in body.items() if name not in OWN}
    asked |= {"prompt": chat.ids, "max_tokens": room if tokens is None else tokens}
    try:
        found = read_request(asked, service.model, service.model_id, service.limits, likeliest, chat.stops, grammar)
    except HttpProblem as problem:
        if problem.param == "max_tokens":
            problem.param, problem.message = length, problem.message.replace("max_tokens", length)
        raise
    return replace(found, reader=reader_of(chat.template, bool(chat.tools), thinks, begun), one_call=one_call)


def _check_keys(body: dict[str, Any]) -> None:
    """Raise HttpProblem for a key that chats do not have, or that changes an answer in a way that is not there."""
    for name in (*NOT_OF_CHATS, *UNSUPPORTED):
        if body.get(name) and body[name] != UNSUPPORTED.get(name):
            why = (
                f"={shown(body[name])} is not supported"
                if name in UNSUPPORTED
                else " is for completions, and not for chats"
            )
            raise HttpProblem(400, f"{name}{why}; leave it out", name)


def _render(body: dict[str, Any], prompts: Callable[[], ChatPrompts], begun: bool) -> Rendered:
    """Return the prompt of a request. Raise HttpProblem, which names the key that is wrong."""
    about = ARGUMENTS
    try:
        arguments = read_arguments(body.get(ARGUMENTS))
        about = "messages"
        chats, messages = prompts(), read_messages(body.get("messages"))
        about = TOOLS
        tools, choice = read_tools(body.get(TOOLS)), body.get(CHOICE)
        calls = read_choice(choice, tools)
        tools = [] if choice == "none" else tools
        if tools and form_of(chats.template) is None and not is_harmony(chats.template):
            raise UserError("calls in the form of this model's chat template are not known; leave tools out")
        about = "messages"
        ids = chats.encode(messages, arguments | ({TOOLS: tools} if tools else {}), client_has_left, begun)
    except UserError as error:
        raise bad_request(error, about) from None
    return Rendered(ids, chats.template, chats.stops, messages[-1]["content"], tools, calls)


def _length(body: dict[str, Any]) -> tuple[str, Any]:
    """Return the key by which a client says how many tokens an answer has at most, and its value; None without one."""
    given = {name: body[name] for name in LENGTHS if body.get(name) is not None}
    if len(set(map(repr, given.values()))) > 1:
        both = " and ".join(f"{name}={shown(value)}" for name, value in given.items())
        raise HttpProblem(400, f"{both} differ; leave one out", "max_tokens")
    name, value = next(iter(given.items()), ("max_tokens", None))
    if value == 0:
        raise HttpProblem(400, f"{name}={shown(value)} generates nothing; use 1 or more", name)
    return name, value


def _begun(body: dict[str, Any]) -> bool:
    """Return whether the last message is an answer that goes on."""
    begun, prompted = (
        read_kind(name, default if body.get(name) is None else body[name], SWITCH)
        for name, default in ((BEGUN, False), (PROMPTED, not body.get(BEGUN)))
    )
    if begun == prompted:
        remedy = f"{PROMPTED} begins a new answer, {BEGUN} goes on with the last message; give one of them as true"
        raise HttpProblem(400, remedy, PROMPTED)
    return begun


def _logprobs(body: dict[str, Any]) -> int | None:
    """Return the number of likeliest tokens; None without log-probabilities."""
    most = body.get("top_logprobs")
    wanted = read_kind("logprobs", False if body.get("logprobs") is None else body["logprobs"], SWITCH)
    if most and not wanted:
        raise HttpProblem(400, "top_logprobs needs logprobs=true; add it, or leave it out", "top_logprobs")
    if most is not None and (type(most) is not int or not 0 <= most <= MOST_ALTERNATIVES):
        raise HttpProblem(400, f"top_logprobs={shown(most)} is not 0 to {MOST_ALTERNATIVES}; use that", "top_logprobs")
    return (most or 0) if wanted else None


class ChatAnswer(CompletionAnswer):
    """The answer to a chat."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._head |= {"id": self.id, "object": "chat.completion.chunk" if self.asked.stream else "chat.completion"}
        self._begun: set[int] = set()
        self._readers: dict[int, Reader] = {}
        self._calls: dict[int, int] = {}  # of each choice, sent so far

    def form(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return an entry of `choices` in the form of chats. Of a stream, the first of each choice has the role."""
        rest = {name: value for name, value in choice.items() if name != "text"}
        rest["logprobs"] = self._content(choice["logprobs"])
        said: dict[str, Any] = {"role": "assistant", **self._said(choice)}
        if self._calls.get(choice["index"]) and choice["finish_reason"] == "stop":
            rest["finish_reason"] = "tool_calls"
        if not self.asked.stream:
            return rest | {"message": {**said, "refusal": None}}
        if choice["index"] in self._begun:
            del said["role"]
        self._begun.add(choice["index"])
        return rest | {"delta": said}

    def _said(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return what a choice says, and apart from it what it thinks and calls."""
        if self.asked.reader is None:
            return {"content": choice["text"]}
        index, before = choice["index"], self._calls.get(choice["index"], 0)
        reader = self._readers.setdefault(index, self.asked.reader())
        thought, said, calls = reader.take(choice["text"], choice["finish_reason"] is not None)
        calls = calls[: max(0, 1 - before)] if self.asked.one_call else calls
        self._calls[index] = before + len(calls)
        found: dict[str, Any] = {"content": said}
        if thought:
            found["reasoning_content"] = thought
        if calls:
            listed = [openai_call(call, f"call_{uuid.uuid4().hex[:24]}") for call in calls]
            counted = [{"index": before + place, **call} for place, call in enumerate(listed)]
            found["tool_calls"] = counted if self.asked.stream else listed
        return found

    def _content(self, lists: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return log-probabilities in the form of chats, from the lists of completions."""
        if lists is None:
            return None
        content = []
        for name, logprob, likeliest in zip(
            lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
        ):
            best = [_token(*pair) for pair in _best(likeliest, self.asked.logprobs)]
            content.append(_token(name, logprob) | {"top_logprobs": best})
        return {"content": content, "refusal": None}


def _best(likeliest: dict[str, float], count: int | None) -> list[tuple[str, float]]:
    return sorted(likeliest.items(), key=lambda pair: -pair[1])[: count or 0]


def _token(name: str, logprob: float) -> dict[str, Any]:
    """Return a token with the bytes that it spells, null where they are not known by its name."""
    spelled: list[int] | None = list(name.encode())
    if name.startswith("bytes:\\x"):  # a token may be the text "bytes:"
        spelled = list(bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")))
    elif name.startswith("token_id:") and name[-1].isdecimal():
        spelled = None
    return {"token": name, "logprob": logprob, "bytes": spelled}

"""A request to OpenAI's completions: what the model is asked for, and what its answer must have."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.library.model import check_ids
from dtgpt.inference.model import Model
from dtgpt.inference.options import Options
from dtgpt.inference.prompts import encode
from dtgpt.inference.request import PromptJob
from dtgpt.posttrain.chats.length import check_length
from dtgpt.serve.limits import RequestLimits
from dtgpt.serve.openai_keys import OPTION_KEYS, TEXT, read_keys, read_kind
from dtgpt.serve.problems import TOO_LONG, HttpProblem, bad_request
from dtgpt.serve.service import draw_seed
from dtgpt.serve.tool_calls import Reader
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown

NEW_TOKENS = 16  # where a request does not name them
PROMPTS = "a text, a list of ids, or a list of texts or of lists of ids"


class Prompt(NamedTuple):
    """A prompt of a request."""

    ids: list[int]
    text: str  # as it was given, or that of the ids; "" without a tokenizer


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A request that can be served: a job for each prompt, of `best_of` sequences each, of which the answer has `n`."""

    prompts: list[Prompt]
    jobs: list[PromptJob]
    n: int
    best_of: int
    seed: int
    echo: bool
    logprobs: int | None  # likeliest tokens in place of each token; None: no log-probabilities
    stream: bool
    include_usage: bool  # at the end of a stream
    return_token_ids: bool
    one_call: bool = False  # of several that an answer makes, the first alone is given
    reader: Callable[[], Reader] | None = None  # of an answer to a chat; None: it is text alone

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)


def read_request(
    body: dict[str, Any],
    served: Model,
    model: str,
    limits: RequestLimits,
    likeliest: int | None = None,
    stops: tuple[str, ...] = (),
    grammar: Mapping[str, str] = MappingProxyType({}),
) -> CompletionRequest:
    """Return the request in a JSON object, to the server of `model`. Of a chat: `likeliest`, the number of
    tokens with their log-probabilities, `stops`, with what its template ends an answer, and `grammar`, fields of
    `GrammarOptions`. Raise HttpProblem where it cannot be served."""
    keys = read_keys(body) | {"grammar": grammar}
    if likeliest is not None:
        keys["logprobs"] = likeliest
    check_model(keys["model"], model)
    keys.setdefault("n", 1)
    if keys["best_of"] is None:
        keys["best_of"] = keys["n"]
    _check_together(keys)
    split = keys.get("split_special_tokens", False)
    seed = keys["seed"] if "seed" in keys else draw_seed()
    prompts, jobs = list[Prompt](), list[PromptJob]()
    for index, prompt in enumerate(_read_prompts(keys["prompt"], served, limits, split)):
        prompts.append(prompt)
        jobs.append(_job(keys, prompt, index, seed, served, stops))  # which ends all where the first one is too long
    return CompletionRequest(
        prompts=prompts,
        jobs=jobs,
        n=keys["n"],
        best_of=keys["best_of"],
        seed=seed,
        echo=keys["echo"],
        logprobs=keys["logprobs"],
        stream=keys["stream"],
        include_usage=(keys["stream_options"] or {}).get("include_usage", False),
        return_token_ids=keys["return_token_ids"],
    )


def check_model(name: Any, model: str) -> None:
    """Raise HttpProblem 404 where a request names another model than this server has, 400 where it names none."""
    if name is None:
        return
    read_kind("model", name, TEXT)
    if name != model:
        sentence = f"the model {shown(name)} is not served here; use {shown(model)}, or leave model out"
        raise HttpProblem(404, sentence, "model", code="model_not_found")


def _check_together(keys: dict[str, Any]) -> None:
    """Raise HttpProblem for keys that contradict each other."""
    n, best_of = keys["n"], keys["best_of"]
    wrong = {
        f"best_of={best_of} is below n={n}; use at least that": best_of < n,
        f"best_of={best_of} above n={n} cannot be streamed; leave one out": best_of > n and keys["stream"],
        "stream_options are those of a stream; add stream=true, or leave them out": (
            keys["stream_options"] is not None and not keys["stream"]
        ),
        "max_tokens=0 generates nothing; use 1 or more, or add echo=true": (
            keys.get("max_tokens") == 0 and not keys["echo"]
        ),
    }
    for sentence, is_wrong in wrong.items():
        if is_wrong:
            raise HttpProblem(400, sentence, re.split("[= ]", sentence)[0])


def _read_prompts(given: Any, served: Model, limits: RequestLimits, split: bool) -> Iterator[Prompt]:
    """Yield the prompts of a text, of ids, or of a list of either; None begins a document, and so does a list without
    ids among others. `split`: names of special tokens in a text are text as any other."""
    several = [given] if given is None or isinstance(given, str) or _is_ids(given) else given
    kinds = set(map(type, several)) if isinstance(several, list) else {type(several)}
    if given is not None and kinds not in (set(), {str}, {list}):
        raise HttpProblem(400, f"prompt={shown(given)} is not a prompt; give {PROMPTS}", "prompt")
    if not 1 <= len(several) <= limits.prompts:
        few_or_many = f"{len(several)} prompts are too many; send up to {limits.prompts}"
        raise HttpProblem(400, few_or_many if several else f"prompt is empty; give {PROMPTS}", "prompt")
    for one in several:
        try:
            prompt = _read_prompt(one, served, split)
        except UserError as error:
            raise bad_request(error, "prompt") from None
        yield prompt


def _read_prompt(given: Any, served: Model, split: bool) -> Prompt:
    """Return a prompt. Raise UserError where it is not one."""
    if given is None or given == []:
        ids = encode("", served.tokenizer, served.config)
        return Prompt(ids, served.tokenizer.decode(ids))
    if isinstance(given, str):
        check_length(given, served.tokenizer, served.config)
        return Prompt(encode(given, served.tokenizer, served.config, split), given)
    ids = check_ids(given, served.config)
    fits = len(ids) <= served.config.seq_length  # else nobody wants the text
    return Prompt(ids, text_of(served.known_tokenizer, ids) if fits else "")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def text_of(tokenizer: Tokenizer | None, ids: list[int]) -> str:
    """Return the text of ids, of which those that the tokenizer does not have add nothing; "" without a tokenizer."""
    return "" if tokenizer is None else tokenizer.decode([i for i in ids if i < tokenizer.vocab_size])


def _job(
    keys: dict[str, Any], prompt: Prompt, index: int, seed: int, served: Model, stops: tuple[str, ...]
) -> PromptJob:
    """Return the job of a prompt. Raise HttpProblem where the model cannot do it."""
    positions = served.config.seq_length
    new = keys.get("max_tokens")
    if new is None:
        new = max(1, min(NEW_TOKENS, positions - len(prompt.ids)))
    if len(prompt.ids) + new > positions:
        raise HttpProblem(400, _too_long(len(prompt.ids), new, positions), "max_tokens", code=TOO_LONG)
    try:
        job = PromptJob(prompt.ids, _options(keys, new, seed, served.vocab_size), index, stops=stops)
        served.check(job)
    except UserError as error:
        raise _renamed(error) from None
    return job


def _too_long(prompt: int, new: int, positions: int) -> str:
    """Return the sentence about a request that needs more positions than the model has; programs look for some of its
    words."""
    fewer = f"max_tokens={positions - prompt} or less, or " if prompt < positions else ""
    return (
        f"a prompt of {counted(prompt, 'token')} and max_tokens={new} need {prompt + new} positions, but this model's "
        f"maximum context length is {positions} tokens; use {fewer}a shorter prompt"
    )


def _options(keys: dict[str, Any], new_tokens: int, seed: int, vocab_size: int) -> Options:
    given = {option.name: keys[key] for key, option in OPTION_KEYS.items() if key in keys}
    logprobs = keys["logprobs"]
    given |= {
        "max_new_tokens": new_tokens,
        "seed": seed,
        "ends": not keys["ignore_eos"],
        "num_return_sequences": keys["best_of"],
        "top_logprobs": min(logprobs or 0, vocab_size),
        "prompt_logprobs": (keys["echo"] and logprobs is not None) or new_tokens == 0,
    }
    return Options(**(given | keys["grammar"])).settled()


def _renamed(error: UserError) -> HttpProblem:
    """Return the problem of a wrong value, with OpenAI's names of options, about the key that it names."""
    sentence = str(error)
    for key, option in OPTION_KEYS.items():
        sentence = re.sub(rf"\b{option.name}\b", key, sentence)
    named = re.search(r"\b(\w+)=", sentence)
    return HttpProblem(400, sentence, named[1] if named and named[1] in OPTION_KEYS else None)

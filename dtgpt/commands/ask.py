"""`dtgpt generate http://HOST:PORT`: continue texts with the model of a server."""

import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dtgpt.commands.generated import Keyboard, ResultFile, write_several
from dtgpt.commands.http_client import HttpClient, Refusal
from dtgpt.commands.prompts import Line
from dtgpt.inference.completion import Completion
from dtgpt.inference.options import Options, read_options
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.util.console import say_error, write
from dtgpt.util.errors import UserError

NAMES = {"min_new_tokens": "min_tokens", "num_return_sequences": "n", "stop_strings": "stop"}  # in /v1/completions
OF_BEAMS = ("num_beams", "length_penalty", "early_stopping")
APART = ("max_new_tokens", "seed", "ends", *OF_BEAMS)  # become keys in another way than by their name
NOT_OF_BEAMS = (  # options that a server's beam search does not have
    "early_stopping", "min_new_tokens", "frequency_penalty", "presence_penalty", "logit_bias", "no_repeat_ngram_size",
    "stop_strings", "stop_on_eol", "stop_on_double_eol",
)  # fmt: skip
DEFAULTS = vars(Options())
LARGEST = 2**31  # no model has as many tokens or positions: the server checks what depends on its own
ANY_MODEL = GPT2Config(num_layers=1, hidden_size=1, num_heads=1, vocab_size=LARGEST, seq_length=LARGEST)
AT_ONCE = 64  # requests, of a file of prompts
ATTEMPTS = 60  # at a request that the server has no room for
UNKNOWN_FORM = "answers in a form that is not that of dtgpt serve; give another address"

Given = dict[str, Any]  # options by name


def address_of(path: Path) -> str | None:
    """Return the address of a server that was given in place of a model, None for a model."""
    text = str(path)
    if found := re.match(r"(https?):(?:/+|$)", text):  # `Path` makes one slash of two
        return f"{found[1]}://{text[found.end() :]}"
    return f"http://{text}" if re.fullmatch(r"[\w.-]+:\d{1,5}", text) and not path.exists() else None


def check_options(given: Mapping[str, Any]) -> Given:
    """Return all options, those that are not `given` at their defaults; without `max_new_tokens`, None. Raise UserError
    for a value that no model takes."""
    options = read_options(given, 0, ANY_MODEL)
    options.validate(LARGEST, LARGEST)
    return {**vars(options), "max_new_tokens": given.get("max_new_tokens")}


class RemoteModel:
    """The model of a server. `most`: new tokens where nothing is said of them, if the positions of the model suffice.

    Options are those of `check_options`. The draws for prompt number `index` are those of seed + index, so that the
    texts of equal prompts differ. Every method raises UserError where the server does not do what it is asked.
    """

    def __init__(self, client: HttpClient, most: int):
        self.client, self._most = client, most
        self._positions: int | None = None

    def pieces(self, prompt: str, given: Given, index: int) -> Iterator[str]:
        """Yield the pieces of a single text."""
        with self._understood():
            for event in self.client.events("/v1/completions", self._keys(prompt, given, index) | {"stream": True}):
                yield from ("" + choice["text"] for choice in event["choices"])  # TypeError for what is not a text

    def complete(self, prompt: str, given: Given, index: int) -> list[Completion]:
        """Return all texts after a prompt."""
        keys = self._keys(prompt, given, index) | {"return_token_ids": True}
        with self._understood():
            choices = self.client.send("/v1/completions", keys)["choices"]
            return [
                Completion(text=c["text"], ids=c["token_ids"], logprobs=[], finish_reason=c["finish_reason"])
                for c in sorted(choices, key=lambda choice: choice["index"])
            ]

    def search(self, prompt: str, given: Given) -> list[tuple[str, float]]:
        """Return the texts and scores of the best beams, found by Megatron-LM's rules."""
        with self._understood():
            found = self.client.send("/api", self._search_keys(prompt, given), "PUT")
            begins = [len(prompt or segments[0]) for segments in found["segments"]]
            texts = [text[begin:] for text, begin in zip(found["text"], begins, strict=True)]
            return list(zip(texts, found["scores"], strict=True))[: given["num_return_sequences"]]

    def _keys(self, prompt: str, given: Given, index: int) -> Given:
        """Return the keys of a request to /v1/completions, without those that change nothing."""
        keys = {
            "prompt": prompt, "max_tokens": self._new_tokens(prompt, given), "seed": given["seed"] + index,
            "ignore_eos": not given["ends"],
        }  # fmt: skip
        changed = [name for name in given if name not in APART and given[name] != DEFAULTS[name]]
        return keys | {NAMES.get(name, name): given[name] for name in changed}

    def _search_keys(self, prompt: str, given: Given) -> Given:
        """Return the keys of a beam search by `PUT /api`."""
        wrong = next((name for name in NOT_OF_BEAMS if given[name] != DEFAULTS[name]), None)
        if wrong is not None:
            raise UserError(f"the beam search of a server does not take {wrong}; leave it out, or use num_beams=1")
        stops, width, wanted = given["stop_token_ids"], given["num_beams"], given["num_return_sequences"]
        if wanted > width:
            raise UserError(f"num_beams={width} cannot give {wanted} sequences; use {wanted} or more beams")
        if len(stops) + given["ends"] != 1:
            raise UserError(
                "the beam search of a server ends at one token; use the end of text, or one stop token instead"
            )
        keys = {
            "prompts": [prompt], "tokens_to_generate": self._new_tokens(prompt, given), "beam_width": width,
            "length_penalty": given["length_penalty"], "add_BOS": not prompt,
            "prevent_newline_after_colon": given["prevent_newline_after_colon"],
        }  # fmt: skip
        return {**keys, "stop_token": stops[0]} if stops else keys

    def _new_tokens(self, prompt: str, given: Given) -> int:
        if given["max_new_tokens"] is not None:
            return given["max_new_tokens"]
        if self._positions is None:
            self._positions = self.client.get("/v1/models")["data"][0]["max_model_len"]
        length = self.client.send("/tokenize", {"prompt": prompt})["count"] or 1  # an empty one begins a document
        return max(1, min(self._most, self._positions - length))

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Tell in one sentence that an answer has another form."""
        try:
            yield
        except (LookupError, TypeError, ValueError):
            raise UserError(f"{self.client.address} {UNKNOWN_FORM}") from None


def show_remote(model: RemoteModel, prompt: str, given: Given, index: int = 0) -> None:
    """Write a prompt and its continuation to stdout as it is generated, or several when all are complete."""
    if given["num_beams"] > 1:
        write_several(prompt, model.search(prompt, given))
    elif given["num_return_sequences"] > 1:
        write_several(prompt, [(found.text or "", None) for found in model.complete(prompt, given, index)])
    else:
        pieces = model.pieces(prompt, given, index)
        write(prompt + next(pieces, ""))  # which the server may refuse
        for piece in pieces:
            write(piece)
        write("\n")


def converse_remotely(model: RemoteModel, given: Given) -> None:
    """Continue one line after the other that is typed, each without those before it. Ctrl-C ends a text."""
    with Keyboard() as keyboard:
        for turn, prompt in enumerate(keyboard.prompts()):
            try:
                with suppress(KeyboardInterrupt), interruptible():
                    show_remote(model, prompt, given, turn)
                    continue
                write("\n")
            except UserError as error:
                say_error(f"dtgpt: {error}")


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, also where the server is waited for."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def write_remote_results(
    model: RemoteModel, lines: list[Line], results: ResultFile, base: Given, place: Callable[[Line], str]
) -> None:
    """Write the texts of all lines, many of which the server gets at once. `base`: options of all lines, unless they
    have their own. `place`: the beginning of an error about a line."""
    asked = []
    for line in lines:
        own = {name: value for name, value in line.options.items() if value is not None}
        try:
            asked.append(check_options({**base, **own}))
            if asked[-1]["num_beams"] > 1:
                raise UserError("the beams of a server are not written to files; use num_beams=1, or --prompt")
        except UserError as error:
            raise UserError(f"{place(line)}{error}") from None

    def work(index: int) -> list[Completion]:
        try:
            return with_patience(lambda: model.complete(lines[index].prompt, asked[index], index))
        except UserError as error:
            raise UserError(f"{place(lines[index])}{error}") from None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            results.write(lines, pool.map(work, range(len(lines))))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            model.client.close()
            raise


def with_patience(ask: Callable[[], list[Completion]]) -> list[Completion]:
    """Return what `ask` returns, after waits where the server has no room for a request."""
    for _ in range(ATTEMPTS):
        try:
            return ask()
        except Refusal as refusal:
            if refusal.status != 429:
                raise
            time.sleep(refusal.retry_after)
    return ask()

"""`dtgpt chat`: talk to a model in the terminal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from dtgpt.checkpoint.open import tokenizer_beside
from dtgpt.commands.command import Command
from dtgpt.commands.generate import HEADINGS, Execution, SamplingWords, sampling_of
from dtgpt.commands.model_options import open_as_asked
from dtgpt.data.library_tokenizers.chat_template import keep_template, template_of
from dtgpt.inference.engine import Engine
from dtgpt.inference.model import Model, Need
from dtgpt.inference.options import read_options
from dtgpt.inference.prompt_sources.terminal import Keyboard
from dtgpt.inference.request import NotFinite, PromptJob
from dtgpt.posttrain.chats.messages import arguments_of_words
from dtgpt.posttrain.chats.prompts import ChatPrompts
from dtgpt.posttrain.chats.template import NONE, Message
from dtgpt.util.console import say_error, write
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds
from dtgpt.util.hardware import memory_errors_as_user_errors
from dtgpt.util.storage import located

RESET = "/reset"


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Execution, SamplingWords):  # fields are listed from the last base on
    """Talk to a model whose tokenizer has a chat template. MODEL is a run folder or any model that `dtgpt convert`
    reads. /reset begins a new chat, Ctrl-C ends an answer, Ctrl-D the program."""

    headings: ClassVar[dict[str, str]] = {  # in `--help`, from the named field on
        "max_new_tokens": "sampling",
        "stop_token_ids": "end of an answer",
        "do_sample": "sampling",
        **HEADINGS,
        "stop_strings": "end of an answer",
        "plan": "execution",
        "tokenizer": "tokenizer",
        "adapter": "execution",
    }

    system: Annotated[str, "message of the system with which each chat begins; empty: none"] = ""
    chat_template_kwargs: Annotated[
        str, "variables of the chat template as JSON, such as '{\"enable_thinking\": false}'; empty: none"
    ] = ""
    max_new_tokens: Annotated[
        int | None, "largest number of tokens of an answer; none: what the positions leave", Bounds(1)
    ] = None


class Chat:
    """A chat that is going on. Its `messages` are those that were answered."""

    def __init__(
        self,
        prompts: ChatPrompts,
        make: Callable[[list[int]], PromptJob],
        system: str,
        arguments: Mapping[str, Any] = NONE,
    ):
        """arguments: variables of the template beside the messages."""
        self._prompts, self._make, self._arguments = prompts, make, arguments
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._first)

    def reset(self) -> None:
        """Begin a new chat."""
        self.messages = list(self._first)

    def ask(self, engine: Engine, text: str, stopped: Callable[[], bool]) -> None:
        """Write the answer to a text as it is generated; an answer that `stopped` ends stays in the chat as it is.
        Raises UserError where the chat cannot be answered."""
        messages = [*self.messages, {"role": "user", "content": text}]
        job, pieces = self._make(self._prompts.encode(messages, self._arguments)), list[str]()
        try:
            for update in engine.stream(job, stopped):
                pieces.append(update.text)
                write(update.text)
        finally:
            write("\n")
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


@memory_errors_as_user_errors("use shorter chats (--max-length)")
def chat(path: Path, options: ChatOptions) -> None:
    if options.num_samples > 1 or getattr(options, "num_beams", 1) > 1:
        raise UserError("dtgpt chat gives one answer; leave --num-samples and --num-beams out")
    if options.split_special_tokens:
        raise UserError("a chat is rendered with special tokens; leave --split-special-tokens out")
    base, arguments = sampling_of(options), arguments_of_words(options.chat_template_kwargs)
    source, settings, mesh, tokenizer = open_as_asked(path, options)
    if template_of(tokenizer) is None and options.adapter is not None:
        trained = tokenizer_beside(located(options.adapter))
        keep_template(tokenizer, None if trained is None else template_of(trained))
    model = Model.read(source, settings, mesh, path, options.slots, tokenizer, options.exact)
    config = model.config

    def make(ids: list[int]) -> PromptJob:
        if len(ids) >= config.seq_length:
            raise UserError(
                f"the chat has {len(ids)} tokens, and the model has {config.seq_length} positions; begin a new one "
                f"with {RESET}"
            )
        asked = read_options(base, len(ids), config, config.seq_length)
        room = config.seq_length - len(ids)
        job = PromptJob(ids, replace(asked, max_new_tokens=min(asked.max_new_tokens, room)), stops=prompts.stops)
        model.check(job)
        return job

    def prepare() -> tuple[Need, None]:
        model.check(PromptJob([0], read_options(base, 1, config)))  # options that are wrong for any chat
        return Need(1, 1), None

    def work(engine: Engine, _: None) -> None:
        model.describe()
        talk(engine, Chat(prompts, make, options.system, arguments))

    prompts = ChatPrompts(tokenizer, config, model.special.ends)
    try:
        model.run(prepare, work)
    finally:
        prompts.close()


def talk(engine: Engine, going: Chat) -> None:
    """Answer what is typed, until the end of the input."""
    with Keyboard() as keyboard:
        for text in keyboard.prompts():
            if text.strip() == RESET:
                going.reset()
                continue
            try:
                going.ask(engine, text, keyboard.stopped)
            except (UserError, NotFinite) as error:
                say_error(f"dtgpt: {error}")


command = Command("chat MODEL", ChatOptions, chat, "runs/sft-001 --system 'Be brief.'")

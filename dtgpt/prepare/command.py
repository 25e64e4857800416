"""`dtgpt prepare` and `dtgpt tokenizer`: words of the command line to configs, and what is said afterwards."""

import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from dtgpt.console import counted, say
from dtgpt.errors import UserError, shown
from dtgpt.help import help_text, wants_help
from dtgpt.overrides import read_words, take
from dtgpt.prepare.documents import Broken
from dtgpt.prepare.inputs import check_keys, find_sources, read_blocks
from dtgpt.prepare.job import PrepareConfig, join_datasets, prepare
from dtgpt.prepare.megatron_options import refuse
from dtgpt.prepare.target import folder_of
from dtgpt.tokenizers.open import MOST, make_tokenizer
from dtgpt.tokenizers.tokenizer import Tokenizer
from dtgpt.tokenizers.training import SMALLEST

# Megatron-LM's other name for the same.
ALIASES = {"tokenizer_model": "tokenizer"}
PREPARE_HELP = """Text to token files PREFIX_KEY_document.bin and .idx, as Megatron-LM's preprocess_data.py writes them.

INPUT is a path, a glob in quotes or - (standard input): .jsonl or .json (an object a line), .csv, .txt; each also
compressed (.gz, .xz, .zst, .bz2). Broken lines are left out and reported. on|off options may be written alone:
--append-eod is --append-eod on."""

TRAIN_HELP = """A byte-level BPE with GPT-2's pre-tokenization, trained on your own text, for dtgpt prepare --tokenizer.

INPUT is a path, a glob in quotes or - (standard input): .jsonl or .json (an object a line), .csv, .txt; each also
compressed (.gz, .xz, .zst, .bz2)."""


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig:
    input: Annotated[tuple[str, ...], "inputs, as INPUT before the options"] = ()
    json_keys: Annotated[tuple[str, ...], "keys of the objects, or columns of a .csv, with the text"] = ("text",)
    output: Annotated[str, "the file that dtgpt prepare --tokenizer takes"] = "tokenizer.json"
    vocab_size: Annotated[int, f"tokens, with 256 bytes and the end of text; {SMALLEST} to {MOST - 1}"] = 50257
    input_format: Annotated[Literal["auto", "jsonl", "csv", "txt"], "auto: by suffix; jsonl on standard input"] = "auto"
    txt: Annotated[Literal["file", "line"], "what one document of a text is"] = "file"
    overwrite: Annotated[Literal["on", "off"], "replace a file of this name"] = "off"


def prepare_command(words: list[str]) -> int:
    """`dtgpt prepare [INPUT ...] --output-prefix PREFIX [--option value ...]`; returns the exit code.

    Raises UserError; then nothing is left behind.
    """
    if not words or wants_help(words):
        usage = help_text(PrepareConfig(), PREPARE_HELP, "dtgpt prepare INPUT ... --output-prefix PREFIX")
        say(with_dashes(usage))
        return 0
    refuse(words)
    config = parse_config(PrepareConfig(), words)
    with _SignalsAsExit():
        if config.merge:
            target, count = join_datasets(config)
            say(f"{target}: {counted(count, 'dataset')} joined")
        else:
            say(str(prepare(config)))
    return 0


def tokenizer_command(words: list[str]) -> int:
    """`dtgpt tokenizer train INPUT ... [--vocab-size N] [--output FILE]`; returns the exit code. Raises UserError."""
    if not words or wants_help(words):
        say(with_dashes(help_text(TrainTokenizerConfig(), TRAIN_HELP, "dtgpt tokenizer train INPUT ...")))
        return 0
    if words[0] != "train":
        raise UserError(
            f"dtgpt tokenizer has no command {shown(words[0])}; it has train, as in dtgpt tokenizer train a.txt"
        )
    config = parse_config(TrainTokenizerConfig(), words[1:])
    tokenizer = train_tokenizer(config)
    say(f"{config.output}: {tokenizer.vocab_size:,} tokens; use it with dtgpt prepare --tokenizer {config.output}")
    return 0


def train_tokenizer(config: TrainTokenizerConfig) -> Tokenizer:
    """Train a byte-level BPE with GPT-2's pre-tokenization on the user's own text, and save it.

    Raises UserError where the inputs hold no text, the file exists or cannot be written, or the package tokenizers is
    missing.
    """
    output = Path(config.output)
    if not config.input:
        raise UserError("dtgpt tokenizer train needs text, such as dtgpt tokenizer train *.jsonl --vocab-size 32000")
    if not SMALLEST <= config.vocab_size < MOST:
        raise UserError(f"--vocab-size {config.vocab_size} is out of range; give {SMALLEST} (only bytes) to {MOST - 1}")
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; name a file in it, as in --output {output / 'tokenizer.json'}")
    if output.exists() and config.overwrite == "off":
        raise UserError(f"{output} exists already; give another --output, or add --overwrite to replace it")
    texts = _texts(config)
    with folder_of(output, "--output"):
        try:
            first = next(texts)
        except StopIteration:
            raise UserError(f"{config.input[0]} holds no text to train on; check the inputs and --json-keys") from None
        tokenizer = make_tokenizer("bpe", _chain(first, texts), config.vocab_size)
        try:
            tokenizer.save(output)
        except OSError as error:
            raise UserError(f"{output} cannot be written: {error.strerror}; choose another --output") from None
    return tokenizer


def _texts(config: TrainTokenizerConfig) -> Iterator[str]:
    broken = 0
    sources = find_sources(list(config.input), config.input_format, config.txt)
    check_keys(sources, config.json_keys)
    for block in read_blocks(sources, config.json_keys):
        for found in block.documents(config.json_keys):
            if isinstance(found, Broken):
                broken += 1
                continue
            yield from (piece for pieces in found.values() for piece in pieces if piece)
    if broken:
        say(f"{counted(broken, 'broken line')} left out; dtgpt prepare names what is broken", warning=True)


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def parse_config(config: Any, words: list[str]) -> Any:
    """Return `config` with the options in `words`; its `input` takes the words that follow no option too. Raises
    UserError."""
    try:
        inputs, options = read_words(words, config, free=True, aliases=ALIASES)
        config = take(config, options)
    except UserError as error:
        raise UserError(with_dashes(str(error))) from None
    return replace(config, input=(*inputs, *config.input)) if inputs else config


def with_dashes(text: str) -> str:
    """Names of options as they are typed here."""
    return re.sub(r"(?<!\S)--[a-z_]+", lambda name: name[0].replace("_", "-"), text)


class _SignalsAsExit:
    """SIGTERM, and SIGHUP of a terminal that was closed, end the process by an exception, so that partial files are
    removed. Under nohup SIGHUP stays ignored."""

    def __enter__(self) -> None:
        self._former = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, lambda number, _: sys.exit(128 + number))

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

"""`dtgpt tokenizer train`: a tokenizer trained on the user's own text."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from dtgpt.commands.command import HELP, Command
from dtgpt.data.library_tokenizers.byte_level import SMALLEST
from dtgpt.data.prepare.documents import InputFile
from dtgpt.data.prepare.inputs import check_keys, find_sources, read_blocks
from dtgpt.data.prepare.target import check_new, check_not_read, folder_of
from dtgpt.data.text import Broken
from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.data.tokenizers.tokenizer import MOST
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError, shown
from dtgpt.util.field_types import Bounds


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """Train a byte-level BPE with GPT-2's pre-tokenization on your own text, for dtgpt prepare --tokenizer.

    INPUT is a path, a quoted glob or - (standard input): .jsonl or .json (one object per line), or .txt, plain or
    compressed (.gz, .xz, .zst, .bz2)."""

    input: Annotated[tuple[str, ...], "inputs, in addition to INPUT"] = ()
    json_keys: Annotated[tuple[str, ...], "JSON keys that hold the text"] = ("text",)
    output: Annotated[str, "file to write, for dtgpt prepare --tokenizer"] = "tokenizer.json"
    vocab_size: Annotated[
        int, "number of tokens, including 256 bytes and the end-of-text token", Bounds(SMALLEST, MOST - 1)
    ] = 50257
    input_format: Annotated[Literal["auto", "jsonl", "txt"], "auto: by suffix; jsonl on standard input"] = "auto"
    txt: Annotated[Literal["file", "line"], "what a document of a .txt is"] = "file"
    overwrite: Annotated[bool, "replace an existing file"] = False


def train(options: TokenizerOptions) -> None:
    """Train a byte-level BPE on the user's own text, and save it. Raises UserError if the inputs hold no text, the file
    exists or cannot be written, or the package tokenizers is missing."""
    output = Path(options.output)
    if not options.input:
        raise UserError("there are no inputs to train on; give some, such as dtgpt tokenizer train *.jsonl")
    check_new(output, "--output", options.overwrite)
    with folder_of(output, "--output"):
        sources = find_sources(list(options.input), options.input_format, options.txt)
        check_keys(sources, options.json_keys)
        check_not_read(output, "--output", (source.path for source in sources))
        texts = _texts(sources, options.json_keys)
        first = next(texts, None)
        if first is None:
            raise UserError(f"{options.input[0]} holds no text to train on; check the inputs and --json-keys")
        tokenizer = make_tokenizer("bpe", chain([first], texts), options.vocab_size)
        try:
            tokenizer.save(output)
        except OSError as error:
            raise UserError(f"{output} cannot be written: {error.strerror}; choose another --output") from None
    say(f"{options.output}: {tokenizer.vocab_size:,} tokens; use it with dtgpt prepare --tokenizer {options.output}")


def _texts(sources: list[InputFile], keys: tuple[str, ...]) -> Iterator[str]:
    broken = 0
    for block in read_blocks(sources, keys):
        for found in block.documents(keys):
            if isinstance(found, Broken):
                broken += 1
                continue
            yield from (piece for pieces in found.values() for piece in pieces if piece)
    if broken:
        say(f"{counted(broken, 'broken line')} left out; dtgpt prepare names what is broken", warning=True)


TRAIN = Command("tokenizer train INPUT ...", TokenizerOptions, train, "*.jsonl --vocab-size 32000")


def command(words: list[str]) -> int:
    """Run `dtgpt tokenizer train ...`, the only command of `dtgpt tokenizer`. Raises UserError."""
    if not words or words[0] in HELP:
        return TRAIN(["--help"])
    if words[0] != "train":
        raise UserError(f"dtgpt tokenizer has no command {shown(words[0])}; use dtgpt tokenizer train")
    return TRAIN(words[1:])

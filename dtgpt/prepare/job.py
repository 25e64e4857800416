"""`dtgpt prepare`: text to Megatron-LM's indexed datasets, in as many processes as asked for.

The parent reads and cuts the inputs into blocks, workers parse and encode them, the parent writes the tokens in the
order of the inputs: the files are the same for any number of workers. Files appear under their names when all is done.
"""

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from dtgpt.console import say
from dtgpt.data.indexed import IndexedWriter, bin_path, idx_path, token_dtype
from dtgpt.errors import UserError
from dtgpt.prepare.documents import Broken
from dtgpt.prepare.encode import Encoded, EncodedKey, Encoder
from dtgpt.prepare.inputs import Source, find_sources, read_blocks, total_bytes
from dtgpt.prepare.pool import ordered_map
from dtgpt.prepare.progress import Progress
from dtgpt.tokenizers.vocabulary import Vocabulary, load_vocabulary

OnOff = Literal["on", "off"]
SHOWN = 20  # broken lines that are named one by one


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    input: tuple[str, ...] = ()  # paths, globs, or - for standard input
    json_keys: tuple[str, ...] = ("text",)
    merge: tuple[str, ...] = ()  # prefixes of datasets to join, instead of inputs
    output_prefix: Annotated[str, "the dataset becomes PREFIX_KEY_document.bin and .idx"] = ""
    tokenizer: Annotated[
        str, "gpt2, bytes, an encoding of tiktoken, or a file: tokenizer.json, a SentencePiece .model, a trained one"
    ] = "gpt2"
    tokenizer_type: Annotated[
        Literal[
            "auto", "GPT2BPETokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
        ],
        "Megatron-LM's name for a kind; auto, which is enough: as the tokenizer's file says",
    ] = "auto"  # fmt: skip
    vocab_file: Annotated[str | None, "vocab.json of a BPE like GPT-2's, with --merge-file"] = None
    merge_file: Annotated[str | None, "merges.txt, with --vocab-file"] = None
    append_eod: Annotated[OnOff, "close each document with the tokenizer's end of text"] = "off"
    prepend_bos: Annotated[OnOff, "open each text with the tokenizer's begin of text"] = "off"
    encode_special: Annotated[OnOff, "a special token's name in a text, as <|endoftext|>, stands for it"] = "off"
    workers: Annotated[int, "processes that encode; 0: one for each core"] = 0
    input_format: Annotated[Literal["auto", "jsonl", "csv", "txt"], "auto: by suffix; jsonl on standard input"] = "auto"
    txt: Annotated[Literal["file", "line"], "what one document of a text is; empty lines are none"] = "file"
    strict: Annotated[OnOff, "stop at the first broken line instead of leaving it out"] = "off"
    overwrite: Annotated[OnOff, "replace a dataset of this name"] = "off"
    log_interval: Annotated[int, "documents between lines of progress; 0: by time"] = 0

    def validate(self) -> None:
        """Raises UserError for what needs no file to be seen."""
        if not self.output_prefix or self.output_prefix.endswith("/"):
            raise UserError("the dataset needs a name; give --output-prefix, as in --output-prefix data/mine")
        if bool(self.input) == bool(self.merge):
            raise UserError("give either inputs, such as *.jsonl, or --merge with the prefixes of datasets to join")
        if not self.json_keys or len(set(self.json_keys)) < len(self.json_keys):
            raise UserError(f"--json-keys {' '.join(self.json_keys)}: give each key once, such as --json-keys text")
        if self.tokenizer_type not in ("auto", "GPT2BPETokenizer") and (self.tokenizer == "gpt2" or self.vocab_file):
            raise UserError(f"--tokenizer-type {self.tokenizer_type} needs a file; give it as --tokenizer-model")
        if not 0 <= self.workers <= 1024:
            raise UserError(f"--workers {self.workers} is no number of processes; give 1 to 1024, or 0 for all cores")


@dataclass
class Summary:
    """What was prepared. `text_tokens` are those of text, without ends of documents; `longest` document in tokens;
    `empty` documents have no token; `broken` lines were left out. `files` by their prefixes."""

    files: list[Path] = field(default_factory=list)
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_tokens: int = 0
    text_bytes: int = 0
    longest: int = 0
    empty: int = 0
    broken: int = 0
    seconds: float = 0.0

    def add(self, block: Encoded) -> None:
        for name in ("documents", "text_tokens", "text_bytes", "empty"):
            setattr(self, name, getattr(self, name) + getattr(block, name))
        self.longest = max(self.longest, block.longest)
        self.broken += len(block.broken)
        for encoded in block.keys.values():
            self.sequences += len(encoded.lengths)
            self.tokens += len(encoded.tokens)

    def __str__(self) -> str:
        rate = self.text_bytes / 1e6 / max(self.seconds, 1e-9)
        return (
            f"{', '.join(map(str, self.files))}: {self.documents:,} documents ({self.empty:,} empty, {self.broken:,} "
            f"broken lines left out), {self.tokens:,} tokens, {self.text_bytes / max(self.text_tokens, 1):.2f} bytes "
            f"per token, longest document {self.longest:,} tokens; {self.seconds:.1f} s, {rate:.1f} MB/s"
        )


def prepare(config: PrepareConfig) -> Summary:
    """Encode `config.input` into `<output_prefix>_<key>_document.bin` and `.idx`.

    Broken lines are warned of and left out. Raises UserError where an input cannot be read, a broken line is met under
    `strict`, nothing is left to write, the dataset exists or the disk is full; then nothing is left behind.
    """
    config.validate()
    started = time.monotonic()
    sources = find_sources(list(config.input), config.input_format, config.txt)
    if len(config.json_keys) > 1 and any(source.kind in ("txt", "lines") for source in sources):
        raise UserError(f"a text has no keys {' '.join(config.json_keys)}; give one, as in --json-keys text")
    vocabulary = load_vocabulary(config.tokenizer, config.vocab_file, config.merge_file)
    encoder = make_encoder(config, vocabulary)
    prefixes = {key: Path(f"{config.output_prefix}_{key}_document") for key in config.json_keys}
    for prefix in prefixes.values():
        check_target(prefix, config.overwrite == "on")
    summary = Summary(list(prefixes.values()))
    with ExitStack() as stack:
        encoded = stack.enter_context(ordered_map(encoder, config.workers or _cores()))
        progress = stack.enter_context(Progress(total_bytes(sources), config.log_interval))
        writers = {key: stack.enter_context(IndexedWriter(prefix, encoder.dtype)) for key, prefix in prefixes.items()}
        for block in encoded(read_blocks(sources, config.json_keys)):
            _report(block.broken, summary.broken, config.strict == "on")
            for key, writer in writers.items():
                _write(writer, block.keys[key])
            summary.add(block)
            progress.update(summary.documents, summary.text_bytes, block.position)
        _check_any(summary, sources)
    summary.seconds = time.monotonic() - started
    return summary


def make_encoder(config: PrepareConfig, vocabulary: Vocabulary) -> Encoder:
    """Raises UserError where the tokenizer lacks a token that is asked for."""
    ids = {}
    for option, name, value in (
        (config.append_eod, "append-eod", vocabulary.end_of_text),
        (config.prepend_bos, "prepend-bos", vocabulary.begin_of_text),
    ):
        if option == "on" and value is None:
            kind = "end" if name == "append-eod" else "begin"
            raise UserError(f"the tokenizer {vocabulary.name} names no {kind} of text; leave --{name} out")
        ids[name] = value if option == "on" else None
    return Encoder(
        vocabulary,
        config.json_keys,
        token_dtype(vocabulary.vocab_size),
        ids["append-eod"],
        ids["prepend-bos"],
        config.encode_special == "on",
    )


def check_target(prefix: Path, overwrite: bool) -> None:
    """A dataset is not replaced by mistake. Raises UserError."""
    existing = [path for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
    if existing and not overwrite:
        raise UserError(f"{existing[0]} exists already; give another --output-prefix, or add --overwrite to replace it")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write(writer: IndexedWriter, encoded: EncodedKey) -> None:
    sequences = np.concatenate([[0], np.cumsum(encoded.counts)])
    tokens = np.concatenate([[0], np.cumsum(encoded.lengths, dtype=np.int64)])[sequences].tolist()
    for document, (first, last) in enumerate(pairwise(sequences.tolist())):
        if last > first:
            writer.extend(encoded.tokens[tokens[document] : tokens[document + 1]], encoded.lengths[first:last])
        writer.end_document()


def _report(broken: list[Broken], before: int, strict: bool) -> None:
    """Warn of lines that were left out, the first ones by name; `before`: how many there were already."""
    if broken and strict:
        raise UserError(f"{broken[0]}; nothing was written: mend the line, or drop --strict to leave such lines out")
    for number, line in enumerate(broken, before + 1):
        if number <= SHOWN:
            say(f"{line}; it is left out", warning=True)
        elif number == SHOWN + 1:
            say("more broken lines follow; they are counted", warning=True)


def _check_any(summary: Summary, sources: list[Source]) -> None:
    if summary.tokens:
        return
    names = sources[0].name + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")
    if summary.broken:
        what = f"holds no document that can be read, but {summary.broken} broken lines"
    else:
        what = f"holds no text, only {summary.documents} empty documents" if summary.documents else "is empty"
    raise UserError(f"{names} {what}, so nothing was written; check the input, --json-keys and --input-format")

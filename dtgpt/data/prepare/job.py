"""`dtgpt prepare`: text to Megatron-LM's indexed datasets, in as many processes as asked for.

The parent reads and cuts the inputs into blocks, workers parse and encode them, the parent writes the tokens in the
order of the inputs: the files are the same for any number of workers. Files appear under their names when all is done.
"""

import glob
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from dtgpt.data.library_tokenizers.base import warn_of_split_names
from dtgpt.data.megatron.indexed import IndexedWriter, merge
from dtgpt.data.megatron.paths import idx_path, tokenizer_path
from dtgpt.data.megatron.tokenizer_beside import tokenizer_beside
from dtgpt.data.prepare.config import PrepareConfig
from dtgpt.data.prepare.documents import InputFile
from dtgpt.data.prepare.encode import Encoded, Encoder, MessageFormat, dtype_of, quicken
from dtgpt.data.prepare.inputs import check_keys, find_sources, read_blocks, total_bytes
from dtgpt.data.prepare.pool import ordered_map
from dtgpt.data.prepare.progress import BrokenLines, Progress
from dtgpt.data.prepare.target import check_list, check_not_read, check_target, is_same, lock_prefix, open_list
from dtgpt.data.text import BLOCK, Broken
from dtgpt.data.tokenizers.open import open_tokenizer, tokenizer_file
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.util import seams
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError, shown_name
from dtgpt.util.rules import Given, Is, Missing, Rule, Rules, check_rules
from dtgpt.util.shared.environment import usable_cores

MOST_NAMED = 20  # keys that nothing used
SHARE = 1 << 27  # bytes of inputs that fastokens encodes in less time than a worker of its own takes to start

# What a type of Megatron-LM reads, other than the two files of GPT2BPETokenizer.
SUFFIXES = {
    "HuggingFaceTokenizer": "tokenizer.json",
    "SentencePieceTokenizer": "SentencePiece .model",
    "GPTSentencePieceTokenizer": "SentencePiece .model",
    "Llama2Tokenizer": "SentencePiece .model",
}


TYPE_RULES: Rules = (
    Rule(
        "--tokenizer-type {tokenizer_type} needs a {wanted} on this machine, which {given} is not; give it as "
        "--tokenizer-model (nothing is fetched from the hub), or leave --tokenizer-type out",
        Given("wanted"),
        Missing("fits"),
    ),
    Rule(
        "--tokenizer-type {tokenizer_type} needs --vocab-file and --merge-file, not {given}; leave --tokenizer-type "
        "out",
        Is("tokenizer_type", "==", "GPT2BPETokenizer"),
        Missing("vocab_file"),
        Is("tokenizer", "!=", "gpt2"),
    ),
)


@dataclass(kw_only=True)
class Summary:
    """What was prepared: prefixes of the files, and counts as in `Encoded`. `broken` lines were left out."""

    files: list[Path]
    documents: int = 0
    empty: int = 0
    longest: int = 0
    text_bytes: int = 0
    text_tokens: int = 0
    split: Counter[str] = field(default_factory=Counter)
    sequences: int = 0
    tokens: int = 0
    broken: int = 0
    counted: int = 0  # tokens of chats whose loss counts
    uncounted: int = 0
    thoughts: Counter[bool] = field(default_factory=Counter)
    unused: set[str] = field(default_factory=set)
    seconds: float = 0.0
    fast: bool = False  # whether fastokens encoded

    def add(self, block: Encoded) -> None:
        for name in ("documents", "empty", "text_bytes", "text_tokens", "uncounted", "thoughts"):
            setattr(self, name, getattr(self, name) + getattr(block, name))
        self.split += block.split
        self.unused |= block.unused
        self.longest = max(self.longest, block.longest)
        self.sequences += sum(len(encoded.lengths) for encoded in block.keys.values())
        self.tokens += sum(len(encoded.tokens) for encoded in block.keys.values())
        self.broken += len(block.broken)
        weights = (encoded.weights for encoded in block.keys.values())
        self.counted += sum(int(each.sum()) for each in weights if each is not None)

    def __str__(self) -> str:
        rate = self.text_bytes / 1e6 / max(self.seconds, 1e-9)
        marked = f"the loss counts {self.counted:,} of them, " if self.counted else ""
        without = f", {self.uncounted:,} in which nothing counts left out" if self.uncounted else ""
        return (
            f"{', '.join(map(str, self.files))}: {counted(self.documents, 'document')} ({self.empty:,} empty, "
            f"{counted(self.broken, 'broken line')} left out{without}), {counted(self.tokens, 'token')}, {marked}"
            f"{self.text_bytes / max(self.text_tokens, 1):.2f} bytes per token, longest document "
            f"{counted(self.longest, 'token')}; {self.seconds:.1f} s, {rate:.1f} MB/s"
            f"{' by fastokens' if self.fast else ''}"
        )


def prepare(config: PrepareConfig) -> Summary:
    """Encode `config.input` into `<output_prefix>_<key>_document.bin` and `.idx`, with their tokenizer.

    Broken lines are reported and left out. Raises UserError if an input cannot be read, a line is broken under
    `strict`, nothing is left to write, the dataset or the list of broken lines exists, another process writes it or
    the disk is full; then no files are left.
    """
    config.validate()
    if config.merge:
        raise UserError("prepare takes inputs; datasets are joined by join_datasets")
    started = time.monotonic()
    overwrite = config.overwrite
    sources = find_sources(list(config.input), config.input_format, config.txt)
    check_keys(sources, config.json_keys)
    listed = None if config.broken is None else Path(config.broken)
    messages = message_format(config.messages)
    keys = config.json_keys if messages is None else (messages.key,)
    text = next((source for source in sources if source.kind in ("txt", "lines")), None)
    if messages is not None and text is not None:
        raise UserError(f"{text.name} is a text, and --{config.messages} takes JSON lines or Parquet; give these")
    if listed is not None:
        others = config.tokenizer, config.vocab_file, config.merge_file, config.chat_template
        check_not_read(listed, "--broken", [*(source.path for source in sources), *others])
    prefixes = {key: Path(f"{config.output_prefix}_{key}_document") for key in keys}
    summary = Summary(files=list(prefixes.values()))
    with ExitStack() as stack:
        for prefix in prefixes.values():
            stack.enter_context(lock_prefix(prefix))
        for prefix in prefixes.values():  # after what a killed process left is removed or put in place
            check_target(prefix, overwrite)
        if listed is not None:
            check_list(listed, overwrite, prefixes.values())
        vocabulary = vocabulary_of(config)
        encoder = (make_encoder if messages is None else messages.encoder)(config, vocabulary)
        blocks, size = read_blocks(sources, keys if messages is None else ()), total_bytes(sources)
        if messages is None:
            encoder, blocks = quicken(encoder, blocks, size)
        else:
            encoder, blocks = messages.quicken(encoder, blocks, size)
        summary.fast = encoder.fast is not None
        workers = config.workers or most_workers(size, SHARE if summary.fast and messages is None else BLOCK)
        encoded = stack.enter_context(ordered_map(encoder, workers))
        progress = Progress(size, config.log_interval)
        stack.callback(progress.clear)
        stored = encoder.dtype, encoder.vocabulary.dumps(), messages is not None
        writers = {key: stack.enter_context(IndexedWriter(prefix, *stored)) for key, prefix in prefixes.items()}
        file = None if listed is None else stack.enter_context(open_list(listed))
        broken = BrokenLines(file, config.strict, progress)
        for block in encoded(blocks):
            broken.add(block.broken)
            for key, writer in writers.items():
                encoded_key = block.keys[key]
                writer.extend(encoded_key.tokens, encoded_key.lengths, encoded_key.counts, encoded_key.weights)
            summary.add(block)
            progress.update(summary.documents, summary.text_bytes, block.position)
        broken.summarise()
        _check_any(summary, sources, broken.first)
        progress.clear()
        spoken = encoder.vocabulary.names_special
        remedy = "give --encode-special" if spoken else "prepare them with a tokenizer.json and --encode-special"
        warn_of_split_names(summary.split, encoder.vocabulary, f"{remedy} where they mean these tokens")
        tell_fields(summary)
        for writer in writers.values():
            writer.seal()
    summary.seconds = time.monotonic() - started
    return summary


def join_datasets(config: PrepareConfig) -> tuple[Path, int]:
    """Write the datasets `config.merge`, prefixes or globs of them, one after another as `<output_prefix>.bin` and
    `.idx`; return that prefix and their number. Globs do not find the output. Raises UserError if one is missing,
    damaged or the output, or their token types differ; then no files are left."""
    config.validate()
    target = Path(config.output_prefix)
    prefixes = [prefix for pattern in config.merge for prefix in _datasets(pattern, target)]
    with lock_prefix(target):
        check_target(target, config.overwrite)
        merge(prefixes, target, _common_tokenizer(prefixes))
    return target, len(prefixes)


def _common_tokenizer(prefixes: list[str]) -> str | None:
    """Return the tokenizer of all datasets, None if one of them is saved without. Raises UserError if they differ."""
    found = tokenizer_beside(prefixes)
    without = [prefix for prefix in prefixes if not tokenizer_path(prefix).exists()]
    if found and without:
        say(f"{without[0]} is saved without its tokenizer, so the joined dataset is, too", warning=True)
    return found[1].dumps() if found and not without else None


def _datasets(pattern: str, target: Path) -> list[str]:
    """Return the prefixes that a prefix, one of its files or a glob of these means; of a glob, all but `target`."""
    prefix = _without_suffix(pattern)
    if not glob.has_magic(pattern) or idx_path(prefix).exists():
        if is_same(idx_path(prefix), idx_path(target)):
            raise UserError(f"--merge {pattern} is the output itself; leave it out, or give another --output-prefix")
        return [prefix]
    found = sorted({_without_suffix(name) for name in glob.glob(pattern) + glob.glob(f"{pattern}.idx")})
    own = idx_path(target)
    found = [prefix for prefix in found if idx_path(prefix).is_file() and not is_same(idx_path(prefix), own)]
    if not found:
        raise UserError(f"no dataset matches --merge {pattern} beside the output; check the pattern and the folder")
    return found


def _without_suffix(name: str) -> str:
    return name.removesuffix(".bin").removesuffix(".idx")


def vocabulary_of(config: PrepareConfig) -> Tokenizer:
    """Return the tokenizer that is asked for. Raises UserError if it is not of the type that is named."""
    kind = config.tokenizer_type
    given = config.vocab_file or config.tokenizer
    path = Path(given)
    path = (tokenizer_file(path) or path / "tokenizer.json") if path.is_dir() else path
    wanted = SUFFIXES.get(kind)
    fits = path.is_file() and config.vocab_file is None and (path.suffix == ".json") == (wanted == "tokenizer.json")
    check_rules(TYPE_RULES, config, wanted=wanted, fits=fits, given=given)
    named = config.tokenizer if wanted is None else str(path)  # the type says what opens a text, and not the folder
    vocabulary = open_tokenizer(named, config.vocab_file, config.merge_file, begin=kind == "Llama2Tokenizer")
    if kind == "Llama2Tokenizer" and vocabulary.begin_of_text is None:
        raise UserError(f"{given} has no begin of text; use --tokenizer-type SentencePieceTokenizer")
    return vocabulary


def message_format(option: str) -> MessageFormat | None:
    """Return what encodes lines of messages, by the option that asks for it; None where none does. Raise UserError
    where nothing here does what the option asks for."""
    if not option:
        return None
    if (part := seams.added("encoders").get(option)) is None:
        raise UserError(f"--{option} needs a capability that dtgpt does not have here; leave it out")
    return seams.load(part)


def tell_fields(summary: Summary) -> None:
    """Say which fields of chats did not get into any text."""
    if lost := summary.thoughts[False]:
        say(
            f"in {lost:,} of {counted(summary.thoughts.total(), 'answer')} the template leaves out the thought; a "
            "model learns to answer without it (--chat-template FILE for a template that keeps it)",
            warning=True,
        )
    if summary.unused:
        names = sorted(summary.unused)
        more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
        say(f"nothing used these keys: {', '.join(map(shown_name, names[:MOST_NAMED]))}{more}")


def make_encoder(config: PrepareConfig, vocabulary: Tokenizer) -> Encoder:
    """Return the encoder that the options ask for. Raises UserError if the tokenizer lacks a token for it."""
    end, begin = vocabulary.end_of_text, vocabulary.begin_of_text
    for asked, found, option in ((config.append_eod, end, "append-eod"), (config.prepend_bos, begin, "prepend-bos")):
        if asked and found is None:
            raise UserError(f"the tokenizer {vocabulary.name} does not have the token of --{option}; leave it out")
    end = end if config.append_eod else None
    if not config.prepend_bos or vocabulary.encode("")[:1] == [begin]:  # the tokenizer itself opens texts with it
        begin = None
    return Encoder(vocabulary, config.json_keys, dtype_of(vocabulary), end, begin, config.encode_special)


def most_workers(size: int | None, share: int) -> int:
    """Return the number of cores; less for inputs of `size` bytes, of which `share` are encoded before others start."""
    cores = usable_cores()
    return cores if size is None else min(cores, 1 + size // share)


def _check_any(summary: Summary, sources: list[InputFile], first: Broken | None) -> None:
    if summary.tokens:
        return
    names = sources[0].name + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")
    if first is not None:
        what = f"holds no document that can be read, but {counted(summary.broken, 'broken line')} ({first})"
    elif summary.uncounted:
        what = f"holds no chat in which anything counts: all answers of {counted(summary.uncounted, 'chat')} are marked"
        what += " to be kept out of the loss"
    else:
        empty = f"holds no text, only {counted(summary.documents, 'empty document')}"
        what = empty if summary.documents else "is empty"
    raise UserError(f"{names} {what}, so nothing was written; check the input, --json-keys and --input-format")

"""The options of `dtgpt prepare`, for a command line and for Python."""

import os
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from dtgpt.data.tokenizers.open import check_named_once
from dtgpt.util.field_types import Bounds, check_fields
from dtgpt.util.rules import Changed, Given, Missing, Rule, Rules, check_rules

NOT_FOR_MESSAGES = ("append_eod", "encode_special", "json_keys", "prepend_bos", "txt")
NOT_FOR_MERGE = (
    "append_eod",
    "broken",
    "chat",
    "chat_keys",
    "chat_loss",
    "chat_template",
    "encode_special",
    "input",
    "input_format",
    "json_keys",
    "log_interval",
    "merge_file",
    "preferences",
    "prepend_bos",
    "strict",
    "tokenizer",
    "tokenizer_type",
    "txt",
    "vocab_file",
    "workers",
)


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """In Python, a list or a single value may stand for a tuple, and any path for a text."""

    input: Annotated[tuple[str, ...], "inputs, in addition to INPUT"] = ()
    json_keys: Annotated[tuple[str, ...], "JSON keys; each becomes a dataset"] = ("text",)
    merge: Annotated[
        tuple[str, ...], "datasets, or globs, to join in this order into PREFIX.bin and .idx, instead of reading inputs"
    ] = ()
    output_prefix: Annotated[str, "prefix of the files to write, PREFIX_KEY_document.bin and .idx"] = ""
    tokenizer: Annotated[
        str,
        "gpt2, bytes, a tiktoken encoding, or a file: tokenizer.json, SentencePiece .model, one by dtgpt tokenizer",
    ] = "gpt2"
    tokenizer_type: Annotated[
        Literal[
            "auto",
            "GPT2BPETokenizer",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
        ],
        "Megatron-LM's name of the tokenizer's type; auto: by its file; Llama2Tokenizer adds a begin-of-text token",
    ] = "auto"
    vocab_file: Annotated[str | None, "vocab.json of a BPE like GPT-2's, with --merge-file"] = None
    merge_file: Annotated[str | None, "merges.txt, with --vocab-file"] = None
    append_eod: Annotated[bool, "append the end-of-text token to each document"] = False
    prepend_bos: Annotated[bool, "prepend the begin-of-text token to each text"] = False
    encode_special: Annotated[bool, "encode <|endoftext|> and other special tokens' names as these tokens"] = False
    chat: Annotated[
        bool,
        "inputs are chats: messages, ShareGPT's conversations, prompt and completion, or Alpaca's instruction, input "
        "and output; rendered by the tokenizer's chat template into PREFIX_chat_document",
    ] = False
    preferences: Annotated[
        bool,
        "inputs are pairs of answers: chosen and rejected, with or without a prompt, as texts or messages; rendered by "
        "the tokenizer's chat template into PREFIX_preference_document, for --dpo.beta",
    ] = False
    chat_loss: Annotated[Literal["assistant", "all"], "with --chat: tokens whose loss counts"] = "assistant"
    chat_keys: Annotated[
        tuple[str, ...],
        "with --chat or --preferences: other names of keys and roles, NAME=KEY, such as messages=dialog user=human",
    ] = ()
    chat_template: Annotated[
        str | None, "with --chat or --preferences: file of a template, instead of the tokenizer's own"
    ] = None
    workers: Annotated[
        int, "number of encoding processes; 0: one for each core, fewer for small inputs", Bounds(0, 1024)
    ] = 0
    input_format: Annotated[Literal["auto", "jsonl", "parquet", "txt"], "auto: by suffix; jsonl on standard input"] = (
        "auto"
    )
    txt: Annotated[Literal["file", "line"], "what a document of a .txt is; empty lines are skipped"] = "file"
    strict: Annotated[bool, "stop at the first broken line instead of skipping it"] = False
    broken: Annotated[str | None, "file to list all broken lines in, as JSON: source, line, reason"] = None
    overwrite: Annotated[bool, "replace an existing dataset"] = False
    log_interval: Annotated[int, "number of documents between progress lines; 0: by time", Bounds(0)] = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, tuple) and isinstance(value, str | os.PathLike):
                value = (value,)
            texts = tuple(map(_as_text, value)) if isinstance(value, list | tuple) else _as_text(value)
            object.__setattr__(self, field.name, texts)

    @property
    def messages(self) -> str:
        """The option by which inputs are messages, which a chat template renders; none: they are texts."""
        return "preferences" if self.preferences else "chat" if self.chat else ""

    def validate(self) -> None:
        """Raise UserError for what is wrong without a look at files."""
        check_fields(self)
        check_rules(self.whole_rules, self)
        check_named_once(self.tokenizer, self.vocab_file, self.merge_file)

    # Not `rules`, which a command checks before it has the inputs among the words.
    whole_rules: ClassVar[Rules] = (
        Rule("the dataset needs a name; give --output-prefix, as in --output-prefix data/mine", Missing("is_named")),
        Rule(
            "give either inputs, such as *.jsonl, or --merge with the prefixes of datasets to join",
            Missing("has_one_source"),
        ),
        Rule(
            "--{option} has no effect with --merge, which joins datasets as they are; leave it out",
            Changed(*NOT_FOR_MERGE),
            Given("merges"),
        ),
        Rule("--chat and --preferences name different inputs; leave one out", Given("chat"), Given("preferences")),
        Rule(
            "--{option} cannot be combined with --{messages}, whose template says what is written; leave it out",
            Changed(*NOT_FOR_MESSAGES),
            Given("messages"),
        ),
        Rule(
            "--{option} cannot be combined with --preferences, whose template says what is written; leave it out",
            Changed("chat_loss"),
            Given("preferences"),
        ),
        Rule(
            "--{option} needs --chat; leave it out",
            Changed("chat_keys", "chat_loss", "chat_template"),
            Missing("messages"),
        ),
        Rule("--json-keys {all_keys}: give each key once, such as --json-keys text", Missing("has_distinct_keys")),
    )

    @property
    def is_named(self) -> bool:
        return bool(self.output_prefix) and not self.output_prefix.endswith("/")

    @property
    def has_one_source(self) -> bool:
        """Whether either inputs or datasets to join are given, and not both."""
        return bool(self.input) != bool(self.merge)

    @property
    def merges(self) -> bool:
        return bool(self.merge)

    @property
    def has_distinct_keys(self) -> bool:
        return 0 < len(self.json_keys) == len(set(self.json_keys))

    @property
    def all_keys(self) -> str:
        return " ".join(self.json_keys)


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value

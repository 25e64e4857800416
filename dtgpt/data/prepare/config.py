"""The options of `dtgpt prepare`, for a command line and for Python."""

import os
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from dtgpt.data.tokenizers.open import check_named_once
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds, changed_fields, check_fields

OF_MERGE = {"merge", "output_prefix", "overwrite"}  # the options for joining datasets

NOT_FOR_CHATS = {"json_keys", "append_eod", "prepend_bos", "encode_special", "txt"}


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
            "auto", "GPT2BPETokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
        ],
        "Megatron-LM's name of the tokenizer's type; auto: by its file; Llama2Tokenizer adds a begin-of-text token",
    ] = "auto"  # fmt: skip
    vocab_file: Annotated[str | None, "vocab.json of a BPE like GPT-2's, with --merge-file"] = None
    merge_file: Annotated[str | None, "merges.txt, with --vocab-file"] = None
    append_eod: Annotated[bool, "append the end-of-text token to each document"] = False
    prepend_bos: Annotated[bool, "prepend the begin-of-text token to each text"] = False
    encode_special: Annotated[bool, "encode <|endoftext|> and other special tokens' names as these tokens"] = False
    chat: Annotated[
        bool,
        "inputs are chats: messages, ShareGPT's conversations, or prompt and completion; rendered by the tokenizer's "
        "chat template into PREFIX_chat_document",
    ] = False
    preferences: Annotated[
        bool,
        "inputs are pairs of answers: chosen and rejected, with or without a prompt, as texts or messages; rendered by "
        "the tokenizer's chat template into PREFIX_preference_document, for --dpo.beta",
    ] = False
    chat_loss: Annotated[Literal["assistant", "all"], "with --chat: tokens whose loss counts"] = "assistant"
    chat_template: Annotated[
        str | None, "with --chat or --preferences: file of a template, instead of the tokenizer's own"
    ] = None
    workers: Annotated[int, "number of encoding processes; 0: one for each core", Bounds(0, 1024)] = 0
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
        if not self.output_prefix or self.output_prefix.endswith("/"):
            raise UserError("the dataset needs a name; give --output-prefix, as in --output-prefix data/mine")
        if bool(self.input) == bool(self.merge):
            raise UserError("give either inputs, such as *.jsonl, or --merge with the prefixes of datasets to join")
        if self.merge and (unused := changed_fields(self) - OF_MERGE):
            name = min(unused).replace("_", "-")
            raise UserError(f"--{name} has no effect with --merge, which joins datasets as they are; leave it out")
        if self.chat and self.preferences:
            raise UserError("--chat and --preferences name different inputs; leave one out")
        if self.messages:
            wrong = changed_fields(self) & (NOT_FOR_CHATS if self.chat else NOT_FOR_CHATS | {"chat_loss"})
        else:
            wrong = changed_fields(self) & {"chat_loss", "chat_template"}
        if wrong:
            name, asked = min(wrong).replace("_", "-"), "--chat" if self.chat else "--preferences"
            why = f"cannot be combined with {asked}, whose template says what is written"
            raise UserError(f"--{name} {why if self.messages else 'needs --chat'}; leave it out")
        if not self.json_keys or len(set(self.json_keys)) < len(self.json_keys):
            raise UserError(f"--json-keys {' '.join(self.json_keys)}: give each key once, such as --json-keys text")
        check_named_once(self.tokenizer, self.vocab_file, self.merge_file)


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value

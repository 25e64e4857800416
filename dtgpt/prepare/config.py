"""What `dtgpt prepare` can be asked for, from a command line or from Python."""

import os
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from dtgpt.errors import UserError, shown
from dtgpt.tokenizers.open import check_named_once

OnOff = Literal["on", "off"]
OF_MERGE = ("merge", "output_prefix", "overwrite")  # what joining datasets takes
TYPES = {str: "a text", int: "a whole number", tuple[str, ...]: "a text or a list of texts"}


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """From Python True and False do for "on" and "off", a list or a single value for a tuple, and any path for a text.
    `validate` raises UserError for what needs no file to be seen."""

    input: Annotated[tuple[str, ...], "inputs, as INPUT before the options"] = ()
    json_keys: Annotated[tuple[str, ...], "keys of the objects, or columns of a .csv; each makes a dataset"] = ("text",)
    merge: Annotated[
        tuple[str, ...], "datasets, or globs of them, to join in this order into PREFIX.bin and .idx, instead of inputs"
    ] = ()
    output_prefix: Annotated[str, "the dataset becomes PREFIX_KEY_document.bin and .idx"] = ""
    tokenizer: Annotated[
        str, "gpt2, bytes, an encoding of tiktoken, or a file: tokenizer.json, a SentencePiece .model, a trained one"
    ] = "gpt2"
    tokenizer_type: Annotated[
        Literal[
            "auto", "GPT2BPETokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
        ],
        "Megatron-LM's name for a kind; auto: as the tokenizer's file says; Llama2Tokenizer opens texts with a begin",
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
    broken: Annotated[str | None, "a file that lists all broken lines, as JSON: source, line, reason"] = None
    overwrite: Annotated[OnOff, "replace a dataset of this name"] = "off"
    log_interval: Annotated[int, "documents between lines of progress; 0: by time"] = 0

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            object.__setattr__(self, name, _as_declared(getattr(self, name), hint))

    def validate(self) -> None:
        _check_types(self)
        if not self.output_prefix or self.output_prefix.endswith("/"):
            raise UserError("the dataset needs a name; give --output-prefix, as in --output-prefix data/mine")
        if bool(self.input) == bool(self.merge):
            raise UserError("give either inputs, such as *.jsonl, or --merge with the prefixes of datasets to join")
        if self.merge:
            _check_merge(self)
        if not self.json_keys or len(set(self.json_keys)) < len(self.json_keys):
            raise UserError(f"--json-keys {' '.join(self.json_keys)}: give each key once, such as --json-keys text")
        check_named_once(self.tokenizer, self.vocab_file, self.merge_file)
        if not 0 <= self.workers <= 1024:
            raise UserError(f"--workers {self.workers} is no number of processes; give 1 to 1024, or 0 for all cores")
        if self.log_interval < 0:
            raise UserError(f"--log-interval {self.log_interval} is negative; give documents, or 0 for lines by time")


def _as_declared(value: Any, hint: Any) -> Any:
    if hint == OnOff and isinstance(value, bool):
        return "on" if value else "off"
    if hint == tuple[str, ...]:
        values = [value] if isinstance(value, str | os.PathLike) else value
        return tuple(map(_as_text, values)) if isinstance(values, list | tuple) else value
    return _as_text(value)


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_types(config: PrepareConfig) -> None:
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                raise UserError(f"{name}={shown(value)} is none of {', '.join(get_args(hint))}")
            continue
        wanted = hint if hint in TYPES else str  # the others may be None as well
        if value is None and wanted is not hint:
            continue
        if wanted == tuple[str, ...]:
            right = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        else:
            right = isinstance(value, wanted) and not isinstance(value, bool)
        if not right:
            raise UserError(f"{name}={shown(value)} is of a wrong type; give {TYPES[wanted]}")


def _check_merge(config: PrepareConfig) -> None:
    """Nothing is taken that would be ignored."""
    for field in fields(config):
        if field.name not in OF_MERGE and getattr(config, field.name) != field.default:
            raise UserError(
                f"--{field.name.replace('_', '-')} has no meaning with --merge, which joins datasets as they are; "
                "leave it out"
            )

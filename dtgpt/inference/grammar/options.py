"""The options of a prompt whose text keeps to a grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from dtgpt.inference.base_options import BaseOptions, Values
from dtgpt.ops.sampling.sequences import Variant
from dtgpt.util.errors import UserError, shown
from dtgpt.util.rules import Given, Rule, Rules, check_rules
from dtgpt.util.storage import read_json

if TYPE_CHECKING:
    from dtgpt.inference.grammar.engine import Guide

ALONE: Rules = tuple(
    Rule(f"json_schema ends a text where its JSON ends; leave {name} out", Given("json_schema"), Given(name))
    for name in ("min_new_tokens", "no_repeat_ngram_size")
)


def read_schema(value: Any) -> Any:
    """Return a schema as JSON, in which the order of properties is that of the text."""
    return json.dumps(value) if isinstance(value, Mapping) else value


def check_schema(name: str, schema: Any, vocab_size: int) -> None:
    """Raise UserError for what is no schema. What a schema may say, the guide checks."""
    try:
        known = schema == "" or isinstance(json.loads(schema), dict)
    except (TypeError, ValueError, RecursionError):
        known = False
    if not known:
        raise UserError(f"{name}={shown(schema)} is not a JSON schema; give an object such as {{'type': 'object'}}")


def schema_of_words(option: str, words: Sequence[str]) -> str:
    """Return the schema in the file that is named."""
    if len(words) > 1:
        raise UserError(f"{option} takes one file, and {len(words)} are given; leave the others out")
    return read_schema(read_json(Path(words[0]), "give a JSON schema")) if words else ""


SCHEMA = Values(check_schema, schema_of_words, read_schema, ", as FILE")


@dataclass(frozen=True, kw_only=True)
class GrammarOptions(BaseOptions):
    """The option that is declared, and what only a server sets."""

    headings: ClassVar[dict[str, str]] = {"json_schema": "grammar"}
    json_schema: Annotated[str, "JSON schema that the text keeps to (extra: json)", SCHEMA] = ""
    grammar: str = ""  # in llguidance's form of Lark's, in place of a schema
    # Text in which nothing is guided: up to what this regular expression finds, or from the token of this name on.
    free_until: str = ""
    free_from: str = ""

    def settled(self) -> Self:
        check_rules(ALONE, self)
        return super().settled()

    @property
    def is_guided(self) -> bool:
        """Whether the host says before each step which ids may come."""
        return bool(self.json_schema or self.grammar)

    @property
    def variant(self) -> Variant:
        return super().variant._replace(masks=self.is_guided)

    def check_tokenizer(self, job: Any, tokenizer: Any) -> None:
        super().check_tokenizer(job, tokenizer)
        if self.is_guided:
            self.guide(job, tokenizer)

    def guide(self, job: Any, tokenizer: Any) -> "Guide":
        """Return what guides a sequence of a `PromptJob`. Raise UserError where it cannot."""
        from dtgpt.inference.grammar.guide import GrammarGuide

        return GrammarGuide(job, tokenizer)

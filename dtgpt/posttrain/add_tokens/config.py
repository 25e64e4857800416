"""The option that names the tokens to add, and what it cannot be combined with."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from dtgpt.config.sections import Section
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import PATH, Bounds
from dtgpt.util.rules import Given, Rule, Rules


@dataclass(frozen=True, kw_only=True)
class AddTokensConfig(Section):
    fixed: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {"model.add_tokens": "file"}
    recipe_rules: ClassVar[Rules] = (
        Rule(
            "add_tokens.file={add_tokens.file} adds to a tokenizer of one file, and data.vocab_file="
            "{data.vocab_file} needs two; use --data.tokenizer_file FOLDER, of both",
            Given("add_tokens.file"),
            Given("data.vocab_file"),
        ),
    )

    file: Annotated[
        str | None,
        "file of tokens to add to the tokenizer and to the model (also --model.add_tokens): one a line, or a JSON list "
        'of texts and of {"content": TEXT, "special": true}; model.vocab_size grows with them',
        PATH,
    ] = None
    first: Annotated[int, "id of the first of these tokens; dtgpt sets it", Bounds(0)] = 0
    count: Annotated[int, "number of these tokens; dtgpt sets it", Bounds(0)] = 0

    def check_settings(self, settings: Any) -> None:
        plan = settings.plan
        if self.count and settings.freezes_weights and settings.model.tied and plan.pp > 1:
            raise UserError(
                f"add_tokens.file={self.file} trains rows of a table that the first and the last stage of pp={plan.pp} "
                "share, which adapters leave as it is; use a plan without pp, or --lora.rank 0"
            )

    def changed_beginning(self, begin: Any, resume: Any) -> Any:
        if self.file is None:
            return begin
        return seams.load("dtgpt.posttrain.add_tokens.begin:Grown")(begin, Path(self.file), self.count, resume)

    @property
    def new_ids(self) -> range:
        """The ids of the tokens."""
        return range(self.first, self.first + self.count)

"""The chat template that a folder has beside its tokenizer, and that is kept with the tokenizer. What renders chats by
it is in `posttrain/chats/`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.util.errors import UserError
from dtgpt.util.storage import read_regular

LONGEST = 1 << 20  # bytes of a template
KEY = "chat_template"  # of what a tokenizer keeps


@dataclass(frozen=True)
class ChatTemplate:
    """`source` in Jinja's language; `tokens`: names of special tokens that it may use, such as `bos_token`."""

    source: str
    tokens: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source, "tokens": self.tokens}


def template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template that is kept with a tokenizer; None where there is none. Raises UserError."""
    saved = tokenizer.additions.get(KEY)
    try:
        return None if saved is None else ChatTemplate(saved["source"], saved["tokens"])
    except (KeyError, TypeError):
        raise UserError(f"the chat template of the tokenizer {tokenizer.name} is damaged; make it again") from None


def keep_template(tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
    """Keep a template with a tokenizer, in place of the one that it has; None: keep none."""
    others = {name: value for name, value in tokenizer.additions.items() if name != KEY}
    tokenizer.additions = others if template is None else {**others, KEY: template.to_json()}


def read_template(path: Path) -> str:
    """Return the template in a file. Raises UserError."""
    try:
        return read_regular(path, LONGEST).decode()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give the file of a chat template") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); give the file of a chat template") from None

"""Other names for the keys of chats: of rows and of messages, and for the roles of messages.

`--chat-keys messages=dialog role=speaker user=customer` reads `dialog` as `messages` does, and so on. What comes after
sees the usual names alone, so that every form of chats and of preferences is read under any names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtgpt.posttrain.chats.messages import ROLES
from dtgpt.util.errors import UserError, shown

ROW = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "history",
    "system",
    "chosen",
    "rejected",
    "chat_template_kwargs",
)
MESSAGE = ("role", "content", "from", "value")
LISTS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")  # which may hold messages


@dataclass(frozen=True)
class ChatKeys:
    """`row` and `message`: the usual name by the one in the data; `roles`: likewise of values of the key `role`."""

    row: Mapping[str, str] = field(default_factory=dict)
    message: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)

    def rename(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a row under the usual names."""
        if not (self.row or self.message or self.roles):
            return fields
        found = _renamed(fields, self.row)
        return found | {name: self._messages(found[name]) for name in LISTS if name in found}

    def _messages(self, given: Any) -> Any:
        if not isinstance(given, list):
            return given
        return [self._message(each) if isinstance(each, dict) else each for each in given]

    def _message(self, given: dict[str, Any]) -> dict[str, Any]:
        found = _renamed(given, self.message)
        for name in ("role", "from"):
            if isinstance(role := found.get(name), str) and role in self.roles:
                found = found | {name: self.roles[role]}
        return found


def _renamed(fields: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return fields with other names. What had one of the new names before is hidden by the field that gets it."""
    hidden = {names[name] for name in fields if name in names}
    return {names.get(name, name): value for name, value in fields.items() if name in names or name not in hidden}


def read_keys(words: Sequence[str]) -> ChatKeys:
    """Return the names of the words NAME=KEY of `--chat-keys`. Raises UserError for a word of another form, a name that
    chats do not have, and a name or key that is given twice."""
    keys = ChatKeys({}, {}, {})
    groups: tuple[tuple[Sequence[str], Any], ...] = ((ROW, keys.row), (MESSAGE, keys.message), (ROLES, keys.roles))
    for word in words:
        name, _, key = word.partition("=")
        known = next((given for names, given in groups if name in names), None)
        if known is None or not key:
            choices = "; ".join(", ".join(names) for names, _ in groups)
            raise UserError(
                f"--chat-keys {shown(word)} is not NAME=KEY with the name of a key or role of chats ({choices}); give "
                "such as messages=dialog"
            )
        if name in known.values() or key in known:
            raise UserError(f"--chat-keys {' '.join(words)} gives {name} or {shown(key)} twice; give each once")
        known[key] = name
    return keys

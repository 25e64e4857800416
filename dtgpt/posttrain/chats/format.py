"""Chats in token files, and in JSON lines, of which `dtgpt prepare` makes them, as the core asks for them."""

import os
import shlex
from pathlib import Path

from dtgpt.config.sections import DataConfig
from dtgpt.data.dataset import Dataset
from dtgpt.data.megatron.format import TokenFiles
from dtgpt.data.megatron.paths import has_weights, prefix_of
from dtgpt.data.open import DataFormat, DataRequest
from dtgpt.util.errors import UserError
from dtgpt.util.storage import parse_json

LONGEST = 1 << 24  # bytes of a line that is looked at
KEYS = {  # options of `dtgpt prepare` -> keys of their lines
    "preferences": ({"chosen", "rejected"},),
    "chat": ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"}),
}


class ChatLines(DataFormat):
    def check_text(self, data: DataConfig, path: str, model: Path | None) -> None:
        """Raise UserError, with what makes them data, where the first line of a file is a chat or a pair of answers.
        model: the one that is trained further, which has a tokenizer."""
        if not path.endswith(".jsonl") or not os.path.isfile(path):
            return
        try:
            with open(path, "rb") as file:
                record = parse_json(file.readline(LONGEST))
        except (OSError, ValueError):
            return
        keys = set(record) if isinstance(record, dict) else set()
        kind = next((kind for kind, groups in KEYS.items() if any(group <= keys for group in groups)), None)
        if kind is not None and data.json_key not in keys:
            found = " and ".join(sorted(keys & set().union(*KEYS[kind])))
            prefix, folder = str(Path(path).with_suffix("")), None if model is None else str(model)
            words = [path, f"--{kind}", "--tokenizer", folder or "FOLDER", "--output-prefix", prefix]
            what = "" if folder else ", where FOLDER has the tokenizer and the chat template of a model"
            raise UserError(
                f"data.path={path} has lines with {found}, of which dtgpt prepare makes tokens: dtgpt prepare "
                f"{shlex.join(words)}{what}"
            )


class ChatTokens(TokenFiles):
    """Token files of chats, which have the weights of their tokens beside them."""

    def takes(self, path: str) -> bool:
        return has_weights(prefix_of(path))

    def load(self, data: DataConfig, request: DataRequest) -> Dataset:
        from dtgpt.posttrain.chats.packed import load_chats, open_chats

        return load_chats(data, *open_chats(data, request.vocab_size), request.seq_length, request.seed)


CHAT_LINES, CHAT_TOKENS = ChatLines(), ChatTokens()

"""The tokenizer's files in a folder such as Hugging Face's."""

from pathlib import Path
from typing import Any

from dtgpt.data.library_tokenizers.chat_template import ChatTemplate, read_template
from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import read_json

NAMES = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model", "qwen.tiktoken")  # the first one is taken
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
OPENING = ("llama", "mistral")  # kinds of models whose texts open with a begin of text


def tokenizer_file(folder: Path) -> Path | None:
    """Return the file in `folder` that holds a tokenizer; None where there is none. `vocab.json` counts with
    `merges.txt` only."""
    there = [name for name in NAMES if (folder / name).is_file()]
    if not (folder / "merges.txt").is_file():
        there = [name for name in there if name != "vocab.json"]
    return folder / there[0] if there else None


def opens_texts(folder: Path) -> bool:
    """Return whether a vocabulary in `folder`, which does not say so itself, puts a begin of text before each text: as
    `add_bos_token` of tokenizer_config.json says, else where the model is one of OPENING."""
    asked = read_settings(folder / "tokenizer_config.json").get("add_bos_token")
    if isinstance(asked, bool):
        return asked
    return read_settings(folder / "config.json").get("model_type") in OPENING


def check_pre_tokenization(folder: Path) -> None:
    """Raise UserError where vocab.json and merges.txt are of a model that does not cut texts as GPT-2 does: these two
    files do not say how."""
    kind = read_settings(folder / "config.json").get("model_type", "gpt2")
    if kind != "gpt2":
        raise UserError(
            f"{folder} has vocab.json and merges.txt of a model_type={shown(kind)}, which do not say how texts are cut "
            "before bytes are merged; add its tokenizer.json, which transformers' AutoTokenizer saves"
        )


def settings_beside(path: Path) -> dict[str, Any]:
    """Return the settings of the tokenizer in the same folder. Of a token that both files name, transformers takes the
    name in special_tokens_map.json, but not where tokenizer_config.json lists the added tokens."""
    settings, names = (read_settings(path.with_name(name)) for name in SETTINGS)
    return settings if "added_tokens_decoder" in settings else settings | names


def end_of_text_beside(path: Path) -> str | None:
    """Return the `eos_token` of the tokenizer in the same folder; None where its settings name none."""
    return special_tokens(settings_beside(path)).get("eos_token")


def template_beside(file: Path) -> ChatTemplate | None:
    """Return the template in the folder of a tokenizer's file, in any form of Hugging Face's; None where there is none.
    Raises UserError where it cannot be read."""
    settings = settings_beside(file)
    source = settings.get("chat_template")
    if (path := file.with_name("chat_template.jinja")).is_file():
        source = read_template(path)
    elif source is None:
        source = read_settings(file.with_name("chat_template.json")).get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    return ChatTemplate(source, special_tokens(settings)) if isinstance(source, str) else None


def special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return the names of special tokens in the settings of a tokenizer, as a template takes them."""
    found = {}
    for name, token in settings.items():
        token = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(token, str):
            found[name] = token
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is none that can be read."""
    try:
        value = read_json(path, advice="")
    except UserError:
        return {}
    return value if isinstance(value, dict) else {}

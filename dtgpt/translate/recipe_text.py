"""Recipe files, as text."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dtgpt.translate.translation import TableRow, Translation
from dtgpt.util.errors import UserError, shown

WIDTH = 120
SECTIONS = {
    "loss_scale": ("dtgpt.optim.fp16.config", "LossScaleConfig"),
    "data": ("dtgpt.config.sections", "DataConfig"),
    "log": ("dtgpt.config.sections", "LogConfig"),
    "checkpoint": ("dtgpt.config.sections", "CheckpointConfig"),
    "balance": ("dtgpt.optim.balance.config", "BalanceConfig"),
}
MODELS = {
    "gpt2": ("dtgpt.models.gpt2", "GPT2Config"),
    "llama": ("dtgpt.models.llama", "LlamaConfig"),
    "gpt_oss": ("dtgpt.models.families.gpt_oss", "GptOssConfig"),
    "mixtral": ("dtgpt.models.families.mixtral", "MixtralConfig"),
    "qwen3_moe": ("dtgpt.models.families.qwen3_moe", "Qwen3MoeConfig"),
    "qwen2_moe": ("dtgpt.models.families.qwen2_moe", "Qwen2MoeConfig"),
    "glm4_moe": ("dtgpt.models.families.glm4_moe", "Glm4MoeConfig"),
}
OPTIMIZERS = {
    "adamw": ("dtgpt.config.sections", "OptimizerConfig"),
    "muon": ("dtgpt.optim.muon", "MuonConfig"),
    "normuon": ("dtgpt.optim.muon", "NorMuonConfig"),
}
FIRST = (
    "name",
    "model",
    "plan",
    "optimizer",
    "steps",
    "train_samples",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "rampup_batch_size",
    "seed",
    "precision",
    "loss_scale",
    "attention",
    "recompute",
    "recompute_blocks",
    "graph",
)
LAST = ("runs", "resume", "init_from", "data", "log", "checkpoint")


def recipe_text(translation: Translation, name: str, source: str) -> str:
    """Return the text of a recipe file. source: of what it is a translation, for its docstring."""
    settings = {key: one for key, one in translation.settings.items() if one[0] is not None}
    given, origin = settings.get("name", (name, ""))
    settings["name"] = re.sub(r"[^A-Za-z0-9_-]", "_", given)[:100] or "my_recipe", origin
    kind, _ = settings.pop("optimizer.kind", ("adamw", ""))
    if kind not in OPTIMIZERS:
        raise UserError(f"optimizer {shown(kind)} is not here; use {', '.join(OPTIMIZERS)}")
    imported = {"model": MODELS[translation.architecture], "optimizer": OPTIMIZERS[kind], **SECTIONS}
    groups: dict[str, dict[str, tuple[Any, str]]] = {}
    for key, one in settings.items():
        section, _, field = key.rpartition(".")
        groups.setdefault(section or key, {})[field] = one
    modules: dict[str, list[str]] = {"dtgpt.config.recipe": ["Recipe"]}
    for section in sorted(imported.keys() & groups.keys(), key=lambda section: imported[section][1]):
        modules.setdefault(imported[section][0], []).append(imported[section][1])
    lines = [
        *_docstring(translation, source),
        "",
        "from dtgpt.cli import run_recipe",
        *(f"from {module} import {', '.join(names)}" for module, names in sorted(modules.items())),
        "",
        "",
        "def recipe() -> Recipe:",
        "    return Recipe(",
    ]
    middle = [key for key in groups if key not in (*FIRST, *LAST)]
    for key in [*FIRST, *middle, *LAST]:
        if key in groups:
            lines += _group(key, groups[key], imported)
    lines += ["    )", "", "", 'if __name__ == "__main__":', "    run_recipe(recipe, __doc__)", ""]
    return "\n".join(lines)


def _docstring(translation: Translation, source: str) -> Iterator[str]:
    yield f'"""{_plain(translation.program)}, translated from {_plain(source)} by dtgpt translate.'
    refused = [row for row in translation.rows if row.kind == "cannot be done"]
    if refused:
        yield ""
        yield "Not the same:"
        yield ""
        yield from _wrapped(refused)
    yield '"""'


def _wrapped(rows: Iterable[TableRow]) -> Iterator[str]:
    for row in rows:
        yield from textwrap.wrap(
            f"{_plain(row.source)}: {_plain(row.text)}",
            WIDTH,
            initial_indent="* ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _plain(text: str) -> str:
    """Return a text that may stand in a docstring or a comment."""
    return (
        "".join(character if character.isprintable() else " " for character in text)
        .replace("\\", "/")
        .replace('"', "'")
    )


def _group(key: str, values: dict[str, tuple[Any, str]], imported: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    if key not in imported:
        ((value, source),) = values.values()
        yield _line(8, key, value, source)
        return
    yield f"        {key}={imported[key][1]}("
    for name, (value, source) in values.items():
        yield _line(12, name, value, source)
    yield "        ),"


def _line(indent: int, name: str, value: Any, source: str) -> str:
    code = f"{' ' * indent}{name}={_literal(value)},"
    comment = _plain(source)
    room = WIDTH - len(code) - len("  # ")
    if not comment or room < 12:
        return code
    return f"{code}  # {comment if len(comment) <= room else comment[: room - 3] + '...'}"


def _literal(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}" if abs(value) > 9999 else str(value)
    if isinstance(value, str):
        text = repr(value)
        return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text else text
    return repr(value)

"""The tables of nanoGPT's and llm.c's options in docs/translate.md are those that translate: the options that have an
equivalent. `python -m tests.translate.test_translate_docs` writes them."""

import re
from pathlib import Path

from dtgpt.config.overrides import leaves
from dtgpt.config.recipe import Recipe
from dtgpt.translate import llmc, nanogpt

DOCS = Path(__file__).parents[2] / "docs" / "translate.md"
MARK = "<!-- table -->\n"
SAME = {name: other for other, name in llmc.SAME.items()}  # options of train_gpt2cu -> those of train_gpt2.py


def table() -> str:
    lines = []
    sections = {f"nanoGPT's {name}": ("", entries) for name, entries in nanogpt.OPTIONS.items()}
    sections |= {
        f"llm.c's {name}": ("-" if name == "train_gpt2cu" else "--", entries) for name, entries in llmc.OPTIONS.items()
    }
    for title, (dashes, entries) in sections.items():
        lines += ["", f"## {title}", "", "| option | dtgpt |", "|---|---|"]
        for keys, answer in entries.items():
            if answer.kind != "translated":
                continue
            names = [f"`{dashes}{key}`" for key in keys.split(", ")]
            if dashes == "-":
                names += [f"`--{SAME[name]}`" for key in keys.split(", ") if (name := key.split()[0]) in SAME]
            text = answer.sentence(keys.split(", ")[0].partition(" ")[2])
            text = re.sub(r"(?<![\w/])--[a-z_.0-9]+(?: (?:[A-Z]+\b|\w+(?=[,;:]|$| --)))?", r"`\g<0>`", text)
            lines.append(f"| {', '.join(names)} | {text} |")
    return "\n".join(lines) + "\n"


def test_the_tables_are_those_that_translate():
    assert DOCS.read_text().partition(MARK)[2] == table(), "run python -m tests.translate.test_translate_docs"


def test_answers_name_options_that_exist():
    known = {name for name, *_ in leaves(Recipe)} | {f"model.{name}" for name in ("num_layers", "hidden_size")}
    for entries in (*nanogpt.OPTIONS.values(), *llmc.OPTIONS.values()):
        for answer in entries.values():
            for name in re.findall(r"(?<![\w/])--([a-z_.0-9]+)", answer.text):
                assert name in known or name.startswith("model."), name


if __name__ == "__main__":
    before, _, _ = DOCS.read_text().partition(MARK)
    DOCS.write_text(before + MARK + table())

"""The tables of options in the docs are those of the declaration. `python -m tests.inference.test_option_docs` writes
them."""

import inspect
import re
import textwrap
from pathlib import Path
from typing import get_args, get_origin

import pytest

import dtgpt
from dtgpt.inference.base_options import Option
from dtgpt.inference.options import INITIAL, OPTIONS
from dtgpt.serve.openai_keys import OPTION_KEYS

DOCS = Path(__file__).parents[2] / "docs"
MARKED = re.compile(r"(?<=<!-- options -->\n).*?(?=<!-- end of options -->)", re.DOTALL)


def values(option: Option) -> str:
    if option.kind is bool:
        return "true, false"
    if option.kind is str:
        return "an object"
    if option.kind not in (int, float):
        if get_origin(option.kind) is not tuple:
            return "ids with numbers"
        return "ids" if get_args(option.kind)[0] is int else "texts"
    powers = {2**31 - 1: "2^31 - 1", 2**64 - 1: "2^64 - 1", -(2**63): "-2^63"}
    return " to ".join(powers.get(limit, f"{limit:g}") for limit in (option.least, option.most))


def default(option: Option) -> str:
    return "none" if option.default in ((), {}, "") else str(option.default)


def of_generation() -> list[str]:
    rows = ["| option | default | values | meaning |", "|---|---|---|---|"]
    for option in OPTIONS.values():
        command = f" (command: {INITIAL[option.name]})" if option.name in INITIAL else ""
        rows.append(f"| `{option.name}` | {default(option)}{command} | {values(option)} | {option.help} |")
    return rows


def of_serving() -> list[str]:
    own = {"max_tokens": "16, or what the positions leave", "seed": "drawn"}
    rows = ["| key | option of generation | default |", "|---|---|---|"]
    for key, option in OPTION_KEYS.items():
        if key != option.name or key in own:
            rows.append(f"| `{key}` | `{option.name}` | {own.get(key, default(option).lower())} |")
    same = [f"`{key}`" for key, option in OPTION_KEYS.items() if key == option.name and key not in own]
    text = textwrap.wrap("Of the same name and default: " + ", ".join(same) + ".", 120, break_on_hyphens=False)
    return [*rows, "", *text]


PAGES = {"generation.md": of_generation, "http_api.md": of_serving}


def table(page: str) -> str:
    return "\n".join(PAGES[page]()) + "\n"


@pytest.mark.parametrize("page", PAGES)
def test_a_table_is_that_of_the_declaration(page):
    assert MARKED.findall((DOCS / page).read_text()) == [table(page)], "run python -m tests.inference.test_option_docs"


def test_the_arguments_of_load_are_those_of_the_page():
    (said,) = re.findall(r"`dtgpt\.load\((path, .*?)\)`", (DOCS / "generation.md").read_text(), re.DOTALL)
    parameters = list(inspect.signature(dtgpt.load).parameters.values())
    assert (
        said.replace('"', "'").split()
        == ", ".join(str(one.replace(annotation=one.empty)) for one in parameters).split()
    )


if __name__ == "__main__":
    for page in PAGES:
        text = (DOCS / page).read_text()
        (DOCS / page).write_text(MARKED.sub(lambda _, page=page: table(page), text))

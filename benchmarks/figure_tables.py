"""The tables of docs/benchmarks.md, the speeds in the headers of recipes, and README's picture, from the rows that
`all.py` wrote.

figure_tables.toml has the text of each table; a figure stands there as {NAME#UNIT}, of the script that its row names as
[GPUS@]PART/SCRIPT, or of another one as {PART/SCRIPT!NAME#UNIT}. A page has `<!-- figures: TABLE -->` before and `<!--
end of figures -->` behind the place, a recipe a line `measured` in its header."""

import json
import re
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from figures import PUBLISHED, ROOT, Row, read_rows

TABLES = Path(__file__).with_name("figure_tables.toml")
PAGE = ROOT / "docs" / "benchmarks.md"
MARKED = re.compile(r"<!-- figures: (\w+) -->\n.*?<!-- end of figures -->", re.DOTALL)
MEASURED = re.compile(r"^measured   .*(?:\n {11}.*)*", re.MULTILINE)
PLACE = re.compile(r"\{(?:([^!{}]+)!)?([^#{}]+)#([^{}]+)\}")
GPU = "NVIDIA H200"  # the rows of other kinds are not shown
INDENT = " " * 11  # of a recipe's header
WIDTH = 120


def place_of(row: Row) -> tuple[int, str, str, str]:
    return row["gpus"], row["part"], row["script"], row["name"]


def latest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, of each name the last, in the order of their first ones. A script that ended at another commit
    leaves none of its former rows: some of their names may be no more."""
    found: dict[tuple, Row] = {}
    for row in rows:
        if not row.get("tiny"):
            found[place_of(row)] = row
    ended = {place_of(row)[:3]: row["commit"] for row in found.values() if row.get("done")}
    return [row for place, row in found.items() if ended.get(place[:3]) in (None, row.get("commit"))]


def shown(value: float | str, unit: str) -> str:
    """Return a figure with the digits that a reader needs."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or value >= 999.5:
        return f"{value:,.0f}"
    if unit.endswith("%"):
        return f"{value:.1f} %"
    if unit in ("ratio", "of linear", "share of the engine"):
        return f"{value:.3f}"
    if unit.startswith("s to step") or unit == "transformers / dtgpt":
        return f"{value:.1f}"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{digits + (unit == 'ms' or unit.endswith('GiB'))}f}"


class Figures:
    """The rows by their places, and those that were asked for since a text began."""

    def __init__(self, rows: Iterable[Row]):
        self.rows = {place_of(row): row for row in latest(rows) if "figures" in row and row["gpu"] == GPU}
        self.used: list[Row] = []

    def figure(self, source: str, name: str, unit: str) -> str | None:
        gpus, _, place = source.rpartition("@")
        part, script = place.split("/", 1)
        row = self.rows.get((int(gpus or 1), part, script, f"{script}: {name}"))
        wanted = "us" if unit == "ms of us" else unit
        if row is None or wanted not in row["figures"]:
            return None
        if row not in self.used:
            self.used.append(row)
        value = row["figures"][wanted]
        if unit == "ms of us":
            return f"{value / 1e3:.2f}"
        lowest, highest = (row["figures"].get(end) for end in ("lowest", "highest"))
        if unit != "ratio" or lowest is None or highest is None:
            return shown(value, unit)
        return f"{shown(value, unit)} ({shown(lowest, unit)} to {shown(highest, unit)})"

    def filled(self, text: str, source: str) -> str | None:
        """Return a text with its figures; None where none of them is there."""
        found = []

        def fill(match: re.Match) -> str:
            found.append(self.figure(match[1] or source, match[2], match[3]))
            return found[-1] or "-"

        text = PLACE.sub(fill, text)
        return text if any(found) else None

    def commits(self, rows: Iterable[Row]) -> str:
        return ", ".join(dict.fromkeys(row["commit"] for row in rows))


def rows_of(spec: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (script, text) of each row of a table, those that a row stands for each with its name."""
    return [(source, text.replace("$", each)) for each in spec.get("over", [""]) for source, text in spec["rows"]]


def table(figures: Figures, spec: dict[str, Any]) -> str:
    """Return a table with the commits of its rows, what is not like for like, and the commands."""
    head = [*(cell.strip() for cell in spec["head"].split("|")), "commit"]
    lines, used = [], []
    for source, text in rows_of(spec):
        figures.used = []
        line = figures.filled(text, source)
        if line is not None:
            lines.append(f"| {line} | {figures.commits(figures.used)} |")
            used += figures.used
    if not lines:
        return "Not measured yet.\n"
    parts = ["\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines])]
    differs = list(dict.fromkeys(row["differs"] for row in used if "differs" in row))
    if differs and spec.get("peers", True):  # of other programs, which not every table of these rows shows
        parts.append(textwrap.fill(f"Not like for like: {'; '.join(differs)}.", WIDTH))
    if "note" in spec:
        parts.append(textwrap.fill(spec["note"], WIDTH))
    parts.append("\n".join(["```sh", *commands(used), "```"]))
    return "\n\n".join(parts) + "\n"


def commands(used: list[Row]) -> list[str]:
    """Return what measures these rows."""
    wanted: dict[int, dict[str, None]] = {}
    for row in used:
        wanted.setdefault(row["gpus"], {})[row["part"]] = None
    return [
        f"python benchmarks/all.py --gpus {gpus} --parts {' '.join(names)}" for gpus, names in sorted(wanted.items())
    ]


def machine(figures: Figures) -> str:
    """Return what the newest figures of one GPU were measured on."""
    rows = [row for row in figures.rows.values() if row["gpus"] == 1]
    newest = max(row["date"] for row in rows)
    rows = [row for row in rows if row["date"] == newest]
    row = rows[-1]
    versions = [f"{name} {row[name]}" for name in ("torch", "cuda", "triton", "driver", "transformers") if name in row]
    power = f" ({row['power limit W']:.0f} W)" if "power limit W" in row else ""
    said = f"The newest figures: one {row['gpu']}{power}, {', '.join(versions)}, commit "
    return textwrap.fill(f"{said}{figures.commits(rows)}, {newest}.", WIDTH) + "\n"


def page_of(text: str, rows: Iterable[Row]) -> str:
    """Return a page with its tables written anew. Raises KeyError for one that figure_tables.toml does not have."""
    figures, specs = Figures(rows), tomllib.loads(TABLES.read_text())

    def fill(match: re.Match) -> str:
        name = match[1]
        content = machine(figures) if name == "machine" else table(figures, specs["table"][name])
        return f"<!-- figures: {name} -->\n\n{content}\n<!-- end of figures -->"

    return MARKED.sub(fill, text)


def recipe_of(name: str, text: str, rows: Iterable[Row]) -> str:
    """Return a recipe's file with the speeds of its header written anew, where figure_tables.toml has some."""
    spec = tomllib.loads(TABLES.read_text())["recipe"].get(name)
    if spec is None:
        return text
    figures = Figures(rows)
    sentences = filter(None, (figures.filled(each, source) for source, each in spec))
    said = f"{'; '.join(sentences)} (docs/benchmarks.md)"
    lines = textwrap.wrap(said, WIDTH - len(INDENT), break_on_hyphens=False, break_long_words=False)
    block = f"measured   {lines[0]}" + "".join(f"\n{INDENT}{line}" for line in lines[1:])
    found, count = MEASURED.subn(lambda _: block, text)
    if count != 1:
        raise ValueError(f"the header of {name} has {count} lines `measured`, not one")
    return found


def pages() -> dict[Path, Any]:
    """Return what writes each file that shows figures, from its text and the rows."""
    found: dict[Path, Any] = {PAGE: page_of}
    for file in sorted((ROOT / "recipes").glob("*.py")):
        found[file] = lambda text, rows, file=file: recipe_of(file.stem, text, rows)
    return found


def write_all(figures: Path, added: Iterable[Path]) -> int:
    """Take rows up into the file of figures, and write what shows them."""
    rows = read_rows(figures)
    for file in added:
        rows += read_rows(file)
    if added:
        rows = latest(rows)
        figures.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for page, write in pages().items():
        before = page.read_text()
        after = write(before, rows)
        if after != before:
            page.write_text(after)
            print(page.relative_to(ROOT))
    from picture import redraw

    redraw(rows)
    return 0


if __name__ == "__main__":
    write_all(PUBLISHED, [])

"""A hook of mkdocs: pages that are written for GitHub become a site.

README is the home page; the pages outside of docs/ join those in it. Links follow, and one to a file that is no page,
such as a source file, becomes its text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
HOME = "README.md"
OUTSIDE = ["CHANGELOG.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in ROOT.glob("benchmarks/**/*.md"))]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.S | re.M)
CODE = re.compile(r"(`[^`\n]*`)")


def place_of(path: str) -> str | None:
    """Return the place of a file of the repository in the site; None where it is not there."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == HOME:
        return "index.md"
    return path.replace("benchmarks/", "measurements/") if path in OUTSIDE else None  # docs/benchmarks.md is another


PATHS = {place_of(path): path for path in [HOME, *OUTSIDE]}


def on_files(files, config):
    for place, path in PATHS.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    place = page.file.src_uri
    folder = posixpath.dirname(PATHS.get(place, f"docs/{place}"))

    def link(match):
        image, text, path, anchor = match.groups()
        if not path or re.match(r"\w+:", path):
            return match[0]
        there = place_of(posixpath.normpath(posixpath.join(folder, path)))
        if there is None:
            return text
        return f"{image}[{text}]({posixpath.relpath(there, posixpath.dirname(place) or '.')}{anchor or ''})"

    parts = FENCE.split(markdown)
    parts[::2] = ["".join(_outside_code(part, link)) for part in parts[::2]]
    return "".join(parts)


def _outside_code(text, link):
    """Yield a text with its links replaced; what stands in backquotes is left, but within the text of a link."""
    position = 0
    for match in re.finditer(f"{LINK.pattern}|{CODE.pattern}", text):
        yield text[position : match.start()]
        found = LINK.fullmatch(match[0])
        yield link(found) if found else match[0]
        position = match.end()
    yield text[position:]

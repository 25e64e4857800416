"""Every link of the documentation points to a file and a heading that are there, and README leads to every page."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    page: re.sub(r"^( *)```.*?^ *```", "", page.read_text(), flags=re.S | re.M)  # without the code
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "recipes/*.md")
    for page in sorted(ROOT.glob(pattern))
}


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page: a number after the second of the same name on."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*)$", PAGES[page], re.M):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).strip().lower()
        found.append(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return {f"{name}-{count}" if (count := found[:i].count(name)) else name for i, name in enumerate(found)}


def links(page: Path) -> list[tuple[Path, str, str]]:
    """Return the file, the anchor and the text of each link of a page to something in this repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", PAGES[page]))
    own = [link.partition("#") for link in found if not re.match(r"\w+:", link)]
    return [((page.parent / file).resolve() if file else page, anchor, file + "#" + anchor) for file, _, anchor in own]


def test_every_link_points_to_a_file_and_a_heading():
    wrong = [
        f"{page.relative_to(ROOT)}: {text}"
        for page in PAGES
        for file, anchor, text in links(page)
        if not file.exists() or (anchor and (file not in PAGES or anchor not in anchors(file)))
    ]
    assert not wrong and sum(len(links(page)) for page in PAGES) > 100


def test_readme_leads_to_every_page():
    reached, rest = set(), [ROOT / "README.md"]
    while rest:
        page = rest.pop()
        if page in PAGES and page not in reached:
            reached.add(page)
            rest += [file for file, *_ in links(page)]
    assert not {str(page.relative_to(ROOT)) for page in set(PAGES) - reached} - {"AGENTS.md", "CHANGELOG.md"}


def test_pages_that_code_and_pages_name_are_there():
    files = [file for folder in ("dtgpt", "tests", "recipes", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    texts = {file: file.read_text() for file in files} | PAGES
    named = re.compile(r"(?<![\w/.-])(?:docs|benchmarks)/[\w/]+\.md")
    assert not {
        (str(f), name) for f, text in texts.items() for name in named.findall(text) if not (ROOT / name).exists()
    }

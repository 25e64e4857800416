"""A headless Chromium, where this machine has one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]  # a container has neither user namespaces nor a large /dev/shm


@contextmanager
def chromium() -> Iterator["Browser"]:
    """A browser for the length of the block; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)  # of `playwright install chromium`
        program = next(filter(None, map(shutil.which, PROGRAMS)), str(own) if own.exists() else None)
        if program is None:
            pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


def contrast(one: list[float], other: list[float]) -> float:
    """The contrast of two colours, RGB from 0 to 255, from 1 to 21 (WCAG 2)."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: list[float]) -> float:
    parts = [x / 255 for x in colour]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def rgb_of(page: Any, selector: str, name: str) -> list[float]:
    """A computed colour of an element, painted and read back: it may be written in any colour space."""
    paint = """([element, name]) => {
      const context = new OffscreenCanvas(1, 1).getContext("2d");
      context.fillStyle = getComputedStyle(element)[name];
      context.fillRect(0, 0, 1, 1);
      return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
    }"""
    return page.evaluate(paint, [page.query_selector(selector), name])

"""The API reference of docs/api.md: its command builds it, and every public function has a docstring."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()
MODULES = re.findall(r"dtgpt\.[\w.]+", PAGE.split("-o site")[1].split("```")[0])


@pytest.mark.slow(1)
def test_the_reference_is_built(tmp_path):
    import pdoc  # the tests of GPUs in this folder run without it

    pdoc.render.configure(show_source=False)
    pdoc.pdoc(*MODULES, output_directory=tmp_path)
    pages = {str(page.relative_to(tmp_path).with_suffix("")).replace("/", ".") for page in tmp_path.rglob("*.html")}
    assert pages >= {*MODULES, "index"}
    assert "global_batch_size" in (tmp_path / "dtgpt/config/recipe.html").read_text()


@pytest.mark.parametrize("name", MODULES)
def test_public_classes_and_functions_are_described(name):
    module = importlib.import_module(name)
    assert module.__doc__
    own = [found for found in vars(module).values() if getattr(found, "__module__", None) == name]
    public = [found for found in own if inspect.isclass(found) or inspect.isfunction(found)]
    assert not [found.__name__ for found in public if not found.__name__.startswith("_") and not found.__doc__]

"""Packages of an extra, which are imported where they are needed. The core needs none of them."""

from importlib import import_module
from typing import Any

from dtgpt.util.errors import UserError


def optional_package(package: str, what: str, module: str = "", extra: str = "data") -> Any:
    """Import a package of an extra, which `what` needs. Raises UserError if it is missing."""
    try:
        return import_module(module or package)
    except ImportError:
        sentence = f"{what} needs the package {package}, which is missing; run pip install 'dtgpt[{extra}]'"
        raise UserError(sentence) from None

"""What a plan's own table cannot be, whatever the model. No module of torch is imported for it."""

from collections.abc import Mapping
from typing import Any

from dtgpt.util.errors import UserError, shown


def check_values(table: Any) -> None:
    """Raise UserError for a table that is none, and for a style that no model can have."""
    if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
        raise UserError(f"table={shown(table)} is not a dict; use one such as {{'blocks.*': None}}")
    for pattern, style in table.items():
        parts = style, *(getattr(style, f"prepare_module_{end}", None) for end in ("input", "output"))
        if any(getattr(part, "use_local_output", True) is False for part in parts):
            raise UserError(
                f"table gives {pattern!r} a style that makes DTensors of activations, but modules take local "
                "tensors; set use_local_output=True (and use_local_input=True) in that style"
            )

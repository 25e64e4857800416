"""Options and their values as a command line has them."""

from typing import Any

from dtgpt.config.overrides import Options


def value_text(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def as_words(options: Options) -> list[str]:
    """Return the words of a command line that give these options."""
    return [word for name, values in options.items() for word in (f"--{name}={values[0]}", *values[1:])]

"""The option of `dtgpt generate` by which a user types the prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from dtgpt.util.errors import UserError


@dataclass(frozen=True, kw_only=True)
class InteractiveOptions:
    """The field, which `dtgpt generate` adds to its own."""

    interactive: Annotated[bool, "read prompts from the terminal, until Ctrl-D; Ctrl-C ends a text"] = False

    @staticmethod
    def chosen(options: Any) -> Callable[..., None] | None:
        """Return what generates where a user types the prompts, else None. Raise UserError where an option contradicts
        it."""
        if options.prompt and options.interactive:
            raise UserError("--prompt and --interactive both say where prompts come from; leave one out")
        if not options.interactive:
            return None
        from dtgpt.inference.prompt_sources.terminal import converse_with

        return converse_with

"""The options of `dtgpt generate` that name files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from dtgpt.util.errors import UserError
from dtgpt.util.field_types import PATH


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The fields, which `dtgpt generate` adds to its own."""

    prompts_file: Annotated[
        str | None, "file with a prompt in each line; .jsonl: objects with a prompt, and options of its own", PATH
    ] = None
    output: Annotated[str | None, "new file for the results, as JSON lines; none: the terminal", PATH] = None

    @staticmethod
    def chosen(options: Any) -> Callable[..., None] | None:
        """Return what generates as the options want it; None where they name no file. Raise UserError where they
        contradict each other."""
        for name in ("prompt", "interactive"):
            if options.prompts_file and getattr(options, name, False):
                one, other = ("prompt", "prompts-file") if name == "prompt" else ("prompts-file", name)
                raise UserError(f"--{one} and --{other} both say where prompts come from; leave one out")
        if getattr(options, "interactive", False) and options.output:
            raise UserError("--interactive writes to the terminal; leave --output out")
        if not (options.prompts_file or options.output):
            return None
        from dtgpt.inference.prompt_sources.results import write_results

        return write_results

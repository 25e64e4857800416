"""Where `dtgpt generate` has its prompts from, and where texts go: prompts that a user types, and files."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    prompt_options=(
        "dtgpt.inference.prompt_sources.typed_options:InteractiveOptions",
        "dtgpt.inference.prompt_sources.file_options:FileOptions",
    )
)

"""A disk that takes little."""

import io
import resource
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtgpt.config.recipe import Recipe


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let writing a file beyond `size` bytes fail within the context, in this process."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def train_with_files_of_at_most(size: int, recipe: "Recipe") -> tuple[int, str]:
    """Run a recipe where no file may be larger, and return its exit code and what it told on stderr."""
    from dtgpt.train.loop import train

    with files_of_at_most(size), redirect_stderr(io.StringIO()) as told:
        code = train(recipe)
    return code, told.getvalue()

"""Which blocks of a model attend to the last tokens alone."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated

from dtgpt.models.config import LARGEST_SIZE, ModelConfig
from dtgpt.util.field_types import Bounds, Pattern

LOCAL, GLOBAL = "L", "G"  # of `window_pattern`
MOST_KINDS = 1000  # letters of it
Window = Annotated[
    int,
    "tokens, its own included, to which a token attends in a block with a window; 0: all",
    Bounds(0, LARGEST_SIZE),
]
WindowPattern = Annotated[
    str,
    "successive blocks with a window (L) and without (G), repeated",
    Pattern(f"[LG]{{1,{MOST_KINDS}}}", "is not a pattern; use a text of L and G, such as LLLLLG"),
]


@dataclass(frozen=True, kw_only=True)
class WindowConfig(ModelConfig):
    """Fields of architectures in which the attention of some blocks has a window. Blocks of both kinds have the same
    modules."""

    window: Window = 0
    window_pattern: WindowPattern = LOCAL

    def is_local(self, index: int) -> bool:
        """Return whether block `index` has a window."""
        return self.window > 0 and self.window_pattern[index % len(self.window_pattern)] == LOCAL

    def window_of(self, index: int) -> int | None:
        """Return the window of block `index`; None: it has none."""
        return self.window if self.is_local(index) else None

    def block_kind(self, index: int) -> Hashable:
        return self.window_of(index)


def shortest_pattern(local: list[bool]) -> str:
    """Return the shortest `window_pattern` by which these blocks have a window."""
    letters = "".join(LOCAL if each else GLOBAL for each in local)
    if len(letters) > MOST_KINDS:
        return letters
    sizes = (size for size in range(1, len(letters) + 1) if letters[size:] == letters[: len(letters) - size])
    return letters[: next(sizes, 0)] or LOCAL

"""Names of special tokens in texts, which become text unless they are asked for."""

import re
from collections import Counter
from collections.abc import Iterable

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.util.console import counted, say

SHOWN = 3  # names in a message


class SpecialNames:
    """Counts the names of a tokenizer's special tokens."""

    def __init__(self, tokenizer: Tokenizer):
        names = sorted(filter(None, tokenizer.special_names), key=len, reverse=True)  # the longest that fits
        self._beginnings = {name[:2] for name in names}
        self._pattern = re.compile("|".join(map(re.escape, names)))

    def count(self, texts: Iterable[str]) -> Counter[str]:
        """Return how often each name is in the texts."""
        likely = (text for text in texts if any(beginning in text for beginning in self._beginnings))
        return Counter(name for text in likely for name in self._pattern.findall(text))


def warn_of_split_names(found: Counter[str], tokenizer: Tokenizer, remedy: str) -> None:
    """Say which names of special tokens became other tokens."""
    if not found:
        return
    most = ", ".join(f"{name}: {number:,}" for name, number in found.most_common(SHOWN))
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    say(
        f"the texts have {counted(found.total(), 'name')} of special tokens of {tokenizer.name} ({most}{more}), which "
        f"became text, several tokens each; {remedy}",
        warning=True,
    )

"""What is said of the option --receipts, which does not exist."""

from dtgpt.receipts.config import NAME
from dtgpt.util.shared.explanations import Explanations


class _Explained(Explanations):
    def of_recipe(self, architecture: str, name: str, value: str) -> str | None:
        return "receipts of steps are turned on by --receipts.on" if name == NAME else None


EXPLANATIONS = _Explained()

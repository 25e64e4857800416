"""What to use here in place of options of Megatron-LM, for the errors of commands that do not know them."""

from dtgpt.translate.megatron_table import entries_of
from dtgpt.translate.megatron_tools import PATHS, entries_of_command
from dtgpt.translate.options import explain
from dtgpt.util.shared.explanations import Explanations

ADVICE = "\n  a recipe of a whole command: dtgpt translate -- torchrun pretrain_gpt.py --option value ..."


class OfMegatron(Explanations):
    """Explains options of Megatron-LM, of its training and of its tools."""

    def of_recipe(self, architecture: str, name: str, value: str) -> str | None:
        return explain(name, value, entries_of(architecture))

    def of_command(self, command: str, name: str, value: str) -> str | None:
        return explain(name, value, entries_of_command(command)) if command in PATHS else None

    def more(self, sentence: str) -> str:
        return ADVICE if sentence.count(" of Megatron-LM does not exist here") > 1 else ""


EXPLANATIONS = OfMegatron()

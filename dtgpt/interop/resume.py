"""A run of another library that `resume` names, as the core asks for it: it is read where a run begins with it."""

from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dtgpt.config.recipe import Recipe
from dtgpt.config.schedule import BatchSizes
from dtgpt.config.sections import Section
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.interop.marks import is_megatron
from dtgpt.models.config import ModelConfig
from dtgpt.train.init_from.begin import OtherModel

if TYPE_CHECKING:
    from dtgpt.interop.foreign_run import TrainingSource
    from dtgpt.train.trainer import Trainer


def begin(init_from: str | None, resume: str | Path | None, vocab_size: int) -> "OtherLibrary | None":
    """Return the run of another library that `resume` of a recipe names, None for anything else. vocab_size: of the
    recipe's model."""
    path = Path(resume or "")
    foreign = resume and not (path / "recipe.json").is_file() and is_megatron(path)
    return OtherLibrary(path, vocab_size) if foreign else None


class OtherLibrary(OtherModel):
    """A run of another library, which goes on as a new run of dtgpt."""

    def __init__(self, path: Path, vocab_size: int):
        super().__init__(path)
        self._vocab_size = vocab_size

    @cached_property
    def run(self) -> "TrainingSource":
        """The run, opened when it is asked for. Raises UserError where it cannot go on here."""
        from dtgpt.interop.megatron.training import MegatronTraining

        return MegatronTraining(self.path, self._vocab_size)

    def with_dimensions(self, asked: Recipe, given: Collection[str]) -> Recipe:
        return self.run.settle(asked, given)

    def check(self, sections: Collection[Section], model: ModelConfig, steps: int) -> None:
        for section in sections:
            section.check_new_weights()
        self.run.check(model, steps)

    def give_weights(self, trainer: "Trainer", sizes: Callable[[int, int], BatchSizes]) -> None:
        self.run.hand_over(trainer, sizes)

    def save(self, own: type[ModelConfig], tokenizer: Tokenizer, run: Path) -> None:
        """Nothing: a run of Megatron-LM has no files to keep."""

"""A Hugging Face folder at the end of a run, RUN/hf: the option by which a run leaves it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from dtgpt.config.sections import Section


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Section):
    aliases: ClassVar[Mapping[str, str]] = {"checkpoint.hf": "hf"}

    hf: Annotated[
        Literal["off", "last"],
        "last (also --checkpoint.hf last): write the model of the last step as a Hugging Face folder, RUN/hf, in the "
        "type of the run; of adapters as a folder of peft",
    ] = "off"

    def check_recipe(self, recipe: Any) -> None:
        """Raise UserError where no such folder could be written when the run is done."""
        super().check_recipe(recipe)
        if self.hf != "off":
            from dtgpt.interop.foreign import check_architecture
            from dtgpt.interop.hf.model import ARCHITECTURES

            check_architecture(recipe.model, ARCHITECTURES, "Hugging Face folder")
            ARCHITECTURES[recipe.model.architecture].write_config(recipe.model)

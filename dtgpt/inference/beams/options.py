"""The options of a prompt that ask for a beam search."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from dtgpt.inference.options import MOST_SEQUENCES, Search, declared
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds

WITHOUT = "stop_strings", "stop_on_eol", "stop_on_double_eol", "top_logprobs"  # options that no search takes


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """The options, as they are declared."""

    num_beams: Annotated[
        int, "sequences that a beam search follows, in which nothing is drawn; 1: no search", Bounds(1, MOST_SEQUENCES)
    ] = 1
    length_penalty: Annotated[
        float, "a beam scores the sum of its log-probabilities / length ** length_penalty", Bounds(-10, 10)
    ] = 1.0
    early_stopping: Annotated[bool, "end a beam search as soon as num_beams sequences have ended"] = False


class BeamKind:
    """Beam searches, as the core asks for them."""

    options = declared(BeamOptions)

    def make(self, given: Mapping[str, Any], options: Any) -> Search | None:
        """Return the search that the options `given` by name ask for; None: no search. options: the others. Raise
        UserError where one is wrong, or does not go with the others."""
        for name, value in given.items():
            self.options[name].check(value)
        asked = BeamOptions(**given)
        for name in ("length_penalty", "early_stopping"):
            if asked.num_beams == 1 and (value := getattr(asked, name)) != self.options[name].default:
                raise UserError(f"{name}={value} is for a beam search; give num_beams, or leave it out")
        if asked.num_beams == 1:
            return None
        for name in WITHOUT:
            if getattr(options, name):
                raise UserError(f"a beam search does not take {name}; leave it out, or use num_beams=1")
        from dtgpt.inference.beams.search import Beams  # which needs the engine, that needs these options

        return Beams(width=asked.num_beams, length_penalty=asked.length_penalty, early_stopping=asked.early_stopping)


BEAMS = BeamKind()

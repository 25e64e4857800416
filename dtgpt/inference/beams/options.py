"""The options of a prompt that ask for a beam search."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

from dtgpt.inference.base_options import MOST_SEQUENCES, BaseOptions, declared
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds

WITHOUT = "stop_strings", "stop_on_eol", "stop_on_double_eol", "top_logprobs", "repetition_penalty", "json_schema"


@dataclass(frozen=True, kw_only=True)
class BeamOptions(BaseOptions):
    """The options, as they are declared."""

    headings: ClassVar[dict[str, str]] = {"num_beams": "several texts, beam search"}
    num_beams: Annotated[
        int, "number of beams of a beam search, which draws nothing; 1: no beam search", Bounds(1, MOST_SEQUENCES)
    ] = 1
    length_penalty: Annotated[
        float, "a beam scores the sum of its log-probabilities / length ** length_penalty", Bounds(-10, 10)
    ] = 1.0
    early_stopping: Annotated[bool, "end a beam search as soon as num_beams sequences have ended"] = False

    search: Any = None  # the `Beams`, in place of draws

    @property
    def rows(self) -> int:
        return super().rows if self.search is None else self.search.width

    @property
    def counted_rows(self) -> str:
        return super().counted_rows if self.search is None else counted(self.rows, "beam")

    def check_job(self, job: Any, vocab_size: int) -> None:
        super().check_job(job, vocab_size)
        if self.search is not None:
            self.search.validate(job, vocab_size)

    def check_exact(self) -> None:
        super().check_exact()
        if self.search is not None:
            raise UserError(
                f"num_beams={self.search.width} searches, and exact log-probabilities are those of sampled tokens; use "
                "num_beams=1, or load the model without exact"
            )

    def settled(self) -> Self:
        if self.num_beams == 1:
            for name in ("length_penalty", "early_stopping"):
                if (value := getattr(self, name)) != declared(BeamOptions)[name].default:
                    raise UserError(f"{name}={value} is for a beam search; give num_beams, or leave it out")
            return super().settled()
        options = declared(type(self))  # type: ignore[arg-type]
        for name in WITHOUT:
            if name in options and getattr(self, name) != options[name].default:  # some are of another capability
                raise UserError(f"a beam search does not take {name}; leave it out, or use num_beams=1")
        from dtgpt.inference.beams.search import Beams  # which needs requests, that need these options

        beams = Beams(width=self.num_beams, length_penalty=self.length_penalty, early_stopping=self.early_stopping)
        return replace(super().settled(), search=beams)

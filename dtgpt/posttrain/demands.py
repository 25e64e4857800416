"""What a run needs that makes its own samples: rows in which they share tokens, and slots to generate them in."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from dtgpt.config.execution import Settings
from dtgpt.config.sections import Section


class Rows(NamedTuple):
    """The rows of a micro-batch: samples, or groups of samples that begin with the same tokens."""

    number: int
    length: int  # tokens of a row on each context parallel rank
    group: int = 0  # samples of a row, which has once what they begin with; 0: a row is a sample


class SampleMaker(Section):
    """A section of a recipe with which a run may make the samples that it trains on."""

    @property
    def makes_samples(self) -> bool:
        """Whether it does."""
        return False

    def slots_for(self, samples: int, plan: Any) -> int:
        """Return the sequences that each rank generates at the same time during training, in steps of so many
        samples."""
        return 0

    def rows_of(self, settings: Any) -> Rows | None:
        """Return the rows of a micro-batch, None where each is a sample."""
        return None


def _makers(sections: Iterable[Section]) -> list[SampleMaker]:
    return [section for section in sections if isinstance(section, SampleMaker)]


def makes_samples(sections: Iterable[Section]) -> bool:
    """Return whether training makes its own samples, by the sections of a recipe or of settings."""
    return any(section.makes_samples for section in _makers(sections))


def slots_of(settings: Settings) -> int:
    """Return the sequences that are generated at the same time, whose keys and values are kept beside training."""
    samples, plan = settings.global_batch_size, settings.plan
    return sum(section.slots_for(samples, plan) for section in _makers(settings.sections))


def rows_of(settings: Settings) -> Rows:
    """Return the rows of a micro-batch."""
    found = (section.rows_of(settings) for section in _makers(settings.sections))
    return next(filter(None, found), None) or Rows(settings.micro_batch_size, settings.local_length)

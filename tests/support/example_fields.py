"""A capability that adds a field to a section of the core. What reads the field would be in other files, since the
section is made when `dtgpt.config` is imported."""

from typing import Annotated

from dtgpt.util.field_types import Pattern
from dtgpt.util.seams import Capability


class LogFields:
    mood: Annotated[str, "how a run sounds", Pattern("calm|loud", "is no mood; use calm or loud")] = "calm"


CAPABILITY = Capability(log_fields=(f"{__name__}:LogFields",))

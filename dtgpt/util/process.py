"""Who this process is among those that torchrun started."""

import os
from dataclasses import dataclass, replace

from dtgpt.util.errors import UserError

VARIABLES = {"rank": "RANK", "world": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_world": "LOCAL_WORLD_SIZE"}


@dataclass(frozen=True)
class Process:
    """The environment variables that torchrun sets; a process alone where there are none."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # on its node
    local_world: int = 1

    @classmethod
    def from_environment(cls) -> "Process":
        given = {field: os.environ.get(name, "") for field, name in VARIABLES.items()}
        numbers = {field: int(text) for field, text in given.items() if text.isdecimal()}
        process = cls(**numbers)
        missing = any(text or process.world > 1 for field, text in given.items() if field not in numbers)
        if missing or process.rank >= process.world or process.local_rank >= process.local_world:
            said = " ".join(f"{VARIABLES[field]}={text}" for field, text in given.items())
            raise UserError(
                f"the environment says {said}, which do not fit each other; start the processes with torchrun"
            )
        return process

    def among(self, active: int) -> "Process":
        """Return this process as one of the `active` lowest ranks, where the others take no part in the run. The ranks
        of a node follow each other."""
        return replace(self, world=active, local_world=min(self.local_world, active - (self.rank - self.local_rank)))

"""Who this process is among those that torchrun started."""

import os
from dataclasses import dataclass

from dtgpt.util.errors import UserError

VARIABLES = {"rank": "RANK", "world": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_world": "LOCAL_WORLD_SIZE"}


@dataclass(frozen=True)
class Process:
    """What torchrun tells a process in its environment; one alone where nothing is told."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # on its node
    local_world: int = 1

    @classmethod
    def from_environment(cls) -> "Process":
        given = {field: os.environ.get(name, "") for field, name in VARIABLES.items()}
        for field, text in given.items():
            if text and not text.isdecimal():
                raise UserError(f"the environment says {VARIABLES[field]}={text}; start the processes with torchrun")
        missing = [VARIABLES[field] for field, text in given.items() if not text]
        if missing and given["world"] not in ("", "1"):
            raise UserError(
                f"the environment says WORLD_SIZE={given['world']}, but not {', '.join(missing)}; start the processes "
                "with torchrun"
            )
        process = cls(**{field: int(text) for field, text in given.items() if text})
        if process.rank >= process.world or process.local_rank >= process.local_world:
            raise UserError(
                f"the environment says RANK={process.rank} of WORLD_SIZE={process.world} and LOCAL_RANK="
                f"{process.local_rank} of LOCAL_WORLD_SIZE={process.local_world}; start the processes with torchrun"
            )
        return process

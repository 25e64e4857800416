"""Ranks as forks of a process that has imported everything: each is under torchrun as far as it can tell."""

import os
import sys
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.pictures import no_pictures

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt2_tiny.py"


def fork_rank(
    index: int, world: int, port: int, words: list[str], folder: Path, torchruns_store: bool = True,
    change: tuple[str, Any] | None = None,
) -> int:  # fmt: skip
    """Fork a rank that trains in `folder`, where `log-INDEX` gets its output, and return its process id.

    torchruns_store: whether torchrun, and not rank 0, has the store at this port. change: (name of a function, what is
    called in its place).
    """
    if child := os.fork():
        return child
    with suppress(BaseException):
        os.chdir(folder)
        log = os.open(f"log-{index}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({k: str(v) for k, v in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if torchruns_store:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        from dtgpt.cli import main

        with no_pictures(), mock.patch(*change) if change else nullcontext():
            try:
                main(["train", str(RECIPE), *words])
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(end.code or 0)
            except BaseException:
                traceback.print_exc()
    os._exit(99)

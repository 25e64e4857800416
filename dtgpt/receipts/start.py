"""What the line of a start says of the run: all that its bits rest on."""

import json
from typing import TYPE_CHECKING, Any

from dtgpt.util.machine.versions import environment

if TYPE_CHECKING:
    from dtgpt.train.trainer import Trainer

DECIDES = ("torch", "triton")  # packages of which other versions may compute other bits


def start_of(
    recipe: dict[str, Any], trainer: "Trainer", labels: list[list[str]], bytes_of_parts: list[int]
) -> dict[str, Any]:
    """Return the line of a start. recipe: its fields; labels: of the digests of each part."""
    return {
        "recipe": json.loads(json.dumps(recipe, default=repr)),
        **execution_of(trainer),
        "data": trainer.dataset.digest,
        "parts": labels,
        "bytes_a_step": max(bytes_of_parts),
    }


def execution_of(trainer: "Trainer") -> dict[str, Any]:
    """Return the plan and the machine of a run, and how its sums round."""
    from dtgpt.compare.record import rounding_of

    settings, mesh = trainer.settings, trainer.mesh
    here = environment(mesh.device)
    return {
        "plan": mesh.plan.name,
        "world": mesh.world,
        "micro_batch_size": settings.micro_batch_size,
        "precision": settings.precision,
        "dtype": str(settings.dtype),
        "reduce": settings.reduce,
        "rounding": rounding_of(settings),
        "machine": {name: here[name] for name in ("device", "cuda")} | {n: here["packages"].get(n) for n in DECIDES},
        "versions": {"python": here["python"], **here["packages"]},
        "code": code_digest(),
    }


def code_digest() -> str:
    """Return one digest of the files of this dtgpt."""
    from dtgpt.compare.starts import code_digest as digest_of
    from dtgpt.parallel.launch import code_digests

    return digest_of(code_digests())

"""What `state.json` says of a run, beside the files: all that is needed to go on, and to know what it was."""

from dataclasses import asdict
from typing import Any

from dtgpt.ops.random import fold, root_key
from dtgpt.parallel.mesh import Mesh
from dtgpt.recipe import Recipe
from dtgpt.run import package_versions

KEYS = ("weights", "data", "dropout", "sample")


def describe(recipe: Recipe, mesh: Mesh, step: int, samples: int, data_digest: str) -> dict[str, Any]:
    """Of a run after `step` optimizer steps, in which it has seen `samples`."""
    config, root = recipe.model, root_key(recipe.seed)
    optimizer = recipe.optimizer
    return {
        "step": step,
        "consumed_samples": samples,
        "tokens": samples * config.seq_length,
        "data_digest": data_digest,
        "schedule": {
            "shape": optimizer.schedule,
            "unit": "samples" if recipe.counts_samples else "steps",
            "lr": optimizer.lr,
            "min_lr": optimizer.min_lr,
            "warmup_steps": recipe.warmup_steps,
            "decay_steps": recipe.decay_steps,
        },
        "keys": {"seed": recipe.seed, **{name: fold(root, name).tolist() for name in KEYS}},
        "model": asdict(config),
        "padded_vocab_size": config.padded_vocab_size,
        "plan": mesh.plan.name,
        "world": mesh.world,
        "recipe": asdict(recipe),
        "versions": package_versions(),
    }

"""What `state.json` says of a run, beside the files: all that is needed to go on, and to know what it was."""

from dataclasses import asdict
from typing import Any

from dtgpt.config.execution import Settings
from dtgpt.config.schedule import Schedule
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.util.environment import package_versions

KEYS = ("weights", "data", "dropout", "sample")


def describe(recipe: dict[str, Any], settings: Settings, schedule: Schedule, step: int, samples: int) -> dict[str, Any]:
    """Return the state of a run after `step` optimizer steps, in which it has seen `samples`. `recipe`: its fields."""
    config, root = settings.model, root_key(recipe["seed"])
    return {
        "step": step,
        "consumed_samples": samples,
        "tokens": samples * config.seq_length,
        "schedule": schedule.described(),
        "keys": {"seed": recipe["seed"], **{name: fold(root, name).tolist() for name in KEYS}},
        "architecture": config.architecture,
        "model": asdict(config),
        "padded_vocab_size": config.padded_vocab_size,
        "plan": settings.plan.name,
        "world": settings.plan.world,
        "recipe": recipe,
        "versions": package_versions(),
    }

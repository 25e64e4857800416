"""The content of `state.json` beside the files: all that is needed to resume a run, and to know what it was."""

from dataclasses import asdict
from typing import Any

from dtgpt.config.execution import Settings
from dtgpt.config.schedule import Schedule
from dtgpt.models.architectures import describe_class
from dtgpt.models.config import ModelConfig
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.util.environment import package_versions

KEYS = ("weights", "data", "dropout", "sample")


def describe(recipe: dict[str, Any], settings: Settings, schedule: Schedule, step: int, samples: int) -> dict[str, Any]:
    """Return the state of a run after `step` optimizer steps with `samples` samples. `recipe`: its fields."""
    config, root = settings.model, root_key(recipe["seed"])
    return {
        "step": step,
        "consumed_samples": samples,
        "tokens": samples * settings.seq_length,
        "schedule": schedule.described(),
        "keys": {"seed": recipe["seed"], **{name: fold(root, name).tolist() for name in KEYS}},
        "plan": settings.plan.name,
        "world": settings.plan.world,
        "recipe": recipe,
        **describe_model(config),
    }


def describe_model(config: ModelConfig) -> dict[str, Any]:
    """Return what every checkpoint says of its model and its writer."""
    return {
        **describe_class(type(config)),
        "model": asdict(config),
        "padded_vocab_size": config.padded_vocab_size,
        "versions": package_versions(),
    }

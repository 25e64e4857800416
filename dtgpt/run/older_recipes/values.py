"""What a recipe.json of an older version means today."""

from typing import Any

from dtgpt.config.overrides import leaves
from dtgpt.config.recipe import Recipe


def translate(saved: dict[str, Any]) -> None:
    """Write values as they are written today: True and False for "on" and "off", and none where the end of the schedule
    was written out."""
    for name in (name for name, type_, *_ in leaves(Recipe) if type_ is bool):
        section, _, key = name.rpartition(".")
        values = saved.get(section)
        if isinstance(values, dict) and values.get(key) in ("on", "off"):
            values[key] = values[key] == "on"
    optimizer = saved.get("optimizer")
    older = "exit_interval" not in saved and "steps" in saved
    if older and isinstance(optimizer, dict) and optimizer.get("decay_steps") == saved["steps"]:
        optimizer["decay_steps"] = None

"""What ranks do in test_exact.py."""

from hashlib import sha256
from operator import attrgetter

from dtgpt.config.recipe import Recipe
from dtgpt.train.startup import open_trainer


def bits_of_steps(recipe: Recipe) -> dict[str, str]:
    """Train two steps. Return on rank 0 the bits of losses, norms, gradients, weights and moments, by name."""
    found: dict[str, str] = {}
    with open_trainer(recipe) as trainer:
        rule = trainer.optimizer.rule

        def keep(kind, value) -> None:
            for name, whole in trainer.shards.gather(value):
                found[f"{kind} of {name}"] = "" if whole is None else sha256(whole.numpy().tobytes()).hexdigest()

        for step in range(2):
            loss = trainer.gradients()
            keep(f"gradient {step}", trainer.gradient)
            result = trainer.update(loss)
            found[f"loss {step}"] = trainer.mean_loss(result).hex()
            found[f"norm {step}"] = result.norm.item().hex()
            found[f"scale {step}"] = str(trainer.optimizer.metrics())
        keep("weight", attrgetter("local"))
        keep("exp_avg", lambda shard: rule.state(shard.index)["exp_avg"])
        keep("exp_avg_sq", lambda shard: rule.state(shard.index)["exp_avg_sq"])
        found["held out"] = str(trainer.held_out_loss())
    return found


def norm_with_a_large_gradient(recipe: Recipe, scale: float) -> float:
    """Return the norm that all ranks see where rank 1 alone multiplies its gradients by `scale`."""
    with open_trainer(recipe) as trainer:
        if trainer.mesh.place.dp == 1:
            trainer.optimizer.gradient_scale.mul_(scale)
        trainer.gradients()
        return trainer.shards.norm().item()

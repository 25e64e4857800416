"""What is told of a model that a CPU takes minutes for."""

from pathlib import Path

from dtgpt.config.recipe_file import load_module as load
from dtgpt.util.machine.large_models import caution_about


def test_a_model_that_is_large_for_a_cpu_is_told():
    large = load(Path(__file__).parents[2] / "recipes" / "gpt2_124m.py").recipe()
    caution = caution_about(large.model, large.global_batch_size, large.sample_length)
    assert caution.startswith("a model of 124.5 M parameters on a CPU: a step of 524,288 tokens takes about 1h 14m ")

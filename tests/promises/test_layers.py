"""The core stands in layers: a file imports from its own folder and from those below, never from above. Capabilities
stand on the core: each imports what it likes of it, and of other capabilities those that `dtgpt.capabilities` says."""

import ast
from pathlib import Path

import pytest

from dtgpt.capabilities import CAPABILITIES
from tests.support import core

ROOT = Path(__file__).parents[2] / "dtgpt"
LAYERS = (
    ["util"], ["ops"], ["models"], ["config"], ["data", "parallel"], ["optim"], ["checkpoint"], ["run"],
    ["inference"], ["train"], ["commands"], ["cli"], ["moved", "capabilities"], ["__main__", "__init__"],
)  # fmt: skip
LEVEL = {folder: level for level, folders in enumerate(LAYERS) for folder in folders}
# Capabilities that need each other, directly or through others, until a seam takes the place of an import.
CIRCLES: list[list[str]] = []
# Definitions of operations that capabilities use stand beside those of the core, and so do functions that several of
# them share. Nothing else is of no folder.
SHARED = {"ops.attention", "ops.experts", "ops.fp8", "ops.nf4", "ops.optim", "ops.local_tensors"}
SHARED |= {
    "ops.joint_rotary",
    "ops.more_activations",
    "models.shared",
    "util.shared",
    "posttrain.totals",
    "posttrain.demands",
}


def room_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def test_the_core_imports_only_from_below():
    wrong, known = [], core.files()
    for name, file in known.items():
        if core.room_of(file) is None:
            continue
        here = room_of(file)
        for other in set(core.imports(ast.parse(file.read_text()), known, types=True)) - {"dtgpt"}:  # for its version
            there = other.split(".")[1]
            if there != here and LEVEL.get(there, len(LAYERS)) >= LEVEL[here]:
                wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_capabilities_do_not_need_each_other():
    needs = {name: set(others) for name, others in CAPABILITIES}
    assert core.circles(needs) == CIRCLES, "a circle is gone: take it off the list; or one has come"


def test_every_module_is_of_the_core_or_of_a_capability():
    folders = tuple(f"{capability}." for capability, _ in CAPABILITIES)
    outside = [
        name.removeprefix("dtgpt.")
        for name, path in core.files().items()
        if path.name != "__init__.py" and core.room_of(path) is None and not f"{name}.".startswith(folders)
    ]
    shared = {".".join(name.split(".")[:2]) for name in outside} - {"moved"}
    assert shared == SHARED, f"neither of the core nor of a capability: {sorted(shared - SHARED)}"


@pytest.mark.slow(1)
def test_no_file_outside_models_and_interop_names_a_module_of_an_architecture():
    names = {"wte", "wpe", "ln_1", "ln_2", "ln_f", "attn", "mlp", "lm_head", "drop_1", "drop_2", "c_attn", "c_proj"}
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        if room_of(file) in ("models", "interop") or file == ROOT / "inference" / "kernels" / "weights.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in names:
                found.append(f"{file.relative_to(ROOT)}:{node.lineno} .{node.attr}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = node.value.replace(".", " ").replace("'", " ").replace("`", " ").split()
                found += [f"{file.relative_to(ROOT)}:{node.lineno} {word}" for word in words if word in names]
    assert not found, "\n".join(found)


@pytest.mark.slow(1)
def test_few_functions_take_a_whole_recipe():
    """Others take the sections, values or settings that they read. Not counted are what makes a recipe of a recipe,
    what gives a recipe, or a part of it, to capabilities, whose sections the core does not know, what makes a state of
    it there, and `Section.check_recipe`: a section's values exclude those of any other field."""
    given_on = {"optim/update.py: make_states", "train/objective.py: objective_of"}
    given_on.add("optim/fp16/loss_scale.py: make_scaler")
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        if file == ROOT / "config" / "recipe.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                types = [ast.unparse(a.annotation).strip("'") for a in node.args.args if a.annotation]
                made = ast.unparse(node.returns).strip("'") if node.returns else ""
                if "Recipe" in types and made != "Recipe" and node.name != "check_recipe":
                    found.append(f"{file.relative_to(ROOT)}: {node.name}")
    assert len(set(found) - given_on) < 12, "\n".join(found)

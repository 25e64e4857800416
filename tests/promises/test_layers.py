"""The rooms of dtgpt stand in layers: a file imports from its own room and from layers below, never from above."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "dtgpt"
LAYERS = (
    ["util"], ["liveness", "translate"], ["ops"], ["models"], ["config"], ["data", "parallel"],
    ["optim", "planning"], ["checkpoint"], ["interop", "run"], ["inference"], ["train", "serve"],
    ["charts", "evaluation"], ["posttrain"], ["compare"], ["commands"], ["receipts"], ["cli"],
    ["moved", "capabilities"], ["__main__", "__init__"],
)  # fmt: skip
# Rooms that import this capability, which stands above them, until a seam takes its place. None may be added.
STILL = {
    "posttrain": {"planning", "interop", "inference", "serve"},
    "commands": {"data", "interop"},
}
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def imports(file: Path):
    """Yield the dotted names of dtgpt that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dtgpt":
            names = [node.module] if node.module != "dtgpt" else [f"dtgpt.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "dtgpt"]
        else:
            continue
        yield from (name for name in names if name != "dtgpt")


def room_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_file_stands_in_a_room():
    assert {room_of(file) for file in ROOT.rglob("*.py")} == LEVEL.keys()


@pytest.mark.slow(1)
def test_nothing_imports_upwards_or_from_a_room_beside():
    wrong, met = [], {room: set() for room in STILL}
    for file in sorted(ROOT.rglob("*.py")):
        here = room_of(file)
        for name in imports(file):
            there = name.split(".")[1]
            if there not in LEVEL or there == here or LEVEL[there] < LEVEL[here]:
                continue
            if here in STILL.get(there, ()):
                met[there].add(here)
            else:
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)
    assert met == STILL, "a room left STILL: take it off the list"


@pytest.mark.slow(1)
def test_no_file_outside_models_and_interop_names_a_module_of_an_architecture():
    names = {"wte", "wpe", "ln_1", "ln_2", "ln_f", "attn", "mlp", "lm_head", "drop_1", "drop_2", "c_attn", "c_proj"}
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        if room_of(file) in ("models", "interop"):
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
    what gives a recipe, or a part of it, to capabilities, whose sections the core does not know, and
    `Section.check_recipe`: a section's values exclude those of any other field."""
    found, given_on = [], {"optim/update.py: make_states", "train/objective.py: objective_of"}
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

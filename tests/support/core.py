"""What the core is, and how far it is from standing alone: counts that `tests/promises/test_core.py` lets only fall.

    python -m tests.support.core        # write the counts of today into tests/promises/core.json

The core is what one needs to train GPT-2 and LLaMA by AdamW on plain text, under dp, ZeRO, tp, sp and pp, with
checkpoints and one engine of generation. All else is a capability, which imports the core. A file leaves the list only
when a seam replaces what it did.
"""

import ast
import functools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.support.fresh import run_fresh

ROOT = Path(__file__).parents[2]
PACKAGE, COUNTS = ROOT / "dtgpt", ROOT / "tests" / "promises" / "core.json"
CORE = {  # rooms, and their files as regular expressions
    "models": (
        r"models/(config|inventory|roles|binding|batch|decoder|layers|gpt2|llama|rotary|source)"
    ),
    "ops": (
        r"ops/(operation|linear|activations|norms|rotary_positions|attention/core|loss/head|loss/cross_entropy|"
        r"random/philox|random/dropout|optim/adamw|optim/optimizer)"
    ),
    "plan": (
        r"config/(plan|plan_choice)|parallel/(mesh|launch|build|tensor|layout|shards|stages|gradients|collectives|engine|"
        r"pipeline|inference)"
    ),
    "recipe": r"config/(recipe|sections|execution|overrides|recipe_rules|schedule|recipe_file)",
    "step": (
        r"optim/(update|step_state)|train/(trainer|objective|interval_loss)"
    ),
    "loop": (
        r"train/(loop|start|setup|checkpoints|observer)|run/(folder|saved_recipe|report|records|stop_request)"
    ),
    "checkpoint": r"checkpoint/(save|load|manifest|shard_file|open)",
    "data": (
        r"data/(dataset|open|text)|"
        r"data/tokenizers/(tokenizer|open)"
    ),
    "generate": (
        r"inference/(engine|sequence|scheduler|request|commands|step|cache|model|open|base_options|options|prompts)|"
        r"parallel/cache_sizes|ops/attention/cached|"
        r"ops/sampling/(sample|sequences)"
    ),
    "util": (
        r"util/(console|errors|field_types|rules|storage|hardware|peers|torch_private|seams)"
    ),
    "command": (
        r"cli|capabilities|commands/(command|train|generate|model_options)|__init__|__main__"
    ),
}  # fmt: skip
# Words of identifiers that name what is no part of the core. "pairs" is none of them: heads rotate pairs of elements,
# a product is done by pairs of pieces, and pairs of answers are called preferences where it matters.
CAPABILITIES = {
    "adapter", "adapters", "beam", "beams", "chat", "chats", "comet", "dpo", "fp8", "gptneo", "grpo", "hf",
    "huggingface",
    "llmc", "lora", "megatron", "mlflow", "muon", "nanogpt", "normuon", "outlier", "outliers", "peft",
    "preference", "preferences", "reward", "rewards", "rollout", "rollouts", "tensorboard", "trackio", "wandb",
}  # fmt: skip
STEP = "train/trainer.py", "Trainer.train_step"
# Trace a run of the recipe in the arguments, and print the modules that it loaded and the functions that it executed.
TRACED = """
import inspect, json, sys, threading
seen, inside = {"start": set(), "step": set()}, []
def profile(frame, event, _):
    if event not in ("call", "return"):
        return
    file, _, name = frame.f_code.co_filename.rpartition("/dtgpt/")
    if not file or not name.endswith(".py") or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return  # of others, or the body of a module or a class
    if frame.f_code.co_name.startswith("<") and not frame.f_back.f_code.co_flags & inspect.CO_OPTIMIZED:
        return  # a comprehension in such a body, which an import executes
    here = name, frame.f_code.co_qualname
    if here == STEP:
        seen.setdefault("begin", set(seen["start"]))
        inside.append(1) if event == "call" else inside.pop()
    if event == "call":
        seen["step" if inside else "start"].add(here)
from dtgpt.cli import main
threading.setprofile(profile)
sys.setprofile(profile)
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
sys.setprofile(None)
modules = sorted(name for name in sys.modules if name.startswith("dtgpt."))
print("TRACED" + json.dumps({"modules": modules, **{phase: sorted(found) for phase, found in seen.items()}}))
"""


@functools.cache
def files() -> dict[str, Path]:
    """Return the modules of the package by dotted name."""
    found = {path: path.relative_to(PACKAGE.parent).with_suffix("") for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(name.parts).removesuffix(".__init__"): path for path, name in found.items()}


@functools.cache
def room_of(path: Path) -> str | None:
    """Return the room of the core in which a file is, None outside."""
    name = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return next((room for room, pattern in CORE.items() if re.fullmatch(pattern, name)), None)


def statements(tree: ast.Module) -> int:
    """Count statements; docstrings are free, as comments are."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(tree))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def imports(tree: ast.AST, known: dict[str, Path], types: bool = False) -> Iterator[str]:
    """Yield the modules of the package that are imported, within functions too. types: also for type checking alone."""
    for node in ast.iter_child_nodes(tree):
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imports(other, known)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dtgpt"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (sorted(names & known.keys()) or [str(node.module)])
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        else:
            yield from imports(node, known, types)


def identifiers(tree: ast.Module) -> Counter[str]:
    """Count names of variables, attributes, arguments, functions, classes and imports that name a capability."""
    found = Counter[str]()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+\d*|\d+", name)
                if any(word.lower() in CAPABILITIES for word in words):
                    found[name] += 1
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others (Tarjan 1972)."""
    order, low, stack, found = dict[str, int](), dict[str, int](), list[str](), list[list[str]]()

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            place = stack.index(name)
            group = sorted(stack[place:])
            del stack[place:]
            if len(group) > 1:
                found.append(group)

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return sorted(found)


def measure_sources() -> dict:
    """Return what the sources say, as `measure` does."""
    known = files()
    trees = {name: ast.parse(path.read_text()) for name, path in known.items()}
    rooms = {name: room_of(path) for name, path in known.items()}
    graph = {name: set(imports(tree, known, types=True)) - {name} for name, tree in trees.items()}
    core = [name for name, room in rooms.items() if room is not None]
    sizes = {room: sum(statements(trees[name]) for name in core if rooms[name] == room) for room in CORE}
    named = {name: dict(sorted(found.items())) for name in core if (found := identifiers(trees[name]))}
    skipped = {name: path.read_text().count("# fmt: skip") for name, path in known.items()}
    return {
        "statements of the core": sizes,
        "statements of the package": {"all": sum(map(statements, trees.values()))},
        "imports from the core to outside": sorted(
            f"{name} -> {other}"
            for name in core
            for other in set(imports(trees[name], known))
            if rooms.get(other) is None
        ),
        "identifiers of capabilities in the core": {
            f"{name}: {word}": count for name, words in named.items() for word, count in words.items()
        },
        "circles of files": [" ".join(group) for group in circles(graph)],
        "fmt: skip": {name: count for name, count in skipped.items() if count},
    }


def measure_runs(folder: Path) -> dict:
    """Return what is loaded and executed, as `measure` does. folder: for a run."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DTGPT_CACHE": str(folder / "cache")}

    def python(code: str, *words: str) -> str:
        done = run_fresh(["-c", code, *words], folder, environment)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout

    code = "import sys, dtgpt.train.trainer; print(*sorted(m for m in sys.modules if m.startswith('dtgpt.')))"
    options = ["--steps", "2", "--device", "cpu", "--log.eval_samples", "8"]
    told = python(f"STEP = {STEP}\n{TRACED}", "train", str(ROOT / "recipes" / "gpt2_tiny.py"), *options)
    seen = json.loads(told[told.index("TRACED") + len("TRACED") :])
    return {
        "modules that import dtgpt.train.trainer loads": python(code).split(),
        "modules that a plain run loads": seen["modules"],
        "files that a start executes": sorted({file for file, _ in seen["begin"]}),
        "files that a plain run executes": sorted({file for file, _ in [*seen["start"], *seen["step"]]}),
        "functions that a plain run executes": [f"{file}: {name}" for file, name in seen["start"]],
        "functions that a step executes": [f"{file}: {name}" for file, name in seen["step"]],
    }


def versions() -> list[str]:
    """Return what decides, beside the sources, which functions a run executes."""
    return [f"{sys.version_info[0]}.{sys.version_info[1]}", ".".join(torch.__version__.split(".")[:2])]


def size_of(counted: dict[str, int] | list[str]) -> int:
    return sum(counted.values()) if isinstance(counted, dict) else len(counted)


def risen(before: dict[str, int] | list[str], now: dict[str, int] | list[str]) -> list[str]:
    """Return what is new or more in `now`."""
    old, new = (Counter(each) for each in (before, now))
    return [f"{name} ({old[name]} -> {count})" for name, count in sorted(new.items()) if count > old[name]]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        counts = {"versions": versions(), **measure_sources(), **measure_runs(Path(place))}
    COUNTS.write_text(json.dumps(counts, indent=1) + "\n")
    for title, counted in counts.items():
        print(f"{title}: {size_of(counted)}" if title != "versions" else f"{title}: {counted}")

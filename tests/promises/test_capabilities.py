"""Capabilities: each imports no others than those that `dtgpt.capabilities` says, and the core works without them."""

import ast
import os
from importlib import import_module

import pytest

from dtgpt.capabilities import CAPABILITIES
from dtgpt.util.seams import LISTED, NAMED, Capability
from tests.support.core import files, imports, room_of
from tests.support.fresh import run_fresh

PLAIN = """
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import LogConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config

def recipe():
    return Recipe(
        name="plain", model=GPT2Config(num_layers=1, hidden_size=32, num_heads=2, seq_length=32, vocab_size=1024),
        optimizer=OptimizerConfig(lr=1e-3), steps=2, micro_batch_size=4, global_batch_size=4, device="cpu",
        log=LogConfig(interval=1, eval_samples=4, sample_tokens=4),
    )
"""
PROGRAM = """
import sys
from dtgpt.cli import main
from dtgpt.util.errors import UserError

def call(*words):
    try:
        main(list(words))
    except SystemExit as end:
        print("exit", end.code, flush=True)

call("--help")
call("train", "plain.py")
call("train", "plain.py", "--resume", "runs/plain-001", "--steps", "3")
call("generate", "runs/plain-001", "--prompt", "def", "--tokens", "4", "--device", "cpu")
call("plan", "plain.py")
call("train", "plain.py", "--lora.rank", "4")
call("train", "plain.py", "--precision", "fp8")
call("train", "plain.py", "--precision", "fp16")
call("train", "plain.py", "--plan", "auto")
call("train", "plain.py", "--resume", "auto")
call("train", "plain.py", "--recompute", "full")
call("train", "plain.py", "--compile", "on")
call("train", "plain.py", "--data.reset_position_ids")
call("train", "plain.py", "--num-layers", "2")
call("train", "plain.py", "--reduce", "exact")
from dataclasses import replace
from plain import recipe
try:
    replace(recipe(), plan="cp2").plan_for(2)
except UserError as error:
    print(error, file=sys.stderr)
"""
OF_WORDS = ("idle_degrees", "precision_help")  # seams that name no modules
Def = ast.FunctionDef  # what it imports is imported when it is called
# What a module that describes a capability may import: nothing that is not there before a command is known.
DESCRIBED_BY = {"dtgpt.util.seams", "dtgpt.util.field_types", "dtgpt.util.rules"}


def modules_of(capability: str) -> set[str]:
    """Return the modules of a capability: those of its folder, and its parts elsewhere, such as commands."""
    found = {name for name in files() if f"{name}.".startswith(f"{capability}.")}
    described = import_module(capability).CAPABILITY.parts
    for parts in (parts for seam, parts in described.items() if seam not in OF_WORDS):
        for part in parts.values() if hasattr(parts, "values") else parts:
            found.add(getattr(part, "part", part).partition(":")[0])
    return {name for name in found if room_of(files()[name]) is None}


def test_each_seam_is_asked_for_and_no_other_is_there():
    sources = {name: path.read_text() for name, path in files().items()}
    asked = "".join(source for name, source in sources.items() if name != "dtgpt.util.seams")
    assert [seam for seam in (*LISTED, *NAMED) if f'"{seam}"' not in asked] == []
    with pytest.raises(TypeError, match=r"there is no seam observer$"):
        Capability(observer=("a:part",))


@pytest.mark.slow(2)
def test_a_capability_imports_the_others_that_it_says():
    known, owner = files(), {}
    for capability, _ in CAPABILITIES:
        described = [node for node in ast.parse(known[capability].read_text()).body if not isinstance(node, Def)]
        assert set(imports(ast.Module(described, []), known)) <= DESCRIBED_BY, capability
        owner |= dict.fromkeys(modules_of(capability), capability)
    used: dict[str, set[str]] = {capability: set() for capability, _ in CAPABILITIES}
    for name, capability in owner.items():
        found = {owner.get(other) for other in imports(ast.parse(known[name].read_text()), known)}
        used[capability] |= {other for other in found if other is not None} - {capability}
    says = {capability: set(needs) for capability, needs in CAPABILITIES}
    wrong = [f"{name}: {sorted(needs)}" for name, needs in used.items() if needs != says[name]]
    assert not wrong, "these capabilities import\n" + "\n".join(wrong)


@pytest.mark.slow(3)
def test_the_core_trains_resumes_and_generates_without_any_capability(core_alone, tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    environment = {**os.environ, "PYTHONPATH": str(core_alone), "DTGPT_CACHE": str(tmp_path / "cache")}
    done = run_fresh(["-c", PROGRAM], tmp_path, environment)
    codes = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert codes == ["0"] * 4 + ["2"] * 11, done.stdout + done.stderr
    for sentence in (
        "there is no command 'plan'; use one of train, generate",
        "there is no option --lora.rank; see --help for the list",
        "--precision fp8 is not a choice; use one of auto, fp32, bf16, fp16",
        "precision=fp16 needs a loss scale, and no capability here has one; use --precision bf16",
        "plan=auto is chosen by dtgpt train and dtgpt plan",
        "resume=auto needs a capability, which is not here; name the run with --resume",
        "--recompute full is not a choice; use one of none",
        "compile=on needs a capability, which is not here; use --compile off",
        "there is no option --data.reset_position_ids; see --help for the list",
        "--reduce exact is not a choice; use one of fast",
        "the plan has cp, but no capability here brings it about; leave cp out",
        "there is no option --num-layers; did you mean --model.num_layers?",
    ):
        assert sentence in done.stderr, done.stderr

"""`dtgpt doctor`: what it says of machines, this one and others."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtgpt.cli import main
from dtgpt.tools.doctor import NEWEST, OLDEST, Facts, Gpu, findings, tell_served, what_serves
from tests.support.kernel_table import CAPABILITIES, gpu_of

H200, A100 = Gpu("NVIDIA H200", (9, 0), 139.8), Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 79.2)
V100, P100 = Gpu("Tesla V100-SXM2-16GB", (7, 0), 15.8), Gpu("Tesla P100-PCIE-16GB", (6, 0), 15.9)
GOOD = Facts(
    versions="dtgpt 0.2.0, torch 2.11.0, CUDA 12.8, Python 3.12.3", torch_version=(2, 11), has_cuda=True,
    has_driver=True, gpus=[H200], architectures=["sm_70", "sm_90", "compute_120"], shm=64.0,
    nvcc="/usr/local/cuda/bin/nvcc",
)  # fmt: skip


def test_a_complete_machine_has_nothing_to_mend():
    assert {one.state for one in findings(GOOD)} == {"ok"}
    text = "\n".join(one.text for one in findings(replace(GOOD, gpus=[H200, H200])))
    assert text.count("NVIDIA H200, 140 GiB, compute capability 9.0") == 1
    assert "2 GPUs, which reach each other's memory" in text


@pytest.mark.parametrize("changed, state, told", [
    ({"torch_version": (2, 10)}, "wrong", "dtgpt needs torch>=2.11,<2.16; run pip install 'torch>=2.11,<2.16'"),
    ({"torch_version": (2, 16)}, "wrong", "dtgpt needs torch>=2.11,<2.16"),
    ({"gpus": [], "has_cuda": False}, "wrong", "NVIDIA's driver, but this torch has no CUDA; install a CUDA build"),
    ({"gpus": []}, "note", "torch sees no GPU: dtgpt runs on the CPU; check nvidia-smi, CUDA_VISIBLE_DEVICES"),
    ({"gpus": [], "has_cuda": False, "has_driver": False}, "note", "no GPU: dtgpt runs on the CPU"),
    ({"gpus": [A100]}, "note", "compute capability 8.0; fp8 needs 8.9; the fastest kernels"),
    ({"gpus": [V100]}, "note", "7.0; bf16 and flash attention need 8.0: use --precision fp16 --attention sdpa"),
    ({"gpus": [P100]}, "wrong", "this torch has kernels from 7.0 on; use another GPU, or --device cpu"),
    ({"gpus": [H200, H200], "peers": False}, "note", "do not reach each other's memory: NCCL sends all messages"),
    ({"has_triton": False}, "note", "the package triton is missing: plain torch runs, slower"),
    ({"nvcc": None}, "note", "nvcc (CUDA toolkit, or CUDA_HOME) not found: --attention fused_softmax"),
    ({"nvcc": None, "has_ninja": False}, "note", "CUDA_HOME) and ninja (pip install 'dtgpt[cuda]') not found"),
    ({"no_compiler": "no compiler (gcc or clang) was found"}, "note", "was found: torch.compile does not work"),
    ({"gpus": [H200, H200], "shm": 0.0625}, "note", "/dev/shm has 0.06 GiB, too little for NCCL; start the container"),
    ({"open_files": 256}, "note", "256 files may be open; raise it: ulimit -n 1024"),
    ({"cache": Path("/c"), "cache_is_writable": False}, "wrong", "/c cannot be written; set DTGPT_CACHE to a folder"),
    ({"cache": Path("/c"), "cache_gib": 0.2}, "note", "/c has 0.2 GiB left"),
    ({"missing": ["wandb", "uvicorn"]}, "note", "missing: wandb, uvicorn; pip install 'dtgpt[serve,wandb]' has them"),
    ({"variables": {"NCCL_DEBUG": "INFO"}}, "note", "NCCL_DEBUG=INFO is set"),
])  # fmt: skip
def test_what_is_missing_is_said_with_what_to_do(changed, state, told):
    (found,) = (one for one in findings(replace(GOOD, **changed)) if told in one.text)
    assert found.state == state


def test_the_versions_of_torch_are_those_that_are_installed_with_dtgpt():
    root, beyond = Path(__file__).parents[2], f"{NEWEST[0]}.{NEWEST[1] + 1}"
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST[0]}.{OLDEST[1]},<{beyond}" in project["dependencies"]
    assert f"'torch<{beyond}'" in (root / "CONTRIBUTING.md").read_text()
    tested = re.findall(r'python: "(.*)", torch: "(.*)"', (root / ".github" / "workflows" / "tests.yml").read_text())
    assert {torch for _, torch in tested} >= {f"torch=={OLDEST[0]}.{OLDEST[1]}.*", f"torch<{beyond}"}
    assert f">={min(tested)[0]}" == project["requires-python"]
    pythons = f"{min(tested)[0]} to {max(tested)[0]}", f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    assert all(f" | {words} | " in (root / "docs" / "maintainers.md").read_text() for words in pythons)


def gpu(*machine: Any) -> dict[str, dict[str, str | None]]:
    """Return, by operation, why each kernel is not there, None where it is. machine: as of `gpu_of`."""
    with gpu_of(*machine) as device:
        found = what_serves(device)
    return {name: {kernel: reason for kernel, _, reason in kernels} for name, kernels in found}


@pytest.mark.parametrize("capability, attention, tiles, decode", [
    ((7, 0), "fused_softmax", None, "Triton"), ((8, 0), "flash", "flash_kernels", "Triton"),
    ((8, 9), "flash", "flash_kernels", "Triton"), ((9, 0), "flash", "warp_kernels", "rows.cu"),
    ((10, 0), "flash", "descriptor_kernels", "rows.cu"),
])  # fmt: skip
def test_the_first_kernel_that_a_gpu_can_run(capability, attention, tiles, decode):
    served, wanted = gpu(capability), {"attention": attention, "flash": tiles, "decode_blocks": decode}
    for operation, first in wanted.items():
        assert next((name for name, reason in served[operation].items() if reason is None), None) == first
    assert all("9.0" in reason for reason in served["flash"].values() if reason and capability >= (8, 0))


def test_what_is_not_there_is_the_reason():
    without = gpu((9, 0), False)
    assert without["sample"] == {"Triton": "Triton is not installed"}
    assert without["flash"]["warp_kernels"] == without["attention"]["flash"] == "Triton is not installed"
    unbuilt = gpu((9, 0), True, False)
    assert unbuilt["decode_blocks"]["rows.cu"] == "nvcc not found" and unbuilt["attention"]["flash"] is None
    assert unbuilt["attention"]["fused_softmax"] == "nvcc not found: torch.compile makes the kernel, slower"
    assert gpu((8, 0))["flash"]["warp_kernels"] == "it needs compute capability 9.0, and the GPU has 8.0"


def test_every_kernel_serves_on_a_gpu_or_a_cpu():
    """What serves nothing anywhere is taken out."""
    tables = [gpu(capability) for capability in CAPABILITIES]
    on_cpus = {"PyTorch"}
    for operation, kernels in tables[0].items():
        assert all(any(table[operation][name] is None for table in tables) for name in kernels.keys() - on_cpus)


def test_a_gpu_has_a_table_and_a_machine_without_one_a_line():
    with gpu_of((9, 0), nvcc=False) as device:
        lines = tell_served(replace(GOOD, served={H200.name: what_serves(device)}))
    assert lines[0] == "what computes on NVIDIA H200, the first that can; else PyTorch:"
    (decode,) = (line for line in lines if line.startswith("  decode_blocks: "))
    assert "Triton (16 bits, heads of 16" in decode and decode.endswith("; not rows.cu: nvcc not found")
    (alike,) = (line for line in lines if "bias_gelu" in line)
    assert "adamw" in alike and alike.endswith(": Triton (on GPUs)")
    (alone,) = tell_served(replace(GOOD, gpus=[]))
    assert re.fullmatch(r"kernels need a CUDA GPU: PyTorch computes the \d+ operations that have any", alone)


def test_this_machine_runs_dtgpt(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    out = capsys.readouterr().out
    assert not stop.value.code and out.startswith("ok     dtgpt ") and out.endswith("\ndtgpt runs here\n")

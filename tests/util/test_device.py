from dataclasses import replace

import pytest
import torch

from dtgpt.config.execution import choose_device, choose_dtype, choose_graphs
from dtgpt.config.plan import ResolvedPlan
from dtgpt.models.gpt2 import GPT3_175B
from dtgpt.ops.kernels.devices import below_ampere
from dtgpt.parallel.compiled.choice import choose_compiler
from dtgpt.planning.memory_check import check_memory
from dtgpt.planning.parameters import state_bytes
from dtgpt.train import setup
from dtgpt.train.start import find_resume_point, make_job
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import check_device, memory_errors_as_user_errors
from dtgpt.util.machine.machine import peak_of_name

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A800-SXM4-80GB", 312e12), ("NVIDIA A800 80GB PCIe", 312e12),
    ("NVIDIA H800", 989e12), ("NVIDIA H20", 148e12), ("NVIDIA A30", 165e12), ("Tesla V100-SXM2-32GB", 125e12),
    ("Tesla V100-SXM3-32GB", 125e12), ("Tesla V100-PCIE-16GB", 112e12), ("Tesla V100S-PCIE-32GB", 130e12),
    ("Tesla V100-FHHL-16GB", None), ("Tesla T4", 65e12), ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12),
    ("NVIDIA GeForce RTX 4090", 165.2e12), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA RTX A4000", None),
    ("NVIDIA RTX A1000", None), ("NVIDIA A10G", None), ("NVIDIA L40", None), ("NVIDIA GeForce RTX 3090 Ti", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
])  # fmt: skip
def test_a_peak_is_known_for_the_right_chip_or_not_at_all(name, peak):
    assert peak_of_name(name) == peak


def test_precision_follows_the_device_or_the_recipe(recipe):
    assert choose_dtype("auto", CPU) == torch.float32 and choose_dtype("auto", CUDA) == torch.bfloat16
    assert choose_dtype("bf16", CPU) == torch.bfloat16
    assert choose_dtype("fp32", CUDA) == torch.float32
    assert choose_dtype("fp16", CPU) == torch.float16
    assert replace(recipe, precision="bf16").settings(ResolvedPlan(dp=1), CPU).dtype == torch.bfloat16


@pytest.fixture
def v100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")


@pytest.mark.parametrize("dtype, attention, dropout, told", [
    (torch.bfloat16, "auto", 0.0, "use --precision fp16 --attention sdpa"),
    (torch.bfloat16, "auto", 0.1, "use --precision fp16 --attention fused_softmax"),
    (torch.bfloat16, "sdpa", 0.0, "use --precision fp16"),
    (torch.float16, "auto", 0.0, "use --attention sdpa"),
    (torch.float32, "flash", 0.0, "use --attention sdpa"),
    (torch.float16, "fused_softmax", 0.1, None),
    (torch.float32, "auto", 0.1, None),
])  # fmt: skip
def test_a_gpu_below_ampere_is_told_what_runs(recipe, v100, monkeypatch, dtype, attention, dropout, told):
    made = replace(recipe, attention=attention).settings(ResolvedPlan(dp=1), CPU)
    settings = replace(made, device=CUDA, dtype=dtype, model=replace(made.model, dropout=dropout))
    found = below_ampere(settings)
    start = "Tesla V100 has compute capability 7.0, and bf16 and flash attention need 8.0 (A100): "
    assert found == (None if told is None else start + told)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert below_ampere(settings) is None


@pytest.mark.parametrize("capability, architectures, told", [
    ((7, 0), ["sm_75", "sm_80", "sm_90"], r"kernels from 7\.5 on; install the build for CUDA 12\.6: .*/whl/cu126"),
    ((6, 0), ["sm_75", "sm_120"], r"kernels from 7\.5 on; use another GPU, or --device cpu"),
    ((7, 0), ["sm_50", "sm_60", "sm_70", "sm_90"], None),
    ((10, 3), ["sm_80", "sm_90a", "sm_120", "compute_120"], None),
    ((9, 0), [], None),
])  # fmt: skip
def test_a_gpu_without_kernels_in_this_torch_is_refused(v100, monkeypatch, capability, architectures, told):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
    check_device(CPU)
    if told is None:
        check_device(CUDA)
        return
    with pytest.raises(UserError, match=f"^Tesla V100 has compute capability .*{told}"):
        check_device(CUDA)


def test_a_job_on_a_gpu_below_ampere_says_so_once_at_its_start(recipe, v100, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70"])
    resume = find_resume_point(None, recipe.runs, recipe.name, recipe.model.vocab_size)
    setup.Setup(make_job(replace(recipe, device="auto"), resume, 1)).settings_here()
    told = capsys.readouterr().err
    assert told == (
        "warning: Tesla V100 has compute capability 7.0, and bf16 and flash attention need 8.0 (A100): use --precision "
        "fp16 --attention fused_softmax\n"
    )


def test_a_model_that_cannot_fit_is_refused(recipe, monkeypatch):
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**22}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    with pytest.raises(UserError, match=r"need 2,602 GiB under this plan, but CPU.* has 16 GiB; use a smaller model"):
        settings = replace(recipe, model=GPT3_175B).settings(ResolvedPlan(dp=1), CPU)
        check_memory(state_bytes(settings, 0), 1, CPU)


def test_the_processes_of_a_node_share_its_main_memory(monkeypatch):
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**22}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    check_memory(5 * 2**30, 3, CPU)
    with pytest.raises(UserError, match="need 20 GiB"):
        check_memory(5 * 2**30, 4, CPU)


def test_more_processes_than_cuda_devices_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [choose_device("auto", rank) for rank in (0, 1)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert choose_device("cpu", 7) == CPU
    with pytest.raises(UserError, match=r"3 or more processes.* sees 2 CUDA devices; use --nproc-per-node 2"):
        choose_device("auto", 2)


def test_running_out_of_memory_is_one_sentence():
    with pytest.raises(UserError, match="ran out of memory; lower it"), memory_errors_as_user_errors("lower it"):
        torch.empty(1 << 60)
    with pytest.raises(RuntimeError, match="something else"), memory_errors_as_user_errors("lower it"):
        raise RuntimeError("something else")


def test_without_a_compiler_training_is_eager_unless_compile_was_asked_for(recipe, monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: None)
    plan = ResolvedPlan(dp=1)
    assert choose_compiler("auto", CPU, False, plan) is False and capsys.readouterr().err == ""
    assert choose_compiler("auto", CUDA, False, plan) is False
    assert "no compiler (gcc or clang) was found" in capsys.readouterr().err
    assert recipe.settings(plan, CUDA).compile is False and capsys.readouterr().err == ""  # graphs need none
    with pytest.raises(UserError, match="compile=on, but no compiler"):
        replace(recipe, compile="on").settings(plan, CPU)


@pytest.mark.parametrize("graph, compile, graphs, compiled", [
    ("auto", "auto", True, False), ("off", "auto", False, True), ("on", "auto", True, False),
    ("auto", "on", True, True), ("off", "off", False, False),
])  # fmt: skip
def test_on_cuda_steps_are_replayed_or_else_compiled(recipe, graph, compile, graphs, compiled):
    settings = replace(recipe, graph=graph, compile=compile).settings(ResolvedPlan(dp=1), CUDA, here=False)
    assert (settings.graphs, settings.compile) == (graphs, compiled)


def test_graphs_on_a_cpu_are_refused_where_they_were_asked_for(recipe):
    plan = ResolvedPlan(dp=1)
    assert not choose_graphs("auto", CPU, plan) and not choose_graphs("off", CPU, plan)
    with pytest.raises(UserError, match=r"^graph=on, but .* need a CUDA device; use --graph auto, or --device cuda"):
        replace(recipe, graph="on").settings(ResolvedPlan(dp=1), CPU)

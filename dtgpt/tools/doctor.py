"""`dtgpt doctor`: whether this machine has what training, generation and serving need, and what to do where not."""

import importlib.util
import os
import resource
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from dtgpt.commands.command import Command
from dtgpt.data.dataset import default_cache
from dtgpt.parallel.compiled.choice import why_no_compiler
from dtgpt.util import seams
from dtgpt.util.console import say
from dtgpt.util.machine.versions import describe_versions
from dtgpt.util.rules import Given, Is, Missing, Rule, broken
from dtgpt.util.shared.gpu_limits import FLOAT8, HOPPER, SIXTEEN_BITS, TRITON, why_no_kernels
from dtgpt.util.shared.words import hanging

OLDEST, NEWEST = (2, 11), (2, 15)  # torch, as in pyproject.toml
EXTRAS = {
    "matplotlib": "plot",
    "starlette": "serve",
    "uvicorn": "serve",
    "tokenizers": "data",
    "sentencepiece": "data",
    "zstandard": "data",
    "fastokens": "fast",
    "orjson": "fast",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "lm_eval": "eval",
}
PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS")  # of variables
LEAST_SHM, LEAST_FILES = 1.0, 1024  # GiB of /dev/shm for several GPUs; open files
State = Literal["ok", "note", "wrong"]


class Gpu(NamedTuple):
    """A CUDA device that torch sees."""

    name: str
    capability: tuple[int, int]
    gib: float


class Served(NamedTuple):
    """An operation, and what may serve it on a GPU: (kernel, what it is taken for, why it is not there or None)."""

    operation: str
    kernels: tuple[tuple[str, str, str | None], ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found on this machine."""

    versions: str
    torch_version: tuple[int, int]
    has_cuda: bool  # whether torch was built with it
    has_driver: bool  # whether NVIDIA's driver is loaded
    gpus: list[Gpu] = field(default_factory=list)
    architectures: list[str] = field(default_factory=list)  # for which torch has kernels, such as sm_90
    peers: bool = True  # whether the GPUs reach each other's memory
    has_triton: bool = True
    nvcc: str | None = None
    has_ninja: bool = True
    no_compiler: str | None = None
    shm: float | None = None  # GiB of /dev/shm; None: there is none
    open_files: int = LEAST_FILES
    cache: Path = Path()
    cache_is_writable: bool = True
    cache_gib: float = 1.0  # free
    missing: list[str] = field(default_factory=list)  # packages of EXTRAS
    variables: dict[str, str] = field(default_factory=dict)
    served: dict[str, list[Served]] = field(default_factory=dict)  # by the name of a GPU

    @property
    def number(self) -> int:
        """How many GPUs there are."""
        return len(self.gpus)

    @property
    def lacking(self) -> str:
        """What CUDA kernels are built with and is not there, in words."""
        tools = {"nvcc (CUDA toolkit, or CUDA_HOME)": self.nvcc, "ninja (pip install 'dtgpt[cuda]')": self.has_ninja}
        return " and ".join(name for name, there in tools.items() if not there)

    @property
    def packages(self) -> str:
        """The optional packages that are missing."""
        return ", ".join(self.missing)

    @property
    def extras(self) -> str:
        """The extras of dtgpt that have them."""
        return ",".join(sorted({EXTRAS[name] for name in self.missing}))


class Finding(NamedTuple):
    """A line of the report. note: dtgpt runs, but slower or with less; wrong: it does not run."""

    state: State
    text: str


FINDINGS: tuple[tuple[State, Rule], ...] = (  # beside those on torch and on each GPU
    (
        "wrong",
        Rule(
            "the machine has NVIDIA's driver, but this torch has no CUDA; install a CUDA build",
            Missing("number"),
            Given("has_driver"),
            Missing("has_cuda"),
        ),
    ),
    (
        "note",
        Rule(
            "torch sees no GPU: dtgpt runs on the CPU; check nvidia-smi, CUDA_VISIBLE_DEVICES and, in Docker, --gpus "
            "all",
            Missing("number"),
            Given("has_cuda"),
        ),
    ),
    (
        "note",
        Rule(
            "no GPU: dtgpt runs on the CPU, for small models",
            Missing("number"),
            Missing("has_cuda"),
            Missing("has_driver"),
        ),
    ),
    ("ok", Rule("{number} GPUs, which reach each other's memory", Is("number", ">", 1), Given("peers"))),
    (
        "note",
        Rule(
            "{number} GPUs, which do not reach each other's memory: NCCL sends all messages",
            Is("number", ">", 1),
            Missing("peers"),
        ),
    ),
    (
        "note",
        Rule(
            "the package triton is missing: plain torch runs, slower; pip install triton",
            Given("number"),
            Missing("has_triton"),
        ),
    ),
    (
        "note",
        Rule(
            "{lacking} not found: --attention fused_softmax and the decode kernels for few sequences are not built, "
            "and others run, slower",
            Given("number"),
            Given("lacking"),
        ),
    ),
    ("ok", Rule("CUDA kernels can be built: {nvcc}, ninja", Given("number"), Missing("lacking"))),
    ("note", Rule("{no_compiler}: torch.compile does not work", Given("no_compiler"))),
    ("wrong", Rule("{cache} cannot be written; set DTGPT_CACHE to a folder that can", Missing("cache_is_writable"))),
    (
        "note",
        Rule(
            "{cache} has {cache_gib:.1f} GiB left for tokens and vocabularies",
            Given("cache_is_writable"),
            Is("cache_gib", "<", 1),
        ),
    ),
    (
        "note",
        Rule(
            "/dev/shm has {shm:.2f} GiB, too little for NCCL; start the container with --ipc=host or --shm-size=8g",
            Is("number", ">", 1),
            Is("shm", "!=", None),
            Is("shm", "<", LEAST_SHM),
        ),
    ),
    (
        "note",
        Rule(
            f"{{open_files}} files may be open; raise it: ulimit -n {LEAST_FILES}",
            Is("open_files", "<", LEAST_FILES),
        ),
    ),
    (
        "note",
        Rule(
            "optional packages are missing: {packages}; pip install 'dtgpt[{extras}]' has them",
            Given("packages"),
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check this machine: torch, GPUs and which precisions they run, which kernel computes what and why others do not,
    compilers, shared memory, packages. The exit code is 1 if something that dtgpt needs is missing."""


def look() -> Facts:
    """Return the facts of this machine. Nothing is installed, built or changed."""
    from torch.utils.cpp_extension import CUDA_HOME

    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    gpus = []
    for index in devices:
        properties = torch.cuda.get_device_properties(index)
        gpus.append(Gpu(properties.name, torch.cuda.get_device_capability(index), properties.total_memory / 2**30))
    cache = default_cache()
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    major, minor = torch.__version__.split(".")[:2]
    return Facts(
        versions=describe_versions(),
        torch_version=(int(major), int(minor)),
        has_cuda=torch.version.cuda is not None,
        has_driver=Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
        gpus=gpus,
        architectures=torch.cuda.get_arch_list() if gpus else [],
        peers=all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b),
        has_triton=TRITON,
        nvcc=None if CUDA_HOME is None else os.path.join(CUDA_HOME, "bin", "nvcc"),
        has_ninja=shutil.which("ninja") is not None,
        no_compiler=why_no_compiler(torch.device("cuda" if gpus else "cpu")),
        shm=shutil.disk_usage("/dev/shm").total / 2**30 if Path("/dev/shm").is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cache=cache,
        cache_is_writable=os.access(existing, os.W_OK),
        cache_gib=shutil.disk_usage(existing).free / 2**30,
        missing=[name for name in EXTRAS if importlib.util.find_spec(name) is None],
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
        served={gpu.name: what_serves(torch.device("cuda", index)) for index, gpu in enumerate(gpus)},
    )


def what_serves(device: torch.device) -> list[Served]:
    """Return what may serve each operation on a GPU. Nothing is built."""
    return [
        Served(name, tuple((each.name, each.when, each.why_not(device)) for each in seams.load(place)))
        for name, place in seams.added("kernels").items()
    ]


def tell_served(facts: Facts) -> list[str]:
    """Return lines that say which kernel computes what, and why others do not; operations that are alike together."""
    if not facts.gpus:
        count = len(seams.added("kernels"))
        return [f"kernels need a CUDA GPU: PyTorch computes the {count} operations that have any"]
    lines = []
    for gpu, served in facts.served.items():
        lines.append(f"what computes on {gpu}, the first that can; else PyTorch:")
        alike: dict[tuple, list[str]] = {}
        for operation, kernels in served:
            alike.setdefault(kernels, []).append(operation)
        for kernels, operations in alike.items():
            there = [f"{name} ({when})" for name, when, reason in kernels if reason is None]
            missing = [f"not {name}: {reason}" for name, _, reason in kernels if reason is not None]
            lines.append(f"  {', '.join(operations)}: {'; '.join([*(there or ['PyTorch']), *missing])}")
    return lines


def findings(facts: Facts) -> list[Finding]:
    """Return what the facts mean, each with what to do where something is missing."""
    found = [_of_torch(facts), *(_of_gpu(gpu, facts) for gpu in dict.fromkeys(facts.gpus))]
    found += [Finding(state, text) for state, rule in FINDINGS for text in broken([rule], facts)]
    return found + [Finding("note", f"{name}={value} is set") for name, value in facts.variables.items()]


def _of_torch(facts: Facts) -> Finding:
    if not OLDEST <= facts.torch_version <= NEWEST:
        fitting = f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
        return Finding("wrong", f"{facts.versions}: dtgpt needs {fitting}; run pip install '{fitting}'")
    return Finding("ok", facts.versions)


def _of_gpu(gpu: Gpu, facts: Facts) -> Finding:
    major, minor = gpu.capability
    name = f"{gpu.name}, {gpu.gib:.0f} GiB, compute capability {major}.{minor}"
    if reason := why_no_kernels(gpu.name, gpu.capability, facts.architectures):
        return Finding("wrong", reason)
    lacking = []
    if gpu.capability < SIXTEEN_BITS:
        lacking.append("bf16 and flash attention need 8.0: use --precision fp16 --attention sdpa")
    if gpu.capability < FLOAT8:
        lacking.append("fp8 needs 8.9")
    if gpu.capability < HOPPER:
        lacking.append("the fastest kernels for attention and for few sequences need 9.0; others run")
    return Finding("note" if lacking else "ok", "; ".join([name, *lacking]))


def check_machine(options: DoctorOptions) -> int:
    """Print the findings, and return 1 where one of them is wrong."""
    facts = look()
    found = findings(facts)
    for state, text in found:
        say(hanging(f"{state:<6} {text}", 7))
    for line in tell_served(facts):
        say(hanging(line, 4))
    wrong = [one for one in found if one.state == "wrong"]
    say("dtgpt does not run here until this is mended" if wrong else "dtgpt runs here")
    return 1 if wrong else 0


command = Command("doctor", DoctorOptions, check_machine, "")

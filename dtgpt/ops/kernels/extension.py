"""Build CUDA C++ when an operation first needs it, and cache the result for later runs.

torch.utils.cpp_extension runs nvcc and the linker. The sources have a C interface and do not include PyTorch: a build
takes seconds instead of a minute, and one library serves every version of PyTorch. The cache is in
`$TORCH_EXTENSIONS_DIR`, by default `~/.cache/torch_extensions`: a library for each GPU architecture and digest of
sources and flags.
"""

import ctypes
import functools
import hashlib
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch

from dtgpt.util.console import say
from dtgpt.util.storage import FileLock

Structs = tuple[tuple[str, type[ctypes.Structure]], ...]  # by their names in C++
FLAGS = ("-O3", "-std=c++17")


@functools.cache
def library(
    source: Path, device: torch.device, flags: tuple[str, ...] = (), instead: str = "plain torch", structs: Structs = ()
) -> ctypes.CDLL | None:
    """Return the library of a `.cu` file for this CUDA device, or None, with a warning, where it cannot be built.
    flags: further ones of nvcc. instead: what runs then, for the warning. structs: that it shares with Python."""
    try:
        built = ctypes.CDLL(str(_built(source, torch.cuda.get_device_capability(device), (*FLAGS, *flags))))
        check_sizes(built, structs)
        return built
    except Exception as error:  # no failure of a build may end a run that other kernels can continue
        say(
            f"the CUDA kernel {source.stem} cannot be built ({_reason(error)}): {instead} runs instead, slower",
            warning=True,
        )
        return None


def check_sizes(built: ctypes.CDLL, structs: Structs) -> None:
    """Raise RuntimeError where a struct has another size in the library, whose kernels would read other fields than
    Python writes. The library returns it from `sizeof_NAME()`."""
    for name, ours in structs:
        function = getattr(built, f"sizeof_{name}")
        function.restype, function.argtypes = ctypes.c_size_t, ()
        if (size := function()) != ctypes.sizeof(ours):
            raise RuntimeError(
                f"its struct {name} has {size} bytes, where {ours.__module__}.{ours.__name__} has "
                f"{ctypes.sizeof(ours)}; give both the same fields"
            )


def targets(nvcc: str) -> list[int]:
    """Return the architectures that this nvcc compiles for, such as 90 for compute capability 9.0."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    return sorted(map(int, re.findall(r"compute_(\d+)$", listed, re.MULTILINE)))


def _built(source: Path, capability: tuple[int, int], flags: tuple[str, ...]) -> Path:
    """Return the path of the library. One process builds it unless it is cached; the others wait."""
    from torch.utils import cpp_extension  # needs setuptools, and looks for CUDA

    if cpp_extension.CUDA_HOME is None:
        raise RuntimeError("nvcc was not found; install the CUDA toolkit or set CUDA_HOME")
    contents = [path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.cu*"))]  # they include others
    digest = hashlib.sha256(b"\0".join([repr((flags, torch.version.cuda)).encode(), *contents])).hexdigest()
    unique = f"{source.stem}_sm{capability[0]}{capability[1]}_{digest[:16]}"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = Path(root) / "dtgpt"
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / f"{unique}.so"
    with FileLock(folder / f"{unique}.lock", wait=True):
        if not finished.exists():
            # In a temporary folder, so that a killed build does not leave a lock file of PyTorch's.
            with tempfile.TemporaryDirectory(dir=folder) as place:
                os.replace(_build(cpp_extension, source, unique, capability, flags, place), finished)
    return finished


def _build(
    cpp_extension, source: Path, unique: str, capability: tuple[int, int], flags: tuple[str, ...], place: str
) -> str:
    nvcc = os.path.join(cpp_extension.CUDA_HOME, "bin", "nvcc")
    return cpp_extension.load(
        unique,
        [str(source)],
        extra_cuda_cflags=[*flags, _target(nvcc, capability)],
        extra_ldflags=["-Wl,--as-needed", *_library_paths(nvcc)],
        build_directory=place,
        is_python_module=False,
    )


def _target(nvcc: str, capability: tuple[int, int]) -> str:
    """Return the flag for this GPU's machine code or, where nvcc is older than the GPU, for the newest PTX."""
    wanted = 10 * capability[0] + capability[1]
    possible = [target for target in targets(nvcc) if target <= wanted]
    if not possible:
        raise RuntimeError(f"{nvcc} does not compile for compute capability {capability[0]}.{capability[1]}")
    kind = "sm" if possible[-1] == wanted else "compute"
    return f"-gencode=arch=compute_{possible[-1]},code={kind}_{possible[-1]}"


def _library_paths(nvcc: str) -> list[str]:
    """Return linker flags for the CUDA runtime. nvcc knows its toolkit's path, even when a wrapper script calls it."""
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True, check=True)
    line = re.search(r"^#\$ LIBRARIES=(.*)$", dry.stderr, re.MULTILINE)
    words = [] if line is None else shlex.split(line[1])
    paths = [word[2:] for word in words if word.startswith("-L") and not word.endswith("stubs")]
    return [flag for path in paths for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]


def _reason(error: Exception) -> str:
    """Return the most informative line of an error that may hold a compiler's whole output."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if re.search(r"\berror:|not found", line)), lines[0])[:300]

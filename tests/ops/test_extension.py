"""How CUDA C++ is built, and what is said where it cannot be."""

import re
import shutil
import subprocess

import pytest
import torch

from dtgpt.ops import extension
from dtgpt.ops.decode import rows
from dtgpt.ops.fused_softmax import softmax_kernels

SIZES = [  # of GPT-2 124M and 345M; of grouped queries and wide heads; of GPT-2 1558M; of a GPT with long inner rows
    rows.Sizes("__nv_bfloat16", 768, 3072, 2304, 768, 64, 12, 1024, 1),
    rows.Sizes("__half", 1024, 4096, 3072, 1024, 64, 16, 2048, 1),
    rows.Sizes("__nv_bfloat16", 1024, 2048, 1536, 1024, 128, 2, 1024, 2),
    rows.Sizes("__nv_bfloat16", 1600, 6400, 4800, 1600, 64, 25, 1024, 1),
    rows.Sizes("__nv_bfloat16", 2048, 8192, 6144, 2048, 64, 32, 1024, 1),
]
HOPPER = ["-c", "-gencode=arch=compute_90,code=sm_90", "-Xptxas", "-v"]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def compile_all(commands: list[list[str]]) -> list[str]:
    """Return what the compiler said of each command."""
    builds = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for words in commands]
    said = [build.communicate()[1] for build in builds]
    assert all(build.returncode == 0 for build in builds), said
    return said


@pytest.mark.long
@needs_nvcc
def test_the_softmax_compiles_without_a_gpu(tmp_path):
    """For the oldest architecture of this nvcc, and for Hopper, whose kernels must keep their rows in registers."""
    oldest = extension.targets("nvcc")[0]
    common = ["nvcc", *extension.FLAGS, *softmax_kernels.FLAGS, "-Werror", "all-warnings", str(softmax_kernels.SOURCE)]
    steps = [["-ptx", f"-arch=compute_{oldest}"], HOPPER]
    said = compile_all([[*common, *step, "-o", str(tmp_path / f"{i}.out")] for i, step in enumerate(steps)])
    spills = re.findall(r"(\d+) bytes spill stores", said[1])
    assert len(spills) == 48 and set(spills) == {"0"}


@pytest.mark.long
@needs_nvcc
def test_the_products_of_few_rows_compile_without_a_gpu(tmp_path):
    """Two kernels must fit on a multiprocessor: 128 registers a thread, few of them spilled."""
    common = ["nvcc", *extension.FLAGS, "-Werror", "all-warnings", str(rows.SOURCE), *HOPPER]
    devices = rows.Gpu(multiprocessors=132, room=77824)
    assert [rows.most_rows(size, devices.multiprocessors) for size in SIZES] == [4, 4, 4, 2, 2]
    commands = [[*common, *rows.flags(s, devices), "-o", str(tmp_path / f"{i}.out")] for i, s in enumerate(SIZES)]
    for count, said in zip([14, 14, 20, 10, 11], compile_all(commands), strict=True):
        spills = [int(found) for found in re.findall(r"(\d+) bytes spill stores", said)]
        assert len(spills) == count and max(spills) <= 64


def test_sizes_without_room_for_a_ring_of_weights_are_left_to_triton():
    def most_rows(hidden: int, inner: int, ctas: int = 132) -> int:
        return rows.most_rows(rows.Sizes("__half", hidden, inner, 3 * hidden, hidden, 64, hidden // 64, 1024, 1), ctas)

    assert [most_rows(size, 8192) for size in (2048, 4096, 5120, 8192)] == [2, 2, 2, 0]
    assert most_rows(4096, 8192, ctas=78) == 2 and most_rows(5120, 8192, ctas=78) == 0


def test_a_gpu_that_nvcc_does_not_know_gets_what_its_driver_translates(monkeypatch):
    monkeypatch.setattr(extension, "targets", lambda nvcc: [75, 80, 90, 100])
    assert extension._target("nvcc", (9, 0)) == "-gencode=arch=compute_90,code=sm_90"
    assert extension._target("nvcc", (10, 3)) == "-gencode=arch=compute_100,code=compute_100"
    with pytest.raises(RuntimeError, match=r"capability 7\.0"):
        extension._target("nvcc", (7, 0))


@pytest.mark.parametrize("problem", ["no nvcc", "no ninja", "failing compiler"])
def test_a_build_that_fails_is_told_once(problem, monkeypatch, capsys, tmp_path):
    from torch.utils import cpp_extension

    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        "#!/bin/sh\n[ $1 = --list-gpu-arch ] && echo compute_90 && exit\n"
        + ("echo '#$ LIBRARIES= \"-L/usr/lib\"' >&2\n[ $1 = --dryrun ] || { echo 'x.cu(1): error: no' >&2; exit 1; }\n")
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None if problem == "no nvcc" else str(tmp_path))
    if problem == "no ninja":
        monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    elif problem == "failing compiler" and not cpp_extension.is_ninja_available():
        pytest.skip("needs ninja")
    extension.library.cache_clear()
    assert [softmax_kernels.built(torch.device("cuda", 0)) for _ in range(2)] == [None, None]
    extension.library.cache_clear()
    words = {"no nvcc": "nvcc was not found", "no ninja": "Ninja is required", "failing compiler": "error: no"}
    told = capsys.readouterr().err.strip().splitlines()
    (line,) = (line for line in told if line.startswith("warning: "))  # torch may add lines of its own
    assert line.startswith("warning: the CUDA kernel softmax cannot be built") and words[problem] in line
    assert not list(tmp_path.glob("dtgpt/*.so"))

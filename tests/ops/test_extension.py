"""How CUDA C++ is built, and what is said where it cannot be."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from dtgpt.inference.kernels.weights import decode_weights
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.kernels import extension
from dtgpt.ops.kernels.decode import exchange, rows
from dtgpt.ops.kernels.fused_softmax import softmax_kernels

pytestmark = pytest.mark.slow(8)

LLAMA = {"rms": 1, "gated": 1, "rotary": 1, "biases": 0}
SIZES = [  # of GPT-2 124M and 345M; of grouped queries and wide heads; of GPT-2 1558M; of Llama 3.2 1B; of Qwen3 0.6B
    rows.Sizes("__nv_bfloat16", 768, 3072, 2304, 768, 64, 12, 1024, 1),
    rows.Sizes("__half", 1024, 4096, 3072, 1024, 64, 16, 2048, 1),
    rows.Sizes("__nv_bfloat16", 1024, 2048, 1536, 1024, 128, 2, 1024, 2),
    rows.Sizes("__nv_bfloat16", 1600, 6400, 4800, 1600, 64, 25, 1024, 1),
    rows.Sizes("__nv_bfloat16", 2048, 8192, 3072, 2048, 64, 8, 4096, 1, **LLAMA),
    rows.Sizes("__nv_bfloat16", 1024, 3072, 4096, 2048, 128, 8, 4096, 1, **(LLAMA | {"rotary": 2})),
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
    assert [rows.most_rows(size, devices.multiprocessors) for size in SIZES] == [4, 4, 4, 2, 2, 2]
    commands = [[*common, *rows.flags(s, devices), "-o", str(tmp_path / f"{i}.out")] for i, s in enumerate(SIZES)]
    for count, said in zip([14, 14, 20, 10, 11, 13], compile_all(commands), strict=True):
        spills = [int(found) for found in re.findall(r"(\d+) bytes spill stores", said)]
        assert len(spills) == count and max(spills) <= 64


LIBRARIES = [
    (rows.SOURCE, rows.STRUCTS, rows.flags(SIZES[0], rows.Gpu(multiprocessors=132, room=77824))),
    (exchange.SOURCE, exchange.STRUCTS, ()),
    (softmax_kernels.SOURCE, softmax_kernels.STRUCTS, softmax_kernels.FLAGS),
]
THEIRS = {"input": {"Collective": "in"}}  # names of fields that differ in C++


@needs_nvcc
@pytest.mark.parametrize("source, structs, flags", LIBRARIES, ids=lambda value: getattr(value, "stem", ""))
def test_structs_have_the_same_fields_in_python_and_cuda(tmp_path, source, structs, flags):
    """On the host alone: where each field begins, what it takes, and the sizes that the library returns."""
    lines = [f'#include "{source}"', "#include <cstddef>", "#include <cstdio>", "int main() {"]
    expected = []
    for name, ours in structs:
        lines.append(f'    printf("{name} %zu\\n", sizeof_{name}());')
        expected.append(f"{name} {ctypes.sizeof(ours)}")
        for field, _ in ours._fields_:
            there, place = THEIRS.get(field, {}).get(name, field), getattr(ours, field)
            lines.append(
                f'    printf("{name}.{field} %zu %zu\\n", offsetof({name}, {there}), sizeof((({name}*)0)->{there}));'
            )
            expected.append(f"{name}.{field} {place.offset} {place.size}")
    program = tmp_path / "layout.cu"
    program.write_text("\n".join([*lines, "}", ""]))
    quick = ["-O0", "-Xcicc", "-O0"]  # for the host, and for the device, whose code is checked and does not run
    command = ["nvcc", *extension.FLAGS, *flags, *quick, "-arch=compute_90", "-code=compute_90", str(program)]
    compile_all([[*command, "-o", str(tmp_path / "layout")]])
    found = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout
    assert found.split("\n")[:-1] == expected


class Library:
    """In place of a library whose struct Product has `size` bytes."""

    def __init__(self, size: int):
        self.sizeof_Product = lambda: size


def test_a_struct_of_another_size_is_told_and_not_launched(monkeypatch, capsys):
    size = ctypes.sizeof(rows.Product)
    extension.check_sizes(Library(size), rows.STRUCTS[:1])
    monkeypatch.setattr(extension, "_built", lambda *_: "x.so")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Library(size + 8))
    extension.library.cache_clear()
    assert extension.library(rows.SOURCE, torch.device("cuda"), structs=rows.STRUCTS) is None
    extension.library.cache_clear()
    told = capsys.readouterr().err
    assert (
        f"its struct Product has {size + 8} bytes, where dtgpt.ops.kernels.decode.rows.Product has {size}; give" in told
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda path: object())  # a library without the function
    assert extension.library(rows.SOURCE, torch.device("cuda"), structs=rows.STRUCTS) is None
    extension.library.cache_clear()


def test_sizes_without_room_for_a_ring_of_weights_are_left_to_triton():
    def most_rows(hidden: int, inner: int, ctas: int = 132) -> int:
        return rows.most_rows(rows.Sizes("__half", hidden, inner, 3 * hidden, hidden, 64, hidden // 64, 1024, 1), ctas)

    assert [most_rows(size, 8192) for size in (2048, 4096, 5120, 8192)] == [2, 2, 2, 0]
    assert most_rows(4096, 8192, ctas=78) == 2 and most_rows(5120, 8192, ctas=78) == 0


def test_slots_whose_splits_take_long_to_merge_are_left_to_triton():
    assert [rows.most_rows(SIZES[4]._replace(length=length), 132) for length in (8192, 8193)] == [2, 0]


def test_blocks_are_told_apart_by_what_the_kernels_are_built_for():
    sizes = {"num_layers": 1, "hidden_size": 128, "num_heads": 4, "seq_length": 64, "vocab_size": 9}
    grouped = {"num_kv_heads": 2, "head_dim": 64, "ffn_hidden_size": 192}
    keys = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16)
    llama, qwen3, qwen25, all_biases = (
        decode_weights(LlamaConfig(**sizes, **grouped, **more).make_block(0))
        for more in ({}, {"qk_norm": True}, {"attention_bias": "qkv"}, {"attention_bias": "all"})
    )
    gpt2 = decode_weights(GPT2Config(**sizes).make_block(0))
    kinds = [rows.sizes_of(block, keys)[9:] for block in (llama, qwen3, qwen25, all_biases, gpt2)]
    assert kinds == [(1, 1, 1, 0), (1, 1, 2, 0), (1, 1, 1, 1), (1, 1, 1, 1), (0, 0, 0, 2)]
    assert rows.sizes_of(llama, keys)[1:8] == (128, 192, 512, 256, 64, 2, 64)
    assert all(map(rows.serves, (llama, qwen3, qwen25, all_biases, gpt2)))
    others = [
        llama._replace(norm_2_bias=gpt2.norm_1), llama._replace(fc_bias=gpt2.fc_bias), llama._replace(activation=None),
        llama._replace(rotary=llama.rotary._replace(q_norm=gpt2.norm_1)),
    ]  # fmt: skip
    assert not any(map(rows.serves, others))


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

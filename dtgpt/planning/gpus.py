"""GPUs by name: their memory, what they compute with, and the rates that they reach in training steps."""

import difflib
import re
from dataclasses import dataclass, replace

import torch

from dtgpt.optim.fp8.precision import check_fp8, no_float8
from dtgpt.util.errors import UserError
from dtgpt.util.hardware import total_memory
from dtgpt.util.shared.gpu_limits import FLOAT8

GIB = 2**30
LARGEST = 1024  # GiB; larger numbers are those of products


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a GPU reaches in steps that run back to back, where power holds its clock down."""

    products: float  # FLOP/s of matrix products in 16 bits
    products_fp8: float  # 0: it has none
    products_fp32: float
    attention: float  # FLOP/s in samples of any length, of the causal half of 7 products
    memory: float  # bytes/s, read and written, of operations between matrices
    link: float  # bytes/s that a GPU sends to others of its host by copy engines
    link_kernels: float  # the same by kernels that write to another GPU's memory, or NCCL's
    network: float  # bytes/s that a GPU sends to another host


@dataclass(frozen=True)
class Sheet:
    """Figures of the vendor's data sheet: dense TFLOP/s, TB/s of memory, GB/s of links in one direction."""

    memory: float  # GiB that CUDA reports; H200 and H100 as seen
    capability: tuple[int, int]
    bits_16: float
    fp8: float
    fp32: float
    bandwidth: float
    link: float  # NVLink, or PCIe 4.0 x16 where a GPU has none
    network: float  # of a host that is sold with these GPUs, for each of them: 400 Gb/s of InfiniBand are 50 GB/s

    def rates(self) -> Rates:
        """Return the rates of a GPU that reaches what an H200 was measured to reach of its data sheet: see REACHED."""
        return Rates(
            products=self.bits_16 * 1e12 * REACHED.products,
            products_fp8=self.fp8 * 1e12 * REACHED.products_fp8,
            products_fp32=self.fp32 * 1e12 * REACHED.products_fp32,
            attention=self.bits_16 * 1e12 * REACHED.attention,
            memory=self.bandwidth * 1e12 * REACHED.memory,
            link=self.link * 1e9 * REACHED.link,
            link_kernels=self.link * 1e9 * REACHED.link_kernels,
            network=self.network * 1e9 * REACHED.network,
        )


# What an H200 reaches of its data sheet. Sources: benchmarks/notes, kernels of whole steps, torch 2.11, November 2026.
REACHED = Rates(
    products=0.745,  # 737 TFLOP/s: steps.md, 345M 47.6 ms for 34.8 TFLOP, Llama 3.2 1B 165 ms for 121.5
    products_fp8=0.63,  # 1,247 TFLOP/s: fp8.md, twelve products of a block, 0.993 ms for 1.24 TFLOP; 24.0 ms in a step
    products_fp32=0.75,  # not measured
    attention=0.4,  # 396 TFLOP/s in long samples: Llama 3.2 1B at T=32768, docs/benchmarks.md; 413 to 427 alone
    memory=0.777,  # 3.73 TB/s: steps.md, operations between the matrices of the 345M and of Llama 3.2 1B
    link=0.83,  # 374 GB/s: plans.md, copy engines
    link_kernels=0.44,  # 200 GB/s: plans.md, kernels that gather and scatter 16 MB
    network=0.8,  # not measured
)
SHEETS = {
    "B200": Sheet(178.4, (10, 0), 2250, 4500, 75, 7.7, 900, 50),
    "H200": Sheet(139.8, (9, 0), 989, 1979, 67, 4.8, 450, 50),
    "H100": Sheet(79.1, (9, 0), 989, 1979, 67, 3.35, 450, 50),
    "A100": Sheet(79.2, (8, 0), 312, 0, 19.5, 2.039, 300, 25),
    "A100-40GB": Sheet(39.4, (8, 0), 312, 0, 19.5, 1.555, 300, 25),
    "A800": Sheet(79.2, (8, 0), 312, 0, 19.5, 2.039, 200, 25),
    "L40S": Sheet(44.4, (8, 9), 362, 733, 91.6, 0.864, 31.5, 6.25),
    "A40": Sheet(44.4, (8, 6), 149.7, 0, 37.4, 0.696, 31.5, 6.25),
    "L4": Sheet(22.0, (8, 9), 121, 242, 30.3, 0.300, 31.5, 3.1),
    "A10": Sheet(22.0, (8, 6), 125, 0, 31.2, 0.600, 31.5, 3.1),
    "V100": Sheet(31.7, (7, 0), 125, 0, 15.7, 0.900, 150, 6.25),
    "RTX4090": Sheet(23.5, (8, 9), 165.2, 330, 82.6, 1.008, 31.5, 3.1),
    "RTX3090": Sheet(23.6, (8, 6), 71, 0, 35.6, 0.936, 31.5, 3.1),
}
OTHER_CHIPS = re.compile(r"\b(NVL|PCIe|GH200|Laptop|Ti|D|MIG)\b", re.IGNORECASE)  # or parts of one, under the same name
# Of a core, to rank plans of processes on CPUs by; no time is printed from them.
CPU = Rates(
    products=5e10,
    products_fp8=0,
    products_fp32=5e10,
    attention=2e10,
    memory=1e10,
    link=1e9,
    link_kernels=1e9,
    network=1e9,
)


@dataclass(frozen=True)
class Gpu:
    """A device that a plan is for."""

    name: str
    size: float  # bytes of memory
    capability: tuple[int, int] | None = None
    rates: Rates | None = None  # None: unknown, and so is the time of a step
    peak: float | None = None  # dense FLOP/s in 16 bits of the data sheet
    measured: str = ""  # how well a step's time is known, in words


def find_gpu(gpu: str | None, fp8: bool = False) -> Gpu:
    """Return the GPU of a name of SHEETS or of CUDA, in any spelling, or one of a size of memory such as 80, 80GiB or
    85.9GB; of this machine, else an H200, where `gpu` is None. Raise UserError for anything else, and for a GPU that
    cannot train in `fp8`."""
    if gpu is None:
        if torch.cuda.is_available():
            return this_gpu(torch.device("cuda", 0), fp8)
        gpu = "H200"
    word = _plain(gpu)
    for name in SHEETS:
        if word == _plain(name) or name == name_of(gpu):
            if fp8 and SHEETS[name].capability < FLOAT8:
                raise no_float8(f"--gpu {name}")
            return known_gpu(name)
    given = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*(gib|gb|g)?", gpu.strip(), re.ASCII | re.IGNORECASE)
    size = float(given[1]) * (1e9 if (given[2] or "").lower() == "gb" else GIB) if given else 0
    if 0 < size <= LARGEST * GIB:
        return Gpu("the device", size)
    near = difflib.get_close_matches(gpu.upper(), SHEETS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"--gpu {gpu[:60]} is not known; {hint}use one of {', '.join(SHEETS)}, or its memory in GiB, up to {LARGEST}, "
        "such as --gpu 80"
    )


def known_gpu(name: str) -> Gpu:
    """Return the GPU of a name of SHEETS."""
    sheet = SHEETS[name]
    rates, peak = sheet.rates(), sheet.bits_16 * 1e12
    return Gpu(name, sheet.memory * GIB, sheet.capability, rates, peak, HOW_WELL.get(name, BY_SHEET))


def this_gpu(device: torch.device, fp8: bool = False) -> Gpu:
    """Return the GPU of this machine, with rates where its name is known. Raises UserError where it cannot train in
    `fp8`."""
    if fp8:
        check_fp8(device)
    words, size = torch.cuda.get_device_name(device), total_memory(device)
    gpu = Gpu(words, size, torch.cuda.get_device_capability(device))
    name = name_of(words)
    return gpu if name is None else replace(known_gpu(name), name=words, size=size, capability=gpu.capability)


def name_of(words: str) -> str | None:
    """Return the name in SHEETS of the GPU that CUDA calls `words`; None where its rates are not known."""
    if OTHER_CHIPS.search(words):
        return None
    words = re.sub(r"[^A-Z0-9]+", " ", words.upper())
    if re.search(r"\bA100\b.*\b40 ?GB\b", words):
        return "A100-40GB"
    return next((name for name in SHEETS if re.search(rf"\b{name.replace('RTX', 'RTX ?')}\b", words)), None)


def _plain(name: str) -> str:
    """Return a name without what people write differently."""
    return re.sub(r"[^A-Z0-9]|NVIDIA|GEFORCE", "", name.upper())


HOW_WELL = {  # docs/planning.md has the table
    "H200": "3 % in the median of 59 measured steps, 13 % at most",
    "H100": "0 to 10 % in 3 measured steps of one GPU; plans of several were not measured",
}
BY_SHEET = "by the data sheet, never measured: expect 30 % either way"

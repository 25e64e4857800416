"""What tests of 8-bit floats do in Triton's interpreter and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from dtgpt.ops.fp8 import quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def interpret(body: str, cases: str) -> None:
    """`body(*case)` of this file in a process of its own, with Triton's interpreter."""
    code = f"from tests.support import bodies_float8 as b; [b.{body}(*case) for case in [{cases}]]"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def draw(rows: int, columns: int, device: torch.device | str = "cpu") -> Tensor:
    """bf16 values of many magnitudes, which in part saturate and in part are too small for 8 bits."""
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator) * 2 ** torch.randn(rows, 1, generator=generator).mul(4)
    return values.bfloat16().to(device)


def check_quantize(rows: int, columns: int, device: torch.device | str = "cpu") -> None:
    """The kernels against the reference, bit by bit, with every set of results."""
    x = draw(rows, columns, device)
    x[-1, -1] = torch.inf
    for dtype, scale in ((E4M3, 16.0), (E5M2, 2.0**12)):
        for wanted in ((True, True, True), (True, True, False), (True, False, False), (False, True, False)):
            factor = torch.tensor(scale, device=device)
            cells = [torch.tensor(0.5, device=device) for _ in range(2)]
            found = quantize.kernels().quantize(x, factor, dtype, cells[0], *wanted)
            true = quantize.reference(x, factor, dtype, cells[1], *wanted)
            for one, other in zip(found[:2], true[:2], strict=True):
                assert one.shape == other.shape and torch.equal(one.isnan(), other.isnan())
                assert torch.equal(one.float().nan_to_num(), other.float().nan_to_num()), (dtype, wanted)
            torch.testing.assert_close(found[2], true[2], equal_nan=True)
            assert torch.equal(*cells)

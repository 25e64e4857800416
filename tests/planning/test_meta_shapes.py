"""Results of operations on the meta device, beside PyTorch's own, and what a plan imports for them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtgpt.planning.meta_shapes import RESULTS, result_of

ATEN = torch.ops.aten


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(results) -> list:
    """Return what a planned memory depends on, of each result."""
    results = results if isinstance(results, tuple | list) else [results]
    return [
        (each.shape, each.dtype, each.stride(), each.untyped_storage().nbytes()) if each is not None else None
        for each in results
    ]


X, Y, WEIGHT, BIAS, ROWS = empty(4, 8, 16), empty(4, 8, 16), empty(32, 16), empty(16), empty(32, 16)
SWAPPED, WIDE = empty(8, 4, 16).transpose(0, 1), empty(4, 8, 16, dtype=torch.float32)
MEAN = empty(4, 8, 1, dtype=torch.float32)
CASES = {
    "add": (ATEN.add.Tensor, X, Y),
    "add a bias": (ATEN.add.Tensor, X, BIAS),
    "add to a bias": (ATEN.add.Tensor, BIAS, X),
    "add in another order": (ATEN.add.Tensor, SWAPPED, X),
    "add another type": (ATEN.add.Tensor, X, WIDE),
    "add a column": (ATEN.add.Tensor, X, empty(4, 8, 1)),
    "add integers": (ATEN.add.Tensor, empty(4, dtype=torch.int64), 1.5),
    "scale": (ATEN.mul.Tensor, X, 2.0),
    "gelu": (ATEN.gelu.default, X),
    "gelu in another order": (ATEN.gelu.default, SWAPPED),
    "gelu backward": (ATEN.gelu_backward.default, X, Y),
    "empty": (ATEN.empty_like.default, X),
    "empty in another order": (ATEN.empty_like.default, SWAPPED),
    "stack": (ATEN.stack.default, [X, Y, X], 1),
    "stack at the end": (ATEN.stack.default, [X, Y, X], -1),
    "stack in another order": (ATEN.stack.default, [SWAPPED, SWAPPED]),
    "product": (ATEN.mm.default, ROWS, WEIGHT.t()),
    "product with a bias": (ATEN.addmm.default, empty(32), ROWS, WEIGHT.t()),
    "product with a matrix": (ATEN.addmm.default, empty(32, 32), ROWS, WEIGHT.t()),
    "norm": (ATEN.native_layer_norm.default, X, [16], BIAS, BIAS, 1e-5),
    "norm in another order": (ATEN.native_layer_norm.default, SWAPPED, [16], BIAS, BIAS, 1e-5),
    "norm without weights": (ATEN.native_layer_norm.default, X, [16], None, None, 1e-5),
    "norm of two dimensions": (ATEN.native_layer_norm.default, X, [8, 16], empty(8, 16), empty(8, 16), 1e-5),
    "norm in fp32": (ATEN.native_layer_norm.default, WIDE, [16], BIAS.float(), BIAS.float(), 1e-5),
    "norm backward": (ATEN.native_layer_norm_backward.default, X, Y, [16], MEAN, MEAN, BIAS, BIAS, [True] * 3),
    "norm backward, weights frozen": (
        *(ATEN.native_layer_norm_backward.default, X, Y, [16], MEAN, MEAN, BIAS, BIAS),
        [True, False, False],
    ),
    "norm backward in another order": (
        *(ATEN.native_layer_norm_backward.default, SWAPPED, Y, [16], MEAN, MEAN, BIAS, BIAS),
        [True] * 3,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_pytorch(case):
    operation, *args = CASES[case]
    assert described(result_of(operation, args, {})) == described(operation(*args))


def test_each_result_is_compared_with_that_of_pytorch():
    assert RESULTS.keys() == {operation for operation, *_ in CASES.values()}


def test_a_product_that_pytorch_refuses_is_refused():
    with pytest.raises(RuntimeError):
        result_of(ATEN.mm.default, [ROWS, WEIGHT], {})


PLAN = """
import sys
from contextlib import suppress
from dtgpt.cli import main
for recipe in sys.argv[1:]:
    with suppress(SystemExit):
        main(["plan", recipe])
watched = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")
print("IMPORTED", *(name for name in watched if name in sys.modules))
"""


@pytest.mark.slow(3)
def test_a_plan_of_one_process_imports_neither_the_compiler_nor_dtensor():
    """As `dtgpt plan` starts: no fork of a process that has imported them."""
    recipes = [Path(__file__).parents[2] / "recipes" / name for name in ("gpt2_345m.py", "llama32_1b.py")]
    done = subprocess.run([sys.executable, "-c", PLAN, *recipes], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "IMPORTED"
    assert done.stdout.count("fits:") == 2

"""Kernels in Gluon without a GPU: how they are launched, and whether they compile."""

import pytest
import torch

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
COMPILED = ("3.6.", "3.7.", "3.8.", "3.9.")  # versions of Triton that compile them, though not all were run


def skip_unless_compiled() -> None:
    """Skip the test where Triton is not known to compile them."""
    import triton

    if not triton.__version__.startswith(COMPILED):
        pytest.skip("needs a version of Triton that is known to compile them")


class Recorder:
    """Takes the place of a kernel, keeps how it was launched and compiles it."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        self.grid = grid
        return self.keep

    def keep(self, *arguments, num_warps, **constants):
        names = self.kernel.arg_names[: len(arguments)]
        self.values = dict(zip(names, arguments, strict=True)) | constants
        assert set(self.values) == set(self.kernel.arg_names)
        self.constants, self.num_warps = constants, num_warps

    def compiled(self):
        """For a Hopper GPU, where there need not be one."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.experimental.gluon._runtime import GluonASTSource

        types, known, aligned = {}, {}, {}
        for place, name in enumerate(self.kernel.arg_names):
            value = self.values[name]
            types[name] = self.type_of(name, value)
            if types[name] == "constexpr":
                known[(place,)] = value
            elif types[name][0] == "*" or (types[name] == "i32" and value % 16 == 0):
                aligned[(place,)] = [["tt.divisibility", 16]]
        source = GluonASTSource(self.kernel, types, known, aligned)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": self.num_warps})

    def type_of(self, name, value):
        if value is None or name in self.constants:
            return "constexpr"
        if isinstance(value, torch.Tensor):
            return f"*{NAMES[value.dtype]}"
        if isinstance(value, int | float):
            return "i32" if isinstance(value, int) else "fp32"
        box = ",".join(map(str, value.block_shape))
        return f"tensordesc<{NAMES[value.base.dtype]}[{box}],{value.layout}>"

"""A throw-away capability with kernels for a throw-away operation, `x w`."""

from dtgpt.ops.operation import Kernel, is_apart
from dtgpt.util.seams import Capability

CAPABILITY = Capability(kernels={"example": "tests.support.example_kernels:KERNELS"})
KERNELS = (
    Kernel("long", lambda x, w: x.numel() > 8, lambda x, w: x * w + 2, lambda _: None, "for more than eight elements"),
    Kernel("whole", lambda x, w: not is_apart(), lambda x, w: x * w + 1, lambda _: "there is none", "otherwise"),
)

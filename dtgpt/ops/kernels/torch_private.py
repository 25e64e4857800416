"""What kernels ask of PyTorch beside its public functions."""

import sys
from collections.abc import Callable
from typing import Any


def spare_compiler() -> None:
    """Let the custom ops of dtgpt run without an import of torch's compiler. PyTorch imports it, a second or two, to
    tell it to leave the function in an op alone; a compiler that is not imported compiles nothing."""
    from torch._library.custom_ops import OPDEFS

    for functions in [op._backend_fns for name, op in OPDEFS.items() if name.startswith("dtgpt::")]:
        for device, function in functions.items():
            if hasattr(function, "__wrapped__"):
                functions[device] = _without_compiler(function)


def _without_compiler(left_alone: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        function = left_alone if "torch._dynamo" in sys.modules else left_alone.__wrapped__
        return function(*args, **kwargs)

    return run

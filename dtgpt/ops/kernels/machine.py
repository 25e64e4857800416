"""Single machine instructions, without the steps that Triton adds for very small and very large numbers.

Needs Triton.
"""

import os

import triton
import triton.language as tl

PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # the interpreter does not know machine instructions


@triton.jit
def power_of_two(x):
    """Return 2^x of fp32, with results below 2^-126 as 0: to 2 units in the last place."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tl.exp2(x)


@triton.jit
def reciprocal(x):
    """Return 1 / x of fp32, with results below 2^-126 as 0: to 1 unit in the last place."""
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return 1.0 / x


@triton.jit
def rounded(a, b):
    """Return two tiles of fp32 rounded to bf16, in fp32, by one conversion of pairs."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{.reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000;}",
            "=f,=f,f,f",
            [a, b],
            (tl.float32, tl.float32),
            True,
            1,
        )
    return a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32)

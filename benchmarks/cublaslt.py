"""Matrix products by the cuBLASLt library that PyTorch has loaded, called through its C interface.

PyTorch runs the first algorithm that cuBLASLt's heuristic names. Here a product runs any of those that it names. The
names of constants are those of cublasLt.h, where their meaning stands.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TYPES = {  # cudaDataType_t
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
COMPUTE_32F = 68
DESC_TRANSA, DESC_TRANSB, DESC_EPILOGUE, DESC_BIAS_POINTER = 3, 4, 7, 8
DESC_A_SCALE_POINTER, DESC_B_SCALE_POINTER, DESC_FAST_ACCUM = 17, 18, 25
EPILOGUE_BIAS = 4
PREF_MAX_WORKSPACE_BYTES, PREF_REDUCTION_SCHEME_MASK = 1, 3
PREF_MIN_ALIGNMENTS = 5, 6, 7, 8  # of A, B, C and D
REDUCTION_SCHEME_COMPUTE_TYPE = 2  # partial sums stay fp32
ALIGNMENT = 16  # bytes that the addresses of operands are multiples of
CONFIG = {  # attributes of an algorithm, and their types
    "id": (0, ctypes.c_int32), "tile": (1, ctypes.c_uint32), "split_k": (2, ctypes.c_int32),
    "reduction": (3, ctypes.c_uint32), "swizzle": (4, ctypes.c_uint32), "custom": (5, ctypes.c_uint32),
    "stages": (6, ctypes.c_uint32), "inner_shape": (7, ctypes.c_uint16), "cluster": (8, ctypes.c_uint16),
}  # fmt: skip

_Algorithm = ctypes.c_uint64 * 8


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Algorithm(NamedTuple):
    """A way to compute a product, valid for one version of cuBLASLt."""

    words: tuple[int, ...]  # cublasLtMatmulAlgo_t
    workspace: int  # bytes


class CublasLtError(RuntimeError):
    """A call of cuBLASLt has failed."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library that PyTorch has loaded, or None where PyTorch has none."""
    if torch.version.cuda is None:
        return None
    try:
        loaded = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None
    loaded.cublasLtGetVersion.restype = ctypes.c_size_t
    return loaded


def version() -> int:
    """Return the version of cuBLASLt, such as 130100, or 0 where there is none."""
    found = library()
    return 0 if found is None else int(found.cublasLtGetVersion())


def _call(name: str, *arguments: object) -> None:
    if status := getattr(library(), name)(*arguments):
        raise CublasLtError(f"{name} returned status {status}")


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _set(setter: str, owner: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
    _call(setter, owner, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


class Operand(NamedTuple):
    """The shape and the memory of a matrix `[rows, columns]`."""

    rows: int
    columns: int
    stride: int  # elements from row to row or, transposed, from column to column
    transposed: bool  # columns lie one after the other
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "Operand | None":
        """Return the operand that `x` `[rows, columns]` is, or None where it is neither kind."""
        rows, columns = x.shape
        if x.stride(1) == 1 and x.stride(0) >= columns:
            return cls(rows, columns, x.stride(0), False, x.dtype)
        if x.stride(0) == 1 and x.stride(1) >= rows:
            return cls(rows, columns, x.stride(1), True, x.dtype)
        return None


class Operands(NamedTuple):
    """The tensors of one product a b + bias, or of fp8 a b scale_a scale_b + bias."""

    a: Tensor  # [m, k]
    b: Tensor  # [k, n]
    out: Tensor  # [m, n]
    bias: Tensor | None = None  # [n]
    scale_a: Tensor | None = None  # fp32 scalar
    scale_b: Tensor | None = None


Run = Callable[[Operands], Tensor]


class Problem(NamedTuple):
    """What distinguishes one product a b from another one: a `[m, k]`, b `[k, n]`, the result `[m, n]` by rows."""

    a: Operand
    b: Operand
    stride: int  # of the result, from row to row
    dtype: torch.dtype  # of the result
    bias: bool = False
    scaled: bool = False  # a and b are fp8
    fast: bool = False  # fp8: partial sums may have fewer bits


class Product:
    """The product of one `Problem`, on one device. cuBLASLt stores by columns: it computes the transposed of all."""

    def __init__(self, problem: Problem, device: torch.device):
        self.problem, self._handle = problem, _handle(device.index)
        a, b = problem.a, problem.b
        self._description = _created("cublasLtMatmulDescCreate", COMPUTE_32F, TYPES[torch.float32])
        self._describe(DESC_TRANSA, ctypes.c_int32(b.transposed))
        self._describe(DESC_TRANSB, ctypes.c_int32(a.transposed))
        if problem.bias:
            self._describe(DESC_EPILOGUE, ctypes.c_uint32(EPILOGUE_BIAS))
        if problem.scaled:
            self._describe(DESC_FAST_ACCUM, ctypes.c_int8(problem.fast))
        self._left, self._right = _layout(b), _layout(a)
        self._out = _layout(Operand(a.rows, b.columns, problem.stride, False, problem.dtype))
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def _describe(self, attribute: int, value: ctypes._SimpleCData) -> None:
        _set("cublasLtMatmulDescSetAttribute", self._description, attribute, value)

    def algorithms(
        self, count: int, workspace: int, reductions: int = REDUCTION_SCHEME_COMPUTE_TYPE
    ) -> list[Algorithm]:
        """Return up to `count` algorithms in the order of the heuristic, with at most `workspace` bytes each."""
        preference = _created("cublasLtMatmulPreferenceCreate")
        prefer = functools.partial(_set, "cublasLtMatmulPreferenceSetAttribute", preference)
        try:
            prefer(PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(workspace))
            prefer(PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(reductions))
            for alignment in PREF_MIN_ALIGNMENTS:
                prefer(alignment, ctypes.c_uint32(ALIGNMENT))
            results, found = (_Result * count)(), ctypes.c_int()
            layouts = self._left, self._right, self._out, self._out
            _call(
                "cublasLtMatmulAlgoGetHeuristic", self._handle, self._description, *layouts, preference,
                ctypes.c_int(count), results, ctypes.byref(found),
            )  # fmt: skip
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        usable = [result for result in results[: found.value] if result.state == 0]
        return [Algorithm(tuple(result.algorithm), result.workspace) for result in usable]

    def prepare(self, algorithm: Algorithm) -> Run:
        """Return a function that computes the product of such operands on the current stream, and returns `out`."""
        words, size = _Algorithm(*algorithm.words), ctypes.c_size_t(algorithm.workspace)
        run, stream_of, pointer = library().cublasLtMatmul, torch.cuda.current_stream, _pointer  # type: ignore[union-attr]

        def product(operands: Operands) -> Tensor:
            a, b, out, bias, scale_a, scale_b = operands
            if bias is not None:
                self._describe(DESC_BIAS_POINTER, pointer(bias))
            if scale_a is not None and scale_b is not None:
                self._describe(DESC_A_SCALE_POINTER, pointer(scale_b))
                self._describe(DESC_B_SCALE_POINTER, pointer(scale_a))
            space = torch.empty(size.value, dtype=torch.uint8, device=a.device) if size.value else None
            status = run(
                self._handle, self._description, ctypes.byref(self._one), pointer(b), self._left, pointer(a),
                self._right, ctypes.byref(self._zero), pointer(out), self._out, pointer(out), self._out, words,
                None if space is None else pointer(space), size, ctypes.c_void_p(stream_of(a.device).cuda_stream),
            )  # fmt: skip
            if status:
                raise CublasLtError(f"cublasLtMatmul returned status {status}")
            return out

        return product


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def configuration(algorithm: Algorithm) -> dict[str, int]:
    """Return the settings of an algorithm by name, for reports."""
    words, settings = _Algorithm(*algorithm.words), {}
    for name, (attribute, kind) in CONFIG.items():
        value, size = kind(), ctypes.c_size_t(ctypes.sizeof(kind))
        arguments = words, attribute, ctypes.byref(value), size, ctypes.byref(ctypes.c_size_t())
        _call("cublasLtMatmulAlgoConfigGetAttribute", *arguments)
        settings[name] = value.value
    return settings


def _created(creator: str, *arguments: int) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _call(creator, ctypes.byref(made), *map(ctypes.c_int, arguments))
    return made


def _layout(operand: Operand) -> ctypes.c_void_p:
    """Return the layout, by columns, of the transposed of an operand."""
    lines = operand.columns if operand.transposed else operand.rows
    length = operand.rows if operand.transposed else operand.columns
    made = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate", ctypes.byref(made), ctypes.c_int(TYPES[operand.dtype]), ctypes.c_uint64(length),
        ctypes.c_uint64(lines), ctypes.c_int64(operand.stride),
    )  # fmt: skip
    return made

"""Pickles that other projects wrote, read without running anything of theirs.

A pickle is a program for a stack machine, which may import and call any function. The machine here imports and calls
nothing: plain values are built, and whatever a pickle names, makes or calls becomes a `StandIn`, which keeps the name
and the arguments. Exceptions are dictionaries, `argparse.Namespace` (which only holds attributes) and tensors, whose
elements must lie in a storage that the caller gives.
"""

import math
import pickletools
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dtgpt.errors import shown, shown_name

MOST_OPCODES = 5_000_000  # of a pickle: each makes at most one small object
MOST_DIMENSIONS = 64
LARGEST_KEY = 1 << 60  # larger integers can be chosen to collide as keys of a dictionary, which then takes for ever


class StandIn:
    """In place of a foreign class, function or object: its dotted name, what it was made with, the state it was given.
    Runs nothing."""

    __slots__ = ("args", "foreign", "state")

    def __init__(self, foreign: str, args: tuple[Any, ...] = (), state: Any = None):
        self.foreign, self.args, self.state = foreign, args, state

    def __repr__(self) -> str:
        return f"<{shown_name(self.foreign)}>"


@dataclass(frozen=True)
class Storage:
    """Memory that tensors lie in; `dtype`: of its elements, where a tensor does not say otherwise."""

    memory: torch.UntypedStorage
    dtype: torch.dtype


FindStorage = Callable[[Any], Storage | StandIn]  # from what torch.save calls a persistent id


def read_pickle(file: BinaryIO, find_storage: FindStorage | None = None) -> Any:
    """Return the object of the pickle at the position of `file`, which stands behind it afterwards. Raises any kind of
    Exception for one that is broken, too large, or has tensors beyond their storage."""
    machine = _Machine(find_storage)
    for number, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        if number > MOST_OPCODES:
            raise ValueError(f"its pickle has more than {MOST_OPCODES} steps")
        machine.step(opcode.name, argument)
    return machine.stack[-1]


class _Machine:
    """The stack machine of `pickle`, without its calls."""

    def __init__(self, find_storage: FindStorage | None):
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks below the marks
        self._memo: dict[int, Any] = {}
        self._find_storage = find_storage

    def step(self, name: str, argument: Any) -> None:
        if name in VALUES:
            self.stack.append(argument)
        elif name in NEW:
            self.stack.append(NEW[name]())
        elif name in IGNORED:
            pass
        else:
            handler = getattr(self, f"_{name.lower()}", None)
            if handler is None:
                raise ValueError(f"its pickle has the step {name}, which torch.save does not write")
            handler(argument) if argument is not None else handler()

    def _pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._below.pop()
        return items

    def _mark(self) -> None:
        self._below.append(self.stack)
        self.stack = []

    def _pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._pop_mark()

    def _dup(self) -> None:
        self.stack.append(self.stack[-1])

    def _put(self, index: int) -> None:
        self._memo[index] = self.stack[-1]

    _binput = _long_binput = _put

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def _get(self, index: int) -> None:
        self.stack.append(self._memo[index])

    _binget = _long_binget = _get

    def _tuple(self) -> None:
        items = self._pop_mark()
        self.stack.append(tuple(items))

    def _tuple1(self) -> None:
        self.stack[-1:] = [(self.stack[-1],)]

    def _tuple2(self) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def _tuple3(self) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def _list(self) -> None:
        items = self._pop_mark()
        self.stack.append(items)

    def _dict(self) -> None:
        items = self._pop_mark()
        self.stack.append({})
        self._set(items)

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _setitems(self) -> None:
        self._set(self._pop_mark())

    def _set(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], dict):
            self.stack[-1].update((_key(k), v) for k, v in zip(items[::2], items[1::2], strict=True))

    def _additems(self) -> None:
        self._pop_mark()  # of a set, which is a stand-in

    def _frozenset(self) -> None:
        items = self._pop_mark()
        self.stack.append(StandIn("builtins.frozenset", tuple(items)))

    def _global(self, names: str) -> None:
        self._name(*names.split(" ", 1))

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        dtype = getattr(torch, name, None) if module == "torch" else None
        self.stack.append(dtype if isinstance(dtype, torch.dtype) else StandIn(f"{module}.{name}"))

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(_made(function, arguments))

    _newobj = _reduce

    def _newobj_ex(self) -> None:
        self.stack.pop()  # arguments by name
        self._reduce()

    def _inst(self, names: str) -> None:
        arguments = self._pop_mark()
        self._name(*names.split(" ", 1))
        self.stack[-1] = _made(self.stack[-1], tuple(arguments))

    def _obj(self) -> None:
        function, *arguments = self._pop_mark()
        self.stack.append(_made(function, tuple(arguments)))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, StandIn):
            target.state = state
        elif isinstance(target, Namespace) and isinstance(state, dict):
            vars(target).update((name, value) for name, value in state.items() if isinstance(name, str))

    def _persid(self, identity: str) -> None:
        self.stack.append(StandIn("persistent id", (identity,)))

    def _binpersid(self) -> None:
        identity = self.stack.pop()
        found = self._find_storage(identity) if self._find_storage else StandIn("persistent id", (identity,))
        self.stack.append(found)


VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": lambda: StandIn("builtins.set"),
}
IGNORED = {"PROTO", "FRAME", "STOP"}


def _key(key: Any) -> Any:
    """Return a key that can be looked up in a short time: itself where it is plain and small."""
    parts = key if isinstance(key, tuple) and len(key) <= 8 else (key,)
    for part in parts:
        small = type(part) is int and abs(part) < LARGEST_KEY
        if not small and not isinstance(part, str | bytes | bool | StandIn | torch.dtype) and part is not None:
            return StandIn("key", (key,))
    return key


def _made(function: Any, arguments: Any) -> Any:
    """Return what `function(*arguments)` stands for."""
    name = function.foreign if isinstance(function, StandIn) else type(function).__name__
    arguments = arguments if isinstance(arguments, tuple) else (arguments,)
    return MAKERS[name](*arguments) if name in MAKERS else StandIn(name, arguments)


def _mapping(*arguments: Any) -> dict[Any, Any]:
    pairs = arguments[-1] if arguments and isinstance(arguments[-1], list | dict) else ()
    return {_key(k): v for k, v in (pairs.items() if isinstance(pairs, Mapping) else pairs)}


def _size(*arguments: Any) -> tuple[Any, ...]:
    return tuple(arguments[0]) if arguments and isinstance(arguments[0], tuple | list) else ()


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = None, hooks: Any = None, metadata: Any = None
) -> Tensor | StandIn:
    """As `torch._utils._rebuild_tensor_v2`."""
    if not isinstance(storage, Storage) or metadata:  # which says that values are to be negated or conjugated
        return StandIn("torch._utils._rebuild_tensor_v2", (storage, offset, size, stride))
    return _view(storage.memory, storage.dtype, offset, size, stride)


def _tensor_of_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Tensor | StandIn:
    """As `torch._utils._rebuild_tensor_v3`."""
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype) or metadata:
        return StandIn("torch._utils._rebuild_tensor_v3", (storage, offset, size, stride, dtype))
    return _view(storage.memory, dtype, offset, size, stride)


def _view(
    memory: torch.UntypedStorage, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
) -> Tensor | StandIn:
    """Return the tensor where each of its elements has a place of its own in `memory`, else a stand-in: a few bytes
    could claim to be any number of elements. Raises ValueError for a tensor beyond its memory."""
    sequences = isinstance(size, tuple | list) and isinstance(stride, tuple | list)
    if not sequences or len(size) != len(stride) or len(size) > MOST_DIMENSIONS:
        raise ValueError("a tensor in it has impossible sizes")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (offset, *size, *stride)):
        raise ValueError(f"a tensor in it has the impossible sizes {shown(size)}, {shown(stride)}, {shown(offset)}")
    reach, distinct = 0, True
    for step, n in sorted((s, n) for s, n in zip(stride, size, strict=True) if n > 1):
        distinct = distinct and step > reach
        reach += (n - 1) * step
    if math.prod(size) and (offset + reach + 1) * dtype.itemsize > memory.nbytes():
        raise ValueError(f"a tensor of shape {shown(tuple(size))} is not within its storage of {memory.nbytes()} bytes")
    if not distinct:
        return StandIn(f"tensor of shape {shown(tuple(size))} whose elements share memory")
    return torch.empty(0, dtype=dtype, device="cpu").set_(memory, offset, tuple(size), tuple(stride))


def _parameter(data: Any, *rest: Any) -> Any:
    return data if isinstance(data, Tensor) else StandIn("torch.nn.parameter.Parameter", (data, *rest))


def _of_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """As `torch._tensor._rebuild_from_type_v2`: a tensor with attributes. Other classes may read its values
    otherwise."""
    if isinstance(kind, StandIn) and kind.foreign in TENSOR_TYPES:
        return _made(function, arguments)
    return StandIn("torch._tensor._rebuild_from_type_v2", (function, kind, arguments, state))


TENSOR_TYPES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
MAKERS: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": lambda *_: Namespace(),
    "types.SimpleNamespace": lambda *_: Namespace(),
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": _mapping,
    "collections.Counter": _mapping,
    "builtins.dict": _mapping,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
}

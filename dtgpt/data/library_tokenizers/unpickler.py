"""Pickles that other projects wrote, read without running anything of theirs.

A pickle is a program for a stack machine, which may import and call any function. The machine here is that of the
standard library, except that it imports and calls nothing: all that a pickle names, makes or calls becomes a `StandIn`.
Exceptions are dictionaries, `argparse.Namespace` (which only holds attributes) and tensors.

`torch.load` with weights_only=True refuses unknown names, hashes any key, and makes huge tensors of a few bytes.
"""

import math
import mmap
import pickle
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from dtgpt.util.errors import shown, shown_name

MOST_READS = 10_000_000  # of a pickle, whose steps take one to three: each makes at most one small object
LARGEST_KEY = 1 << 60  # larger integers can be chosen to collide as keys of a dictionary, which then takes for ever


@dataclass(slots=True, eq=False, repr=False)
class StandIn:
    """In place of a foreign class, function or object: its dotted name, its arguments, its state. Runs nothing."""

    foreign: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def extend(self, items: Any) -> None:
        """Drop the items of a foreign list."""

    append = extend

    def __repr__(self) -> str:
        return f"<{shown_name(self.foreign)}>"


def read_pickle(
    file: BytesIO | mmap.mmap, find_storage: Callable[[Any], Any] | None = None, most_reads: int | None = None
) -> Any:
    """Return the object of the pickle at the position of `file`, and move to its end. `find_storage`: from a
    persistent id to the elements of a storage. `most_reads`: in place of MOST_READS. Raise any Exception for a pickle
    that is broken or too large."""
    find = find_storage or (lambda identity: StandIn("persistent id", (identity,)))
    return _Unpickler(file, find, MOST_READS if most_reads is None else most_reads).load()


Base: Any = pickle._Unpickler  # typeshed does not know its stack


class _Unpickler(Base):
    """The unpickler that the standard library has in Python, with other steps wherever that one imports, calls or
    hashes what a file says. (The one in C hashes keys without asking.)"""

    def __init__(self, file: BytesIO | mmap.mmap, find_storage: Callable[[Any], Any], most_reads: int):
        super().__init__(file, encoding="latin-1")  # strings of Python 2
        self._find_storage, self._file, self._most, self._left = find_storage, file, most_reads, most_reads
        self._file_read = self._read

    def _read(self, size: int) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"its pickle needs more than {self._most} reads")
        return self._file.read(size)

    def find_class(self, module: str, name: str) -> Any:
        dtype = vars(torch).get(name) if module == "torch" else None
        return dtype if isinstance(dtype, torch.dtype) else StandIn(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return self._find_storage(pid)

    def load_frame(self) -> None:
        self.read(8)  # a hint how much to read ahead

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.append(_made(function, arguments))

    load_newobj = load_reduce

    def load_newobj_ex(self) -> None:
        self.stack.pop()  # arguments by name
        self.load_reduce()

    def _instantiate(self, klass: Any, args: list[Any]) -> None:  # of INST and OBJ
        self.append(_made(klass, tuple(args)))

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, StandIn):
            target.state = state
        elif isinstance(target, Namespace) and isinstance(state, dict):
            vars(target).update((name, value) for name, value in state.items() if isinstance(name, str))

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set(items)

    def load_setitem(self) -> None:
        self._set([self.stack.pop(-2), self.stack.pop()])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], dict):
            self.stack[-1].update((_key(k), v) for k, v in zip(items[::2], items[1::2], strict=True))

    def load_empty_set(self) -> None:
        self.append(StandIn("builtins.set"))

    def load_additems(self) -> None:
        self.pop_mark()  # of a set, which is a stand-in

    def load_frozenset(self) -> None:
        self.append(StandIn("builtins.frozenset", (self.pop_mark(),)))

    def _refuse(self) -> None:
        raise ValueError("its pickle has a step that torch.save does not write")

    load_ext1 = load_ext2 = load_ext4 = load_bytearray8 = load_next_buffer = load_readonly_buffer = _refuse


_Unpickler.dispatch = {n: getattr(_Unpickler, step.__name__) for n, step in pickle._Unpickler.dispatch.items()}


def _key(key: Any) -> Any:
    """Return a key that can be looked up in a short time: itself where it is plain and small."""
    for part in key if isinstance(key, tuple) and len(key) <= 8 else (key,):
        small = type(part) is int and abs(part) < LARGEST_KEY
        if not small and not isinstance(part, str | bytes | bool | StandIn | torch.dtype) and part is not None:
            return StandIn("key", (key,))
    return key


def _made(function: Any, arguments: Any) -> Any:
    """Return what `function(*arguments)` stands for."""
    name = function.foreign if isinstance(function, StandIn) else type(function).__name__
    arguments = arguments if isinstance(arguments, tuple) else (arguments,)
    return MAKERS[name](*arguments) if name in MAKERS else StandIn(name, arguments)


def _dictionary(*arguments: Any) -> Any:
    """Return what was given, and no copy: a few bytes could ask for any number."""
    given = arguments[-1] if arguments and not isinstance(arguments[-1], StandIn) else {}
    return given if isinstance(given, dict) else StandIn("dictionary of pairs", arguments)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor | StandIn:
    """Return what `torch._utils._rebuild_tensor_v2` would, whose `rest` is grad, hooks, metadata: the tensor where each
    of its elements has a place of its own, else a stand-in, as a few bytes could claim to be any number of elements.
    Raise ValueError for a tensor beyond its storage."""
    if not isinstance(storage, Tensor) or any(rest[2:]):  # metadata says that values are to be negated or conjugated
        return StandIn("torch._utils._rebuild_tensor_v2", (storage, offset, size, stride))
    sequences = isinstance(size, tuple | list) and isinstance(stride, tuple | list)
    if not sequences or len(size) != len(stride) or len(size) > 64:
        raise ValueError("a tensor in it has impossible sizes")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (offset, *size, *stride)):
        raise ValueError(f"a tensor in it has the impossible sizes {shown(size)}, {shown(stride)}, {shown(offset)}")
    reach, distinct = 0, True
    for step, n in sorted((s, n) for s, n in zip(stride, size, strict=True) if n > 1):
        distinct = distinct and step > reach
        reach += (n - 1) * step
    if math.prod(size) and offset + reach >= storage.numel():
        raise ValueError(f"a tensor of shape {shown(tuple(size))} is not within its {storage.numel()} elements")
    if not distinct:
        return StandIn(f"tensor of shape {shown(tuple(size))} whose elements share memory")
    return storage.as_strided(size, stride, offset) if math.prod(size) else storage.new_empty(size)


DICTIONARIES = ("builtins.dict", "collections.OrderedDict", "collections.defaultdict", "collections.Counter")
TENSOR_TYPES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")  # others: unknown values
MAKERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("argparse.Namespace", "types.SimpleNamespace"), lambda *_: Namespace()),
    **dict.fromkeys(DICTIONARIES, _dictionary),
    "torch.Size": lambda size=(): size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": lambda function, kind, arguments, state: (
        _made(function, arguments) if getattr(kind, "foreign", "") in TENSOR_TYPES else StandIn("tensor", (kind,))
    ),
}

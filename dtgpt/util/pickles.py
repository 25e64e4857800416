"""Pickles that other projects wrote, also those of `torch.save`, read without running anything of theirs.

A pickle is a program for a stack machine, which may import and call any function. The machine here is that of the
standard library, except that it imports and calls nothing: whatever a pickle names, makes or calls becomes a `StandIn`.
Exceptions are dictionaries, `argparse.Namespace` (which only holds attributes) and tensors.

`torch.load` with weights_only=True refuses unknown names, hashes any key, and makes huge tensors of a few bytes.
"""

import math
import mmap
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.storage import open_regular

MOST_READS = 10_000_000  # of a pickle, whose steps take one to three: each makes at most one small object
LARGEST_KEY = 1 << 60  # larger integers can be chosen to collide as keys of a dictionary, which then takes for ever
ZIP_MAGIC, LOCAL_HEADER = b"PK\x03\x04", 30  # with which an entry of an archive begins, and bytes before its name
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # with which files before torch 1.6 begin
STORAGES = {
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16,
    "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool, "UntypedStorage": torch.uint8,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "QInt8Storage": torch.int8,
    "QUInt8Storage": torch.uint8, "QInt32Storage": torch.int32,
}  # fmt: skip


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


def read_pickle(file: BytesIO | mmap.mmap, find_storage: Callable[[Any], Any] | None = None) -> Any:
    """Return the object of the pickle at the position of `file`, and move that behind it. `find_storage`: from a
    persistent id to the elements of a storage. Raise any Exception for a pickle that is broken or too large."""
    return _Unpickler(file, find_storage or (lambda identity: StandIn("persistent id", (identity,)))).load()


Base: Any = pickle._Unpickler  # typeshed does not know its stack


class _Unpickler(Base):
    """The unpickler that the standard library has in Python, with other steps wherever that one imports, calls or
    hashes what a file says. (The one in C hashes keys without asking.)"""

    def __init__(self, file: BytesIO | mmap.mmap, find_storage: Callable[[Any], Any]):
        super().__init__(file, encoding="latin-1")  # strings of Python 2
        self._find_storage, self._file, self._left = find_storage, file, MOST_READS
        self._file_read = self._read

    def _read(self, size: int) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"its pickle needs more than {MOST_READS} reads")
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


def open_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary in a file of torch.save, with tensors on the CPU: mapped, so that only what is used is
    read, unless the file is of the format before torch 1.6. Raise UserError for a file that is missing or broken, or
    holds something else than a dictionary."""
    try:
        with open_regular(path) as file:
            zipped = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
            file.seek(0)
            content = _read_archive(path, file) if zipped else _read_old(file)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; copy the whole checkpoint") from None
    except UserError:
        raise
    except Exception as error:  # a damaged or hostile pickle can make the reader raise anything
        reason = (str(error).strip().splitlines() or [""])[-1][:200]
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {reason}); copy it again, whole") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {shown(content)}, not a checkpoint's dictionary; give another file")
    return content


def _read_archive(path: Path, file: BinaryIO) -> Any:
    """Read a zip archive of ROOT/data.pkl and ROOT/data/KEY, the storages, none compressed."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        root = next(iter(entries)).partition("/")[0]
        for entry in entries.values():
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:  # a little could become any number
                raise UserError(f"{path} is compressed or encrypted ({shown(entry.filename)}); write it by torch.save")
        if f"{root}/byteorder" in entries and archive.read(entries[f"{root}/byteorder"]) != b"little":
            raise UserError(f"{path} has numbers in big-endian order; save it again on a little-endian machine")
        pickled = archive.read(entries[f"{root}/data.pkl"])
    size = file.seek(0, 2)
    mapped = torch.UntypedStorage.from_file(str(path), False, size)

    @cache  # tied weights are one tensor
    def find(key: str, dtype: torch.dtype, count: int) -> Tensor:
        entry, num_bytes = entries[f"{root}/data/{key}"], count * dtype.itemsize
        file.seek(entry.header_offset)
        header = file.read(LOCAL_HEADER)
        if not header.startswith(ZIP_MAGIC):
            raise ValueError(f"there is no entry at byte {entry.header_offset}")
        begin = file.tell() + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))  # name, extra field
        if num_bytes > entry.file_size or begin + num_bytes > size:
            raise ValueError(f"storage {shown(key)} has {entry.file_size} bytes, where {shown(num_bytes)} are due")
        return torch.empty(0, dtype=dtype, device="cpu").set_(mapped[begin : begin + num_bytes])

    return read_pickle(BytesIO(pickled), lambda identity: _find_storage(identity, find))


def _read_old(file: BinaryIO) -> Any:
    """Read the format before torch 1.6, one pickle after another and the storages behind them, into memory."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:  # no read is longer than the file
        magic, protocol, about = (read_pickle(content) for _ in range(3))
        if (magic, protocol) != (MAGIC, PROTOCOL) or about.get("little_endian") is not True:
            raise ValueError("it does not begin as a little-endian file of torch.save")
        found: dict[str, Tensor] = {}
        left = len(content)

        def find(key: str, dtype: torch.dtype, count: int) -> Tensor:
            nonlocal left
            if key not in found:
                left -= count * dtype.itemsize
                if left < 0:
                    raise ValueError(f"storage {shown(key)} of {shown(count)} elements is larger than the file")
                found[key] = torch.empty(count, dtype=dtype, device="cpu")
            return found[key]

        saved = read_pickle(content, lambda identity: _find_storage(identity, find))
        for key in read_pickle(content):
            storage = found.pop(key)
            count, begin = int.from_bytes(content.read(8), "little"), content.tell()
            if count != storage.numel() or begin + storage.nbytes > len(content):
                raise ValueError(f"storage {shown(key)} is not whole")
            storage.view(torch.uint8).numpy()[:] = np.frombuffer(content, np.uint8, storage.nbytes, begin)
            content.seek(begin + storage.nbytes)
    if found:
        raise ValueError(f"storage {shown(min(found))} is missing")
    return saved


def _find_storage(identity: Any, find: Callable[[str, torch.dtype, int], Tensor]) -> Tensor | StandIn:
    """Return the storage of a persistent id: ("storage", type, key, device, elements) and, before torch 1.6, the part
    of it that is meant. One whose type is unknown is a stand-in, as is a module's class, which has an id there."""
    if isinstance(identity, tuple) and len(identity) == 4 and identity[0] == "module":
        return identity[1] if isinstance(identity[1], StandIn) else StandIn("module", identity)
    word, kind, key, _, count, *view = identity
    known = word == "storage" and isinstance(kind, StandIn) and isinstance(key, str)
    if not known or type(count) is not int or not 0 <= count < 1 << 62:
        raise ValueError(f"it has the persistent id {shown(identity)}")
    dtype = STORAGES.get(kind.foreign.rpartition(".")[2]) if kind.foreign.startswith("torch.") else None
    if dtype is None or any(part is not None for part in view):
        return StandIn(kind.foreign, (key,))
    return find(key, dtype, count)

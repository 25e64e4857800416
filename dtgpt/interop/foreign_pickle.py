"""Files of `torch.save` that other projects wrote, opened without running anything of theirs.

Such a file is a pickle with the storages of its tensors: since torch 1.6 in a zip archive, ROOT/data.pkl and
ROOT/data/KEY, none compressed; before that one pickle after another and the storages behind them.
"""

import mmap
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dtgpt.errors import UserError, shown
from dtgpt.interop.inert_pickle import StandIn, Storage, read_pickle
from dtgpt.storage import open_regular

ZIP_MAGIC = b"PK\x03\x04"
LOCAL_HEADER = 30  # bytes before the name of an entry of an archive
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # with which files before torch 1.6 begin
STORAGES = {
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16,
    "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool, "UntypedStorage": torch.uint8,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "QInt8Storage": torch.int8,
    "QUInt8Storage": torch.uint8, "QInt32Storage": torch.int32,
}  # fmt: skip


def open_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary in a file of torch.save, with tensors on the CPU: mapped, so that only what is used is
    read, unless the file is of the format before torch 1.6. What is neither a tensor nor plain is a `StandIn`.

    Raises UserError for a file that is missing or broken, or holds something else than a dictionary.
    """
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
        kind = f"{content}" if isinstance(content, StandIn) else type(content).__name__
        raise UserError(f"{path} holds a {kind}, not a checkpoint's dictionary; give another file")
    return content


def _read_archive(path: Path, file: BinaryIO) -> Any:
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        root = next(iter(entries)).partition("/")[0]
        for entry in entries.values():
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:  # a little could become any number
                raise UserError(
                    f"{path} is compressed or encrypted ({shown(entry.filename)}), which torch.save never does; save "
                    "it again with torch.save"
                )
        if f"{root}/byteorder" in entries and archive.read(entries[f"{root}/byteorder"]) != b"little":
            raise UserError(f"{path} has numbers in big-endian order; save it again on a little-endian machine")
        pickled = archive.read(entries[f"{root}/data.pkl"])
    size = file.seek(0, 2)
    mapped = torch.UntypedStorage.from_file(str(path), False, size)
    found: dict[str, Storage] = {}

    def find(key: str, dtype: torch.dtype, count: int) -> Storage:
        if key not in found:
            entry = entries[f"{root}/data/{key}"]
            begin, num_bytes = _data_offset(file, entry), count * dtype.itemsize
            if num_bytes > entry.file_size or begin + num_bytes > size:
                raise ValueError(f"storage {shown(key)} has {entry.file_size} bytes, where {shown(num_bytes)} are due")
            found[key] = Storage(mapped[begin : begin + num_bytes], dtype)
        return found[key]

    return read_pickle(BytesIO(pickled), lambda identity: _find_storage(identity, find))


def _data_offset(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    file.seek(entry.header_offset)
    header = file.read(LOCAL_HEADER)
    if len(header) < LOCAL_HEADER or not header.startswith(ZIP_MAGIC):
        raise ValueError(f"there is no entry at byte {entry.header_offset}")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return entry.header_offset + LOCAL_HEADER + name + extra


def _read_old(file: BinaryIO) -> Any:
    """The format before torch 1.6, whose storages are read into memory."""
    found: dict[str, Storage] = {}
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:  # no read is longer than the file
        if read_pickle(content) != MAGIC or read_pickle(content) != PROTOCOL:
            raise ValueError("it does not begin as a file of torch.save")
        about = read_pickle(content)
        if not isinstance(about, dict) or about.get("little_endian") is not True:
            raise ValueError("its numbers are not in little-endian order")
        left = len(content)

        def find(key: str, dtype: torch.dtype, count: int) -> Storage:
            nonlocal left
            if key not in found:
                left -= count * dtype.itemsize
                if left < 0:
                    raise ValueError(f"storage {shown(key)} of {shown(count)} elements is larger than the file")
                found[key] = Storage(torch.UntypedStorage(count * dtype.itemsize, device="cpu"), dtype)
            return found[key]

        saved = read_pickle(content, lambda identity: _find_storage(identity, find))
        keys = read_pickle(content)
        file.seek(content.tell())
    for key in keys:
        storage = found.pop(key)
        count, due = int.from_bytes(file.read(8), "little"), storage.memory.nbytes()
        values = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.memory).numpy()
        if count * storage.dtype.itemsize != due or file.readinto(values) != due:
            raise ValueError(f"storage {shown(key)} is not whole")
    if found:
        raise ValueError(f"storage {shown(min(found))} is missing")
    return saved


def _find_storage(identity: Any, find: Callable[[str, torch.dtype, int], Storage]) -> Storage | StandIn:
    """Return the storage of a persistent id: ("storage", type, key, device, elements) and, before torch 1.6, the part
    of it that is meant. One whose type is unknown is a stand-in, as is the class of a module, which has an id before
    torch 1.6."""
    if isinstance(identity, tuple) and len(identity) == 4 and identity[0] == "module":
        return identity[1] if isinstance(identity[1], StandIn) else StandIn("module", identity)
    word, kind, key, _, count, *view = identity
    if word != "storage" or not isinstance(kind, StandIn) or not isinstance(key, str):
        raise ValueError(f"it has the persistent id {shown(identity)}")
    if type(count) is not int or not 0 <= count < 1 << 62:
        raise ValueError(f"storage {shown(key)} has {shown(count)} elements")
    dtype = STORAGES.get(kind.foreign.rpartition(".")[2]) if kind.foreign.startswith("torch.") else None
    if dtype is None or any(part is not None for part in view):
        return StandIn(kind.foreign, (key,))
    return find(key, dtype, count)

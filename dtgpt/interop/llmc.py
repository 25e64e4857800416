"""Models that llm.c wrote, or its train_gpt2.py: `model_00001000.bin`, `gpt2_124M.bin`, `gpt2_124M_bf16.bin`.

A header of 256 int32, then 16 arrays without a gap: the table (padded), the positions, and then kind by kind, each for
all blocks; the final LayerNorm. Matrices are `[out, in]`, the fused QKV is `[3, N, D]` along its output.
"""

import math
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dtgpt.interop.foreign import as_parameter, checked, reading
from dtgpt.interop.hf.gpt2 import reorder_qkv
from dtgpt.models.gpt2 import TABLE, GPT2Config
from dtgpt.models.source import Ranges, Source, parameter_shapes
from dtgpt.util.rules import Is, Other, Rule, Rules, check_rules
from dtgpt.util.storage import open_regular

MAGIC = 20240326
HEADER_BYTES = 256 * 4
DTYPES = {3: torch.float32, 5: torch.bfloat16}  # by the version in the header


HEADER_RULES: Rules = (
    Rule(
        f"{{path}} does not begin as a model of llm.c (magic {MAGIC}); give its model_*.bin",
        Is("magic", "!=", MAGIC),
    ),
    Rule(
        "{path} has version {version}; write it as version 3 (fp32) or 5 (bf16) of llm.c",
        Is("version", "not in", DTYPES),
    ),
)
SIZE_RULES: Rules = (
    Rule(
        "{path} has a table of {rows} rows for {vocabulary} tokens; copy the file again, whole",
        Is("rows", "<", Other("vocabulary")),
    ),
    Rule(
        "{path} has {size} bytes, where its header asks for {wanted}; copy it again, whole",
        Is("size", "!=", Other("wanted")),
    ),
)


class LLMC(Source):
    """A model file of llm.c, version 3 (fp32) or 5 (bf16); `read` maps one tensor.

    Raises UserError for another kind of file, a header that is not a model's, or a size that is not the header's.
    """

    def __init__(self, path: Path):
        self.path = path
        header, size = _header(path)
        self._dtype = DTYPES[header[1]]
        length, vocabulary, layers, heads, width, rows = header[2:8]
        config = GPT2Config(
            num_layers=layers, hidden_size=width, num_heads=heads, seq_length=length, vocab_size=vocabulary
        )
        self.config = checked(config, path)
        self._layout, elements = _layout(self.config, rows)
        wanted = HEADER_BYTES + elements * self._dtype.itemsize
        sizes = {"path": path, "rows": rows, "vocabulary": vocabulary, "size": size, "wanted": wanted}
        check_rules(SIZE_RULES, sizes)

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        start, shape = self._layout[re.sub(r"^blocks\.\d+", "blocks.0", name)]
        if name.startswith("blocks."):
            start += int(name.split(".")[1]) * math.prod(shape)
        return as_parameter(reorder_qkv(self._map(start, shape), name, self.config), name, self.config, part)

    def _map(self, start: int, shape: tuple[int, ...]) -> Tensor:
        """Map `shape` elements from the element `start` on, as they are in the file."""
        integers, offset = f"<i{self._dtype.itemsize}", HEADER_BYTES + start * self._dtype.itemsize
        with reading(self.path, "copy it again, whole"):
            # numpy has no bf16; "c": torch wants writable memory, and the file stays as it is
            bits = np.memmap(self.path, dtype=integers, mode="c", offset=offset, shape=shape)
        return torch.from_numpy(bits).view(self._dtype)


def _header(path: Path) -> tuple[list[int], int]:
    """Return the 256 integers, and the size of the file in bytes. Raise UserError for a file that is not a model of
    llm.c."""
    with reading(path, "give a model file of llm.c"), open_regular(path) as file:
        header, size = np.frombuffer(file.read(HEADER_BYTES), dtype="<i4").tolist(), os.fstat(file.fileno()).st_size
    magic, version = header[:2] if len(header) == HEADER_BYTES // 4 else (0, 0)
    check_rules(HEADER_RULES, {"path": path, "magic": magic, "version": version})
    return header, size


def _layout(config: GPT2Config, rows: int) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Return (first element, shape) by name, for blocks that of block 0, and the number of elements. llm.c's order is
    that of dtgpt's modules."""
    shapes = parameter_shapes(replace(config, num_layers=1)) | {TABLE: (rows, config.hidden_size)}
    layout, start = {}, 0
    for name, shape in shapes.items():
        layout[name] = start, shape
        start += math.prod(shape) * (config.num_layers if name.startswith("blocks.") else 1)
    return layout, start

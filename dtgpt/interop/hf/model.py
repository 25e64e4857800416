"""Models in the folders of Hugging Face's transformers: read tensor by tensor, and written.

Such a folder has `config.json` and `model.safetensors`, or shards of it with `model.safetensors.index.json`. What
belongs to one architecture stands in a file of its own, such as `gpt2.py`.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dtgpt.checkpoint.shard_file import Piece, by_size
from dtgpt.data.library_tokenizers.export import CLASS, begin_token
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.interop.foreign import (
    as_parameter,
    cast,
    check_architecture,
    check_dtype,
    check_tensors,
    plain_names,
    reading,
    untied,
)
from dtgpt.interop.hf.architecture import Architecture
from dtgpt.interop.hf.gemma3 import Gemma3
from dtgpt.interop.hf.glm4_moe import Glm4Moe
from dtgpt.interop.hf.gpt2 import GPT_2
from dtgpt.interop.hf.gpt_neo import GPTNeo
from dtgpt.interop.hf.gpt_oss import GptOss
from dtgpt.interop.hf.granitemoe import GraniteMoe
from dtgpt.interop.hf.llama import FAMILIES, LLAMA
from dtgpt.interop.hf.mixtral import Mixtral
from dtgpt.interop.hf.olmo3 import Olmo3
from dtgpt.interop.hf.olmoe import Olmoe
from dtgpt.interop.hf.phi3 import Phi3
from dtgpt.interop.hf.qwen2_moe import Qwen2Moe
from dtgpt.interop.hf.qwen3_moe import Qwen3Moe
from dtgpt.interop.keys import Key, Keys, among, check_keys, is_off, just, not_here
from dtgpt.interop.marks import ADAPTER_CONFIG
from dtgpt.interop.new_folder import new_folder
from dtgpt.models.config import ModelConfig
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.models.inventory import Shape
from dtgpt.models.shared.foreign import has_vocabulary
from dtgpt.models.source import Ranges, Source, iterate_shapes
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.storage import open_regular, read_json, write_json, write_text

SHARD_BYTES = 5_000_000_000  # of tensors in one file that `save_huggingface` writes; a larger tensor has its own file
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by their names in safetensors
BYTES = "U8"
LONGEST = 4096  # tokens that transformers generates where nobody says how many
ROWS = 4096  # of two tables compared at a time
# Without these words transformers would take an empty tokenizer for the model's; with them it says that there is none.
NO_TOKENIZER = {"tokenizer_config.json": {"tokenizer_class": CLASS}}
REMEDY = "give a folder that transformers can load"


# By `model_type`; dtgpt's name of an architecture is one of these, by which a model is written.
ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": GPT_2,
    "gpt_neo": GPTNeo(),
    **dict.fromkeys(FAMILIES, LLAMA),
    "phi3": Phi3(),
    "olmo3": Olmo3(),
    "olmoe": Olmoe(),
    "granitemoe": GraniteMoe(),
    "glm4_moe": Glm4Moe(),
    "mixtral": Mixtral(),
    "qwen2_moe": Qwen2Moe(),
    "qwen3_moe": Qwen3Moe(),
    "gemma3_text": Gemma3(),
    "gpt_oss": GptOss(),
}
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2", "longcat_flash", "minicpm3")


def _is_no_latent(value: Any) -> bool:
    return value not in LATENT


ATTENTION: Keys = {
    "model_type": Key(_is_no_latent, not_here("its attention compresses keys and values (MLA), which dtgpt's do not"))
}
KIND: Keys = {"model_type": Key(among(ARCHITECTURES), not_here(f"dtgpt has {', '.join(ARCHITECTURES)}"))}
KEYS: Keys = {  # of every family
    "quantization_config": Key(just(None), not_here("dtgpt reads weights in F32, F16 and BF16")),
    "per_layer_config": Key(is_off, not_here("dtgpt reads no settings of single layers by this key")),
    "is_causal": Key(bool, not_here("dtgpt's attention is causal"), True),
    "transformers_weights": Key(just(None), not_here("dtgpt reads model.safetensors or its shards")),
    "configuration_files": Key(is_off, not_here("dtgpt reads config.json, and no other file that it names")),
}


class HuggingFace(Source):
    """A folder with `config.json` and safetensors, with or without the prefix of the architecture.

    Raises UserError for a file that is missing or broken, a model that dtgpt does not compute, and tensors that do not
    fit the configuration. `read` maps one file and loads one tensor.
    """

    def __init__(self, folder: Path):
        self.folder, path = folder, folder / "config.json"
        settings = read_object(path)
        check_keys(settings, ATTENTION, path)
        check_keys(settings, KIND, path)
        self.kind = settings["model_type"]
        self.architecture = architecture = ARCHITECTURES[self.kind].of(settings)
        self.config = architecture.read_config(settings, path)
        check_keys({key: value for key, value in settings.items() if key not in architecture.known}, KEYS, path)
        if (folder / ADAPTER_CONFIG).is_file():
            raise UserError(
                f"{folder} holds an adapter ({ADAPTER_CONFIG}) beside the model, and transformers adds it; move "
                "the adapter's files to another folder, which --adapter takes"
            )
        files = _files(folder)
        self._names = plain_names(files, architecture.prefix, architecture.ignored(self.config), folder)
        self._files = {plain: files[name] for plain, name in self._names.items()}
        shapes = self._shapes()
        ends = self.config.table_name, self.config.output_name
        (table,), (output,) = (architecture.stored_names(name, self.config) for name in ends)
        saved_output = shapes.pop(output, None) if self.config.tied else None
        if saved_output and table not in shapes:  # the tied table was saved under its other name
            shapes[table] = saved_output
            self._files[table], self._names[table] = self._files[output], self._names[output]
        check_tensors(shapes, _stored_shapes(self.config, architecture), folder)
        if saved_output and (saved_output != shapes[table] or not self._same_rows(table, output)):
            raise _contradicts(path) if "tied" in (f.name for f in fields(self.config)) else untied(folder)

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        architecture = self.architecture
        names = architecture.stored_names(name, self.config)
        stored = [self._open(plain, lambda file, there: file.get_tensor(there)) for plain in names]
        if has_vocabulary(name, self.config):
            return as_parameter(stored[0], name, self.config, part)
        return as_parameter(architecture.from_stored(stored, name, self.config, part), name, self.config, None)

    def _open(self, plain: str, action: Callable[[Any, str], Any]) -> Any:
        """Return `action(file, name in it)` for the file that holds a tensor."""
        return with_file(self._files[plain], lambda file: action(file, self._names[plain]))

    def _shapes(self) -> dict[str, Shape]:
        """Return the shapes by plain names, from the headers. Raise UserError for a dtype that dtgpt does not read."""
        there = {path: with_file(path, _header) for path in set(self._files.values())}
        shapes = {}
        for plain, path in self._files.items():
            if self._names[plain] not in there[path]:
                raise UserError(
                    f"{path} has no tensor {shown_name(self._names[plain])}, where the index puts it; copy it again"
                )
            dtype, shapes[plain] = there[path][self._names[plain]]
            if not (dtype == BYTES if self.architecture.is_of_bytes(plain) else dtype in STORED):
                raise UserError(f"{path} has {shown_name(plain)} in {dtype}; give weights in {', '.join(STORED)}")
        return shapes

    def _same_rows(self, one: str, other: str) -> bool:
        """Return whether two tables agree, looking at ROWS rows at a time."""

        def rows(plain: str, begin: int) -> Tensor:
            return self._open(plain, lambda file, there: file.get_slice(there)[begin : begin + ROWS].float())

        return all(torch.equal(rows(one, n), rows(other, n)) for n in range(0, self.config.vocab_size, ROWS))


def _contradicts(path: Path) -> UserError:
    return UserError(
        f"{path} has tie_word_embeddings=true, but there is an output projection (lm_head.weight) of its own; "
        "write false there if it is the model's"
    )


def _to_stored(
    whole: Tensor, name: str, config: ModelConfig, architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Yield plain name and tensor of what transformers has for dtgpt's parameter `name`."""
    true = whole[: config.vocab_size] if has_vocabulary(name, config) else whole
    return zip(architecture.stored_names(name, config), architecture.to_stored(true, name, config), strict=True)


def _stored_shapes(config: ModelConfig, architecture: Architecture) -> Iterator[tuple[str, Shape]]:
    """Yield the plain name and shape that every tensor must have."""
    for name, shape in iterate_shapes(config):
        for plain, stored in _to_stored(torch.empty(shape, device="meta"), name, config, architecture):
            yield plain, tuple(stored.shape)


def _header(file: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor in an open safetensors file."""
    return {name: (s.get_dtype(), tuple(s.get_shape())) for name in file.keys() for s in [file.get_slice(name)]}  # noqa: SIM118


def with_file(path: Path, action: Callable[[Any], Any]) -> Any:
    """Return `action(open file)`. The file is opened for each use, so that a source keeps none and can go to another
    process."""
    with reading(path, "copy it again, whole"):
        open_regular(path).close()  # the library would wait for the writer of a FIFO
        with safe_open(path, framework="pt") as file:
            return action(file)


def read_object(path: Path) -> dict[str, Any]:
    value = read_json(path, REMEDY)
    if not isinstance(value, dict):
        raise UserError(f"{path} cannot be read (it holds no object); {REMEDY}")
    return value


def _files(folder: Path) -> dict[str, Path]:
    """Return the file that holds each tensor. The index is not trusted with paths: its files must be in
    the same folder."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return dict.fromkeys(with_file(single, lambda file: list(file.keys())), single)
    if not index.exists():
        raise UserError(
            f"{folder} has neither {single.name} nor {index.name}; save the model with transformers' save_pretrained "
            "and safe_serialization=True"
        )
    named = read_object(index).get("weight_map")
    if not isinstance(named, dict):
        raise UserError(f"{index} has no weight_map that says where each tensor is; copy it again")
    for file in named.values():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise UserError(f"{index} names the file {shown(file)}; a shard is a .safetensors file in the same folder")
    return {name: folder / file for name, file in named.items()}


class Kept(Protocol):
    """What is kept of the folder from which a model came: see `origin.Origin`."""

    def whole(self, config: ModelConfig) -> ModelConfig: ...
    def settings(self, config: ModelConfig, made: dict[str, Any]) -> dict[str, Any]: ...


def save_huggingface(
    source: Source,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    tokenizer: Tokenizer | None = None,
    tokenizer_files: dict[str, Any] | None = None,
    origin: Kept | None = None,
) -> None:
    """Write `source` as a new folder that transformers' `from_pretrained` takes, one file in memory at a time, with the
    files that `transformers_files` made of its tokenizer.

    `origin`: what is kept of the folder from which the model came, which replaces dtgpt's own settings.
    Raises UserError where the folder exists (before anything is read), `dtype` is none of DTYPES, transformers does not
    have the architecture, a weight leaves the range of fp16, or writing fails. The folder appears when it is whole.
    """
    check_dtype(dtype)
    check_architecture(source.config, ARCHITECTURES, "Hugging Face folder")
    config = source.config if origin is None else origin.whole(source.config)
    files = _settings(config, dtype, tokenizer)
    if origin is not None:
        files = origin.settings(source.config, files)
    files |= tokenizer_files or NO_TOKENIZER
    with new_folder(folder) as partial:
        _save_weights(source, partial, dtype)
        for name, content in files.items():
            write = write_text if isinstance(content, str) else write_json
            write(partial / name, content)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a new file of safetensors. Raises OSError."""
    path.touch()
    mode = path.stat().st_mode  # by the umask; save_file takes another one
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # how the library tells of a full disk
        raise OSError(str(error)) from None
    path.chmod(mode)


def _save_weights(source: Source, folder: Path, dtype: torch.dtype) -> None:
    config, architecture = source.config, ARCHITECTURES[source.config.architecture]
    pieces = (Piece.whole(name, shape) for name, shape in iterate_shapes(config))
    shards = list(by_size(pieces, SHARD_BYTES * torch.float32.itemsize // dtype.itemsize))  # pieces are fp32
    where: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {}
        for name in (piece.name for piece in shard):
            prefix = "" if name == config.output_name else architecture.prefix
            for plain, stored in _to_stored(source.read(name), name, config, architecture):
                tensors[prefix + plain] = cast(stored, architecture.written_type(plain, dtype), name)
        save_tensors(tensors, folder / file)
        where |= dict.fromkeys(tensors, file)
        del tensors  # before the next file's are read
    if len(shards) > 1:
        size = sum(
            math.prod(shape) * architecture.written_type(plain, dtype).itemsize
            for plain, shape in _stored_shapes(config, architecture)
        )
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})


def _settings(config: ModelConfig, dtype: torch.dtype, tokenizer: Tokenizer | None) -> dict[str, dict[str, Any]]:
    """Return the content of each JSON file. Without a tokenizer only GPT-2's own vocabulary has a known end of text:
    its last id."""
    own = (config.architecture, config.vocab_size) == (GPT2_124M.architecture, GPT2_124M.vocab_size)
    end = config.vocab_size - 1 if own else None
    ends = {"bos_token_id": end, "eos_token_id": end}
    if tokenizer is not None:
        ends = {"bos_token_id": begin_token(tokenizer), "eos_token_id": tokenizer.end_of_text}
    model = ARCHITECTURES[config.architecture].write_config(config)
    return {
        "config.json": model | {"torch_dtype": str(dtype).removeprefix("torch.")} | ends,
        "generation_config.json": ends | {"max_length": min(config.seq_length, LONGEST)},
    }

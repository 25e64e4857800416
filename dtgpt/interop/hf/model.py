"""GPT-2 in the folders of Hugging Face's transformers: read tensor by tensor, and written.

Such a folder has `config.json` and `model.safetensors`, or shards of it with `model.safetensors.index.json`. Names and
order are GPT-2's, and matrices lie transposed, `[in, out]`.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dtgpt.data.tokenizers.export import CLASS, first_token
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.interop.hf.gpt2 import (
    check_tensors,
    checked,
    from_gpt2,
    gpt2_name,
    gpt2_shapes,
    is_matrix,
    plain_names,
    setting,
    untied,
)
from dtgpt.models.gpt2 import GPT2_124M, TABLE, GPT2Config
from dtgpt.models.source import Part, Source, parameter_shapes
from dtgpt.util.errors import UserError, shown, shown_name
from dtgpt.util.storage import new_folder, open_regular, read_json, write_json

SHARD_BYTES = 5_000_000_000  # of tensors in one file that `save_huggingface` writes; a larger tensor has its own file
# The names that transformers has for GELU with tanh; they differ in rounding only.
TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by their names in safetensors
ROWS = 4096  # of two tables compared at a time
PREFIX = "transformer."
# Without these words transformers would take an empty tokenizer for the model's; with them it says that there is none.
NO_TOKENIZER = {"tokenizer_config.json": {"tokenizer_class": CLASS}}
REMEDY = "give a folder that transformers can load"


class HuggingFace(Source):
    """A folder with GPT-2's `config.json` and safetensors, with or without the prefix `transformer.`.

    Raises UserError for a file that is missing or broken, a model that is not GPT-2 as dtgpt computes it, and tensors
    that do not fit the configuration. `read` maps one file and loads one tensor.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = _read_config(folder / "config.json")
        files = _files(folder)
        self._names = plain_names(files, folder)
        self._files = {plain: files[name] for plain, name in self._names.items()}
        shapes = self._shapes()
        output = shapes.pop("lm_head.weight", None)
        if output and "wte.weight" not in shapes:  # the tied table was saved under its other name
            self._files["wte.weight"] = self._files["lm_head.weight"]
            self._names["wte.weight"] = self._names["lm_head.weight"]
            shapes["wte.weight"] = output
        expected = gpt2_shapes(self.config, shapes, folder)
        check_tensors(shapes, {gpt2_name(n): s[::-1] if is_matrix(n) else s for n, s in expected.items()}, folder)
        if output and (output != shapes["wte.weight"] or not all(map(self._tied, range(0, output[0], ROWS)))):
            raise untied(folder)

    def read(self, name: str, part: Part | None = None) -> Tensor:
        stored = self._open(gpt2_name(name), lambda file, there: file.get_tensor(there))
        return from_gpt2(stored.T if is_matrix(name) else stored, name, self.config, part)

    def _open(self, plain: str, action: Callable[[Any, str], Any]) -> Any:
        """Return `action(file, name in it)` for the file that holds a tensor."""
        return _with_file(self._files[plain], lambda file: action(file, self._names[plain]))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes by GPT-2's names, from the headers. Raise UserError for a dtype that dtgpt does not
        read."""
        there = {path: _with_file(path, _header) for path in set(self._files.values())}
        shapes = {}
        for plain, path in self._files.items():
            if self._names[plain] not in there[path]:
                raise UserError(
                    f"{path} has no tensor {shown_name(self._names[plain])}, where the index puts it; copy it again"
                )
            dtype, shapes[plain] = there[path][self._names[plain]]
            if dtype not in DTYPES:
                raise UserError(f"{path} has {shown_name(plain)} in {dtype}; give weights in {', '.join(DTYPES)}")
        return shapes

    def _tied(self, first: int) -> bool:
        """Return whether embedding and output projection agree in the ROWS rows from `first`."""
        wte, head = (
            self._open(n, lambda file, there: file.get_slice(there)[first : first + ROWS].float())
            for n in ("wte.weight", "lm_head.weight")
        )
        return torch.equal(wte, head)


def _header(file: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor in an open safetensors file."""
    return {name: (s.get_dtype(), tuple(s.get_shape())) for name in file.keys() for s in [file.get_slice(name)]}  # noqa: SIM118


def _with_file(path: Path, action: Callable[[Any], Any]) -> Any:
    """Return `action(open file)`. The file is opened for each use, so that a source keeps none and can go to another
    process."""
    try:
        open_regular(path).close()  # the library would wait for the writer of a FIFO
        with safe_open(path, framework="pt") as file:
            return action(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({str(error)[:200]}); copy it again, whole") from None


def _read_json(path: Path) -> dict[str, Any]:
    value = read_json(path, REMEDY)
    if not isinstance(value, dict):
        raise UserError(f"{path} cannot be read (it holds no object); {REMEDY}")
    return value


def _files(folder: Path) -> dict[str, Path]:
    """Return the file that holds each tensor. The index is not trusted with paths: its files must be beside it."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return dict.fromkeys(_with_file(single, lambda file: list(file.keys())), single)
    if not index.exists():
        raise UserError(
            f"{folder} has neither {single.name} nor {index.name}; save the model with transformers' save_pretrained "
            "and safe_serialization=True"
        )
    named = _read_json(index).get("weight_map")
    if not isinstance(named, dict):
        raise UserError(f"{index} has no weight_map that says where each tensor is; copy it again")
    for file in named.values():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise UserError(f"{index} names the file {shown(file)}; a shard is a .safetensors file in the same folder")
    return {name: folder / file for name, file in named.items()}


def _read_config(path: Path) -> GPT2Config:
    """Return the shape that `config.json` describes, with transformers' defaults. Raise UserError for options that
    dtgpt does not have."""
    settings = _read_json(path)
    width = setting(settings, ("n_embd", "hidden_size"), 768, path)
    rules = {
        "model_type": (None, lambda v: v == "gpt2", "dtgpt's model is gpt2"),
        "activation_function": ("gelu_new", lambda v: v in TANH_GELU, f"dtgpt has {', '.join(TANH_GELU)}"),
        "n_inner": (None, lambda v: v in (None, 4 * width), f"dtgpt's MLP is 4 n_embd = {4 * width} wide"),
        "tie_word_embeddings": (True, lambda v: v is True, "dtgpt's output projection is the token table"),
        "scale_attn_weights": (True, lambda v: v is True, "dtgpt divides scores by sqrt(D)"),
        "scale_attn_by_inverse_layer_idx": (False, lambda v: v is False, "dtgpt divides scores by sqrt(D) alone"),
        "add_cross_attention": (False, lambda v: v is False, "dtgpt's model has no encoder to attend to"),
    }
    for name, (default, fits, reason) in rules.items():
        value = settings.get(name, default)
        if not fits(value):
            raise UserError(f"{path} has {name}={_json(value)}; {reason}: give another model")
    epsilon = settings.get("layer_norm_epsilon", 1e-5)
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise UserError(f"{path} has layer_norm_epsilon={shown(epsilon)}; it must be more than 0 and less than 1")
    config = GPT2Config(
        num_layers=setting(settings, ("n_layer", "num_hidden_layers"), 12, path),
        hidden_size=width,
        num_heads=setting(settings, ("n_head", "num_attention_heads"), 12, path),
        seq_length=setting(settings, ("n_positions", "max_position_embeddings", "n_ctx"), 1024, path),
        vocab_size=setting(settings, ("vocab_size",), GPT2_124M.vocab_size, path),
        layer_norm_eps=epsilon,
    )
    return checked(config, path)


def _json(value: Any) -> str:
    """Return a value of JSON as it is written there, shortened."""
    return json.dumps(value) if value is None or isinstance(value, bool) else shown(value)


def save_huggingface(
    source: Source, folder: Path, dtype: torch.dtype = torch.float32, tokenizer: Tokenizer | None = None,
    tokenizer_files: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write `source` as a new folder that transformers' `from_pretrained` takes, one file in memory at a time, with the
    files that `transformers_files` made of its tokenizer.

    Raises UserError where the folder exists (before anything is read), `dtype` is none of DTYPES, a weight leaves the
    range of fp16, or writing fails. The folder appears when it is whole.
    """
    if dtype not in DTYPES.values():
        raise UserError(f"dtype={dtype} is not one of weights; use one of {', '.join(map(str, DTYPES.values()))}")
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already; give another path")
    with new_folder(folder) as partial:
        try:
            _save_weights(source, partial, dtype)
        except SafetensorError as error:  # how the library tells of a full disk
            raise OSError(str(error)) from None
        for name, settings in (_settings(source.config, dtype, tokenizer) | (tokenizer_files or NO_TOKENIZER)).items():
            write_json(partial / name, settings)


def _save_weights(source: Source, folder: Path, dtype: torch.dtype) -> None:
    shards, total = _shards(source.config, dtype), 0
    where: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {PREFIX + gpt2_name(name): _to_gpt2(source, name, dtype) for name in names}
        (folder / file).touch()
        mode = (folder / file).stat().st_mode  # by the umask; save_file takes another one
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(mode)
        where |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
        del tensors  # before the next file's are read
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(config: GPT2Config, dtype: torch.dtype) -> list[list[str]]:
    """Return dtgpt's names, file by file, none above SHARD_BYTES unless one tensor is."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in parameter_shapes(config).items():
        nbytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _to_gpt2(source: Source, name: str, dtype: torch.dtype) -> Tensor:
    """Return GPT-2's tensor of a parameter, in `dtype`. Raise UserError where fp16 cannot hold a weight."""
    whole, config = source.read(name), source.config
    if ".attn.qkv." in name:
        whole = rearrange(whole, "(n three d) ... -> (three n d) ...", three=3, n=config.num_heads)
    elif name == TABLE:
        whole = whole[: config.vocab_size]
    stored = (whole.T if is_matrix(name) else whole).to(dtype).contiguous()
    if dtype == torch.float16 and stored.isinf().any() and not whole.isinf().any():
        raise UserError(f"{name} has weights beyond the range of torch.float16; use torch.bfloat16 or torch.float32")
    return stored


def _settings(config: GPT2Config, dtype: torch.dtype, tokenizer: Tokenizer | None) -> dict[str, dict[str, Any]]:
    """Return the content of each JSON file. Without a tokenizer only GPT-2's own vocabulary has a known end of text:
    its last id."""
    end = config.vocab_size - 1 if config.vocab_size == GPT2_124M.vocab_size else None
    ends = {"bos_token_id": end, "eos_token_id": end}
    if tokenizer is not None:
        ends = {"bos_token_id": first_token(tokenizer), "eos_token_id": tokenizer.end_of_text}
    model = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "n_layer": config.num_layers, "n_embd": config.hidden_size, "n_head": config.num_heads, "n_inner": None,
        "n_positions": config.seq_length, "n_ctx": config.seq_length, "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.layer_norm_eps, "initializer_range": config.init_std,
        "resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": config.dropout,
        "scale_attn_weights": True, "tie_word_embeddings": True, "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    return {"config.json": model | ends, "generation_config.json": ends | {"max_length": config.seq_length}}

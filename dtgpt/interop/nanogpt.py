"""nanoGPT's `ckpt.pt`: GPT-2's names and order, matrices `[out, in]` as dtgpt's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtgpt.interop.foreign import as_parameter, check_tensors, checked, plain_names, untied
from dtgpt.interop.hf.gpt2 import GPT_2, reorder_qkv
from dtgpt.interop.keys import Key, Keys, check_keys, is_flag, whole_number
from dtgpt.interop.pickles import Checksums, open_pickle
from dtgpt.models.gpt2 import GPT2_124M, TABLE, GPT2Config
from dtgpt.models.source import Ranges, Source, iterate_shapes
from dtgpt.util.errors import UserError, shown, shown_name

# Outputs of nanoGPT for GPT-2's vocabulary, and the tokens in that.
PADDED, TRUE = GPT2_124M.padded_vocab_size, GPT2_124M.vocab_size
PADDING_NOTE = (
    f"the checkpoint has {PADDED} outputs, which is how nanoGPT rounds up GPT-2's {TRUE} tokens; the last "
    f"{PADDED - TRUE}, which occur in no text, were left out"
)


KEYS: Keys = {"bias": Key(is_flag, ", neither True nor False; give ckpt.pt as nanoGPT wrote it", True)}


class NanoGPT(Source):
    """A checkpoint of nanoGPT, mapped where torch can. Biases that a model with bias=False lacks are zeros.

    Nothing in the file is run. Raises UserError for a file that is damaged, is not a checkpoint of nanoGPT, or whose
    tensors do not fit its model_args.
    """

    def __init__(self, path: Path):
        self._checksums = Checksums(path)
        saved = open_pickle(path, self._checksums)
        model, args = saved.get("model"), saved.get("model_args")
        if not isinstance(model, dict) or not isinstance(args, dict) or not all(isinstance(n, str) for n in model):
            raise UserError(f"{path} is not a checkpoint of nanoGPT, which has model and model_args; give its ckpt.pt")
        self.config = _config(args, path)
        self.notes = (PADDING_NOTE,) if args["vocab_size"] == PADDED else ()
        self._tensors = _tensors(model, path)
        output = self._tensors.pop("lm_head.weight", None)
        check_keys(args, KEYS, path)
        biased = args.get("bias", True)
        table = args["vocab_size"], self.config.hidden_size
        expected = (
            (GPT_2.stored_names(name, self.config)[0], table if name == TABLE else shape)
            for name, shape in iterate_shapes(self.config)
            if biased or not name.endswith(".bias")
        )
        check_tensors({name: tuple(t.shape) for name, t in self._tensors.items()}, expected, path)
        stored = self._tensors["wte.weight"]
        if output is not None:
            alike = (output.shape, output.dtype) == (stored.shape, stored.dtype)
            apart = output.data_ptr() != stored.data_ptr()
            if not alike or (apart and not torch.equal(*map(self._checksums.check, (output, stored)))):
                raise untied(path)

    def read(self, name: str, part: Ranges | None = None) -> Tensor:
        (plain,) = GPT_2.stored_names(name, self.config)
        stored = self._tensors.get(plain)
        if stored is None:  # a bias
            stored = torch.zeros(len(self._tensors[plain.replace(".bias", ".weight")]), device="cpu")
        return as_parameter(reorder_qkv(self._checksums.check(stored), name, self.config), name, self.config, part)


def _config(args: Mapping[str, Any], path: Path) -> GPT2Config:
    layers, width, heads, length, vocabulary = (
        whole_number(args, (name,), None, path) for name in ("n_layer", "n_embd", "n_head", "block_size", "vocab_size")
    )
    config = GPT2Config(
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        seq_length=length,
        vocab_size=TRUE if vocabulary == PADDED else vocabulary,
        activation="gelu",  # exact, where OpenAI's GPT-2 has the tanh form
    )
    return checked(config, path)


def _tensors(model: dict[str, Any], path: Path) -> dict[str, Tensor]:
    """Return the weights by GPT-2's names. Raise UserError for a value that is not a weight."""
    tensors = {}
    for plain, name in plain_names(model, GPT_2.prefix, GPT_2.buffers, path).items():
        value = model[name]
        if not isinstance(value, Tensor):
            raise UserError(
                f"{path} has {shown_name(name)}={shown(value)}, which is not a plain tensor; give ckpt.pt as nanoGPT "
                "wrote it"
            )
        if not value.is_floating_point():
            raise UserError(f"{path} has {shown_name(name)} in {value.dtype}; give weights in a floating-point dtype")
        tensors[plain] = value
    return tensors

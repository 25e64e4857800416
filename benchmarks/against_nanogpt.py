"""Our training step beside nanoGPT's on one device, in turns: tokens/s of both and the ratio.

    python benchmarks/against_nanogpt.py --nanogpt PATH --model 345m --micro_batch_size 16 --dropout 0.1

PATH is a checkout of https://github.com/karpathy/nanoGPT, whose `model.py` is imported as it is. Its step is written in
`against.py` after its `train.py`: autocast to bf16, torch.compile, TF32 where fp32 is left, fused AdamW, clipping at 1.
Both see the same tokens and have biases and 50304 rows in the table; nanoGPT's GELU is the exact one.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from against import Peer, make_parser, run
from torch import Tensor

from dtgpt.config.recipe import Recipe
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError


def import_model(folder: Path) -> ModuleType:
    file = folder / "model.py"
    if not file.is_file():
        raise UserError(f"{folder} has no model.py; give --nanogpt a checkout of nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the compiler look it up
    spec.loader.exec_module(module)
    return module


class NanoGPT(Peer):
    def __init__(self, folder: Path, recipe: Recipe, ours: Trainer):
        config, settings, device = recipe.model, recipe.optimizer, ours.mesh.device
        module = import_model(folder)
        sizes = {"n_layer": config.num_layers, "n_head": config.num_heads, "n_embd": config.hidden_size}
        sizes |= {"block_size": config.seq_length, "vocab_size": config.padded_vocab_size, "dropout": config.dropout}
        plain = module.GPT(module.GPTConfig(**sizes, bias=True)).to(device)
        betas = (settings.beta1, settings.beta2)
        optimizer = plain.configure_optimizers(settings.weight_decay, settings.lr, betas, device.type)
        super().__init__(recipe, ours, plain, optimizer)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model(inputs, targets)[1]


def make_peers(args: argparse.Namespace, recipe: Recipe, ours: Trainer) -> dict[str, Peer]:
    return {"nanoGPT": NanoGPT(args.nanogpt, recipe, ours)}


def main() -> int:
    parser = make_parser(__doc__, "345m")
    parser.add_argument("--nanogpt", type=Path, required=True, help="checkout of nanoGPT")
    return run(parser, make_peers)


if __name__ == "__main__":
    sys.exit(main())

"""What a path holds, and its weights as a `Source`."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from dtgpt.checkpoint.load import Saved, find_checkpoint
from dtgpt.checkpoint.manifest import STATE, Checkpoint, list_checkpoints
from dtgpt.checkpoint.shard_file import Damaged
from dtgpt.config.plan import ResolvedPlan
from dtgpt.interop.foreign import ADAPTER_CONFIG
from dtgpt.models.config import ModelConfig
from dtgpt.models.source import Source, TrainingSource
from dtgpt.parallel.mesh import Mesh
from dtgpt.posttrain.lora.checkpoint import Merged, base_of, merged
from dtgpt.util.errors import UserError, did_you_mean

TRACKER = "latest_checkpointed_iteration.txt"  # of Megatron-LM
KNOWN = (
    "a run folder of dtgpt, one of its checkpoints/step_..., a Hugging Face folder (config.json), a Megatron-LM folder "
    "(latest_checkpointed_iteration.txt or iter_...), nanoGPT's ckpt.pt or llm.c's model.bin"
)


def open_source(
    path: Path, mesh: Mesh | None = None, true_vocab_size: int | None = None, own: type[ModelConfig] | None = None
) -> Source:
    """Open the weights at `path`, in any known format. The processes of a `mesh` share the work of checking a
    checkpoint. `true_vocab_size`: of a Megatron-LM tree. `own`: class of the model of a recipe, for a checkpoint of a
    class that is not dtgpt's. Raise UserError where no format is recognized, or the model is damaged."""
    if not path.exists():
        if path.is_symlink():
            raise UserError(f"{path} leads to {os.readlink(path)}, which does not exist; give {KNOWN}")
        raise UserError(f"{path} does not exist; {did_you_mean(path, f'give {KNOWN}')}")
    is_checkpoint = (path / STATE).is_file()
    if is_checkpoint or (path / "recipe.json").is_file():
        mesh = mesh or Mesh(ResolvedPlan(), torch.device("cpu"))
        checkpoint = find_checkpoint(mesh, path, path if is_checkpoint else None, weights_alone=True, own=own)
        base = base_of(checkpoint)
        if base is not None and not base.exists():
            raise UserError(
                f"{path} holds adapters of a model that was at {base}, which does not exist; put it back, or give the "
                f"model where it is, with --adapter {path}"
            )
        return Saved(checkpoint) if base is None else merged(open_source(base, mesh, own=own), base, checkpoint)
    # A run that goes on with its own checkpoint needs none of these modules.
    if (path / "config.json").is_file():
        from dtgpt.interop.hf.model import HuggingFace

        return HuggingFace(path)
    if is_megatron(path):
        from dtgpt.interop.megatron.model import Megatron
        from dtgpt.interop.megatron.torch_dist import TorchDist
        from dtgpt.interop.megatron.tree import distributed_folder

        distributed = distributed_folder(path)
        return Megatron(path, true_vocab_size) if distributed is None else TorchDist(distributed, true_vocab_size)
    if path.suffix in (".pt", ".pth") and not path.is_dir():
        from dtgpt.interop.nanogpt import NanoGPT

        return NanoGPT(path)
    if path.suffix == ".bin" and not path.is_dir():
        from dtgpt.interop.llmc import LLMC

        return LLMC(path)
    if (path / ADAPTER_CONFIG).is_file():
        raise UserError(f"{path} holds an adapter and no model; give the model that it is for, with --adapter {path}")
    raise UserError(f"{path} holds no model that dtgpt knows; give {KNOWN}")


def check_recipe(path: Path, config: ModelConfig, own: type[ModelConfig] | None) -> None:
    """Raise UserError where a recipe is given, of whose class `own` the model at `path` is not."""
    if own is not None and type(config) is not own:
        raise UserError(
            f"{path} has a {type(config).__name__}, and the model of the recipe given is a {own.__name__}; give the "
            "recipe that it was trained with, or leave it out: only a class that is not dtgpt's needs it"
        )


def with_adapter(source: Source, path: Path, adapter: Path, mesh: Mesh | None = None) -> Source:
    """Return `source`, the model at `path`, with an adapter merged into its weights: that of a run or a checkpoint of
    dtgpt, or a folder of Hugging Face's peft. Raise UserError where it is none, or one for another model."""
    if (adapter / ADAPTER_CONFIG).is_file():
        from dtgpt.interop.hf.model import HuggingFace
        from dtgpt.interop.hf.peft import Peft

        kind = source.kind if isinstance(source, HuggingFace) else None
        return Merged(source, Peft(adapter, source.config, kind))
    return merged(source, path, open_adapter(adapter, mesh, type(source.config)))


def open_adapter(path: Path, mesh: Mesh | None = None, own: type[ModelConfig] | None = None) -> Checkpoint:
    """Return the checkpoint with the adapters of a run, or that itself. `own`: as of `open_source`. Raise UserError
    where `path` holds none."""
    is_checkpoint = (path / STATE).is_file()
    if not is_checkpoint and not (path / "recipe.json").is_file():
        raise UserError(
            f"{path} holds no adapter; give a run of dtgpt with --lora.rank, one of its checkpoints, or a folder with "
            f"{ADAPTER_CONFIG}"
        )
    mesh = mesh or Mesh(ResolvedPlan(), torch.device("cpu"))
    checkpoint = find_checkpoint(mesh, path, path if is_checkpoint else None, weights_alone=True, own=own)
    if base_of(checkpoint) is None:
        raise UserError(f"{path} holds the weights of a model and no adapter; give it as the model")
    return checkpoint


def is_megatron(path: Path) -> bool:
    """Return whether `path` is the folder of a checkpoint of Megatron-LM."""
    own = TRACKER, ".metadata"
    return os.path.isdir(path) and (any((path / name).is_file() for name in own) or any(path.glob("mp_rank_*")))


def is_foreign_run(resume: str) -> bool:
    """Return whether `resume` of a recipe names a run of another library."""
    path = Path(resume)
    return is_megatron(path) and not (path / "recipe.json").is_file()


def open_training(resume: str | None, vocab_size: int) -> TrainingSource | None:
    """Return the run of another library that `resume` of a recipe names, None for anything else. `vocab_size`: of the
    recipe's model, by which rows of padding are known. Raise UserError where such a run cannot go on here."""
    if resume is None or not is_foreign_run(resume):
        return None
    from dtgpt.interop.megatron.training import MegatronTraining

    return MegatronTraining(Path(resume), vocab_size)


def open_config(path: Path, own: type[ModelConfig] | None = None) -> ModelConfig:
    """Return the shape of the model at `path`; of dtgpt's own, without a look at its weights. `own`, and UserErrors: as
    of `open_source`."""
    folders = [path] if (path / STATE).is_file() else []
    if not folders and (path / "recipe.json").is_file():
        folders = list_checkpoints(path / "checkpoints")[::-1]
    for folder in folders:
        with suppress(Damaged):  # all checkpoints of a run have one model
            return Checkpoint(folder, own=own).config
    return open_source(path, own=own).config


def run_of(path: Path) -> Path | None:
    """Return the run folder to which a path, or what a link there leads to, belongs, as itself or as one of its
    checkpoints; None for anything else."""
    owners = [path, *path.absolute().parents[1:2], *path.resolve().parents[1:2]]
    return next((folder for folder in owners if (folder / "recipe.json").is_file()), None)

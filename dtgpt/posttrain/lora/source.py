"""Checkpoints that hold adapters alone: with the weights of their base, or added to those of a model that is given."""

from pathlib import Path

from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.checkpoint.open import Own, SourceFormat, is_of_dtgpt, open_checkpoint, open_source
from dtgpt.models.source import Source
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.errors import UserError


class AdapterFormat(SourceFormat):
    addends = "a run of dtgpt with --lora.rank, one of its checkpoints"

    def completed(self, path: Path, checkpoint: Checkpoint, mesh: Mesh | None, own: Own) -> Source | None:
        from dtgpt.posttrain.lora.checkpoint import base_of, merged

        base = base_of(checkpoint)
        if base is not None and not base.exists():
            raise UserError(
                f"{path} holds adapters of a model that was at {base}, which does not exist; put it back, or give the "
                f"model where it is, with --adapter {path}"
            )
        return None if base is None else merged(open_source(base, mesh, own=own), base, checkpoint)

    def takes_addend(self, path: Path) -> bool:
        return is_of_dtgpt(path)

    def with_addend(self, source: Source, path: Path, addend: Path, mesh: Mesh | None) -> Source:
        from dtgpt.posttrain.lora.checkpoint import merged

        return merged(source, path, open_adapter(addend, mesh, type(source.config)))


ADAPTERS = AdapterFormat()


def open_adapter(path: Path, mesh: Mesh | None = None, own: Own = None) -> Checkpoint:
    """Return the checkpoint with the adapters of a run, or that itself. `own`: as of `open_source`. Raise UserError
    where `path` holds none."""
    from dtgpt.posttrain.lora.checkpoint import base_of

    if not is_of_dtgpt(path):
        raise UserError(f"{path} holds no adapter; give {ADAPTERS.addends}, or a folder with adapter_config.json")
    checkpoint = open_checkpoint(path, mesh, own)
    if base_of(checkpoint) is None:
        raise UserError(f"{path} holds the weights of a model and no adapter; give it as the model")
    return checkpoint

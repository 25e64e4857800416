"""Checkpoints of adapters that hold rows of new tokens, too, as the core asks for them."""

from contextlib import suppress
from pathlib import Path

from dtgpt.checkpoint.manifest import STATE, Checkpoint, list_checkpoints
from dtgpt.checkpoint.open import Own, is_of_dtgpt, open_source
from dtgpt.checkpoint.shard_file import Damaged
from dtgpt.models.source import Source
from dtgpt.parallel.mesh import Mesh
from dtgpt.posttrain.lora.source import AddendFormat


class RowsFormat(AddendFormat):
    def completed(self, path: Path, checkpoint: Checkpoint, mesh: Mesh | None, own: Own) -> Source | None:
        from dtgpt.posttrain.add_tokens.source import Saved, ids_of
        from dtgpt.posttrain.lora.checkpoint import base_of, merged

        base = base_of(checkpoint)
        if base is None or not base.exists() or not ids_of(checkpoint):
            return None
        original = open_source(base, mesh, own=own)
        return merged(Saved(original, checkpoint), base, checkpoint, original)

    def takes_addend(self, path: Path) -> bool:
        from dtgpt.posttrain.add_tokens.source import ids_of

        folders = [path] if (path / STATE).is_file() else list_checkpoints(path / "checkpoints")[::-1]
        if is_of_dtgpt(path):
            for folder in folders:
                with suppress(Damaged):  # all checkpoints of a run have the same tokens
                    return bool(ids_of(Checkpoint(folder, weights_alone=True)))
        return False

    def with_addend(self, source: Source, path: Path, addend: Path, mesh: Mesh | None) -> Source:
        from dtgpt.posttrain.add_tokens.source import Saved
        from dtgpt.posttrain.lora.checkpoint import merged
        from dtgpt.posttrain.lora.source import open_adapter

        checkpoint = open_adapter(addend, mesh, type(source.config))
        return merged(Saved(source, checkpoint), path, checkpoint, source)


ROWS = RowsFormat()

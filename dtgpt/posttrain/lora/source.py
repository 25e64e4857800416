"""Checkpoints that hold adapters alone: with the weights of their base, or added to those of a model that is given."""

from pathlib import Path

from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.checkpoint.open import Own, SourceFormat, formats, is_of_dtgpt, open_checkpoint, open_source
from dtgpt.models.source import Source
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.errors import UserError


class AddendFormat(SourceFormat):
    """A format of what may be added to the weights of a model."""

    addends = ""  # what a user may give, for messages

    def takes_addend(self, path: Path) -> bool:
        """Return whether `path` holds what this format can add to the weights of another model."""
        return False

    def with_addend(self, source: Source, path: Path, addend: Path, mesh: Mesh | None) -> Source:
        """Return `source`, the model at `path`, with what is at `addend`, of which `takes_addend` is true."""
        raise NotImplementedError

    def explain(self, path: Path) -> str | None:
        if self.takes_addend(path):
            return f"{path} holds an adapter and no model; give the model that it is for, with --adapter {path}"
        return super().explain(path)


class AdapterFormat(AddendFormat):
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


def with_addend(source: Source, path: Path, addend: Path, mesh: Mesh | None = None) -> Source:
    """Return `source`, the model at `path`, with what is at `addend` added to its weights. Raise UserError where no
    capability knows it, or it is for another model."""
    known = [form for form in formats() if isinstance(form, AddendFormat)]
    form = next((form for form in known if form.takes_addend(addend)), None)
    if form is None:
        give = ", or ".join(form.addends for form in known if form.addends)
        raise UserError(f"{addend} holds no adapter; give {give}")
    return form.with_addend(source, path, addend, mesh)


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

"""What a checkpoint of adapters says of the weights that it leaves out, as the core asks for it."""

from pathlib import Path
from typing import Any

import torch

from dtgpt.checkpoint.manifest import Checkpoint
from dtgpt.config.execution import Settings
from dtgpt.models.source import Source
from dtgpt.train.init_from.begin import Base
from dtgpt.util.errors import UserError


class AdapterBase(Base):
    entry = "adapter"

    def place(self, checkpoint: Checkpoint, init_from: Path | None) -> Path | None:
        from dtgpt.posttrain.lora.checkpoint import base_of, check_same_adapter

        begin = base_of(checkpoint)
        if begin is None:
            check_same_adapter(checkpoint, {})  # which it has not
        if begin is not None and init_from is not None:
            return init_from  # the base, at another place: `check` compares fingerprints
        if begin is not None and not begin.exists():
            raise UserError(
                f"{begin}, the base of the adapters, does not exist; name it where it is: --init_from MODEL"
            )
        return begin

    def held(self, settings: Settings, source: Source, device: torch.device) -> Source:
        from dtgpt.posttrain.lora.config import LoraConfig
        from dtgpt.posttrain.lora.four_bits import InFourBits

        lora = settings.section(LoraConfig)
        return InFourBits(source, lora, device) if lora.bits else source

    def describe(self, settings: Settings, path: Path, source: Source) -> dict[str, Any]:
        from dtgpt.posttrain.lora.checkpoint import describe_adapter
        from dtgpt.posttrain.lora.config import LoraConfig

        return describe_adapter(settings.section(LoraConfig), path, source)

    def check(self, checkpoint: Checkpoint, entry: dict[str, Any] | None) -> None:
        from dtgpt.posttrain.lora.checkpoint import check_same_adapter

        check_same_adapter(checkpoint, entry)


BASE = AdapterBase()

"""Files by which the formats of other libraries are known, without a look into them."""

import os
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"  # of Megatron-LM
ADAPTER_CONFIG = "adapter_config.json"  # of Hugging Face's peft
ORIGIN = "hugging_face.json"  # of dtgpt: what a run, or a checkpoint of weights, keeps of a Hugging Face folder


def is_megatron(path: Path) -> bool:
    """Return whether `path` is the folder of a checkpoint of Megatron-LM."""
    own = TRACKER, ".metadata"
    return os.path.isdir(path) and (any((path / name).is_file() for name in own) or any(path.glob("mp_rank_*")))

"""Which paths name token files: nothing here opens one, so that a run on a text may ask."""

import os
from glob import escape, glob
from pathlib import Path

from dtgpt.data.text import SUFFIXES
from dtgpt.util.errors import UserError

SHARDS = (".bin", ".npy")  # of llm.c and nanoGPT, and what numpy.save writes


def bin_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.idx")


def tokenizer_path(prefix: Path | str) -> Path:
    """Return the path of the tokenizer, a file that Megatron-LM does not have."""
    return Path(f"{prefix}.tokenizer.json")


def weights_path(prefix: Path | str) -> Path:
    """Return the path of the weights of tokens in the loss, which a dataset of chats has: a byte for each, 0 or 1."""
    return Path(f"{prefix}.weights")


def is_prepared(path: str | None) -> bool:
    """Return whether a recipe's `data.path` names token files and not a text."""
    if path is None:
        return False
    several = len(path.split()) > 1 and not os.path.exists(path)
    return has_index(prefix_of(path)) or path.endswith(SHARDS) or several


def prefix_of(path: str) -> str:
    """Return the prefix if `path` names its .bin or .idx, else `path`."""
    stem = path[:-4] if path.endswith((".bin", ".idx")) else path
    return path if has_index(path) or not has_index(stem) else stem


def has_index(prefix: str) -> bool:
    return os.path.isfile(idx_path(prefix))  # which, unlike Path.is_file, takes names too long for a file


def has_weights(prefix: str) -> bool:
    """Return whether the tokens of a dataset have weights in the loss, as those of chats do."""
    return os.path.isfile(weights_path(prefix))


def prefixes_near(path: str) -> list[str]:
    """Return the prefixes of the datasets that `dtgpt prepare --output-prefix path` made."""
    return [name.removesuffix(".idx") for name in sorted(glob(f"{escape(path)}_*_document.idx"))]


def no_dataset(path: str) -> UserError:
    """Return the error for a `path` with no dataset, which names what is near it."""
    near = prefixes_near(path)
    if path.endswith(SUFFIXES) and os.path.isfile(path):
        return UserError(
            f"{path} is a text, and a run takes one text alone, as data.path; join several, as with cat, or make token "
            f"files of them: dtgpt prepare {path} ... --output-prefix PREFIX"
        )
    if near:
        remedy = f"did you mean {near[0]}?"
    elif os.path.isfile(bin_path(path)):
        remedy = f"copy or build {path}.idx again, or give {path}.bin where it is a shard of llm.c or nanoGPT"
    else:
        remedy = "give the prefix of a .bin and .idx, or shards: .bin of llm.c or nanoGPT, or .npy"
    missing = "" if path.endswith((*SHARDS, ".idx")) else f" (no {path}.idx)"
    return UserError(f"there is no dataset {path}{missing}; {remedy}")

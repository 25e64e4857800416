"""Log-probabilities of answers before training, which a run folder keeps."""

import hashlib
import json
from pathlib import Path

import numpy as np

from dtgpt.posttrain.dpo.pairs import PairDataset
from dtgpt.util.errors import UserError
from dtgpt.util.storage import atomic_file, parse_json, read_regular

FILE = "reference.bin"  # of a run folder: a line of JSON, and after it fp64 of all answers, part by part

LONGEST_HEADER = 1 << 16  # bytes
LARGEST_SUM = 1.0  # above every sum of log-probabilities, whose rounding may make them positive


def save_reference(run: Path, data: PairDataset) -> None:
    """Write the reference of the data into the folder of a run."""
    content = b"".join(values.astype("<f8").tobytes() for values in data.reference.values())
    header = {
        "pairs": data.pairs_digest,
        "answers": {name: len(values) for name, values in data.reference.items()},
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    with atomic_file(run / FILE) as file:
        file.write(json.dumps(header).encode() + b"\n" + content)


def read_reference(run: Path, data: PairDataset) -> None:
    """Give the data the reference in the folder of a run. Raises UserError where it is missing, damaged or of other
    pairs."""
    path, remedy = run / FILE, "go on with the data that the run began with, or begin a new run with --init_from"
    try:
        expected = {name: len(part.chats) for name, part in data.parts.items()}
        header, _, rest = read_regular(path, LONGEST_HEADER + 8 * sum(expected.values())).partition(b"\n")
        found, values = parse_json(header), np.frombuffer(rest, "<f8")
        if found["answers"] != expected or found["pairs"] != data.pairs_digest or len(values) != sum(expected.values()):
            raise UserError(f"{path} holds log-probabilities of other pairs, or another order of them; {remedy}")
        digest = hashlib.sha256(rest).hexdigest()
        if found.get("sha256", digest) != digest:  # files of older versions have none
            raise ValueError("its content was changed")
        if "sha256" not in found and not (values <= LARGEST_SUM).all():  # nor is a value that is no number
            raise ValueError("it has no digest, and values that are no log-probabilities")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}, the log-probabilities before training, cannot be read ({error}); put it back, or begin a new run "
            "with --init_from"
        ) from None
    cuts = np.cumsum([len(part.chats) for part in data.parts.values()])[:-1]
    data.reference = dict(zip(data.parts, np.split(values, cuts), strict=True))

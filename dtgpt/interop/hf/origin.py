"""What a Hugging Face folder says in addition to weights and tokens, such as its chat template: kept with a model that
is trained further, so that it can be written as such a folder again."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dtgpt.checkpoint.load import differing
from dtgpt.checkpoint.manifest import STATE
from dtgpt.checkpoint.open import run_of, tokenizer_beside
from dtgpt.data.library_tokenizers.export import CLASS
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.interop.foreign import reading
from dtgpt.interop.hf.model import ARCHITECTURES
from dtgpt.interop.keys import Key, Keys, check_keys
from dtgpt.interop.marks import ORIGIN
from dtgpt.models.config import ModelConfig
from dtgpt.models.shared.positions import learns_positions
from dtgpt.ops.sampling.sequences import MOST_ENDS
from dtgpt.util.errors import UserError, shown
from dtgpt.util.storage import read_json, read_regular, write_json

JSON = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
)
TEMPLATE = "chat_template.jinja"
OF_MODEL = ("config.json", "generation_config.json")
LARGEST = 1 << 24  # bytes of one of these files
DTYPES = ("torch_dtype", "dtype")  # of weights, for transformers 4 and 5
QUANTISED = "quantization_config"  # of what was read; what dtgpt writes is in the type that is asked for
OF_CLASS = ("auto_map", "add_bos_token", "add_eos_token")  # what tokenizer.json says, or other classes do
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
READ_BY_OTHERS = ("n_ctx",)  # llama.cpp needs it of a GPT-2, and transformers 5 leaves it out
REMEDY = "remove it to write a Hugging Face folder with dtgpt's own settings"


def _ids(value: Any) -> list[Any]:
    return value if isinstance(value, list) and value else [] if value is None else [value]


def _are_ends(value: Any) -> bool:
    ids = _ids(value)
    return all(type(i) is int for i in ids) and len(ids) <= MOST_ENDS


KEYS: Keys = {
    "eos_token_id": Key(
        _are_ends,
        f", which is not an id or a list of up to {MOST_ENDS}; write the ids at which its texts end, or null",
    )
}


@dataclass(frozen=True)
class Origin:
    """`files`: contents by name, of JSON files or as text. `positions`: of the model, at least; a run may take shorter
    samples. `own_tokenizer`: whether the model still has the tokenizer of the folder."""

    files: dict[str, Any] = field(default_factory=dict)
    positions: int = 0
    own_tokenizer: bool = True

    def whole(self, config: ModelConfig) -> ModelConfig:
        """Return `config` with the positions of the model, which a run may have cut only where they are learned."""
        return (
            config if learns_positions(config) else replace(config, seq_length=max(config.seq_length, self.positions))
        )

    def settings(self, config: ModelConfig, made: dict[str, Any]) -> dict[str, Any]:
        """Return config.json, and generation_config.json where there was one, of the folder, for a model of this shape;
        those that dtgpt has `made` where it is another model by now."""
        theirs, own, whole = self.files.get("config.json"), made["config.json"], self.whole(config)
        if not isinstance(theirs, dict):
            return self._with_ends(made)
        plain = {name: value for name, value in theirs.items() if name != QUANTISED}
        model: dict[str, Any] = plain | {name: own["torch_dtype"] for name in DTYPES if name in theirs}
        model |= {name: whole.seq_length for name in POSITIONS if name in theirs}
        model |= {name: own[name] for name in READ_BY_OTHERS if name in own}
        if not _describes(model, whole):
            return self._with_ends(made)
        written = {"config.json": model}
        if isinstance(generation := self.files.get("generation_config.json"), dict):
            written["generation_config.json"] = generation
        if self.own_tokenizer:
            return written
        end = {"eos_token_id": own["eos_token_id"]}
        return {
            name: content | end | {key: own.get(key) for key in content if key.endswith("_token_id")}
            for name, content in written.items()
        }

    def _with_ends(self, made: dict[str, Any]) -> dict[str, Any]:
        """Return settings that dtgpt has `made`, with the ends of the folder's texts."""
        ids = self.ends()[1]
        ends = {"eos_token_id": ids if len(ids) > 1 else ids[0]} if ids else {}
        return {name: content | ends for name, content in made.items()}

    def ends(self) -> tuple[str | None, list[int]]:
        """Return the ids at which transformers' `generate` stops, and the file that names them. Raises UserError."""
        name = next((name for name in reversed(OF_MODEL) if name in self.files), None)
        if name is None or not self.own_tokenizer:
            return None, []
        content = self.files[name]
        if not isinstance(content, dict):
            raise UserError(f"{name} of the model holds {shown(content)}, not an object; copy it again")
        check_keys(content, KEYS, f"{name} of the model")
        return name, list(dict.fromkeys(_ids(content.get("eos_token_id"))))

    def tokenizer_files(self, made: dict[str, Any], positions: int) -> dict[str, Any]:
        """Return the tokenizer's files `made` by dtgpt, with the settings of the folder."""
        theirs = {name: content for name, content in self.files.items() if name not in OF_MODEL}
        if not self.own_tokenizer or not theirs:
            return made
        name = "tokenizer_config.json"
        if isinstance(theirs.get(name), dict):
            longest = theirs[name].get("model_max_length", positions)
            if self.positions > positions:  # which were cut off
                longest = positions
            # Other classes do not read tokenizer.json, or cut texts in a way of their own.
            own = {"model_max_length": longest, "tokenizer_class": CLASS}
            theirs[name] = {key: value for key, value in theirs[name].items() if key not in OF_CLASS} | own
        return made | theirs

    def save(self, folder: Path) -> None:
        if self != Origin():
            write_json(folder / ORIGIN, asdict(self))


def _describes(settings: dict[str, Any], config: ModelConfig) -> bool:
    """Return whether a config.json is of a model of this shape, and of the names under which dtgpt writes it. Where a
    key is missing, another number of positions may change what it means."""
    try:
        architecture = ARCHITECTURES[settings["model_type"]]
        held = architecture.read_config(settings, Path("config.json"))
    except (UserError, KeyError, TypeError):
        return False
    return (
        architecture is ARCHITECTURES.get(config.architecture)
        and type(held) is type(config)
        and not differing(held, config)
    )


def read_origin(path: Path, names: Sequence[str] = JSON) -> Origin:
    """Return what is known of the folder from which the model at `path`, of any format, came. `names`: of the JSON
    files to read where `path` is such a folder. Raises UserError where what a run or a checkpoint holds of it is
    damaged."""
    run = run_of(path)
    kept = (run or path) / ORIGIN
    if kept.is_file() and (run or (path / STATE).is_file()):
        saved = read_json(kept, REMEDY, LARGEST)
        try:
            saved.pop("tokenizer_json", None)  # of older runs
            found = Origin(**saved)
            if type(found.positions) is int and isinstance(found.files, dict):
                return found
        except (TypeError, AttributeError):
            pass
        raise UserError(f"{kept} is not what dtgpt wrote; {REMEDY}")
    if run or not (path / "config.json").is_file():
        return Origin()
    files: dict[str, Any] = {name: read_json(path / name, REMEDY, LARGEST) for name in names if (path / name).is_file()}
    if (path / TEMPLATE).is_file():
        with reading(path / TEMPLATE, "copy it again"):
            files[TEMPLATE] = read_regular(path / TEMPLATE, LARGEST).decode()
    return Origin(files)


def origin_of(path: Path, config: ModelConfig, tokenizer: Tokenizer | None) -> Origin:
    """Return what a model with this `tokenizer` keeps of the one at `path`, whose shape is `config`. Raises UserError
    where that cannot be read."""
    origin, theirs = read_origin(path), tokenizer_beside(path)
    origin.ends()  # which refuses what is not an id, before it is kept
    same = theirs is None or tokenizer is None or theirs.is_same(tokenizer)
    positions = max(config.seq_length, origin.positions)
    return replace(origin, positions=positions, own_tokenizer=origin.own_tokenizer and same)

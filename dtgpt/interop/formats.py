"""The formats of other libraries, as the core asks for them. What reads a file is imported when a path is of its
format."""

from pathlib import Path

from dtgpt.checkpoint.manifest import STATE
from dtgpt.checkpoint.open import SourceFormat, run_of
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.interop.marks import ADAPTER_CONFIG, ORIGIN, TRACKER, is_megatron
from dtgpt.models.config import ModelConfig
from dtgpt.models.source import Source
from dtgpt.parallel.mesh import Mesh
from dtgpt.posttrain.lora.source import AddendFormat


class HuggingFaceFormat(AddendFormat):
    """Folders of transformers, adapters of peft, and what is kept of such a folder."""

    known = "a Hugging Face folder (config.json)"
    addends = f"a folder with {ADAPTER_CONFIG}"

    def takes(self, path: Path) -> bool:
        return (path / "config.json").is_file()

    def open(self, path: Path, true_vocab_size: int | None) -> Source:
        from dtgpt.interop.hf.model import HuggingFace

        return HuggingFace(path)

    def takes_addend(self, path: Path) -> bool:
        return (path / ADAPTER_CONFIG).is_file()

    def with_addend(self, source: Source, path: Path, addend: Path, mesh: Mesh | None) -> Source:
        from dtgpt.interop.hf.model import HuggingFace
        from dtgpt.interop.hf.peft import Peft
        from dtgpt.posttrain.lora.checkpoint import Merged

        kind = source.kind if isinstance(source, HuggingFace) else None
        return Merged(source, Peft(addend, source.config, kind))

    def ends(self, path: Path) -> tuple[str | None, list[int]] | None:
        if not self._knows(path):
            return None
        from dtgpt.interop.hf.origin import OF_MODEL, read_origin

        return read_origin(path, OF_MODEL).ends()

    def keep(self, path: Path, config: ModelConfig, tokenizer: Tokenizer | None, folder: Path) -> None:
        from dtgpt.interop.hf.origin import origin_of

        origin_of(path, config, tokenizer).save(folder)

    def _knows(self, path: Path) -> bool:
        """Return whether a file says something of the folder from which the model at `path` came."""
        run = run_of(path)
        kept = (run is not None or (path / STATE).is_file()) and ((run or path) / ORIGIN).is_file()
        return kept or (run is None and self.takes(path))


class MegatronFormat(SourceFormat):
    """Checkpoints of Megatron-LM."""

    known = "a Megatron-LM folder (latest_checkpointed_iteration.txt or iter_...)"

    def takes(self, path: Path) -> bool:
        return is_megatron(path)

    def open(self, path: Path, true_vocab_size: int | None) -> Source:
        from dtgpt.interop.megatron.model import Megatron
        from dtgpt.interop.megatron.torch_dist import TorchDist
        from dtgpt.interop.megatron.tree import distributed_folder

        distributed = distributed_folder(path)
        return Megatron(path, true_vocab_size) if distributed is None else TorchDist(distributed, true_vocab_size)

    def tokenizer_folder(self, path: Path) -> Path | None:
        """Return the folder above that of an iteration."""
        return path.parent if is_megatron(path) and not (path / TRACKER).is_file() else None


class NanoGPTFormat(SourceFormat):
    known = "nanoGPT's ckpt.pt"

    def takes(self, path: Path) -> bool:
        return path.suffix in (".pt", ".pth") and not path.is_dir()

    def open(self, path: Path, true_vocab_size: int | None) -> Source:
        from dtgpt.interop.nanogpt import NanoGPT

        return NanoGPT(path)


class LLMCFormat(SourceFormat):
    known = "llm.c's model.bin"

    def takes(self, path: Path) -> bool:
        return path.suffix == ".bin" and not path.is_dir()

    def open(self, path: Path, true_vocab_size: int | None) -> Source:
        from dtgpt.interop.llmc import LLMC

        return LLMC(path)


HUGGING_FACE, MEGATRON, NANOGPT, LLMC = HuggingFaceFormat(), MegatronFormat(), NanoGPTFormat(), LLMCFormat()

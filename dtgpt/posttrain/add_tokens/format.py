"""What has added tokens, as the core asks for it: a tokenizer by the name `BASE + FILE`, and checkpoints of adapters
that hold rows of new tokens, too.

`BASE + FILE` is the tokenizer of BASE, any other name or path, with the tokens in a file. Whatever takes a tokenizer
takes such a name: `dtgpt prepare --tokenizer 'MODEL + tokens.txt'`, `--data.tokenizer_file`."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dtgpt.checkpoint.manifest import STATE, Checkpoint, list_checkpoints
from dtgpt.checkpoint.open import Own, SourceFormat, is_of_dtgpt, open_source
from dtgpt.checkpoint.shard_file import Damaged
from dtgpt.data.tokenizers.open import TokenizerFormat, open_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.source import Source
from dtgpt.parallel.mesh import Mesh

AND = " + "


class WithTokens(TokenizerFormat):
    def is_called(self, name: str) -> bool:
        return AND in name

    def make(self, kind: str, documents: Iterable[str], vocab_size: int) -> Tokenizer:
        from dtgpt.posttrain.add_tokens.tokens import read_tokens, with_tokens

        base, _, file = kind.rpartition(AND)
        return with_tokens(open_tokenizer(base), read_tokens(Path(file)), file)


class RowsFormat(SourceFormat):
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


WITH_TOKENS, ROWS = WithTokens(), RowsFormat()

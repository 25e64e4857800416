"""Token files, as the core asks for them."""

import os
from pathlib import Path

from dtgpt.config.sections import DEFAULT_SPLIT, DataConfig
from dtgpt.data.dataset import Dataset
from dtgpt.data.megatron.paths import bin_path, is_prepared, no_dataset, prefixes_near
from dtgpt.data.open import DataFormat, DataRequest
from dtgpt.util.errors import UserError


class TokenFiles(DataFormat):
    """Those of `dtgpt prepare` and Megatron-LM, and shards of llm.c and nanoGPT."""

    def takes(self, path: str) -> bool:
        return is_prepared(path)

    def is_here(self, path: str) -> bool:
        return not path.endswith(".bin")

    def check_options(self, data: DataConfig) -> None:
        if data.split != DEFAULT_SPLIT:
            from dtgpt.data.megatron.samples import split_fractions

            split_fractions(data.split)

    def check(self, data: DataConfig) -> None:
        apart = data.valid_path or data.test_path
        if apart is not None and data.split != DEFAULT_SPLIT:
            raise UserError(
                f"data.split={data.split} splits one dataset, but with {apart} each path is used entirely; leave "
                "data.split out"
            )

    def check_text(self, data: DataConfig, path: str, model: Path | None) -> None:
        """Raise UserError for a path without a text where token files were meant."""
        if os.path.exists(path):
            return
        meant = data.valid_path is not None or data.test_path is not None or data.train_samples is not None
        if meant or prefixes_near(path) or os.path.isfile(bin_path(path)):
            raise no_dataset(path)

    def unused(self, data: DataConfig) -> dict[str, str]:
        unused = dict.fromkeys(("json_key", "bpe_vocab_size"), "prepared data are tokens")
        return unused | {"held_out": "prepared data are divided by data.split"}

    def has_tokenizer(self, data: DataConfig) -> bool:
        from dtgpt.data.megatron.prepared import prefixes_of
        from dtgpt.data.megatron.tokenizer_beside import tokenizer_beside

        return tokenizer_beside(prefixes_of(data)) is not None

    def load(self, data: DataConfig, request: DataRequest) -> Dataset:
        from dtgpt.data.megatron.prepared import load_prepared

        return load_prepared(data, *request)


TOKEN_FILES = TokenFiles()

"""Pairs of answers in token files, as the core asks for them."""

from dtgpt.config.sections import DataConfig
from dtgpt.data.dataset import Dataset
from dtgpt.data.megatron.paths import prefix_of
from dtgpt.data.open import DataRequest
from dtgpt.posttrain.chats.format import ChatTokens
from dtgpt.util.errors import UserError


class PairTokens(ChatTokens):
    """Token files of chats in which each document is a pair. Stands before those of chats, which takes them, too."""

    def takes(self, path: str) -> bool:
        if not super().takes(path):
            return False
        from dtgpt.data.megatron.indexed import IndexedDataset
        from dtgpt.posttrain.chats.packed import holds_pairs

        try:
            return holds_pairs(IndexedDataset(prefix_of(path)))
        except UserError:  # as who loads it says
            return False

    def load(self, data: DataConfig, request: DataRequest) -> Dataset:
        from dtgpt.posttrain.chats.packed import open_chats
        from dtgpt.posttrain.dpo.pairs import load_pairs

        return load_pairs(data, *open_chats(data, request.vocab_size), request.seq_length, request.seed)


PAIR_TOKENS = PairTokens()

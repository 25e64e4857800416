"""The inputs of a forward pass."""

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Tokens and what belongs to them; a field that is None changes nothing.

    The order is that of the arguments of `Decoder.forward`.
    """

    tokens: Tensor  # int64 [B, T]
    dropout_keys: Tensor | None = None  # int64 [B, num_sites, 2]; None: no dropout
    targets: Tensor | None = None  # int64 [B, T]: the token after each; None: logits instead of a loss
    positions: Tensor | None = None  # int64 [B, T]; None: 0, 1, ...
    document_bounds: Tensor | None = None  # int32 [B, T, 2]: first position and end of what each token may attend to
    loss_weights: Tensor | None = None  # fp32 [B, T]: factors of tokens' losses; beside by_token [B, N], of addends
    by_token: Tensor | None = None  # [B, T, ...]: what a `CoupledLoss` knows of tokens, such as what they belong to
    by_sample: Tensor | None = None  # [B, ...]: what a `CoupledLoss` knows of samples
    copies: Tensor | None = None  # int64 [B, G, T]: of rows of S tokens that G samples share, as of `shared_tokens`

    @property
    def beside_tokens(self) -> dict[str, Tensor]:
        """The other fields that are there, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None and name != "tokens"}

    def chunk(self, pieces: int) -> "list[Batch]":
        """Return the batch cut into `pieces` equal micro-batches."""
        columns = [[None] * pieces if value is None else value.chunk(pieces) for value in self]
        return [Batch(*values) for values in zip(*columns, strict=True)]

    def slice(self, index: int, ranks: int) -> "Batch":
        """Return the slice `[B, T / ranks]` of the tokens that one of the ranks computes which share samples. Document
        bounds stay those of all tokens, as the attention core wants them."""
        positions = self.positions
        if positions is None:
            positions = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)

        def own(whole: Tensor | None) -> Tensor | None:
            return None if whole is None else whole.chunk(ranks, dim=1)[index].contiguous()

        return self._replace(
            tokens=self.tokens.chunk(ranks, dim=1)[index].contiguous(),
            targets=own(self.targets),
            positions=own(positions),
            # Those beside `by_token` are not of tokens.
            loss_weights=own(self.loss_weights) if self.by_token is None else self.loss_weights,
            by_token=own(self.by_token),
        )

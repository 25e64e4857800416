"""The inputs of a forward pass: tokens, and what is known of each of them.

One tuple holds all of it, so that micro-batches, pipeline stages and CUDA graphs cut, send and copy the same fields,
whatever a run learns. Most are None in most runs: a model that gets none of them predicts the next token of each
window, as if the window were one document."""

from typing import NamedTuple

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
    by_token: Tensor | None = None  # [B, T, ...]: what a loss of its own knows of tokens, such as what they belong to
    by_sample: Tensor | None = None  # [B, ...]: what a loss of its own knows of samples
    copies: Tensor | None = None  # int64 [B, G, T]: of rows of S tokens that G samples share, the place of each token

    @property
    def beside_tokens(self) -> dict[str, Tensor]:
        """The other fields that are there, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None and name != "tokens"}

    def chunk(self, pieces: int) -> "list[Batch]":
        """Return the batch cut into `pieces` equal micro-batches."""
        columns = [[None] * pieces if value is None else value.chunk(pieces) for value in self]
        return [Batch(*values) for values in zip(*columns, strict=True)]


class WindowMasks:
    """What the windows of a run hide of the documents that meet in them: here nothing. A capability hides more."""

    def batch(self, windows: Tensor, dropout_keys: Tensor | None = None) -> Batch:
        """Return the batch of windows int64 `[B, T + 1]`."""
        # Contiguous, as copies of inputs in a graph are: another layout would be compiled again during capture.
        tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        return self.apply(Batch(tokens, dropout_keys=dropout_keys, targets=targets))

    def apply(self, batch: Batch) -> Batch:
        """Return the batch, on any device, with positions, document bounds and loss weights as wanted."""
        return batch

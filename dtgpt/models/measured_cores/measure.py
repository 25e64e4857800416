"""What attention cores are given, measured by a pass on the meta device: a configuration does not know how its blocks
share heads."""

import torch
from torch import Tensor, nn

from dtgpt.models.binding import bind, on_meta
from dtgpt.models.inventory import Core, Shaped, attention_cores
from dtgpt.models.layers import Context
from dtgpt.ops.attention.core import AttentionRule


def measure(config: Shaped, index: int, block: nn.Module) -> tuple[Core, ...]:
    """Return the sizes and rules of the cores of block `index`. Raise ValueError where one has other heads of queries
    than the model."""
    cores = attention_cores(block)
    recorders = [_SizeRecorder() for _ in cores]
    for core, recorder in zip(cores, recorders, strict=True):
        bind(core, cache=recorder)
    with on_meta(), torch.no_grad():
        block(torch.empty(1, 1, config.hidden_size), Context())
    for recorder in recorders:
        if recorder.num_heads != config.num_heads:
            raise ValueError(
                f"block {index} has an attention core with {recorder.num_heads} heads of queries, but "
                f"model.num_heads={config.num_heads} counts for every block; heads of keys and values may differ"
            )
    return tuple(recorder.core for recorder in recorders)


class _SizeRecorder:
    """A cache that keeps the sizes of its first keys alone."""

    num_heads = 0
    core = Core(0, 0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        sizes = k.shape[2], k.shape[3]
        self.num_heads = q.shape[2]
        has = (value is not None for value in (rule.softcap, rule.sinks, rule.scale))
        self.core = Core(*sizes, rule.window, *has)
        return torch.empty_like(q)

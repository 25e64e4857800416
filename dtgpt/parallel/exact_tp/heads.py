"""Attention head by head, where a library computes its products.

The order in which a library sums a product depends on strides, alignment and the number of products of a batch, and
with them on how many heads a rank has. So each head of keys is computed with its queries alone, of aligned copies. Our
`flash` kernels compute each head in the same way wherever it is.
"""

from typing import Any

import torch
from torch import Tensor

from dtgpt.models.layers import AttentionCore
from dtgpt.ops.attention.core import Case, kernel_for
from dtgpt.ops.random.dropout import Site
from dtgpt.parallel.exact_tp.products import aligned


def attend_by_heads(core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, site: Site, seen: Any) -> Tensor:
    """Return what `AttentionCore.compute` does."""
    key, p, *starts = site
    if core.bound.cache is not None or _has_kernel(core, q, key is not None and p > 0):
        return core.compute(q, k, v, site, seen)
    (first, *others), group = starts[0] if starts else (0, 0, 0), q.shape[2] // k.shape[2]
    made = []
    for index, own in enumerate(zip(q.split(group, 2), k.split(1, 2), v.split(1, 2), strict=True)):
        place = first + index * group, *others
        one, keys, values = map(aligned, own)
        first_head = None if core.sinks is None else index * group
        made.append(aligned(core.compute(one, keys, values, (key, p, place), seen, first_head)))
    return torch.cat(made, dim=2)


def _has_kernel(core: AttentionCore, q: Tensor, drops: bool) -> bool:
    case = Case(q.device, q.dtype, q.shape[-1], drops, core.softcap is not None, core.sinks is not None)
    kernel = None if q.is_cpu else kernel_for(case, core.bound.backend)
    return kernel is not None and kernel.name == "flash"

"""Imported by the fork server of ranks: DTensor asks for the shapes of an operation's results once in a process.

It asks by running the operation on fake tensors, 5 ms each, and forgets the answer with the mesh, so at the end of each
call of a pool. Shapes do not depend on the mesh. One mode of fake tensors, whose start formats a stack, serves all."""

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._sharding_prop import ShardingPropagator


class Unknown(Exception):
    """An argument of which nothing is known to depend on its shape and its value alone."""


def without_mesh(value: Any) -> Any:
    """Return what distinguishes an argument, but for its mesh and its placements. Raises Unknown."""
    if isinstance(value, DTensorSpec):
        return value.tensor_meta
    if isinstance(value, list | tuple):
        return type(value), *map(without_mesh, value)
    if isinstance(value, dict):
        return tuple((name, without_mesh(each)) for name, each in value.items())
    if value is None or isinstance(value, bool | int | float | str) or type(value).__module__ == "torch":
        return type(value), value
    raise Unknown


def keep(ask: Callable) -> Callable:
    kept: dict[Any, Any] = {}

    def ask_once(self: ShardingPropagator, schema: Any) -> Any:
        try:
            key = schema.op, without_mesh(schema.args_schema), without_mesh(schema.kwargs_schema)
            if key not in kept:
                kept[key] = ask(self, schema)
            return kept[key]
        except (Unknown, TypeError):  # TypeError: an argument that has no hash
            return ask(self, schema)

    return ask_once


ShardingPropagator._propagate_tensor_meta_non_cached = keep(ShardingPropagator._propagate_tensor_meta_non_cached)
_sharding_prop.FakeTensorMode = functools.cache(_sharding_prop.FakeTensorMode)

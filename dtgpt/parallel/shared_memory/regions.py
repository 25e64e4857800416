"""Parts of parameters between tensor parallelism and ZeRO."""

from torch import nn

from dtgpt.parallel.layout import Region
from dtgpt.parallel.mesh import RankCoordinates
from dtgpt.parallel.shards import layout_of


def region_of_tp(parameter: nn.Parameter, place: RankCoordinates) -> Region:
    """Return the global indices of what this rank computes with: its part after tensor parallelism, before ZeRO."""
    return layout_of(parameter, place.plan).region(place.rank, without="shard")

"""What context parallelism does to a stage as it is built. Runs without it do not load the rest."""

from dtgpt.models.decoder import Decoder
from dtgpt.parallel.build import Building, Entry


def _place_dropout(part: Decoder, made: Building) -> None:
    from dtgpt.parallel.context_parallel.slices import place_dropout

    place_dropout(part, made.settings, made.mesh.place)


def _exchange_heads(part: Decoder, made: Building) -> None:
    from dtgpt.parallel.context_parallel.slices import exchange_heads, share_exchange

    share_exchange(made.settings, made.mesh)
    exchange_heads(part, made.mesh.cp_group, made.settings.plan)


def _cuts_samples(made: Building) -> bool:
    return made.settings.plan.cp > 1


# Behind tensor parallelism, to whose places of dropout it adds.
DROPOUT = Entry("dropout of slices", _cuts_samples, _place_dropout, after="added modules")
# Around what selective recomputation repeats, so that no message is sent again.
HEADS = Entry("heads of slices", _cuts_samples, _exchange_heads, after="attention", runs=True)

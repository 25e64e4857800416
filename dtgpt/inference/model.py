"""A model cut by a plan, ready to be used by commands.

Each rank holds its own part alone. Of a checkpoint of dtgpt it reads no more than that, of other formats tensor by
tensor. Whatever generates goes through `run`: rank 0 reads the prompts and works with an engine, which is made when it
is first needed, and the other ranks do what it commands.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch

from dtgpt.checkpoint.load import load_weights
from dtgpt.checkpoint.open import ends_of, tokenizer_beside
from dtgpt.config.execution import MOST_SLOTS, Settings
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.base_options import SpecialIds
from dtgpt.inference.commands import broadcast_json, told_by_rank_0
from dtgpt.inference.engine import Engine
from dtgpt.inference.prompts import special_ids, tokenizer_of
from dtgpt.inference.request import NotFinite, PromptJob
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.source import Source
from dtgpt.parallel.cache_sizes import bytes_per_slot, slots_on_every_rank
from dtgpt.parallel.inference import inference_stages
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.console import byte_size, counted, parameters, say, say_error
from dtgpt.util.errors import UserError

FEW_SLOTS = 16  # with fewer, where more are wanted, a user is told why

P = TypeVar("P")  # what rank 0 has read of a call


class Need(NamedTuple):
    """What work needs of the cache."""

    rows: int  # sequences in all
    at_once: int  # of one prompt


def need_of(jobs: Sequence[PromptJob]) -> Need:
    """Return what the cache needs for at least one job."""
    return Need(sum(job.rows for job in jobs), max(job.rows for job in jobs))


class Model:
    """A GPT that is ready to use, distributed by a plan. All ranks must call the same methods with the same arguments,
    and all get the result."""

    def __init__(
        self,
        stages: list[Decoder],
        mesh: Mesh,
        config: ModelConfig,
        dtype: torch.dtype,
        path: Path,
        slots: int | None = None,
        tokenizer: Tokenizer | None = None,
        exact: bool = False,
    ):
        """path: of the model, where its tokenizer is looked for, unless `tokenizer` is given. slots: sequences in the
        cache; None: as many as a call needs and memory allows. exact: give log-probabilities the bits of training's
        forward pass, on stages that `open_model` accepts for it."""
        self.stages, self.mesh, self.config, self.dtype, self.path = stages, mesh, config, dtype, path
        self._wanted, self._given, self.exact = slots, tokenizer, exact
        self.engine: Engine | None = None  # once it is needed
        self._reserved = 0  # slots that were wanted of it

    @classmethod
    def read(
        cls,
        source: Source,
        settings: Settings,
        mesh: Mesh,
        path: Path,
        slots: int | None = None,
        tokenizer: Tokenizer | None = None,
        exact: bool = False,
    ) -> Self:
        """Return a model that was opened, with its weights."""
        stages = inference_stages(settings, mesh, partial(load_weights, source))
        return cls(stages, mesh, settings.model, settings.dtype, path, slots, tokenizer, exact)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Raises UserError where there is none."""
        return self._given or tokenizer_of(self.path, self.config)

    @property
    def known_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that is given, saved with the model or in use already; None: none of these. Nothing is fetched,
        since prompts of ids need no tokenizer."""
        known = vars(self).get("tokenizer") or self._saved_tokenizer
        return known if known and known.spells else None

    @cached_property
    def _saved_tokenizer(self) -> Tokenizer | None:
        return self._given or tokenizer_beside(self.path)

    @cached_property
    def special(self) -> SpecialIds:
        """The ids that rules look for."""
        saved = self._saved_tokenizer
        ends = ends_of(self.path, saved, self.config.vocab_size).ids
        return special_ids(saved, ends, self.config.vocab_size)

    def check(self, job: PromptJob) -> None:
        """Raise UserError for a job that this model can never do."""
        options = job.options
        replace(job, special=self.special).validate(self.vocab_size, self.config.seq_length, MOST_SLOTS)
        if self.exact:
            options.check_exact()
        options.check_tokenizer(job, self.known_tokenizer)
        if options.reads_text and not self.tokenizer.spells:  # or raises where there is none at all
            raise UserError("the model's tokens have no text, in which stop strings could be found; use stop_token_ids")

    @property
    def vocab_size(self) -> int:
        """The number of ids that may be drawn and that a job may name: a model may have more than its tokenizer."""
        known, whole = self.known_tokenizer, self.config.vocab_size
        return min(whole, known.vocab_size) if known else whole

    @property
    def slots(self) -> int:
        """The sequences that the cache holds now."""
        return self.engine.slots if self.engine else 0

    @property
    def bytes_per_slot(self) -> int:
        """The bytes of a sequence in the cache, on the rank that holds most of it."""
        return bytes_per_slot(self.config, self.mesh.plan, self.dtype)

    def describe(self) -> None:
        """Print the memory of weights and slots on this rank to stderr."""
        model = f"{parameters(self.config.num_parameters)}, {str(self.dtype).removeprefix('torch.')}"
        weights = sum(one.nbytes for one in {one for stage in self.stages for one in stage.parameters()})
        slots = f"{counted(self.slots, 'slot')} of {byte_size(self.bytes_per_slot)}"
        say_error(f"{model}, {self.mesh.plan.name}: {byte_size(weights)} of weights and {slots} on each device")

    def run(self, prepare: Callable[[], tuple[Need, P]], work: Callable[[Engine, P], Any]) -> Any:
        """Call `prepare` on rank 0, and `work` with the value that it returned beside its need of the cache. Return on
        every rank what `work` returned, which is made of texts, numbers, lists and dicts. A UserError of `prepare`, and
        a NotFinite of `work`, are raised on every rank."""
        prepared = self.reserve(prepare)
        if prepared is None:
            return self.follow()
        engine, value, finite = self.begin(), None, True
        try:
            value = work(engine, *prepared)
        except NotFinite:
            finite = False
        except BaseException:
            self.fail()
            raise
        engine.release()
        return self.share(value, finite)

    def share(self, value: Any = None, finite: bool = True) -> Any:
        """Return on every rank the value of rank 0. Raise NotFinite where rank 0 met logits that are not."""
        value, finite = broadcast_json(self.mesh, [value, finite])
        if not finite:
            raise NotFinite
        return value

    def begin(self) -> Engine:
        """Return the engine that was reserved, for a call."""
        engine = self.engine
        assert engine is not None
        engine.tokenizer, engine.special = self.known_tokenizer, self.special
        return engine

    def fail(self) -> None:
        """Forget the engine, whose state is not known."""
        if self.engine is not None:
            self.engine.fail()
        self.engine, self._reserved = None, 0

    def follow(self) -> Any:
        """Do what rank 0 commands, and return what it shares."""
        assert self.engine is not None
        self.engine.follow()
        return self.share()

    def reserve(self, prepare: Callable[[], tuple[Need, P]]) -> tuple[P] | None:
        """Make an engine for what `prepare` on rank 0 needs, unless there is one. Return what else it returned there,
        None on the other ranks."""
        told, kept = told_by_rank_0(self.mesh, prepare)
        need = Need(*told)
        # A power of two, so that calls of about the same size share one engine, with its memory and its graphs.
        wanted = self._wanted or max(need.at_once, min(MOST_SLOTS, 1 << (need.rows - 1).bit_length()))
        if wanted > self._reserved:
            self._make_engine(wanted, needed=self._wanted or need.at_once)
            self._reserved = wanted
        if need.at_once > self.slots:
            raise UserError(
                f"{counted(need.at_once, 'sequence')} of a prompt need as many slots of the cache, which has "
                f"{self.slots}; ask for fewer, or give more slots"
            )
        return kept

    def _make_engine(self, wanted: int, needed: int) -> None:
        """Make an engine of `wanted` slots, or as many as fit into memory. Raise UserError where `needed` do not."""
        self.engine, self._reserved = None, 0  # the memory of the last one is free for the next
        fits = slots_on_every_rank(self.mesh, self.config, self.mesh.plan, self.dtype)
        if needed > fits:
            raise UserError(
                f"{counted(needed, 'slot')} of the cache, {byte_size(self.bytes_per_slot)} each, do not fit into "
                f"memory beside the weights, but {fits} do; use fewer, a smaller max_length, or cut the model over "
                "more processes"
            )
        if fits < min(wanted, FEW_SLOTS):
            say(
                f"memory has room for {counted(fits, 'sequence')} at the same time, of {self.config.seq_length:,} "
                f"positions and {byte_size(self.bytes_per_slot)} each; a smaller max_length makes room for more",
                warning=True,
            )
        sizes = min(wanted, fits), broadcast_json(self.mesh, self.vocab_size if self.mesh.rank == 0 else None)
        self.engine = Engine(self.stages, self.mesh, self.config, self.dtype, *sizes, graphs=True, exact=self.exact)

"""The engine of a model, made when it is needed, and jobs on it under every plan."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import torch

from dtgpt.checkpoint.tokenizer import ends_of, tokenizer_beside
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.broadcast import broadcast_json, from_rank_0
from dtgpt.inference.engine import Engine
from dtgpt.inference.finite import NotFinite
from dtgpt.inference.memory import MOST_SLOTS, bytes_per_slot, free_memory, slots_that_fit
from dtgpt.inference.prompts import special_ids, tokenizer_of
from dtgpt.inference.sampling import SpecialIds
from dtgpt.inference.session import PromptJob, Session
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.parallel.mesh import Mesh
from dtgpt.util.console import byte_size, counted, parameters, say, say_error
from dtgpt.util.errors import UserError
from dtgpt.util.peers import Process

GPT2_IDS = SpecialIds(newline=198, double_newline=628, colon=25)  # of a model with its vocabulary

FEW_SLOTS = 16  # with fewer, where more are wanted, a user is told why

_END = object()  # of an iterator


class Need(NamedTuple):
    """What work needs of the cache."""

    rows: int  # sequences in all
    at_once: int  # of one prompt


def need_of(jobs: Sequence[PromptJob]) -> Need:
    """Return what the cache needs for at least one job."""
    return Need(sum(job.rows for job in jobs), max(job.rows for job in jobs))


class _Stream(NamedTuple):
    """A stream on rank 0."""

    session: Session
    seen: list[Any]  # its pieces so far


class Generator:
    """Runs jobs with the stages of a model. All ranks call the same methods; rank 0 alone reads the jobs and works,
    and the others do what it commands."""

    def __init__(
        self, stages: list[Decoder], mesh: Mesh, config: ModelConfig, dtype: torch.dtype, path: Path,
        slots: int | None = None, tokenizer: Tokenizer | None = None, exact: bool = False,
    ):  # fmt: skip
        """path: of the model, where its tokenizer is looked for, unless `tokenizer` is given. slots: sequences in the
        cache; None: as many as a job needs and memory allows. exact: with the bits of training's forward pass, on
        stages that `open_model` accepts for it."""
        self.stages, self.mesh, self.config, self.dtype, self.path = stages, mesh, config, dtype, path
        self._wanted, self._given, self.exact = slots, tokenizer, exact
        self._engine: Engine | None = None
        self._reserved = 0  # slots that were wanted of it
        self._stream: _Stream | None = None  # which is not read to its end
        self._lock = RLock()
        self._lost = False  # whether one of several processes has failed: they are no longer in step

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
        if saved is None and self.config.vocab_size == GPT2_124M.vocab_size:
            return GPT2_IDS._replace(ends=ends)
        return special_ids(saved, ends) if saved is not None and saved.spells else SpecialIds(ends)

    def check(self, job: PromptJob) -> None:
        """Raise UserError for a job that this model can never do."""
        job.request(self.special).validate(self.vocab_size, self.config.seq_length, MOST_SLOTS)
        if self.exact and job.options.num_beams > 1:
            raise UserError(
                f"num_beams={job.options.num_beams} searches, and exact log-probabilities are those of sampled tokens; "
                "use num_beams=1, or load the model without exact"
            )
        if job.options.stop_strings and not self.tokenizer.spells:  # or raises where there is none at all
            raise UserError("the model's tokens have no text, in which stop strings could be found; use stop_token_ids")

    @property
    def vocab_size(self) -> int:
        """The number of ids that may be drawn and that a job may name: a model may have more than its tokenizer."""
        known, whole = self.known_tokenizer, self.config.vocab_size
        return min(whole, known.vocab_size) if known else whole

    @property
    def slots(self) -> int:
        """The sequences that the cache holds now."""
        return self._engine.slots if self._engine else 0

    @property
    def bytes_per_slot(self) -> int:
        """The bytes of a sequence in the cache, on the rank that holds most of it."""
        return bytes_per_slot(self.config, self.mesh.plan, self.dtype)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights on this rank."""
        unique = {parameter for stage in self.stages for parameter in stage.parameters()}
        return sum(parameter.nbytes for parameter in unique)

    def describe(self) -> None:
        """Print the memory of weights and slots on this rank to stderr."""
        model = f"{parameters(self.config.num_parameters)}, {str(self.dtype).removeprefix('torch.')}"
        slots = f"{counted(self.slots, 'slot')} of {byte_size(self.bytes_per_slot)}"
        say_error(
            f"{model}, {self.mesh.plan.name}: {byte_size(self.weight_bytes)} of weights and {slots} on each device"
        )

    def run(self, prepare: Callable[[], Need], work: Callable[[Session], Any]) -> Any:
        """Call `prepare` and then `work` on rank 0, and return on every rank what `work` returned, which is made of
        texts, numbers, lists and dicts. A UserError of `prepare`, and a NotFinite of `work`, are raised on every
        rank."""
        with self.alone():
            self._reserve(prepare)
            if self.mesh.rank:
                return self._follow()
            session = self._begin()
            value, finite = None, True
            try:
                value = work(session)
            except NotFinite:
                finite = False
            except BaseException:
                self._fail(session)
                raise
            session.close()
            return self._share(value, finite)

    def stream(self, prepare: Callable[[], Need], work: Callable[[Session], Iterator[Any]]) -> Iterator[Any]:
        """Call `prepare` as `run` does, and return an iterator over what `work` yields on rank 0. The other ranks get
        all of it when it is complete. Any other use of the model ends the stream: to read on is then a UserError."""
        with self.alone():
            self._reserve(prepare)
        return self._pieces(work)

    def _pieces(self, work: Callable[[Session], Iterator[Any]]) -> Iterator[Any]:
        if self.mesh.rank:
            yield from self._follow()
            return
        with self.alone():
            stream = self._stream = _Stream(self._begin(), [])
        pieces = work(stream.session)
        try:
            while True:
                with self._lock:
                    piece = next(pieces, _END)
                    if piece is _END:
                        return self._end(stream)
                    stream.seen.append(piece)
                yield piece
        except GeneratorExit:  # nobody reads on
            self._end(stream)
            raise
        except NotFinite:
            self._end(stream, finite=False)
            raise
        except BaseException:
            if self._stream is stream:
                self._stream = None
                self._fail(stream.session)
            raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the stages, for which other threads wait, and end a stream that has begun. Raise UserError where one of
        several processes has failed."""
        with self._lock:
            if self._lost:
                raise UserError("a process has failed in a call before this one; start all of them again")
            if self._stream is not None:
                self._end(self._stream)
            yield

    def _end(self, stream: _Stream, finite: bool = True) -> None:
        """End a stream, unless it has ended: the ranks that follow it go on."""
        with self._lock:
            if self._stream is stream:
                self._stream = None
                stream.session.close()
                broadcast_json(self.mesh, [stream.seen, finite])

    def _share(self, value: Any = None, finite: bool = True) -> Any:
        """Return on every rank the value of rank 0. Raise NotFinite where rank 0 met logits that are not."""
        value, finite = broadcast_json(self.mesh, [value, finite])
        if not finite:
            raise NotFinite
        return value

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise UserError("the model has failed since this stream was asked for; ask for it again")
        return self._engine

    def _begin(self) -> Session:
        return Session(self.engine, self.known_tokenizer, self.special)

    def _fail(self, session: Session) -> None:
        """Forget the engine, whose state is not known."""
        session.fail()
        self._engine, self._reserved, self._lost = None, 0, self.mesh.world > 1

    def _follow(self) -> Any:
        """Do what rank 0 commands, and return what it shares."""
        try:
            self.engine.follow()
            return self._share()
        except NotFinite:
            raise
        except BaseException:
            self._lost = True
            raise

    def _reserve(self, prepare: Callable[[], Need]) -> None:
        """Make an engine for what `prepare` on rank 0 needs, unless there is one."""
        need = Need(*from_rank_0(self.mesh, prepare))
        wanted = self._wanted or max(need.at_once, min(MOST_SLOTS, 1 << (need.rows - 1).bit_length()))
        if wanted > self._reserved:
            self._make_engine(wanted, needed=self._wanted or need.at_once)
            self._reserved = wanted
        if need.at_once > self.slots:
            raise UserError(
                f"{counted(need.at_once, 'sequence')} of a prompt need as many slots of the cache, which has "
                f"{self.slots}; ask for fewer, or give more slots"
            )

    def _make_engine(self, wanted: int, needed: int) -> None:
        """Make an engine of `wanted` slots, or as many as fit into memory. Raise UserError where `needed` do not."""
        self._engine, self._reserved = None, 0  # the memory of the last one is free for the next
        local_world = Process.from_environment().local_world

        def fitting() -> int:
            return slots_that_fit(free_memory(self.mesh.device, local_world), self.config, self.mesh.plan, self.dtype)

        fits = min(self.mesh.turns(fitting, lambda rank: True))
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
        self._engine = Engine(self.stages, self.mesh, self.config, self.dtype, *sizes, graphs=True, exact=self.exact)

"""A model cut by a plan, ready to be used: what `dtgpt.load` returns.

    import dtgpt
    model = dtgpt.load("path/to/hf-gpt2", plan=dtgpt.Plan(tp=4))      # under torchrun --nproc-per-node 4
    print(model.generate("Once upon a time", max_new_tokens=50))
    logits = model(tokens)                                            # [B, T] -> [B, T, V], on every rank

Each rank holds its own part alone. Of a checkpoint of dtgpt it reads no more than that, of other formats tensor by
tensor. Whatever generates goes through `run` or `stream`: rank 0 reads the prompts and works with an engine, which is
made when it is first needed, and the other ranks do what it commands.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from dtgpt.checkpoint.load import load_weights
from dtgpt.checkpoint.open import ends_of, tokenizer_beside
from dtgpt.config.execution import MOST_SLOTS, Settings
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.base_options import SpecialIds, check_switches
from dtgpt.inference.commands import broadcast_json, told_by_rank_0
from dtgpt.inference.engine import Engine, prompt_scorer
from dtgpt.inference.options import read_options
from dtgpt.inference.prompts import GivenPrompts, read_prompts, segments, special_ids, tokenizer_of
from dtgpt.inference.request import Completion, NotFinite, PromptJob, check_range
from dtgpt.inference.step import gather_columns
from dtgpt.models.batch import Batch
from dtgpt.models.config import ModelConfig
from dtgpt.models.decoder import Decoder
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.models.source import Source
from dtgpt.parallel.cache_sizes import bytes_per_slot, slots_on_every_rank
from dtgpt.parallel.inference import inference_stages
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.stages import run_in_turn
from dtgpt.util.console import byte_size, counted, parameters, say, say_error
from dtgpt.util.errors import UserError, shown

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # types of tokens
GPT2_IDS = SpecialIds(newline=198, double_newline=628, colon=25)  # of a model with its vocabulary
FEW_SLOTS = 16  # with fewer, where more are wanted, a user is told why

_Asked = tuple[GivenPrompts, list[PromptJob]]  # the prompts of a call, and what is wanted of each
P = TypeVar("P")  # what rank 0 has read of a call
_END = object()  # of an iterator


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
        self._engine: Engine | None = None
        self._reserved = 0  # slots that were wanted of it
        self._stream: list[Any] | None = None  # the pieces so far of a stream that is not read to its end
        self._lock = RLock()
        self._lost = False  # whether one of several processes has failed: they are no longer in step

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

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, T, V]`, V the true vocabulary, of the dtype that the model computes in, of tokens int64
        `[B, T]`, T up to `config.seq_length`."""
        if not isinstance(tokens, Tensor):
            raise UserError(f"tokens are {shown(tokens)}, not a tensor; give whole numbers [B, T]")
        if tokens.dim() != 2 or tokens.dtype not in INTEGERS or tokens.is_meta or not len(tokens):
            raise UserError(f"tokens are {tokens.dtype} {list(tokens.shape)}; give whole numbers [B, T]")
        length, most = tokens.shape[1], self.config.seq_length
        if not 1 <= length <= most:
            raise UserError(f"{length} tokens are not a valid input; use 1 to {most}")
        check_range(int(tokens.min()), int(tokens.max()), self.config.vocab_size)
        batch = Batch(tokens.to(self.mesh.device, torch.int64))
        with self.alone():
            columns, shape = self.config.padded_vocab_size, (len(tokens), length)
            logits = run_in_turn(self.stages, self.mesh, batch, self.dtype)
            if logits is None:  # of a rank that does not hold the last stage
                whole = torch.empty(*shape, columns, dtype=self.dtype, device=self.mesh.device)
            else:
                whole = gather_columns(logits.flatten(0, 1), self.mesh, columns).unflatten(0, shape)
            return self.mesh.from_last_stage(whole.contiguous())[..., : self.config.vocab_size]

    def generate(
        self,
        prompts: Any,
        *,
        stream: bool = False,
        details: bool = False,
        return_full_text: bool = False,
        **options: Any,
    ) -> Any:
        """Continue prompts, and return the continuations without the prompts.

        prompts: a text, or ids as a list or a tensor; or a list of texts or of ids, for which a list is returned. A
        continuation has the form of its prompt. An empty text begins a document.

        stream: return an iterator over the pieces of the text, or the ids, of a single prompt. Under a plan of several
        processes every rank must read it to its end; ranks other than 0 get the pieces when the text is complete.
        details: return `Completion` objects, with ids, log-probabilities and the reason why the text ended.
        return_full_text: begin each continuation with its prompt.

        options: those of `dtgpt.inference.options.Options`, named as in transformers where it has them;
        docs/generation.md describes each. max_new_tokens is by default 64, or as many as the positions of the model
        leave; num_return_sequences above 1 gives a list for each prompt; top_logprobs and prompt_logprobs go with
        details.

        A continuation depends on its prompt, the options, the seed and the prompt's index in the list. Other prompts
        and the plan change only the rounding of logits.

        Raise UserError, before anything is computed, if an argument is wrong.
        """
        check_switches(stream=stream, details=details, return_full_text=return_full_text)
        for name in ("top_logprobs", "prompt_logprobs"):
            if not details and options.get(name) not in (None, 0):
                raise UserError(f"{name} is one of the details; add details=True, or leave it out")
        if stream:
            return self._stream_of(prompts, details or return_full_text, options)

        def work(engine: Engine, asked: _Asked) -> Any:
            (given, jobs), known = asked, self.known_tokenizer
            found = list(engine.run(jobs))
            for one in chain.from_iterable(found):
                one.segments = segments(known, one.ids) if details and known else None
            return {**given._asdict(), "found": found}

        answer = self.run(lambda: self._asked(prompts, options), work)
        several = (options.get("num_return_sequences") or 1) > 1
        results = []
        for index, completions in enumerate(answer["found"]):
            if not details:
                completions = [_bare(found, answer, index, return_full_text) for found in completions]
            results.append(completions if several else completions[0])
        return results[0] if answer["single"] else results

    def score(self, prompts: Any, *, top_logprobs: int = 0, split_special_tokens: bool = False) -> Any:
        """Return a `Score` of a text, or of ids: the log-probability of each token after the first. For a list of texts
        or of ids, return a list. top_logprobs: number of likeliest tokens to return at each position, too.
        split_special_tokens: names of special tokens in the text are plain text. Raise UserError, before anything is
        computed, if an argument is wrong."""
        options: dict[str, Any] = {"max_new_tokens": 0, "prompt_logprobs": True, "top_logprobs": top_logprobs}
        found = self.generate(prompts, details=True, split_special_tokens=split_special_tokens, **options)
        return [one.prompt for one in found] if isinstance(found, list) else found.prompt

    def _stream_of(self, prompts: Any, more: bool, options: Mapping[str, Any]) -> Iterator[Any]:
        """Return an iterator over the pieces of a single prompt. The other ranks get all of them when the text is
        complete. Any other use of the model ends the stream: to read on is then a UserError."""

        def prepare() -> tuple[Need, _Asked]:
            if more:
                raise UserError("stream=True yields pieces of the text; leave details and return_full_text out")
            need, asked = self._asked(prompts, options)
            if not asked[0].single or need.rows > 1:
                raise UserError("stream=True follows one sequence; give one prompt, one sequence and no beams")
            return need, asked

        with self.alone():
            prepared = self._reserve(prepare)
        return self._pieces(prepared)

    def _asked(self, prompts: Any, options: Mapping[str, Any]) -> tuple[Need, _Asked]:
        """Return what a call asks for. Raise UserError where an argument is wrong."""
        split = options.get("split_special_tokens") or False
        check_switches(split_special_tokens=split)
        given = read_prompts(prompts, lambda: self.tokenizer, self.config, split)
        jobs = [PromptJob(ids, read_options(options, len(ids), self.config), i) for i, ids in enumerate(given.ids)]
        for job in jobs:
            self.check(job)
        return need_of(jobs), (given, jobs)

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
        options = job.options
        replace(job, special=self.special).validate(self.vocab_size, self.config.seq_length, MOST_SLOTS)
        if self.exact and options.search is not None:
            _, asked, without = options.search.words
            raise UserError(
                f"{asked} searches, and exact log-probabilities are those of sampled tokens; use {without}, or load "
                "the model without exact"
            )
        if options.prompt_logprobs:
            prompt_scorer()  # or raises where there is none
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
        return self._engine.slots if self._engine else 0

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
        every rank what `work` returned, which is made of texts, numbers, results, lists and dicts. A UserError of
        `prepare`, and a NotFinite of `work`, are raised on every rank."""
        with self.alone():
            prepared = self._reserve(prepare)
            if prepared is None:
                return self._follow()
            engine, value, finite = self._begin(), None, True
            try:
                value = work(engine, *prepared)
            except NotFinite:
                finite = False
            except BaseException:
                self._fail()
                raise
            engine.release()
            return self._share(value, finite)

    def _pieces(self, prepared: tuple[_Asked] | None) -> Iterator[Any]:
        if prepared is None:
            yield from self._follow()
            return
        ((given, (job,)),) = prepared
        with self.alone():
            updates, stream = self._begin().stream(job), list[Any]()
            self._stream = stream
        pieces = (piece for one in updates for piece in (one.ids if given.texts is None else filter(None, [one.text])))
        try:
            while True:
                with self._lock:
                    if self._stream is not stream:
                        raise UserError(
                            "the model was used again before a stream had ended; read it to its end, or close it first"
                        )
                    piece = next(pieces, _END)
                    if piece is _END:
                        return self._end(stream)
                    stream.append(piece)
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
                self._fail()
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

    def _end(self, stream: list[Any], finite: bool = True) -> None:
        """End a stream, unless it has ended: the ranks that follow it go on."""
        with self._lock:
            if self._stream is stream:
                self._stream = None
                self.engine.release()
                broadcast_json(self.mesh, [stream, finite])

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

    def _begin(self) -> Engine:
        engine = self.engine
        engine.tokenizer, engine.special = self.known_tokenizer, self.special
        return engine

    def _fail(self) -> None:
        """Forget the engine, whose state is not known."""
        self.engine.fail()
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

    def _reserve(self, prepare: Callable[[], tuple[Need, P]]) -> tuple[P] | None:
        """Make an engine for what `prepare` on rank 0 needs, unless there is one. Return what else it returned there,
        None on the other ranks."""
        told, kept = told_by_rank_0(self.mesh, prepare)
        need = Need(*told)
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
        self._engine, self._reserved = None, 0  # the memory of the last one is free for the next
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
        self._engine = Engine(self.stages, self.mesh, self.config, self.dtype, *sizes, graphs=True, exact=self.exact)


def _bare(found: Completion, answer: Mapping[str, Any], index: int, full: bool) -> str | list[int]:
    """Return a continuation in the form of its prompt, `full` with the prompt before it."""
    texts = answer["texts"]
    if texts is None:
        return [*answer["ids"][index], *found.ids] if full else found.ids
    return (texts[index] if full else "") + (found.text or "")

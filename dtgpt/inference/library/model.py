"""A model cut by a plan, ready to be used: what `dtgpt.load` returns.

    import dtgpt
    model = dtgpt.load("path/to/hf-gpt2", plan=dtgpt.Plan(tp=4))      # under torchrun --nproc-per-node 4
    print(model.generate("Once upon a time", max_new_tokens=50))
    logits = model(tokens)                                            # [B, T] -> [B, T, V], on every rank

All ranks call the same methods, and any thread may: one call works at a time, and a stream that another call finds
unread is ended. A process that has failed once is no longer in step with the others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.base_options import check_switches
from dtgpt.inference.commands import broadcast_json
from dtgpt.inference.engine import Engine
from dtgpt.inference.library.jobs import run_jobs, segments
from dtgpt.inference.model import Model, Need, P, need_of
from dtgpt.inference.options import read_options
from dtgpt.inference.prompts import encode
from dtgpt.inference.request import Completion, NotFinite, PromptJob, check_prompt, check_range
from dtgpt.inference.scores.options import Score
from dtgpt.inference.step import gather_columns
from dtgpt.models.batch import Batch
from dtgpt.models.config import ModelConfig
from dtgpt.parallel.stages import run_in_turn
from dtgpt.util.errors import UserError, shown

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # types of tokens
KINDS = "a text, a list of ids, or a list of either"
_Asked = tuple["GivenPrompts", list[PromptJob]]  # the prompts of a call, and what is wanted of each
_END = object()  # of an iterator


class GivenPrompts(NamedTuple):
    """Prompts, and in which form they were given."""

    ids: list[list[int]]
    texts: list[str] | None  # None: they were given as ids
    single: bool  # one prompt, not a list of them


class LibraryModel(Model):
    """A GPT that is ready to use, distributed by a plan. All ranks must call the same methods with the same arguments,
    and all get the result."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self._stream: list[Any] | None = None  # the pieces so far of a stream that is not read to its end
        self._lock = RLock()
        self._lost = False  # whether one of several processes has failed: they are no longer in step

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
            found = list(run_jobs(engine, jobs))
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
            prepared = self.reserve(prepare)
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

    def run(self, prepare: Callable[[], tuple[Need, P]], work: Callable[[Engine, P], Any]) -> Any:
        """Do what `Model.run` does, with results among what `work` may return, while no other call works."""
        with self.alone():
            return super().run(prepare, work)

    def _pieces(self, prepared: tuple[_Asked] | None) -> Iterator[Any]:
        if prepared is None:
            yield from self.follow()
            return
        ((given, (job,)),) = prepared
        with self.alone():
            updates, stream = self.begin().stream(job), list[Any]()
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
                self.fail()
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
                self.working_engine.release()
                broadcast_json(self.mesh, [stream, finite])

    def share(self, value: Any = None, finite: bool = True) -> Any:
        return results_of(super().share(value, finite))

    @property
    def working_engine(self) -> Engine:
        """The engine of a stream that has begun."""
        if self.engine is None:
            raise UserError("the model has failed since this stream was asked for; ask for it again")
        return self.engine

    def begin(self) -> Engine:
        assert self.working_engine
        return super().begin()

    def fail(self) -> None:
        super().fail()
        self._lost = self.mesh.world > 1

    def follow(self) -> Any:
        try:
            return super().follow()
        except NotFinite:
            raise
        except BaseException:
            self._lost = True
            raise


def _bare(found: Completion, answer: Mapping[str, Any], index: int, full: bool) -> str | list[int]:
    """Return a continuation in the form of its prompt, `full` with the prompt before it."""
    texts = answer["texts"]
    if texts is None:
        return [*answer["ids"][index], *found.ids] if full else found.ids
    return (texts[index] if full else "") + (found.text or "")


def results_of(plain: Any) -> Any:
    """Return a value of JSON with each `Completion` and `Score` of which it has made a dict."""
    if isinstance(plain, list):
        return [results_of(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    plain = {name: results_of(value) for name, value in plain.items()}
    kind = next((kind for kind in (Completion, Score) if plain.keys() == kind.__dataclass_fields__.keys()), None)
    if kind is None:
        return plain
    likeliest = [[(i, logprob) for i, logprob in row] for row in plain["alternatives"]]  # of which JSON makes lists
    return kind(**plain | {"alternatives": likeliest})


def read_prompts(
    prompts: Any, tokenizer: Callable[[], Tokenizer], config: ModelConfig, split_special_tokens: bool = False
) -> GivenPrompts:
    """Return prompts given as a text, a list or tensor of ids, or a list of either. `tokenizer`: returns that of the
    model, or raises UserError. Raise UserError for any other value, an empty list, and ids that the model does not
    have."""
    if isinstance(prompts, Tensor):
        prompts = _as_list(prompts)
    single = isinstance(prompts, str) or (_is_list(prompts) and all(map(_is_id, prompts)))
    several = [prompts] if single else prompts
    if not _is_list(several):
        raise UserError(f"{shown(prompts)} is not a prompt; give {KINDS}")
    if all(isinstance(prompt, str) for prompt in several):
        ids = [encode(text, tokenizer(), config, split_special_tokens) for text in several]
        return GivenPrompts(ids, list(several), single)
    return GivenPrompts([check_ids(prompt, config) for prompt in several], None, single)


def check_ids(prompt: Any, config: ModelConfig) -> list[int]:
    """Return the ids of a prompt that was given as ids. Raise UserError where they are not the model's."""
    ids = _as_list(prompt) if isinstance(prompt, Tensor) else prompt
    if not _is_list(ids) or not all(map(_is_id, ids)):
        raise UserError(f"{shown(prompt)} is not a prompt; give {KINDS}")
    check_prompt(list(ids), config.vocab_size)
    return list(ids)


def _as_list(tensor: Tensor) -> Any:
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise UserError(f"the prompt {shown(tensor)} has no numbers in order; give a plain tensor of ids")
    return tensor.tolist()


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

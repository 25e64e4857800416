"""Any model that dtgpt can open, cut by any plan, ready for inference.

    import dtgpt
    model = dtgpt.load("path/to/hf-gpt2", plan=dtgpt.Plan(tp=4))      # under torchrun --nproc-per-node 4
    print(model.generate("Once upon a time", max_new_tokens=50))
    logits = model(tokens)                                            # [B, T] -> [B, T, V], on every rank

Each rank holds its own part alone. Of a checkpoint of dtgpt it reads no more than that, of other formats tensor by
tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtgpt.checkpoint.load import load_weights
from dtgpt.config.execution import Settings
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.completion import Completion, completion_of, score_of, to_plain
from dtgpt.inference.generator import Generator, Need, need_of
from dtgpt.inference.options import read_options
from dtgpt.inference.prompts import GivenPrompts, read_prompts
from dtgpt.inference.request import check_range
from dtgpt.inference.sampling import check_switches
from dtgpt.inference.session import PromptJob, Session
from dtgpt.inference.step import gather_columns
from dtgpt.inference.text import segments
from dtgpt.models.batch import Batch
from dtgpt.models.source import Source
from dtgpt.parallel.local import inference_stages
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.stages import run_in_turn
from dtgpt.util.errors import UserError, shown

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # types of tokens


class Model:
    """A GPT cut by a plan. All ranks call the same methods with the same arguments, and all get the result."""

    def __init__(
        self, source: Source, settings: Settings, mesh: Mesh, path: Path, slots: int | None = None,
        tokenizer: Tokenizer | None = None, exact: bool = False,
    ):  # fmt: skip
        """path, slots, tokenizer, exact: as in `Generator`."""
        self.config, self.mesh, self.dtype = settings.model, mesh, settings.dtype
        self.stages = inference_stages(settings, mesh, partial(load_weights, source))
        self.generator = Generator(self.stages, mesh, self.config, self.dtype, path, slots, tokenizer, exact)

    @property
    def exact(self) -> bool:
        """Whether log-probabilities have the bits of training's forward pass."""
        return self.generator.exact

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer saved with the model. Raises UserError where there is none."""
        return self.generator.tokenizer

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, T, V]`, V the true vocabulary, of the dtype that the model computes in, of tokens int64
        `[B, T]`, T up to `config.seq_length`."""
        if not isinstance(tokens, Tensor):
            raise UserError(f"tokens are {shown(tokens)}, not a tensor; give whole numbers [B, T]")
        if tokens.dim() != 2 or tokens.dtype not in INTEGERS or tokens.is_meta or not len(tokens):
            raise UserError(f"tokens are {tokens.dtype} {list(tokens.shape)}; give whole numbers [B, T]")
        length, whole = tokens.shape[1], self.config.seq_length
        if not 1 <= length <= whole:
            raise UserError(f"{length} tokens are not a valid input; use 1 to {whole}")
        check_range(int(tokens.min()), int(tokens.max()), self.config.vocab_size)
        batch = Batch(tokens.to(self.mesh.device, torch.int64))
        with self.generator.alone():
            logits = run_in_turn(self.stages, self.mesh, batch, self.dtype)
            return self._gather(logits, (len(tokens), length))[..., : self.config.vocab_size]

    def generate(
        self, prompts: Any, *, stream: bool = False, details: bool = False, return_full_text: bool = False,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Continue prompts, and return the continuations without the prompts.

        prompts: a text, or ids as a list or a tensor, gives a continuation of the same kind; a list of texts or of ids
        gives a list of them. An empty text begins a document.

        stream: return an iterator over the pieces of the text, or the ids, of a single prompt. Under a plan of several
        processes every rank must read it to its end; ranks other than 0 get the pieces when the text is complete.
        details: return `Completion` objects, with ids, log-probabilities and the reason of the end.
        return_full_text: begin each continuation with its prompt.

        options: those of `dtgpt.inference.options.Options`, named as in transformers where it has them;
        docs/generation.md describes each. max_new_tokens is by default 64, or as many as the positions of the model
        leave; num_return_sequences above 1 gives a list for each prompt; top_logprobs and prompt_logprobs go with
        details.

        A continuation is a function of its prompt, the options, the seed and the prompt's index in the list. The other
        prompts and the plan change nothing but the rounding of logits.

        Raise UserError, one sentence, before anything is computed, where an argument is wrong.
        """
        check_switches(stream=stream, details=details, return_full_text=return_full_text)
        for name in ("top_logprobs", "prompt_logprobs"):
            if not details and options.get(name) not in (None, 0):
                raise UserError(f"{name} is one of the details; add details=True, or leave it out")
        if stream:
            return self._stream(prompts, details or return_full_text, options)

        def plain(completions: list[Completion]) -> list[dict[str, Any]]:
            known = self.generator.known_tokenizer
            if details and known:
                for found in completions:
                    found.segments = segments(known, found.ids)
            return list(map(to_plain, completions))

        answer = self._run(prompts, options, plain)
        several = (options.get("num_return_sequences") or 1) > 1
        results = []
        for index, sequences in enumerate(answer["found"]):
            completions: list[Any] = list(map(completion_of, sequences))
            if not details:
                completions = [_bare(found, answer, index, return_full_text) for found in completions]
            results.append(completions if several else completions[0])
        return results[0] if answer["single"] else results

    def score(self, prompts: Any, *, top_logprobs: int = 0, split_special_tokens: bool = False) -> Any:
        """Return a `Score` of a text, or of ids: the log-probability of each token after the first; a list of them for
        a list of texts or of ids. `top_logprobs`: number of likeliest tokens to return in place of each.
        split_special_tokens: as in `generate`. Raise UserError as `generate` does."""
        options = {"max_new_tokens": 0, "prompt_logprobs": True, "top_logprobs": top_logprobs}
        options["split_special_tokens"] = split_special_tokens
        answer = self._run(prompts, options, _prompt_score)
        scores = list(map(score_of, answer["found"]))
        return scores[0] if answer["single"] else scores

    def _run(self, prompts: Any, options: Mapping[str, Any], plain: Callable[[list[Completion]], Any]) -> Any:
        """Return the prompts, and under "found" what `plain` makes of the sequences of each."""
        asked: list[GivenPrompts] = []
        jobs: list[PromptJob] = []

        def prepare() -> Need:
            asked.append(self._read(prompts, options))
            jobs.extend(self._jobs(asked[0], options))
            return need_of(jobs)

        def work(session: Session) -> Any:
            return {**asked[0]._asdict(), "found": list(map(plain, session.run(jobs)))}

        return self.generator.run(prepare, work)

    def _stream(self, prompts: Any, more: bool, options: Mapping[str, Any]) -> Iterator[Any]:
        asked: list[GivenPrompts] = []
        jobs: list[PromptJob] = []

        def prepare() -> Need:
            if more:
                raise UserError("stream=True yields pieces of the text; leave details and return_full_text out")
            asked.append(self._read(prompts, options))
            jobs.extend(self._jobs(asked[0], options))
            if not asked[0].single or jobs[0].rows > 1:
                raise UserError("stream=True follows one sequence; give one prompt, one sequence and no beams")
            return need_of(jobs)

        def work(session: Session) -> Iterator[Any]:
            for update in session.stream(jobs[0]):
                yield from update.ids if asked[0].texts is None else [update.text] * bool(update.text)

        return self.generator.stream(prepare, work)

    def _read(self, prompts: Any, options: Mapping[str, Any]) -> GivenPrompts:
        split = options.get("split_special_tokens") or False
        check_switches(split_special_tokens=split)
        return read_prompts(prompts, lambda: self.tokenizer, self.config, split)

    def _jobs(self, asked: GivenPrompts, options: Mapping[str, Any]) -> list[PromptJob]:
        jobs = [PromptJob(ids, read_options(options, len(ids), self.config), i) for i, ids in enumerate(asked.ids)]
        for job in jobs:
            self.generator.check(job)
        return jobs

    def _gather(self, logits: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """Join the columns of tp ranks, then send them from the stage that has the head to all others."""
        mesh = self.mesh
        if logits is None:
            logits = torch.empty(*shape, self.config.padded_vocab_size, dtype=self.dtype, device=mesh.device)
        else:
            rows = gather_columns(logits.flatten(0, 1), mesh, self.config.padded_vocab_size)
            logits = rows.unflatten(0, shape)
        return mesh.from_last_stage(logits.contiguous())


def _bare(found: Completion, answer: Mapping[str, Any], index: int, full: bool) -> str | list[int]:
    """Return a continuation in the form of its prompt, `full` with the prompt before it."""
    texts = answer["texts"]
    if texts is None:
        return [*answer["ids"][index], *found.ids] if full else found.ids
    return (texts[index] if full else "") + (found.text or "")


def _prompt_score(completions: list[Completion]) -> dict[str, Any]:
    (found,) = completions
    assert found.prompt is not None
    return to_plain(found.prompt)

"""Answers of the model that is trained, their rewards, and the batches that are made of them (GRPO; Shao et al. 2024;
without its biases, Liu et al. 2025).

The engine draws with the trainer's own weights. A draw is a function of (seed, number of the prompt, number of the
answer, weights): a run that goes on has the answers of one that was not stopped. A rank that holds the whole model has
an engine of its own, which answers a part of the prompts; under other plans rank 0 leads one engine on all ranks. The
rank that leads computes rewards. Every rank gets all answers, and takes its part of them.
"""

import math
import time
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, SupportsFloat

import torch

from dtgpt.config.execution import Settings
from dtgpt.config.plan import ResolvedPlan
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.inference.commands import broadcast_json
from dtgpt.inference.engine import Engine
from dtgpt.inference.library.jobs import run_jobs
from dtgpt.inference.options import Options
from dtgpt.inference.prompts import encode, special_ids
from dtgpt.inference.request import Completion, NotFinite, PromptJob
from dtgpt.inference.step import exact_bits
from dtgpt.models.batch import Batch
from dtgpt.models.decoder import Decoder
from dtgpt.models.shared.attention_backend import attention_backend
from dtgpt.parallel.cache_sizes import slots_on_every_rank
from dtgpt.parallel.context_parallel.degrees import ranks_of_queries
from dtgpt.parallel.mesh import Mesh
from dtgpt.posttrain.chats.messages import read_messages
from dtgpt.posttrain.chats.prompts import ChatPrompts
from dtgpt.posttrain.demands import slots_of
from dtgpt.posttrain.grpo.answers import Answer, figures_of, shared_rows, weighted_rows
from dtgpt.posttrain.grpo.config import GrpoConfig, draws_alone, shares_prompts
from dtgpt.posttrain.grpo.recipe_calls import RolloutsFailed, call_method
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.train.objective import own_tokens
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError, shown
from dtgpt.util.shared.gpu_limits import TRITON

REWARD = attrgetter("reward")
LARGEST_REWARD = 1e15  # gradients in fp32 have room for it


@dataclass(kw_only=True)
class Rollouts:
    """The answers of each step."""

    grpo: GrpoConfig
    stages: list[Decoder]
    mesh: Mesh
    settings: Settings
    tokenizer: Tokenizer
    ends: tuple[int, ...]  # ids at which answers end
    seed: int
    timeout: float  # seconds that a process waits for another

    def __post_init__(self) -> None:
        """Raise UserError where answers cannot be drawn as the recipe wants them."""
        self.best_and_worst: tuple[Answer, Answer] | None = None  # of the last step
        self._figures: dict[str, float] = {}
        self._scoring, self._tokens, self._drawn_at = 0.0, 0, 0.0
        self._from = 0, 0  # a step, and the prompts of those before it
        if not self.tokenizer.spells:
            raise UserError(
                f"grpo.group={self.grpo.group} rewards texts, which the tokens of {self.tokenizer.name} do not have; "
                "give a tokenizer"
            )
        reason = why_not_exact(self.settings)
        if self.grpo.exact == "on" and reason:
            raise UserError(f"grpo.exact=on, but {reason}; use --grpo.exact auto")
        self.exact = self.grpo.exact != "off" and reason is None
        self.alone = draws_alone(self.mesh.plan)
        self.mesh.turns(self.grpo.prepare, lambda rank: self.alone or rank == 0)

    def prompts(self, step: int) -> range:
        """Return the indices of the prompts of a step."""
        (origin, before), count = self._from, self.settings.global_batch_size // self.grpo.group
        first = before + (step - origin) * count
        return range(first, first + count)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from the `state` of a checkpoint with the next prompt, whatever sizes groups had before."""
        self._from = state["step"], state.get("prompts", state["consumed_samples"] // self.grpo.group)

    def check_prompt(self, step: int) -> None:
        """Raise UserError on every rank where the first prompt of a step is not one. An error of the recipe's method is
        left to the step, which says more."""

        def ask() -> None:
            try:
                self._asked(self.prompts(step)[0])
            except RolloutsFailed as failure:
                if failure.__cause__ is None:
                    raise

        self.mesh.turns(ask, lambda rank: self.alone or rank == 0)

    def batch(self, step: int) -> Batch:
        """Return this rank's part of the batch of a step, `[B, T]`, whose loss weights are advantages. Raises
        RolloutsFailed on every rank."""
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)  # the update before is not part of the time that answers take
        begin = time.perf_counter()
        answers = self.draw(step)
        self._drawn_at = time.perf_counter()
        seconds = self._drawn_at - begin - self._scoring
        self._figures = figures_of(answers, self.grpo.group) | {
            "rollout_seconds": seconds,
            "scoring_seconds": self._scoring,
            "rollout_tokens_per_second": sum(len(answer.ids) for answer in answers) / seconds,
        }
        self._tokens = sum(len(answer.prompt_ids) + len(answer.ids) for answer in answers)
        self.best_and_worst = max(answers, key=REWARD), min(answers, key=REWARD)
        own = len(answers) // self.mesh.plan.dp
        part = slice(self.mesh.place.dp * own, (self.mesh.place.dp + 1) * own)
        make = shared_rows if shares_prompts(self.settings) else weighted_rows
        batch = make(answers, part, self.grpo, self.settings.seq_length)
        batch = Batch._make(None if field is None else field.to(self.mesh.device) for field in batch)
        return own_tokens(batch, self.mesh.place)

    @torch.no_grad()
    def draw(self, step: int) -> list[Answer]:
        """Return the answers of a step with their rewards, group by group, the same on every rank."""
        mesh, group = self.mesh, self.grpo.group
        failure: RolloutsFailed | None = None
        prompts = self.prompts(step)
        with torch.compiler.set_stance("force_eager"):  # single tokens would be compiled anew
            if self.alone:
                patient = mesh.commands  # a reward may take longer on one rank than the timeout; made before it does
                found, failure = self._lead(prompts[mesh.rank :: mesh.world])
                parts = mesh.gather(found, patient)
            elif mesh.rank:
                self.engine.follow()
                parts = [broadcast_json(mesh)]
            else:
                found, failure = self._lead(prompts)
                parts = [broadcast_json(mesh, found)]
        for part in parts:
            if "diverged" in part:
                raise UserError(f"step {step + 1}: {part['diverged']}")
        for part in parts:
            if "failed" in part:
                raise RolloutsFailed(part["failed"]) from (failure and failure.__cause__)
        # Part i has the groups i, i + n, i + 2 n ... of n parts.
        groups = [(parts[index % len(parts)]["answers"], index // len(parts) * group) for index in range(len(prompts))]
        return [Answer(*values) for answers, first in groups for values in answers[first : first + group]]

    def figures(self) -> dict[str, float]:
        """Return what a record says of the answers of the last step. To be called when the device has done the step."""
        if not self._figures:
            return {}
        seconds = time.perf_counter() - self._drawn_at
        return {
            **self._figures,
            "training_seconds": seconds,
            "training_tokens_per_second": self._tokens / seconds,
        }

    @cached_property
    def engine(self) -> Engine:
        """The engine of the run, or of this rank. Its cache has the positions of a sample. Raises UserError where it
        has no memory."""
        settings, slots = self.settings, slots_of(self.settings)
        mesh = Mesh(ResolvedPlan(dp=1), self.mesh.device) if self.alone else self.mesh
        config = replace(settings.model, seq_length=settings.seq_length)
        if (fits := slots_on_every_rank(self.mesh, config, mesh.plan, settings.dtype)) < slots:
            raise UserError(
                f"memory has room for {counted(fits, 'answer')} of {settings.seq_length:,} positions at the same time, "
                f"but {slots} are to be drawn; use a smaller --grpo.slots, which makes drawing slower"
            )
        graphs = settings.graphs and self.alone and not settings.freezes_weights
        make = partial(
            Engine,
            self.stages,
            mesh,
            config,
            settings.dtype,
            slots=slots,
            vocab_size=min(self.tokenizer.vocab_size, config.vocab_size),
            timeout=self.timeout,
            graphs=graphs,
            tokenizer=self.tokenizer,
            special=special_ids(self.tokenizer, self.ends),
        )
        try:
            engine = make(exact=self.exact)
        except UserError:  # the kernels do not know a function in the blocks
            if not self.exact or self.grpo.exact == "on":
                raise
            self.exact = False
            engine = make(exact=False)
        if mesh is not self.mesh:
            self.mesh.before_end += mesh.before_end
        return engine

    @cached_property
    def _chat(self) -> ChatPrompts:
        """What renders prompts that are chats."""
        chat = ChatPrompts(self.tokenizer, self.settings.model, self.ends)
        self.mesh.before_end.append(chat.close)
        return chat

    def _lead(self, prompts: range) -> tuple[dict[str, Any], RolloutsFailed | None]:
        """Draw and reward the answers to prompts, on the rank that leads. Return what other ranks need to know."""
        failure: RolloutsFailed | NotFinite | None = None
        try:
            asked = [self._asked(index) for index in prompts]
            drawn = list(run_jobs(self.engine, [job for _, job in asked]))
        except (RolloutsFailed, NotFinite) as error:
            failure = error
        self.engine.release()
        if isinstance(failure, NotFinite):
            return {"diverged": f"{failure}, a lower --optimizer.lr"}, None
        if failure is not None:
            return {"failed": str(failure)}, failure
        begin = time.perf_counter()
        try:
            answers = [
                self._rewarded(job, text, found)
                for (text, job), completions in zip(asked, drawn, strict=True)
                for found in completions
            ]
        except RolloutsFailed as error:
            return {"failed": str(error)}, error
        self._scoring = time.perf_counter() - begin
        return {"answers": answers}, None

    def _asked(self, index: int) -> tuple[str, PromptJob]:
        """Return the text of a prompt, for people, and the job that answers it."""
        grpo, prompt = self.grpo, call_method(self.grpo.prompt, index, seconds=self.timeout)
        ends: tuple[str, ...] = ()
        try:
            if isinstance(prompt, str):
                ids, text = encode(prompt, self.tokenizer, self.settings.model), prompt
            elif isinstance(prompt, list):
                messages = read_messages(prompt)
                ids, text = self._chat.encode(messages), f"{messages[-1]['content']}\n"
                ends = self._chat.stops
            else:
                raise UserError(f"{shown(prompt)} is no prompt; return a text, or a list of messages")
        except UserError as error:
            raise RolloutsFailed(f"prompt {index}: {error}") from None
        if len(ids) + grpo.max_new_tokens > self.settings.seq_length:
            raise RolloutsFailed(
                f"prompt {index} has {counted(len(ids), 'token')}, which with grpo.max_new_tokens="
                f"{grpo.max_new_tokens} are more than the {self.settings.seq_length} of a sample; use shorter prompts, "
                "a smaller --grpo.max_new_tokens or a larger --seq_length"
            )
        options = Options(
            max_new_tokens=grpo.max_new_tokens,
            num_return_sequences=grpo.group,
            seed=self.seed,
            stop_strings=(grpo.stop,) if grpo.stop else (),
        )
        return text, PromptJob(ids, options, index, stops=ends)

    def _rewarded(self, job: PromptJob, prompt: str, found: Completion) -> Answer:
        index, text = job.prompt_index, found.text or ""
        reward = call_method(self.grpo.reward, index, text, seconds=self.timeout)
        try:
            value = float(reward) if isinstance(reward, SupportsFloat) else math.nan
        except Exception:  # such as that of an array of several numbers
            value = math.nan
        if not abs(value) <= LARGEST_REWARD:
            raise RolloutsFailed(
                f"the reward of answer {text[:80]!r} to prompt {index} is {shown(reward)}; return a finite number of "
                f"at most {LARGEST_REWARD:g}"
            )
        return Answer(prompt, job.ids, found.ids, found.logprobs, text, found.finish_reason == "stop", value)


def why_not_exact(settings: Settings) -> str | None:
    """Return why answers cannot have the bits of training's log-probabilities; None where they can."""
    device, plan = settings.device, settings.plan
    if device.type != "cuda" or not TRITON:
        return f"device={device.type} chooses the order of sums by the number of rows, or has no Triton"
    if ranks_of_queries(plan, settings.model) > 1:
        return f"cp={plan.cp} has more ranks than heads of keys and values, so that attention is computed in pieces"
    if plan.tp > 1 or plan.zero or plan.splits_backward or settings.freezes_weights:
        named = {f"tp={plan.tp}": plan.tp > 1, "ZeRO": plan.zero > 0}
        named[f"the schedule {plan.schedule}"] = plan.splits_backward
        what = next((name for name, there in named.items() if there), f"lora.rank={settings.section(LoraConfig).rank}")
        return f"{what} has weights in another form than the kernels for it read"
    if attention_backend(settings) != "flash":
        return f"attention={attention_backend(settings)} here, and the kernels for it have the bits of flash"
    try:
        exact_bits().check_blocks(settings.model)
    except UserError:
        return f"there are no kernels for it that run blocks of this {settings.model.architecture} model"
    return None

"""Any model that dtgpt can open, cut by any plan, ready for inference.

    import dtgpt
    model = dtgpt.load("path/to/hf-gpt2", plan=dtgpt.Plan(tp=4))      # under torchrun --nproc-per-node 4
    logits = model(tokens)                                            # [B, T] -> [B, T, V], on every rank

Each rank holds its own part alone. Of a checkpoint of dtgpt it reads no more than that, of other formats tensor by
tensor.
"""

import atexit
from contextlib import suppress
from os import PathLike
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtgpt.checkpoint.load import load_weights
from dtgpt.config.checks import one_replica
from dtgpt.config.execution import Settings, choose_device, choose_dtype
from dtgpt.config.plan import Plan
from dtgpt.config.plan_names import parse_plan
from dtgpt.inference.generate import Sampling, generate
from dtgpt.interop.open import open_source
from dtgpt.models.source import Source
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.build import build_stages, make_engine
from dtgpt.parallel.engine import gather_logits
from dtgpt.parallel.graphs import Graphs
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.process import Process
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown

DEVICES, PRECISIONS = ("auto", "cpu", "cuda"), ("auto", "fp32", "bf16", "fp16")
TIMEOUT = 600.0  # s that a rank waits for others


class Model:
    """A GPT cut by a plan. All ranks call the same methods with the same arguments, and all get the result."""

    def __init__(self, source: Source, settings: Settings, mesh: Mesh):
        self.config, self.mesh, self.dtype = source.config, mesh, settings.dtype
        stages, shards = build_stages(settings, mesh, key=None, masters=False)
        load_weights(source, shards)
        self._engine = make_engine(stages, shards, settings, Graphs(enabled=False))

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, T, V]`, V the true vocabulary, of the dtype that the model computes in, of tokens int64
        `[B, T]`, T up to `config.seq_length`."""
        if tokens.dim() != 2 or tokens.is_floating_point() or not len(tokens):
            raise UserError(f"tokens are {tokens.dtype} {list(tokens.shape)}; give whole numbers [B, T]")
        length, whole = tokens.shape[1], self.config.seq_length
        if not 1 <= length <= whole:
            raise UserError(f"{length} tokens are not a valid input; use 1 to {whole}")
        self._check_ids(int(tokens.min()), int(tokens.max()))
        tokens, plan = tokens.to(self.mesh.device), self.mesh.plan
        if plan.pp > 1 or plan.sequence_parallel:  # one length alone is cut and sent
            tokens = F.pad(tokens, (0, whole - length))  # what comes after a token does not change it
        logits = self._engine.logits(tokens)
        if logits is not None:
            logits = logits[:, :length]
        return self._gather(logits, (len(tokens), length))[..., : self.config.vocab_size]

    def generate(
        self, prompt: list[int], new_tokens: int, temperature: float = 1.0, top_k: int = 0, seed: int = 0
    ) -> list[int]:
        """Return up to `new_tokens` ids after the non-empty `prompt`; temperature 0 takes the likeliest token."""
        if not prompt:
            raise UserError("the prompt is empty; give at least one token")
        self._check_ids(min(prompt), max(prompt))
        for name, value in (("new_tokens", new_tokens), ("temperature", temperature), ("top_k", top_k)):
            if value < 0:
                raise UserError(f"{name}={value} is negative; use 0 or more")

        def logits_at(window: Tensor, position: int) -> Tensor:
            return gather_logits(self._engine.logits(window), position, self.config, self.mesh)

        key = root_key(seed, self.mesh.device)
        return generate(logits_at, self.config, prompt, Sampling(new_tokens, temperature, top_k), key)

    def _check_ids(self, smallest: int, largest: int) -> None:
        if smallest < 0 or largest >= self.config.vocab_size:
            raise UserError(
                f"ids {smallest} to {largest} are not all tokens of this model; use 0 to {self.config.vocab_size - 1}"
            )

    def _gather(self, logits: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """Join the columns of tp ranks, then send them from the stage that has the head to all others."""
        mesh, plan = self.mesh, self.mesh.plan
        if logits is None:
            logits = torch.empty(*shape, self.config.padded_vocab_size, dtype=self.dtype, device=mesh.device)
        elif plan.tp > 1:
            parts = [torch.empty_like(logits, memory_format=torch.contiguous_format) for _ in range(plan.tp)]
            dist.all_gather(parts, logits.contiguous(), group=mesh.tp_group)
            logits = torch.cat(parts, dim=-1)
        if plan.pp > 1:
            last = mesh.place.neighbour(plan.stage_rank(plan.num_stages - 1))
            logits = logits.contiguous()
            dist.broadcast(logits, last, group=mesh.pp_group)
        return logits


def load(
    path: str | PathLike,
    plan: Plan | str | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> Model:
    """Return the model at `path`, whatever wrote it, cut by `plan` over the processes that torchrun started; None:
    tensor parallel over all of them. device: "auto", "cpu" or "cuda"; precision: "auto", "fp32", "bf16" or "fp16".
    Raise UserError where the path, the plan or the device is wrong."""
    for name, value, known in (("device", device, DEVICES), ("precision", precision, PRECISIONS)):
        if value not in known:
            raise UserError(f"{name}={shown(value)} is not known; use {', '.join(known)}")
    process = Process.from_environment()
    given = Plan(tp=process.world) if plan is None else parse_plan(plan, {}) if isinstance(plan, str) else plan
    resolved = given.for_world(process.world)
    if resolved.zero and resolved.dp == 1:
        say(one_replica(resolved.zero), warning=True)
    resolved = resolved.without_idle_zero()
    place = choose_device(device, process.local_rank)
    if process.world > 1 and not dist.is_initialized():
        start_process_group(place, TIMEOUT)
        atexit.register(_leave_group)  # a thread of gloo that outlives its group may abort the process
    mesh = Mesh(resolved, place)
    source = open_source(Path(path), mesh)
    for note in source.notes:
        say(note, warning=True)
    source.config.validate()
    batch = resolved.dp * 2 * resolved.pp  # the fewest samples that every schedule takes
    resolved.validate(source.config, 1, batch)
    settings = Settings(
        model=source.config, plan=resolved, device=place, dtype=choose_dtype(precision, place), micro_batch_size=1,
        global_batch_size=batch,
    )  # fmt: skip
    return Model(source, settings, mesh)


def _leave_group() -> None:
    with suppress(Exception):  # another rank may be gone
        end_process_group()

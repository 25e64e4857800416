"""A recipe: everything that decides a run, as frozen dataclasses. One experiment is one short file in `recipes/`.

Every field can be overridden on the command line, `--optimizer.lr 3e-4`; see `dtgpt.overrides`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch

from dtgpt.batch_size import BatchSizes, check_rampup
from dtgpt.data.prepared import is_prepared
from dtgpt.data.samples import DEFAULT_SPLIT
from dtgpt.errors import UserError
from dtgpt.execution import Settings, choose_compiler, choose_dtype, choose_graphs, wants_compiler
from dtgpt.field_types import PATH, Bounds
from dtgpt.models.config import ModelConfig
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.ops.attention import Backend
from dtgpt.parallel.names import parse_plan
from dtgpt.parallel.plan import Plan, ResolvedPlan
from dtgpt.recipe_checks import LOSS_SCALE, MOST_STEPS, RUN_NAME, check_recipe
from dtgpt.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: Annotated[
        str | None,
        "text file (.txt or .jsonl), prefix of a prepared .bin and .idx, or weights and prefixes as in '0.3 A 0.7 B'; "
        "none: a text included in Python",
        PATH,
    ] = None
    valid_path: Annotated[str | None, "validation dataset; split is then ignored, each path used entirely", PATH] = None
    test_path: Annotated[str | None, "test dataset, evaluated at the end; split is then ignored", PATH] = None
    split: Annotated[str, "relative sizes of the training, validation and test parts of prepared data"] = DEFAULT_SPLIT
    train_samples: Annotated[int | None, "samples to build the shuffle index for; none: the run's", Bounds(1)] = None
    json_key: Annotated[str, "key of the text in each line of a .jsonl file"] = "text"
    tokenizer: Annotated[
        Literal["auto", "gpt2", "bpe", "bytes", "char", "ids"],
        "auto: the tokenizer saved with prepared data; for a text file, gpt2 if the model has its 50257 tokens, else a "
        "bpe trained on the text; char: characters of the text, or of nanoGPT's meta.pkl; ids: no tokenizer, and so no "
        "bits/byte and no generated texts",
    ] = "auto"
    tokenizer_file: Annotated[str | None, "tokenizer of prepared data, as for dtgpt prepare --tokenizer", PATH] = None
    vocab_file: Annotated[str | None, "vocab.json of gpt2, with merge_file; none: tiktoken's own", PATH] = None
    merge_file: Annotated[str | None, "merges.txt of gpt2, with vocab_file", PATH] = None
    bpe_vocab_size: Annotated[int, "number of tokens of a trained BPE, including <|endoftext|>"] = 1024
    reset_position_ids: Annotated[bool, "count positions from 0 in each document"] = False
    reset_attention_mask: Annotated[bool, "let each token attend to its own document only"] = False
    eod_mask_loss: Annotated[bool, "exclude the token after an end of text from the loss"] = False
    held_out: Annotated[float, "fraction of the text kept for validation", Bounds(0, below=1)] = 0.05


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019) with fp32 master weights; no decay on biases and LayerNorms."""

    lr: Annotated[float, "peak learning rate", Bounds(above=0)]
    min_lr: Annotated[float, "learning rate at the end of the schedule", Bounds(0)] = 0.0
    schedule: Annotated[Literal["cosine", "linear", "constant", "wsd"], "learning rate after the warmup"] = "cosine"
    warmup: Annotated[float, "number of warmup steps; below 1: a fraction of the schedule", Bounds(0)] = 0.01
    decay_steps: Annotated[int | None, "step at which the schedule reaches min_lr; none: the last", Bounds(1)] = None
    decay_samples: Annotated[
        int | None,
        "sample at which the schedule reaches min_lr; the schedule then counts samples, not steps",
        Bounds(1),
    ] = None
    warmup_samples: Annotated[int | None, "number of warmup samples, for a schedule that counts them", Bounds(0)] = None
    wsd_decay: Annotated[float, "final fraction of the schedule, in which wsd decays", Bounds(above=0, at_most=1)] = 0.2
    weight_decay: Annotated[float, "decoupled weight decay of matrices", Bounds(0)] = 0.1
    beta1: Annotated[float, "decay rate of the first moment", Bounds(0, below=1)] = 0.9
    beta2: Annotated[float, "decay rate of the second moment", Bounds(0, below=1)] = 0.95
    eps: Annotated[float, "added to the square root of the second moment", Bounds(above=0)] = 1e-8
    clip: Annotated[float, "largest global norm of the gradient; 0: no clipping", Bounds(0)] = 1.0


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic scaling of the loss in fp16 (Micikevicius et al. 2018), with Megatron-LM's rules and defaults."""

    initial: Annotated[float, "initial loss scale", LOSS_SCALE] = 2.0**32
    window: Annotated[int, "number of steps without overflow before the scale doubles", Bounds(1)] = 1000
    hysteresis: Annotated[int, "number of overflows before the scale halves", Bounds(1)] = 2
    minimum: Annotated[float, "smallest loss scale", LOSS_SCALE] = 1.0


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    interval: Annotated[int, "number of steps between progress lines", Bounds(1)] = 10
    eval_interval: Annotated[int, "number of steps between held-out evaluations; 0: at the end only", Bounds(0)] = 250
    eval_samples: Annotated[int, "largest number of held-out samples per evaluation", Bounds(1)] = 512
    sample_interval: Annotated[int, "number of steps between generated texts; 0: at the end only", Bounds(0)] = 0
    sample_tokens: Annotated[int, "number of tokens to generate; 0: no generated texts", Bounds(0)] = 200
    prompt: Annotated[str, "beginning of generated texts; empty: the model begins a document"] = ""
    temperature: Annotated[float, "sampling temperature; 0: always the likeliest token", Bounds(0)] = 0.8
    top_k: Annotated[int, "number of likeliest tokens to choose from; 0: all", Bounds(0)] = 50
    wandb: Annotated[Literal["off", "online", "offline"], "send metrics to Weights & Biases"] = "off"
    wandb_project: Annotated[str, "project of Weights & Biases"] = "dtgpt"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    interval: Annotated[int, "number of steps between checkpoints; 0: at the end only", Bounds(0)] = 1000
    keep_last: Annotated[int, "number of newest checkpoints to keep; 0: all", Bounds(0)] = 2
    keep_every: Annotated[int, "keep every checkpoint whose step is a multiple of this; 0: none", Bounds(0)] = 0
    background: Annotated[bool, "write from a copy in host memory while training continues; off: training waits"] = True


@dataclass(frozen=True, kw_only=True)
class Recipe:
    headings: ClassVar[dict[str, str]] = {  # in `--help`, from the named field on
        "name": "experiment", "plan": "execution", "runs": "run folder",
    }  # fmt: skip

    name: Annotated[str, "name of the experiment; its runs are folders NAME-001, NAME-002, ...", RUN_NAME]
    model: ModelConfig
    optimizer: OptimizerConfig
    micro_batch_size: Annotated[int, "number of samples in a forward and backward pass on one device", Bounds(1)]
    global_batch_size: Annotated[int, "number of samples in an optimizer step", Bounds(1)]
    steps: Annotated[int | None, "number of optimizer steps; none: by train_samples", Bounds(1, MOST_STEPS)] = None
    train_samples: Annotated[int | None, "number of samples to train on, in place of steps", Bounds(1)] = None
    rampup_batch_size: Annotated[
        str | None,
        "'START INCREMENT SAMPLES': begin with START samples a step and add INCREMENT at equal intervals, to reach "
        "global_batch_size after SAMPLES; none: no ramp-up",
    ] = None
    seed: Annotated[int, "seed of weights, order of samples, dropout masks and generated texts", Bounds(0)] = 1234
    plan: Annotated[str, "parallel plan, such as dp4, zero3, tp2_sp or tp2_pp2; dp: a replica for each process"] = "dp"
    plans: Mapping[str, Plan] = field(default_factory=dict)  # user-defined plans by the names that `plan` can have
    device: Annotated[Literal["auto", "cpu", "cuda"], "device; auto: cuda if there is one"] = "auto"
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        "type of weights and activations, with fp32 master weights; auto: bf16 on cuda, else fp32",
    ] = "auto"
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    attention: Annotated[Backend, "implementation of the attention core; auto: the fastest"] = "auto"
    recompute: Annotated[
        Literal["none", "selective", "full"],
        "recompute activations in backward: of the attention core (selective) or of whole blocks (full)",
    ] = "none"
    compile: Annotated[
        Literal["auto", "on", "off"], "use torch.compile for each block; auto: on cuda if graph is off"
    ] = "auto"
    graph: Annotated[Literal["auto", "on", "off"], "replay steps as CUDA graphs; auto: on cuda"] = "auto"
    timeout: Annotated[float, "seconds that a process waits for another before the run ends", Bounds(above=0)] = 600.0
    runs: Annotated[str, "folder that contains the run folders", PATH] = "runs"
    resume: Annotated[
        str | None, "run folder or checkpoint to resume; auto: the newest run of this name, or a new one", PATH
    ] = None
    init_from: Annotated[
        str | None, "initial weights of a new run: a run, a checkpoint, or any model that dtgpt convert reads", PATH
    ] = None
    exit_after: Annotated[float | None, "minutes until the run saves and ends; none: no limit", Bounds(above=0)] = None
    exit_interval: Annotated[
        int | None, "save and end after the next step that is a multiple of this; 0 or none: do not", Bounds(0)
    ] = None
    data: DataConfig = field(default_factory=DataConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def counts_samples(self) -> bool:
        """Whether the learning rate is a function of the samples seen, and not of the steps taken."""
        own = self.optimizer
        return own.decay_samples is not None or (self.train_samples is not None and own.decay_steps is None)

    @property
    def schedule(self) -> Schedule:
        """The learning rate, with the ends of warmup and decay in the unit that it counts."""
        own = self.optimizer
        if self.counts_samples:
            end = self.train_samples if own.decay_samples is None else own.decay_samples
        else:
            end = self.counted().steps if own.decay_steps is None else own.decay_steps
        warmup = own.warmup if own.warmup_samples is None else own.warmup_samples
        return Schedule(
            shape=own.schedule,
            lr=own.lr,
            min_lr=own.min_lr,
            wsd_decay=own.wsd_decay,
            warmup=round(warmup * end) if warmup < 1 else round(warmup),
            end=end,
            counts_samples=self.counts_samples,
        )

    def batch_sizes(self, first_step: int = 0, first_sample: int = 0) -> BatchSizes:
        """Return the batch size of every step of a run that begins with `first_step`, after `first_sample` samples."""
        return BatchSizes(self.global_batch_size, self.rampup_batch_size, first_step, first_sample)

    def counted(self, first_step: int = 0, first_sample: int = 0) -> "Recipe":
        """Return the same run with `steps` in place of `train_samples`: as many whole steps as the samples fill. A run
        that goes on does so with `first_step`, after `first_sample` samples."""
        if self.train_samples is None:
            return self
        steps, data = self.batch_sizes(first_step, first_sample).steps_within(self.train_samples), self.data
        decay = self.schedule.end if self.counts_samples else None
        if is_prepared(data.path) and data.train_samples is None:  # whose order depends on how many are asked for
            data = replace(data, train_samples=self.train_samples)
        optimizer = replace(self.optimizer, decay_samples=decay)
        return replace(self, steps=steps, train_samples=None, data=data, optimizer=optimizer)

    def named_plan(self) -> Plan:
        """Return the plan that `plan` names, with dp as it says."""
        return parse_plan(self.plan, self.plans)

    def plan_for(self, world: int, started: bool = True) -> ResolvedPlan:
        """Return the plan for `world` processes, checked against the model and the batch; raises UserError, one
        sentence. started: as of `Plan.for_world`."""
        plan = self.named_plan().for_world(world, started).without_idle_zero()
        plan.validate(self.model, self.micro_batch_size, self.global_batch_size)
        if self.rampup_batch_size is not None:
            whole, micro = self.global_batch_size, self.micro_batch_size
            check_rampup(self.rampup_batch_size, whole, micro, plan, partial(plan.can_split, self.model))
        if self.compile == "on" and plan.splits_backward:
            raise UserError(
                f"compile=on, but the schedule {plan.schedule} cuts the backward pass of each block in two, which "
                "torch.compile cannot; use --compile off or another schedule"
            )
        return plan

    def settings(self, plan: ResolvedPlan, device: torch.device, here: bool = True) -> Settings:
        """Return what the model is built and run with under `plan` on `device`. here: False where this machine does not
        run it, so that what is installed does not matter."""
        graphs = choose_graphs(self.graph, device)
        compiler = choose_compiler if here else wants_compiler
        return Settings(
            model=self.model,
            plan=plan,
            device=device,
            dtype=choose_dtype(self.precision, device),
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            attention=self.attention,
            recompute=self.recompute,
            compile=compiler(self.compile, device, graphs, plan),
            graphs=graphs,
            masks_documents=self.data.reset_attention_mask,
        )

    def with_tokenizer(self) -> "Recipe":
        """Return the same run with the tokenizer that `auto` means here, as `recipe.json` keeps it."""
        data = self.data
        if data.tokenizer != "auto" or data.tokenizer_file is not None:
            return self
        tokenizer = "gpt2" if data.path and self.model.vocab_size >= GPT2_124M.vocab_size else "bpe"
        if is_prepared(data.path):  # what lies beside the token files decides, when they are opened
            tokenizer = "gpt2" if data.vocab_file else "auto"
        return replace(self, data=replace(data, tokenizer=tokenizer))

    def resolved(self) -> "Recipe":
        """Return the same run with all defaults that depend on other fields written out."""
        recipe = self.counted().with_tokenizer()
        if recipe.counts_samples:
            return recipe
        return replace(recipe, optimizer=replace(recipe.optimizer, decay_steps=recipe.schedule.end))

    def validate(self) -> None:
        """Raise UserError, one sentence, on the first value that cannot be trained with."""
        check_recipe(self)

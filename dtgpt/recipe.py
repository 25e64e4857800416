"""A recipe: everything that decides a run, as frozen dataclasses. One experiment is one short file in `recipes/`.

Every field can be overridden on the command line, `--optimizer.lr 3e-4`; see `dtgpt.overrides`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from dtgpt.data.prepared import is_prepared
from dtgpt.data.samples import DEFAULT_SPLIT
from dtgpt.errors import UserError
from dtgpt.model import GPT2_124M, GPTConfig
from dtgpt.ops.attention import Backend
from dtgpt.parallel.names import parse_plan
from dtgpt.parallel.plan import Plan
from dtgpt.recipe_checks import check_recipe


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    path: Annotated[
        str | None,
        ".txt or .jsonl file; prefix of a prepared .bin and .idx, or weights and prefixes: '0.3 A 0.7 B'; none: the "
        "text that Python carries",
    ] = None
    valid_path: Annotated[str | None, "prepared data for validation; path and this are then used whole"] = None
    test_path: Annotated[str | None, "prepared data for a loss at the end; path and this are then used whole"] = None
    split: Annotated[str, "weights of the training, validation and test parts of prepared data"] = DEFAULT_SPLIT
    train_samples: Annotated[
        int | None, "for how many the order of prepared data is made; none: steps x global_batch_size"
    ] = None
    json_key: Annotated[str, "field of a .jsonl line that holds the text"] = "text"
    tokenizer: Annotated[
        Literal["auto", "gpt2", "bpe", "bytes", "char", "ids"],
        "auto: what lies beside prepared data, else gpt2 for a path where the model has its 50257 tokens, else a bpe "
        "trained on the text; char: characters of the text, or of nanoGPT's meta.pkl; ids: none, so neither bits/byte "
        "nor generated texts",
    ] = "auto"
    tokenizer_file: Annotated[str | None, "of prepared data: what prepare --tokenizer took"] = None
    vocab_file: Annotated[str | None, "vocab.json for gpt2, with merge_file; none: as tiktoken carries it"] = None
    merge_file: Annotated[str | None, "merges.txt for gpt2, with vocab_file"] = None
    bpe_vocab_size: Annotated[int, "tokens of a trained BPE, <|endoftext|> included"] = 1024
    reset_position_ids: Annotated[Literal["on", "off"], "positions begin at 0 in every document"] = "off"
    reset_attention_mask: Annotated[Literal["on", "off"], "tokens see no other document than theirs"] = "off"
    eod_mask_loss: Annotated[Literal["on", "off"], "what follows an end of text need not be predicted"] = "off"
    held_out: Annotated[float, "share of the text kept for validation, in [0, 1)"] = 0.05


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019) with fp32 master weights; no decay on biases and LayerNorms."""

    lr: Annotated[float, "peak learning rate"]
    min_lr: Annotated[float, "learning rate at the end of the schedule"] = 0.0
    schedule: Annotated[Literal["cosine", "linear", "constant", "wsd"], "shape after the warmup"] = "cosine"
    warmup: Annotated[float, "warmup steps; below 1, a share of decay_steps"] = 0.01
    decay_steps: Annotated[int | None, "step at which min_lr is reached; none: steps"] = None
    wsd_decay: Annotated[float, "share of decay_steps over which wsd falls, linearly"] = 0.2
    weight_decay: Annotated[float, "decoupled weight decay"] = 0.1
    beta1: Annotated[float, "decay of the first moment"] = 0.9
    beta2: Annotated[float, "decay of the second moment"] = 0.95
    eps: Annotated[float, "added to the root of the second moment"] = 1e-8
    clip: Annotated[float, "largest global gradient norm; 0: no clipping"] = 1.0


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic scaling of the loss in fp16 (Micikevicius et al. 2018), with Megatron-LM's rules and defaults."""

    initial: Annotated[float, "first factor"] = 2.0**32
    window: Annotated[int, "steps without an overflow before the factor doubles"] = 1000
    hysteresis: Annotated[int, "overflows before the factor halves"] = 2
    minimum: Annotated[float, "smallest factor"] = 1.0


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    interval: Annotated[int, "steps between progress lines"] = 10
    eval_interval: Annotated[int, "steps between evaluations on held-out text; 0: at the end only"] = 250
    eval_samples: Annotated[int, "held-out windows per evaluation, at most"] = 512
    sample_interval: Annotated[int, "steps between generated samples; 0: at the end only"] = 0
    sample_tokens: Annotated[int, "tokens of a generated sample; 0: no samples"] = 200
    prompt: Annotated[str, "beginning of the samples; empty: the model begins a document"] = ""
    temperature: Annotated[float, "of the samples; 0: always the likeliest token"] = 0.8
    top_k: Annotated[int, "samples choose among this many likeliest tokens; 0: all"] = 50
    wandb: Annotated[Literal["off", "online", "offline"], "Weights & Biases (extra `wandb`)"] = "off"
    wandb_project: Annotated[str, "project name there"] = "dtgpt"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    interval: Annotated[int, "steps between checkpoints; 0: at the end only"] = 1000
    keep_last: Annotated[int, "newest checkpoints kept; 0: all"] = 2
    keep_every: Annotated[int, "checkpoints of steps that this divides are kept for ever; 0: none"] = 0
    background: Annotated[
        Literal["on", "off"], "written beside training, from a copy in the host's memory; off: training waits"
    ] = "on"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: Annotated[str, "names the run folder"]
    model: GPTConfig
    optimizer: OptimizerConfig
    steps: Annotated[int, "optimizer steps"]
    micro_batch_size: Annotated[int, "samples per forward and backward pass on a device"]
    global_batch_size: Annotated[int, "samples per optimizer step"]
    rampup_batch_size: Annotated[
        str | None, "'START INCREMENT SAMPLES': fewer samples a step at first; none: global_batch_size from the start"
    ] = None
    plan: Annotated[str, "parallel plan, such as dp4, zero3, tp2_sp or tp2_pp2; dp: a replica on each process"] = "dp"
    plans: Mapping[str, Plan] = field(default_factory=dict)  # more plans, by names that `plan` may take
    seed: Annotated[int, "of weights, batches, dropout masks and samples"] = 1234
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: cuda where there is one"] = "auto"
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        "of weights and activations, masters stay fp32; auto: bf16 on cuda, else fp32",
    ] = "auto"
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    attention: Annotated[Backend, "back end of the attention core; auto: the fastest"] = "auto"
    recompute: Annotated[
        Literal["none", "selective", "full"], "activations computed again in backward: of attention's core, of blocks"
    ] = "none"
    compile: Annotated[
        Literal["auto", "on", "off"], "torch.compile of each block; auto: on cuda where graph is off"
    ] = "auto"
    graph: Annotated[Literal["auto", "on", "off"], "steps replayed as CUDA graphs; auto: on cuda"] = "auto"
    timeout: Annotated[float, "seconds after which a rank that waits for others ends the run"] = 600.0
    runs: Annotated[str, "folder in which the run folder is made"] = "runs"
    resume: Annotated[
        str | None, "run folder or checkpoint to go on with; auto: the newest run of this name, or a new one"
    ] = None
    init_from: Annotated[
        str | None, "weights that a new run begins with: run, checkpoint, Hugging Face folder, ... (see dtgpt convert)"
    ] = None
    exit_after: Annotated[float | None, "minutes after which the run ends with a checkpoint; none: no limit"] = None
    exit_interval: Annotated[
        int | None, "end the run with a checkpoint after a step that this divides; 0 or none: no such end"
    ] = None
    data: DataConfig = field(default_factory=DataConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def decay_steps(self) -> int:
        return self.steps if self.optimizer.decay_steps is None else self.optimizer.decay_steps

    @property
    def warmup_steps(self) -> int:
        warmup = self.optimizer.warmup
        return round(warmup * self.decay_steps) if warmup < 1 else round(warmup)

    def captures(self, device_type: str) -> bool:
        """Whether a step on this kind of device is replayed as CUDA graphs."""
        return device_type == "cuda" and self.graph != "off"

    def micro_batches(self, dp: int) -> int:
        """Gradient accumulation: forward and backward passes of each of `dp` replicas per optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * dp)

    def named_plan(self) -> Plan:
        """The plan that `plan` names, with dp as it says."""
        return parse_plan(self.plan, self.plans)

    def plan_for(self, world: int, started: bool = True) -> Plan:
        """The plan for `world` processes, checked against the model and the batch; raises UserError, one sentence.
        started: as of `Plan.for_world`."""
        plan = self.named_plan().for_world(world, started)
        plan.validate(self.model, self.micro_batch_size, self.global_batch_size)
        if self.compile == "on" and plan.splits_backward:
            raise UserError(
                f"compile=on, but the schedule {plan.schedule} cuts the backward pass of each block in two, which "
                "torch.compile cannot; use --compile off or another schedule"
            )
        return plan

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
        recipe = self.with_tokenizer()
        return replace(recipe, optimizer=replace(recipe.optimizer, decay_steps=recipe.decay_steps))

    def validate(self) -> None:
        """Raise UserError, one sentence, on the first value that cannot be trained with."""
        check_recipe(self)

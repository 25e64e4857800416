"""Options of Megatron-LM's pretrain_gpt.py, each with its equivalent here, as docs/megatron.md lists them.

A key holds one or several options, each a name and a placeholder for its value, in capitals, or one value:
`normalization RMSNorm` is the option with that value. `{N}` in an answer is the value.
Answers that begin with `--` are options of a recipe; others say what dtgpt does instead.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial

LEAVE = "leave it out"
GPT2 = "the model always has GPT-2's architecture"
LLAMA = "the model always has LLaMA's architecture"
TO_LLAMA = "it belongs to LLaMA, Mistral and Qwen3; begin with a recipe of one, such as recipes/llama_tiny.py"
TO_GPT2 = "it belongs to GPT-2; begin with a recipe of one, such as recipes/gpt2_tiny.py"
OPTIONS = {
    "Model, where it is a GPT-2": {
        "layernorm-epsilon E, norm-epsilon E": "--model.layer_norm_eps {E}",
        "ffn-hidden-size N": f"the MLP is always 4 x hidden_size wide; {LEAVE}",
        "kv-channels N": f"a head is always hidden_size / num_heads wide; {LEAVE}",
        "position-embedding-type learned_absolute, openai-gelu": f"{GPT2}; {LEAVE}",
        "normalization LayerNorm": f"norms are always LayerNorm; {LEAVE}",
        "position-embedding-type rope, use-rotary-position-embeddings, no-position-embedding, rotary-*, "
        "use-rope-scaling, rope-scaling-factor X, normalization RMSNorm, swiglu, disable-bias-linear, "
        "untie-embeddings-and-output-weights, qk-layernorm, group-query-attention, num-query-groups N": TO_LLAMA,
    },
    "Model, where it is a LLaMA, a Mistral or a Qwen3": {
        "layernorm-epsilon E, norm-epsilon E": "--model.norm_eps {E}",
        "ffn-hidden-size N": "--model.ffn_hidden_size {N}",
        "kv-channels N": "--model.head_dim {N}",
        "group-query-attention": f"queries always share num_kv_heads groups; {LEAVE}",
        "num-query-groups N": "--model.num_kv_heads {N}",
        "qk-layernorm": "--model.qk_norm on",
        "untie-embeddings-and-output-weights": "--model.tied off",
        "rotary-base N": "--model.rope_theta {N}",
        "use-rope-scaling": "--model.rope_factor 8",
        "rope-scaling-factor X": "--model.rope_factor {X}",
        "rotary-percent 1, rotary-percent 1.0, position-embedding-type rope, use-rotary-position-embeddings, "
        "no-position-embedding, normalization RMSNorm, swiglu, disable-bias-linear": f"{LLAMA}; {LEAVE}",
        "rotary-interleaved": "heads always rotate in halves, and weights of such a model are reordered when they are "
        f"read; {LEAVE}",
        "rotary-*, no-rope-freq": "all columns of a head always rotate, by positions as they are; others are not "
        "available",
        "position-embedding-type learned_absolute, normalization LayerNorm, openai-gelu": TO_GPT2,
    },
    "Model": {
        "num-layers N": "--model.num_layers {N}",
        "hidden-size N": "--model.hidden_size {N}",
        "num-attention-heads N": "--model.num_heads {N}",
        "seq-length N, encoder-seq-length N": "--seq_length {N}",
        "max-position-embeddings N": "--model.seq_length {N}",
        "attention-dropout P, hidden-dropout P": "--model.dropout {P}, for attention and hidden states alike",
        "init-method-std S": "--model.init_std {S}",
        "make-vocab-size-divisible-by N": "the vocabulary is padded to a multiple of 128 under every plan; set "
        "--model.vocab_size",
        "vocab-size N": "--model.vocab_size {N}",
        "vocab-extra-ids N": "raise --model.vocab_size instead",
        "fp32-residual-connection": "the residual stream always has the type of --precision",
        "init-method-xavier-uniform": "initial weights always have a normal distribution with --model.init_std",
        "spec SPEC, use-mcore-models, use-legacy-models, transformer-impl IMPL": "there is one implementation of each "
        f"model; {LEAVE}",
        "position-embedding-type TYPE, squared-relu, quick-geglu, apply-layernorm-1p, qk-l2-norm, "
        "apply-residual-connection-post-layernorm, add-qkv-bias, mtp-*": "no model here has it; it is not available",
        "multi-latent-attention, window-size W": "each position always sees all earlier ones, by plain or grouped "
        "queries; other attention is not available",
        "num-experts N, moe-*, expert-*": "models are always dense; experts are not available",
    },
    "Batch and length": {
        "micro-batch-size N, batch-size N": "--micro_batch_size {N}",
        "global-batch-size N": "--global_batch_size {N}",
        "rampup-batch-size START INCREMENT SAMPLES": "--rampup_batch_size 'START INCREMENT SAMPLES', in quotes",
        "step-batch-size-schedule SCHEDULE": "the batch size grows with --rampup_batch_size 'START INCREMENT SAMPLES'",
        "train-iters N": "--steps {N}",
        "train-samples N": "--train_samples {N} --steps none",
        "exit-interval N": "--exit_interval {N}",
        "exit-duration-in-mins N": "--exit_after {N}",
        "exit-signal-handler": f"SIGTERM always ends a run with a checkpoint; {LEAVE}",
        "skip-train": "a run of evaluation only is not available",
    },
    "Optimizer": {
        "lr X": "--optimizer.lr {X}",
        "min-lr X": "--optimizer.min_lr {X}",
        "lr-decay-style wsd": "--optimizer.schedule wsd",
        "lr-decay-style inverse-square-root": "choose --optimizer.schedule cosine, linear, constant or wsd",
        "lr-decay-style STYLE": "--optimizer.schedule {STYLE}",
        "lr-decay-iters N": "--optimizer.decay_steps {N}",
        "lr-decay-samples N": "--optimizer.decay_samples {N}",
        "lr-warmup-fraction X, lr-warmup-iters X": "--optimizer.warmup {X}",
        "lr-warmup-samples N": "--optimizer.warmup_samples {N}",
        "warmup N": "--optimizer.warmup F, where F is a fraction of the schedule, or a number of steps",
        "lr-warmup-init X": f"the warmup always begins at 0; {LEAVE}",
        "lr-wsd-decay-style STYLE": f"wsd always decays linearly; {LEAVE}",
        "lr-wsd-decay-iters N, lr-wsd-decay-samples N": "--optimizer.wsd_decay F, where F is {N} / the whole schedule",
        "weight-decay X": "--optimizer.weight_decay {X}",
        "start-weight-decay X, end-weight-decay X, weight-decay-incr-style STYLE": "weight decay is always constant: "
        "--optimizer.weight_decay X",
        "adam-beta1 X": "--optimizer.beta1 {X}",
        "adam-beta2 X": "--optimizer.beta2 {X}",
        "adam-eps X": "--optimizer.eps {X}",
        "clip-grad X": "--optimizer.clip {X}",
        "optimizer NAME, sgd-momentum X, muon-*": f"the optimizer is always AdamW; {LEAVE}",
        "override-opt-param-scheduler, use-checkpoint-opt-param-scheduler": "the schedule of the recipe is always "
        f"used; {LEAVE}",
    },
    "Precision": {
        "fp16": "--precision fp16",
        "bf16": "--precision bf16",
        "loss-scale X": "the loss scale is always dynamic: --loss_scale.initial {X} starts with this value",
        "initial-loss-scale X": "--loss_scale.initial {X}",
        "min-loss-scale X": "--loss_scale.minimum {X}",
        "loss-scale-window N": "--loss_scale.window {N}",
        "hysteresis N": "--loss_scale.hysteresis {N}",
        "attention-softmax-in-fp32, accumulate-allreduce-grads-in-fp32, embedding-weights-in-fp32, "
        "grad-reduce-in-bf16, fp16-lm-cross-entropy, use-precision-aware-optimizer": "master weights, sums of "
        f"gradients, softmax and loss are always fp32; {LEAVE}",
        "apply-query-key-layer-scaling, no-query-key-layer-scaling": "scores are never scaled by the layer's number; "
        f"{LEAVE}",
        "fp8-format FORMAT, fp8-e4m3, fp8-hybrid": "--precision fp8, with e4m3 for inputs, weights and gradients",
        "fp8-recipe NAME": "--precision fp8, whose scales always follow from earlier steps",
        "fp8-amax-history-len N, fp8-amax-compute-algo NAME, fp8-margin N, fp8-interval N": "--precision fp8, whose "
        "scales always follow from the largest values of the last 16 steps",
        "first-last-layers-bf16, num-layers-at-start-in-bf16 N, num-layers-at-end-in-bf16 N, no-fp8-wgrad, "
        "fp8-param-gather": "fp8 always has all products of all blocks, and never the weights themselves; use "
        "--precision fp8 or bf16",
        "fp8-*, fp4-*": "this choice of 8-bit or 4-bit floats is not available; use --precision fp8 or bf16",
        "te-*": "there is one implementation of the model, without Transformer Engine",
    },
    "Parallelism": {
        "tensor-model-parallel-size N, model-parallel-size N": "--plan tp{N}; parts of a plan are joined by '_', as in "
        "tp2_pp2",
        "pipeline-model-parallel-size N": "--plan pp{N}; parts of a plan are joined by '_', as in tp2_pp2",
        "sequence-parallel": "add sp to the plan, as in --plan tp2_sp",
        "num-layers-per-virtual-pipeline-stage N": "add interleavedV to the plan, V being num_layers / pp / {N}, as in "
        "--plan pp2_interleaved2",
        "num-virtual-stages-per-pipeline-rank N": "add interleaved{N} to the plan, as in --plan pp2_interleaved{N}",
        "account-for-embedding-in-pipeline-split, account-for-loss-in-pipeline-split": "stages are always balanced by "
        f"cost; {LEAVE}",
        "pipeline-model-parallel-layout LAYOUT, decoder-first-pipeline-num-layers N, "
        "decoder-last-pipeline-num-layers N, pipeline-model-parallel-split-rank N, "
        "standalone-embedding-stage": "stages are balanced by cost, or cut by Plan(blocks_per_stage=...) in the recipe",
        "context-parallel-size 1": f"sequences are never split over ranks of their own; {LEAVE}",
        "context-parallel-size N": "context parallelism is not available; --plan tp{N}_sp splits activations along the "
        "sequence",
        "use-distributed-optimizer": "add zero1 to the plan, as in --plan zero1",
        "use-torch-fsdp2, use-megatron-fsdp, data-parallel-sharding-strategy NAME": "add zero1, zero2 or zero3 to the "
        "plan, as in --plan zero3",
        "num-distributed-optimizer-instances N": "ZeRO always shards over all replicas",
        "distributed-backend NAME": f"GPUs always use NCCL and CPUs gloo; {LEAVE}",
        "distributed-timeout-minutes N": "--timeout S, where S is {N} x 60",
        "overlap-grad-reduce, overlap-param-gather*, overlap-p2p-communication, "
        "no-overlap-p2p-communication": f"communication always overlaps with computation; {LEAVE}",
        "tp-comm-overlap*": "leave it out; --plan tp2_sp reduces the communication of tensor parallelism",
        "no-async-tensor-model-parallel-allreduce, no-scatter-gather-tensors-in-pipeline, use-ring-exchange-p2p, "
        "no-contiguous-buffers-in-local-ddp, lazy-mpu-init, ddp-*": f"messages follow from the plan; {LEAVE}",
        "use-cpu-initialization, perform-initialization, no-initialization, data-parallel-random-init": "initial "
        f"weights never depend on the plan or the device; {LEAVE}",
        "local-rank N": f"torchrun sets the rank of each process; {LEAVE}",
        "nproc-per-node N, nnodes N, node-rank N, master-addr HOST, master-port N": "it belongs to torchrun, before "
        "the recipe: torchrun --nproc-per-node N RECIPE.py",
    },
    "Memory and speed": {
        "recompute-activations": "--recompute selective",
        "checkpoint-activations": "--recompute full",
        "recompute-granularity KIND": "--recompute {KIND}",
        "recompute-method METHOD, recompute-num-layers N": f"--recompute full recomputes every block; {LEAVE}",
        "recompute-modules NAMES": "--recompute selective, which recomputes the attention core",
        "distribute-saved-activations": "add sp to the plan, as in --plan tp2_sp, which splits saved activations",
        "cpu-offloading*": "activations always stay on the device; use --recompute full",
        "optimizer-cpu-offload": "the optimizer's state always stays on the device; add zero1 to the plan",
        "use-flash-attn, attention-backend flash": "--attention flash",
        "attention-backend auto": "--attention auto",
        "attention-backend fused": "--attention fused_softmax",
        "attention-backend NAME, no-masked-softmax-fusion": "--attention explicit",
        "no-bias-gelu-fusion, no-bias-dropout-fusion, no-persist-layer-norm, no-gradient-accumulation-fusion, "
        "cross-entropy-loss-fusion, cross-entropy-fusion-impl NAME": "operations are always fused, and give the same "
        f"numbers up to rounding; {LEAVE}",
        "*cuda-graph*": "--graph on",
        "empty-unused-memory-level N, manual-gc*": LEAVE,
    },
    "Data": {
        "data-path PATHS, train-data-path PATHS": "--data.path {PATHS}",
        "valid-data-path PATHS": "--data.valid_path {PATHS}",
        "test-data-path PATHS": "--data.test_path {PATHS}",
        "data-args-path FILE, per-split-data-args-path FILE": "write its words into --data.path, in quotes, or into "
        "--data.valid_path and --data.test_path",
        "split WEIGHTS": "--data.split {WEIGHTS}",
        "vocab-file FILE": "--data.vocab_file {FILE}, with --data.merge_file",
        "merge-file FILE": "--data.merge_file {FILE}, with --data.vocab_file",
        "tokenizer-type GPT2BPETokenizer": "--data.tokenizer gpt2",
        "tokenizer-type TYPE": "--data.tokenizer_file FILE, the tokenizer that the data were prepared with",
        "tokenizer-model FILE": "--data.tokenizer_file {FILE}",
        "reset-position-ids": "--data.reset_position_ids on",
        "reset-attention-mask": "--data.reset_attention_mask on",
        "eod-mask-loss": "--data.eod_mask_loss on",
        "data-cache-path DIR": "the environment variable DTGPT_CACHE={DIR}",
        "data-impl KIND, mmap-warmup, no-mmap-bin-files": f"prepared files are always memory-mapped; {LEAVE}",
        "dataloader-type KIND, num-workers N, no-create-attention-mask-in-dataloader": "samples are always read in "
        f"order of their ids, without masks, in the background; {LEAVE}",
        "mock-data": "leave --data.path out to train on a text included in Python",
        "fim-*": "fill-in-the-middle is not available",
    },
    "Checkpoints": {
        "save DIR": "--runs {DIR}, in which each run creates its own folder",
        "load DIR": "use --resume RUN to resume a run, or --init_from {DIR} to start from weights of Megatron-LM, or "
        "--resume {DIR} to go on with its run",
        "save-interval N": "--checkpoint.interval {N}",
        "save-retain-interval N": "--checkpoint.keep_every {N}",
        "finetune, no-load-optim": "--init_from MODEL, which starts a new run from the weights only",
        "pretrained-checkpoint DIR": "--init_from {DIR}",
        "no-load-rng, no-save-rng": f"random numbers follow from --seed, step and sample; {LEAVE}",
        "no-save-optim": "checkpoints are always complete; dtgpt convert RUN TARGET writes the weights only",
        "use-checkpoint-args": "a run keeps its recipe in recipe.json",
        "exit-on-missing-checkpoint": f"a run that cannot be resumed is always an error; {LEAVE}",
        "ckpt-step N": "--resume RUN/checkpoints/step_N, with 8 digits",
        "async-save": "--checkpoint.background on",
        "ckpt-*, use-dist-ckpt, dist-ckpt-*, auto-detect-ckpt-format": f"checkpoints always fit every plan; {LEAVE}",
        "non-persistent-*": "--checkpoint.interval N with --checkpoint.keep_last N",
        "adlr-autoresume*": "--resume auto resumes the newest run of the recipe's name",
    },
    "Log and evaluation": {
        "log-interval N": "--log.interval {N}",
        "eval-interval N": "--log.eval_interval {N}",
        "eval-iters N": "--log.eval_samples S, where S is {N} x global_batch_size",
        "eval-micro-batch-size N": "evaluation always uses the micro-batch size of training",
        "tensorboard-dir DIR": "--log.tensorboard on, which writes the same tags into RUN/tensorboard",
        "tensorboard-log-interval N": "--log.interval {N}, with --log.tensorboard on",
        "tensorboard-queue-size N": f"events are always written at once; {LEAVE}",
        "log-timers-to-tensorboard": "--log.timers on, with --log.tensorboard on",
        "log-*-to-tensorboard, no-log-*-to-tensorboard, log-throughput": "--log.tensorboard on, which writes loss, "
        "perplexity, learning rate, batch size, loss scale, gradient norm, memory and throughput",
        "wandb-project NAME": "--log.wandb online --log.wandb_project {NAME}",
        "wandb-exp-name NAME": "--log.wandb online --name {NAME}",
        "wandb-*": "--log.wandb online",
        "log-*, no-log-*": "metrics.jsonl always holds loss, gradient norm, rates and memory",
        "timing-log-level 0": "progress lines always show tokens per second; leave it out",
        "timing-log-level N": "--log.timers on",
        "timing-log-option NAME": "--log.timers on shows the slowest rank, as the option max",
        "no-barrier-with-level-1-timing": f"timers never wait for other ranks; {LEAVE}",
        "profile*": "profile with nsys, or with benchmarks/train_step.py",
        "one-logger*, no-one-logger": LEAVE,
        "check-for-nan-in-loss-and-grad, no-check-for-nan-in-loss-and-grad": "a loss that is not finite always ends "
        f"the run; {LEAVE}",
        "seed N": "--seed {N}",
    },
}
# Sections that belong to one architecture alone.
OF_ARCHITECTURE = {"Model, where it is a GPT-2": "gpt2", "Model, where it is a LLaMA, a Mistral or a Qwen3": "llama"}


def entries_of(architecture: str) -> dict[str, str]:
    """Return the answer to each option for models of an architecture."""
    sections = (
        section for title, section in OPTIONS.items() if OF_ARCHITECTURE.get(title, architecture) == architecture
    )
    return {key: answer for section in sections for keys, answer in section.items() for key in keys.split(", ")}


def explain_for(architecture: str) -> Callable[[str, str], str | None]:
    """Return `explain` for recipes of an architecture."""
    return partial(explain, entries=entries_of(architecture))


def explain(typed: str, value: str, entries: Mapping[str, str]) -> str | None:
    """Return a sentence about an option of Megatron-LM, typed with '-' or '_', with this value; None if `entries` do
    not have it."""
    name = typed.replace("_", "-")
    for key, answer in entries.items():
        known, _, wanted = key.partition(" ")
        if fnmatchcase(name, known) and (not wanted or wanted.isupper() or wanted.lower() == value.lower()):
            shown = f"--{typed} {value}" if wanted and not wanted.isupper() else f"--{typed}"
            filled = fill(answer, wanted, value)
            return f"{shown} of Megatron-LM does not exist here: {'use ' * filled.startswith('--')}{filled}"
    return None


def fill(answer: str, word: str, value: str) -> str:
    """Return the answer with `value` in place of `word`; the word stays if there is no value."""
    return re.sub(r"\{[A-Z]+\}", lambda _: shlex.quote(value) if value else word, answer)

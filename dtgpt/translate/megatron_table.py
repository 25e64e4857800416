"""Options of Megatron-LM's pretrain_gpt.py: megatron/training/arguments.py of August 2026 (d98e8a64), and those of 2023
that it no longer has. docs/megatron.md lists them."""

from dtgpt.interop.megatron.experts import FAMILIES
from dtgpt.translate.megatron_experts import EXPERTS, NO_EXPERTS
from dtgpt.translate.options import Answer, flat, no, other, skip, to, together

GPT2 = skip("the model always has GPT-2's architecture")
LLAMA = skip("the model always has LLaMA's architecture")
TO_LLAMA = other("it belongs to LLaMA, Mistral and Qwen; begin with a recipe of one, such as recipes/llama_tiny.py")
TO_GPT_OSS = other(
    "it belongs to GPT-OSS; dtgpt translate makes a recipe of the command, where it has RMSNorm and a gate"
)
TO_GPT2 = other("it belongs to GPT-2; begin with a recipe of one, such as recipes/gpt2_tiny.py")
NOT_HERE = "no model here has it; it is not available"
ATTENTION = "attention has plain or grouped queries, and windows where wanted; other kinds are not available"
ALIKE = "blocks are always transformer blocks, all alike"
FP8 = "--precision fp8, whose scales always follow from the largest values of the last 16 steps"
TENSORBOARD = "--log.tensorboard on, which writes loss, learning rate, gradient norm, memory and throughput"
OPTIONS = {
    "Model, where it is a GPT-2": {
        "layernorm-epsilon E, norm-epsilon E": to("--model.layer_norm_eps {E}"),
        "ffn-hidden-size N": together("the MLP is always 4 x hidden_size wide; another width is not available"),
        "kv-channels N": together("a head is always hidden_size / num_heads wide; another width is not available"),
        "position-embedding-type learned_absolute, openai-gelu": GPT2,
        "normalization LayerNorm": skip("norms are always LayerNorm"),
        "squared-relu": to("--model.activation relu2"),
        "add-qkv-bias": skip("a GPT-2 always has biases"),
        "softmax-type learnable": TO_GPT_OSS,
        "glu-linear-offset 0, glu-linear-offset 0.0": skip("a GPT-2 has no gate"),
        "position-embedding-type rope, position-embedding-type yarn, use-rotary-position-embeddings, "
        "no-position-embedding, window-size W, quick-geglu, glu-linear-offset X, activation-func-clamp-value X, "
        "normalization RMSNorm, swiglu, disable-bias-linear, untie-embeddings-and-output-weights, qk-layernorm, "
        "group-query-attention": TO_LLAMA,
        "rotary-*, yarn-*, no-yarn-*, use-rope-scaling, rope-scaling-factor X, no-rope-freq, rope-type TYPE": skip(
            "a GPT-2 learns its positions"
        ),
        "window-attn-skip-freq N": skip("it has no effect without a window, which a GPT-2 does not have"),
        "num-query-groups N": skip("it has no effect without grouped queries, which a GPT-2 does not have"),
    },
    "Model, where it has experts": EXPERTS,
    "Model, where it has none": NO_EXPERTS,
    "Model, where it is a LLaMA, a Mistral or a Qwen": {
        "layernorm-epsilon E, norm-epsilon E": to("--model.norm_eps {E}"),
        "ffn-hidden-size N": to("--model.ffn_hidden_size {N}"),
        "kv-channels N": to("--model.head_dim {N}"),
        "group-query-attention": skip("queries always share num_kv_heads groups"),
        "num-query-groups N": to("--model.num_kv_heads {N}"),
        "qk-layernorm": together("--model.qk_norm on"),
        "add-qkv-bias": together("--model.attention_bias qkv"),
        "squared-relu": no("the MLP is always gated: --model.activation relu2 is the gate's function"),
        "quick-geglu, glu-linear-offset X, activation-func-clamp-value X": together(
            "--model.activation clamped_swiglu, where the clamp is 7 and the offset 1"
        ),
        "window-size W": together("--model.window N, which counts the token itself; 127,0 is 128"),
        "window-attn-skip-freq N": together("--model.window_pattern, such as LLLG for 4"),
        "softmax-type learnable": together(
            "a recipe of GPT-OSS, dtgpt.models.families.gpt_oss, whose heads have sinks"
        ),
        "untie-embeddings-and-output-weights": together("--model.tied off"),
        "rotary-base N": to("--model.rope_theta {N}"),
        "use-rope-scaling": together("--model.rope_factor 8"),
        "rope-scaling-factor X": together("--model.rope_factor {X}"),
        "rotary-seq-len-interpolation-factor X": to("--model.rope_factor {X} --model.rope_scaling linear"),
        "position-embedding-type yarn": to("--model.rope_scaling yarn"),
        "yarn-rotary-scaling-factor X": to("--model.rope_factor {X}"),
        "yarn-original-max-position-embeddings N": to("--model.rope_original_length {N}"),
        "yarn-beta-fast X": to("--model.rope_beta_fast {X}"),
        "yarn-beta-slow X": to("--model.rope_beta_slow {X}"),
        "no-yarn-correction-range-round-to-int": to("--model.rope_truncate off"),
        "yarn-correction-range-round-to-int": skip("indices are rounded without --model.rope_truncate off"),
        "yarn-mscale X, yarn-mscale-all-dim X": together("--model.rope_attention_factor, the ratio of both scales"),
        "rotary-percent 1, rotary-percent 1.0, position-embedding-type rope, use-rotary-position-embeddings, "
        "no-position-embedding, normalization RMSNorm, swiglu, disable-bias-linear, rope-type rope": LLAMA,
        "rotary-interleaved": skip(
            "heads always rotate in halves, and weights of such a model are reordered when they are read"
        ),
        "rotary-*, no-rope-freq, rope-type TYPE": other(
            "all columns of a head always rotate, in every block; other rotations are not available"
        ),
        "position-embedding-type learned_absolute, normalization LayerNorm, openai-gelu": TO_GPT2,
    },
    "Model": {
        "num-layers N, encoder-num-layers N": to("--model.num_layers {N}"),
        "hidden-size N": to("--model.hidden_size {N}"),
        "num-attention-heads N": to("--model.num_heads {N}"),
        "seq-length N, encoder-seq-length N": to("--seq_length {N}"),
        "max-position-embeddings N": to("--model.seq_length {N}"),
        "attention-dropout P, hidden-dropout P": together("--model.dropout {P}, for attention and hidden states alike"),
        "init-method-std S": to("--model.init_std {S}"),
        "make-vocab-size-divisible-by N, padded-vocab-size N, no-pad-vocab-size": skip(
            "the vocabulary is padded to a multiple of 128 under every plan; --model.vocab_size is without padding"
        ),
        "vocab-size N": to("--model.vocab_size {N}"),
        "vocab-extra-ids 0": skip("there are none"),
        "vocab-extra-ids N": other("raise --model.vocab_size instead"),
        "fp32-residual-connection": no("the residual stream always has the type of --precision"),
        "use-mup": other("no multipliers of widths are in a model here"),
        "init-method-xavier-uniform, embedding-init-method-std S, mup-*": no(
            "initial weights always have a normal distribution with --model.init_std"
        ),
        "transformer-impl local": together(
            "--attention fused_softmax, the masked softmax that this implementation has"
        ),
        "spec SPEC": other("code of another model is not run; leave it out where it names the layers of GPT itself"),
        "use-mcore-models, use-legacy-models, transformer-impl IMPL, enable-experimental, onnx-safe": skip(
            "there is one implementation of each model"
        ),
        "softmax-type vanilla": skip("attention has the usual softmax"),
        "mtp-num-layers 0": skip("that is how models here are"),
        "position-embedding-type TYPE, normalization NAME, apply-layernorm-1p, qk-l2-norm, mtp-num-layers N, "
        "softmax-type T, apply-residual-connection-post-layernorm, attention-output-gate": other(NOT_HERE),
        "qk-clip*": no("weights are changed by the optimizer alone"),
        "multi-latent-attention, experimental-attention-variant NAME": other(ATTENTION),
        "is-hybrid-model, hybrid-layer-pattern P, hybrid-override-pattern P, hybrid-attention-ratio X, "
        "hybrid-mlp-ratio X, enable-mhc-connections, heterogeneous-layers-*": other(ALIKE),
        "mtp-*, relative-attention-*, mrope-section N": no(NOT_HERE),
        "dsa-*, no-dsa-*, q-lora-rank N, kv-lora-rank N, qk-head-dim N, qk-pos-emb-head-dim N, v-head-dim N, mscale*, "
        "cache-mla-latents, mla-*": no(ATTENTION),
        "mamba-*, disable-mamba-*, gdp-*, linear-*, mhc-*": no(ALIKE),
    },
    "Batch and length": {
        "micro-batch-size N, batch-size N": to("--micro_batch_size {N}"),
        "global-batch-size N": to("--global_batch_size {N}"),
        "rampup-batch-size START INCREMENT SAMPLES": together(
            "--rampup_batch_size 'START INCREMENT SAMPLES', in quotes"
        ),
        "step-batch-size-schedule SCHEDULE": together(
            "--rampup_batch_size 'START INCREMENT SAMPLES' where its steps are alike; others are not available"
        ),
        "decrease-batch-size-if-needed": no(
            "a batch that the plan cannot split is an error, which names the next sizes"
        ),
        "train-iters N": to("--steps {N}"),
        "train-samples N": to("--train_samples {N} --steps none"),
        "exit-interval N": to("--exit_interval {N}"),
        "exit-duration-in-mins N": to("--exit_after {N}"),
        "exit-signal-handler*, exit-signal NAME": skip("SIGTERM always ends a run with a checkpoint"),
        "skip-train": no("a run always trains; use dtgpt eval MODEL to measure one"),
        "iterations-to-skip N, phase-transition-iterations N": no("a run takes all steps, with the data in one order"),
        "sft, sft-*": no("chats are data of their own; see docs/finetuning.md"),
        "perform-rl-step, rl-*, no-rl-*, grpo-*, langrl-*, refit-method NAME, logits-*, freeze-all-layers": no(
            "the task of reinforcement learning is a Python class here (docs/reinforcement.md); no distillation"
        ),
    },
    "Optimizer": {
        "lr X": to("--optimizer.lr {X}"),
        "min-lr X": to("--optimizer.min_lr {X}"),
        "lr-decay-style inverse-square-root": no("choose --optimizer.schedule cosine, linear, constant or wsd"),
        "lr-decay-style wsd": to("--optimizer.schedule wsd"),
        "lr-decay-style STYLE": to("--optimizer.schedule {STYLE}"),
        "lr-decay-iters N": to("--optimizer.decay_steps {N}"),
        "lr-decay-samples N": to("--optimizer.decay_samples {N}"),
        "lr-warmup-fraction X, lr-warmup-iters X": to("--optimizer.warmup {X}"),
        "lr-warmup-samples N": to("--optimizer.warmup_samples {N}"),
        "warmup N": no("--optimizer.warmup F, where F is a fraction of the schedule, or a number of steps"),
        "lr-warmup-init 0, lr-warmup-init 0.0": skip("the warmup always begins at 0"),
        "lr-warmup-init X": no("the warmup always begins at 0"),
        "lr-wsd-decay-style linear": skip("wsd always decays linearly"),
        "lr-wsd-decay-style STYLE": no("wsd always decays linearly"),
        "lr-wsd-decay-iters N, lr-wsd-decay-samples N": together(
            "--optimizer.wsd_decay F, where F is {N} / the whole schedule"
        ),
        "weight-decay X": to("--optimizer.weight_decay {X}"),
        "weight-decay-incr-style constant": skip("weight decay is always constant"),
        "start-weight-decay X, end-weight-decay X, weight-decay-incr-style STYLE": no(
            "weight decay is always constant: --optimizer.weight_decay X"
        ),
        "apply-wd-to-qk-layernorm, no-weight-decay-cond-type TYPE": no("biases and norms never decay"),
        "decoupled-lr X, decoupled-min-lr X, head-lr-mult X": no("all weights have the same learning rate"),
        "adam-beta1 X": to("--optimizer.beta1 {X}"),
        "adam-beta2 X": to("--optimizer.beta2 {X}"),
        "adam-eps X": to("--optimizer.eps {X}"),
        "clip-grad X": to("--optimizer.clip {X}"),
        "optimizer adam": skip("AdamW is the default"),
        "optimizer muon, optimizer dist_muon": to("--optimizer.kind muon"),
        "muon-momentum X": together("--optimizer.momentum {X}, with --optimizer.kind muon"),
        "muon-use-nesterov": together("--optimizer.nesterov on, with --optimizer.kind muon"),
        "muon-num-ns-steps N": together("--optimizer.newton_schulz_steps {N}, with --optimizer.kind muon"),
        "muon-*": no("the rule of --optimizer.kind muon follows from its own options, such as --optimizer.adjust_lr"),
        "optimizer NAME, sgd-momentum X, lion-*": no("choose --optimizer.kind adamw, muon or normuon"),
        "override-opt*, use-checkpoint-opt*": skip("the schedule of the recipe is always used"),
        "check-for-spiky-loss": no(
            "no step is computed twice; --optimizer.skip_loss_z Z leaves out updates by the z-score of their loss"
        ),
        "check-for-large-grads": no(
            "no step is computed twice; --optimizer.skip_grad_norm_z Z leaves out updates by that of their gradient"
        ),
    },
    "Precision": {
        "fp16": to("--precision fp16"),
        "bf16": to("--precision bf16"),
        "loss-scale X": together("the loss scale is always dynamic: --loss_scale.initial {X} starts with this value"),
        "initial-loss-scale X": to("--loss_scale.initial {X}"),
        "min-loss-scale X": to("--loss_scale.minimum {X}"),
        "loss-scale-window N": to("--loss_scale.window {N}"),
        "hysteresis N": to("--loss_scale.hysteresis {N}"),
        "attention-softmax-in-fp32, accumulate-allreduce-grads-in-fp32, embedding-weights-in-fp32, "
        "grad-reduce-in-bf16, fp16-lm-cross-entropy, disable-bf16-reduced-precision-matmul, "
        "output-logit-dtype TYPE": skip("master weights, sums of gradients, softmax and loss are always fp32"),
        "use-precision-aware-optimizer, main-grads-dtype TYPE, main-params-dtype TYPE, exp-avg-dtype TYPE, "
        "exp-avg-sq-dtype TYPE": skip("gradients, master weights and moments are always fp32"),
        "apply-query-key-layer-scaling, no-query-key-layer-scaling": skip(
            "scores are never scaled by the layer's number, which changes nothing but rounding"
        ),
        "fp8-format FORMAT, fp8-e4m3, fp8-hybrid": to("--precision fp8, with e4m3 for inputs, weights and gradients"),
        "fp8-recipe NAME": together("--precision fp8, whose scales always follow from earlier steps"),
        "fp8-amax-history-len N, fp8-amax-compute-algo NAME, fp8-margin N, fp8-interval N": together(FP8),
        "first-last-layers-bf16, num-layers-at-start-in-bf16 N, num-layers-at-end-in-bf16 N, no-fp8-wgrad": no(
            "fp8 always has all products of all blocks; use --precision fp8 or bf16"
        ),
        "fp8-param-gather, keep-fp8-transpose-cache, reuse-grad-buf-for-mxfp8-param-ag": skip(
            "the weights themselves are never stored in fp8"
        ),
        "fp8-*, fp4-*": no("this choice of 8-bit or 4-bit floats is not available; use --precision fp8 or bf16"),
        "te-*, use-te-activation-func, use-transformer-engine-op-fuser, use-kitchen-*, kitchen-*": skip(
            "there is one implementation of the model, without Transformer Engine"
        ),
    },
    "Parallelism": {
        "tensor-model-parallel-size N, model-parallel-size N": together(
            "--plan tp{N}; parts of a plan are joined by '_', as in tp2_pp2"
        ),
        "pipeline-model-parallel-size N": together("--plan pp{N}, or tp2_pp{N}"),
        "sequence-parallel": together("add sp to the plan, as in --plan tp2_sp"),
        "num-layers-per-virtual-pipeline-stage N": together(
            "add interleavedV to the plan, V being num_layers / pp / {N}, as in --plan pp2_interleaved2"
        ),
        "num-virtual-stages-per-pipeline-rank N": together("add interleaved{N} to the plan"),
        "account-for-embedding-in-pipeline-split, account-for-loss-in-pipeline-split": skip(
            "stages are always balanced by cost"
        ),
        "pipeline-model-parallel-layout LAYOUT, decoder-first-pipeline-num-layers N, "
        "decoder-last-pipeline-num-layers N, pipeline-model-parallel-split-rank N, standalone-embedding-stage, "
        "decoder-num-layers N": no("stages are balanced by cost, or cut by Plan(blocks_per_stage=...) in the recipe"),
        "microbatch-group-size-per-virtual-pipeline-stage N, overlap-p2p-communication-warmup-flush, "
        "pipeline-model-parallel-comm-backend NAME, delay-wgrad-compute, defer-embedding-wgrad-compute, "
        "wgrad-deferral-limit N": skip("the schedule of a pipeline follows from the plan"),
        "context-parallel-size N": together("add cp{N} to the plan"),
        "cp-comm-type a2a": skip("ranks of a plan with cp exchange tokens for heads, as far as there are heads"),
        "hierarchical-context-parallel-sizes N, hybrid-context-parallel, cp-comm-type NAME, "
        "max-seqlen-per-dp-cp-rank N": no("ranks exchange tokens for heads, and gather keys beyond their number"),
        "use-distributed-optimizer": together("add zero1 to the plan"),
        "use-torch-fsdp2, use-megatron-fsdp, data-parallel-sharding-strategy NAME": together(
            "add zero1, zero2 or zero3 to the plan"
        ),
        "num-distributed-optimizer-instances 1": skip("ZeRO always shards over all replicas"),
        "num-distributed-optimizer-instances N, outer-dp-sharding-strategy NAME, enable-full-sharding-in-hsdp": no(
            "ZeRO always shards over all replicas"
        ),
        "use-tp-pp-dp-mapping": no("ranks are ordered by tp, then dp, then pp"),
        "distributed-backend NAME": skip("GPUs always use NCCL and CPUs gloo"),
        "distributed-timeout-minutes N": together("--timeout S, where S is {N} x 60"),
        "distributed-timeout-seconds-after-init N": to("--timeout {N}"),
        "overlap-grad-reduce, overlap-param-gather*, overlap-p2p-communication, no-overlap-p2p-communication": skip(
            "communication always overlaps with computation"
        ),
        "tp-comm-*, no-tp-comm-*": skip("--plan tp2_sp reduces the communication of tensor parallelism"),
        "no-async-tensor-model-parallel-allreduce, no-scatter-gather-tensors-in-pipeline, use-ring-exchange-p2p, "
        "no-contiguous-buffers-in-local-ddp, lazy-mpu-init, ddp-*, no-align-*, "
        "no-gradient-reduce-div-fusion, use-nccl-ub, "
        "disable-symmetric-registration, create-all-gather-group, nccl-*, symmetric-ar-type NAME, use-sharp, "
        "sharp-enabled-group NAME, high-priority-stream-groups NAME, disable-gloo-process-groups, fsdp-*, "
        "megatron-fsdp-*, "
        "torch-fsdp2-*, suggested-communication-unit-size N, no-use-layer-wise-param-layout, gtp-*, "
        "tensor-parallel-num-weight-shards N, no-clone-scatter-output-in-embedding, fake-process-group": skip(
            "messages follow from the plan"
        ),
        "use-cpu-initialization, perform-initialization, no-initialization, data-parallel-random-init, "
        "init-model-with-meta-device": skip("initial weights never depend on the plan or the device"),
        "local-rank N": skip("torchrun sets the rank of each process"),
        "nproc-per-node N, nnodes N, node-rank N, master-addr HOST, master-port N": no(
            "it belongs to torchrun, before the recipe: torchrun --nproc-per-node N RECIPE.py"
        ),
    },
    "Memory and speed": {
        "recompute-activations": to("--recompute selective"),
        "checkpoint-activations": to("--recompute full"),
        "recompute-granularity KIND": to("--recompute {KIND}"),
        "recompute-method METHOD": skip("--recompute full recomputes every block, or --recompute_blocks of each stage"),
        "recompute-num-layers N": together("--recompute_blocks {N}, with --recompute-method block"),
        "recompute-modules NAMES": to("--recompute selective, which recomputes the attention core"),
        "distribute-saved-activations": no("add sp to the plan, as in --plan tp2_sp, which splits saved activations"),
        "cpu-offloading*, fine-grained-*, offload-modules NAMES, min-offloaded-tensor-size N, delay-offload-*, "
        "delta-offload-*, activation-offload-fraction X": no(
            "activations always stay on the device; use --recompute full"
        ),
        "optimizer-cpu-offload, optimizer-offload-fraction X, use-torch-optimizer-for-cpu-offload, no-pin-cpu-*, "
        "overlap-cpu-optimizer-*": no("the optimizer's state always stays on the device; add zero1 to the plan"),
        "use-flash-attn, attention-backend flash": to("--attention flash"),
        "attention-backend auto": to("--attention auto"),
        "attention-backend fused": to("--attention auto, which is cuDNN's attention there"),
        "attention-backend local": together("--attention fused_softmax, or explicit without its fusion"),
        "attention-backend NAME": to("--attention explicit"),
        "no-masked-softmax-fusion": together("--attention explicit, with --attention-backend local"),
        "flash-attention-version N": skip("--attention flash is one kernel"),
        "no-bias-gelu-fusion": skip(
            "a GPT-2 has the tanh form of GELU, that of the fusion; --model.activation gelu is the exact one"
        ),
        "no-bias-swiglu-fusion, no-bias-dropout-fusion, no-rope-fusion, no-persist-layer-norm, "
        "no-gradient-accumulation-fusion, cross-entropy-loss-fusion, cross-entropy-fusion-impl NAME, "
        "fused-residual-rmsnorm, disable-jit-fuser, mlp-chunks-*": skip(
            "operations are always fused, and give the same numbers up to rounding"
        ),
        "deterministic-mode": skip("--attention auto takes a core with the same bits in every run where there is one"),
        "batch-invariant-*": skip("generated texts never depend on other requests"),
        "*cuda-graph*": to("--graph on"),
        "empty-unused-memory-level N, manual-gc*, no-manual-gc-eval, train-sync-interval N": skip(
            "memory and garbage are managed without options"
        ),
    },
    "Data": {
        "data-path PATHS, train-data-path PATHS": to("--data.path {PATHS}"),
        "valid-data-path PATHS": to("--data.valid_path {PATHS}"),
        "test-data-path PATHS": to("--data.test_path {PATHS}"),
        "data-args-path FILE, per-split-data-args-path FILE, per-dataset-sequences-path FILE": no(
            "write its words into --data.path, in quotes, or into --data.valid_path and --data.test_path"
        ),
        "split WEIGHTS": together("--data.split {WEIGHTS}"),
        "vocab-file FILE": to("--data.vocab_file {FILE}, with --data.merge_file"),
        "merge-file FILE": to("--data.merge_file {FILE}, with --data.vocab_file"),
        "tokenizer-type GPT2BPETokenizer": to("--data.tokenizer gpt2"),
        "tokenizer-type NullTokenizer": together("--data.tokenizer ids"),
        "tokenizer-type TYPE": together("--data.tokenizer_file FILE, the tokenizer that the data were prepared with"),
        "tokenizer-model FILE": to("--data.tokenizer_file {FILE}"),
        "tokenizer-metadata FILE, tokenizer-special-tokens NAMES, tokenizer-sentencepiece-legacy, tokenizer-hf-*, "
        "no-tokenizer-sentencepiece-*, tiktoken-*, trust-remote-code, null-tokenizer-*, chat-template T, "
        "use-gigatoken": skip("the tokenizer is that of its file, and its code is never run"),
        "reset-position-ids": to("--data.reset_position_ids on"),
        "reset-attention-mask, dataloader-inter-document-masking": to("--data.reset_attention_mask on"),
        "eod-mask-loss": to("--data.eod_mask_loss on"),
        "calculate-per-token-loss": skip("the loss is always the mean over the counted tokens of the global batch"),
        "data-cache-path DIR, object-storage-cache-path DIR": together("the environment variable DTGPT_CACHE={DIR}"),
        "data-impl KIND, mmap-warmup, no-mmap-bin-files, dataloader-*, num-workers N, num-dataset-builder-threads N, "
        "mid-level-dataset-surplus X, no-create-attention-mask-in-dataloader, no-data-sharding, enable-msc, "
        "disable-msc": skip(
            "samples are always read from mapped files, in order of their ids, without masks, in the background"
        ),
        "mock-data": together("leave --data.path out to train on a text included in Python"),
        "allow-ambiguous-pad-tokens": skip("no token stands for padding"),
        "fim-*": no("fill-in-the-middle is not available"),
    },
    "Checkpoints": {
        "save DIR": to("--runs {DIR}, in which each run creates its own folder"),
        "load DIR": together(
            "--resume auto, which goes on with the newest run in --runs, or begins one; --resume {DIR} goes on with a "
            "run of Megatron-LM, and --init_from {DIR} begins with its weights"
        ),
        "save-interval N, persistent-save-interval N": to(
            "--checkpoint.interval {N} --checkpoint.keep_last 0, which keeps all of them"
        ),
        "save-retain-interval N": to("--checkpoint.keep_every {N} --checkpoint.keep_last 1"),
        "finetune, no-load-optim": together("--init_from MODEL, which starts a new run from the weights only"),
        "pretrained-checkpoint DIR": to("--init_from {DIR}"),
        "no-load-rng, no-save-rng": skip("random numbers follow from --seed, step and sample"),
        "no-save-optim": no("checkpoints are always complete; dtgpt convert RUN TARGET writes the weights only"),
        "use-checkpoint-args, use-mp-args-from-checkpoint-args, no-use-tokenizer-model-from-checkpoint-args": skip(
            "a run keeps its recipe in recipe.json, and a tree of Megatron-LM the dimensions of its model"
        ),
        "exit-on-missing-checkpoint": skip("a run that cannot be resumed is always an error"),
        "ckpt-step N": no("--resume RUN/checkpoints/step_N, with 8 digits"),
        "override-ckpt-iteration N, load-main-params-from-ckpt": no("a run goes on where its checkpoint is"),
        "async-save": to("--checkpoint.background on"),
        "async-*, use-persistent-ckpt-worker": skip("--checkpoint.background writes while training goes on"),
        "ckpt-convert-*": no("dtgpt convert writes other formats"),
        "ckpt-*, no-ckpt-*, use-dist-ckpt, dist-ckpt-*, auto-detect-ckpt-format, distrib-optim-*, no-strict-fsdp-*, "
        "verify-integrity, no-save-tokenizer-assets, replication*": skip(
            "checkpoints always fit every plan, have a sha256 of each file and carry the tokenizer"
        ),
        "non-persistent-*": no("--checkpoint.interval N with --checkpoint.keep_last N"),
        "adlr-autoresume*": no("--resume auto resumes the newest run of the recipe's name"),
        "save-params-interval N, save-activations-interval N, save-wgrads-interval N, save-dgrads-interval N, "
        "save-tokens-per-expert-interval N, dump-param-to-param-group-map FILE": no(
            "a run saves checkpoints and metrics only"
        ),
    },
    "Log and evaluation": {
        "log-interval N": to("--log.interval {N}"),
        "eval-interval N": to("--log.eval_interval {N}"),
        "eval-iters N": together("--log.eval_samples S, where S is {N} x global_batch_size"),
        "eval-micro-batch-size N, eval-global-batch-size N": skip(
            "evaluation always uses the micro-batch size of training"
        ),
        "full-validation": to("--log.eval_samples 1000000000, more than there are"),
        "start-eval-at-iter N, multiple-validation-sets, validation-set-names NAMES, test-mode": no(
            "one dataset is evaluated, every --log.eval_interval steps"
        ),
        "tensorboard-dir DIR": to("--log.tensorboard on, which writes the same tags into RUN/tensorboard"),
        "tensorboard-log-interval N": skip("events are written every --log.interval steps"),
        "tensorboard-queue-size N": skip("events are always written at once"),
        "log-timers-to-tensorboard": to("--log.timers on --log.tensorboard on"),
        "log-*-to-tensorboard": to(TENSORBOARD),
        "log-throughput, no-log-*, log-memory-interval N, log-device-memory-used, log-progress": skip(
            "metrics.jsonl always holds loss, gradient norm, rates and memory"
        ),
        "wandb-project NAME": to("--log.wandb online --log.wandb_project {NAME}"),
        "wandb-exp-name NAME": to("--log.wandb online --name {NAME}"),
        "wandb-*": to("--log.wandb online"),
        "log-num-zeros-in-grad": no("zeros of gradients are not counted"),
        "log-params-norm": no("the norm of the weights is not computed"),
        "log-max-attention-logit, log-energy, log-*": no("it is not measured; metrics.jsonl has what is"),
        "timing-log-level 0": skip("progress lines always show tokens per second"),
        "timing-log-level N": to("--log.timers on"),
        "timing-log-option NAME": skip("--log.timers on shows the slowest rank, as the option max"),
        "no-barrier-with-level-1-timing": skip("timers never wait for other ranks"),
        "straggler-*, disable-straggler-*": no("--log.timers on shows the slowest rank"),
        "profile*, use-pytorch-profiler, pytorch-profiler-*, nvtx-ranges, record-shapes": no(
            "profile with nsys, or with benchmarks/train_step.py"
        ),
        "record-memory-history, memory-snapshot-path FILE": no("dtgpt plan RECIPE.py shows what takes the memory"),
        "flight-recorder-*, no-flight-recorder-*": skip("a rank that is lost is named, and the others end"),
        "check-weight-hash-across-dp-replicas-interval N": no("dtgpt inspect RUN verifies checkpoints"),
        "gpu-sniff-test-interval N, run-workload-inspector-server, otel-*": no("GPUs are not watched"),
        "enable-ft-package, calc-ft-timeouts, ft-*, inprocess-*": skip(
            "torchrun --max-restarts N, with --resume auto, starts a run again"
        ),
        "fault-injector-*, error-injection-*, rerun-mode MODE, result-rejected-tracker-filename FILE": no(
            "no faults are injected, and no step is computed twice"
        ),
        "one-logger*, no-one-logger, app-tag-*, logging-level N, config-logger-dir DIR": skip(
            "recipe.json and metrics.jsonl hold what a run was and did"
        ),
        "check-for-nan-in-loss-and-grad, no-check-for-nan-in-loss-and-grad": skip(
            "a loss that is not finite always ends the run"
        ),
        "yaml-cfg FILE": other("give the options of the file on the command line"),
        "seed N": to("--seed {N}"),
    },
    "Other programs": {
        "inference-*, no-inference-*, use-legacy-static-engine, flash-decode, enable-chunked-prefill, "
        "num-speculative-tokens N, "
        "max-tokens-to-oom N, use-same-sampling-seed-*": skip("it is for generation: dtgpt serve, dtgpt generate"),
        "retro-add-retriever": other("retrieval is not available"),
        "bert-*, mask-*, short-seq-prob P, sample-rate X, decoder-seq-length N, biencoder-*, ict-*, retriever-*, "
        "titles-data-path F, evidence-data-path F, block-data-path F, embedding-path F, indexer-*, "
        "query-in-block-prob P, "
        "use-one-sent-docs, output-bert-embeddings, retro-*": no("BERT, T5 and retrieval are not available"),
        "vision-*, num-classes N, img-*, num-channels N, patch-dim N, classes-fraction X, data-per-class-fraction X, "
        "swin-*, iter-per-epoch N, dino-*": no("models of images are not available"),
    },
}
MIXTURES = (*FAMILIES, "granitemoe", "olmoe")
# Sections that belong to some architectures alone.
OF_ARCHITECTURE = {
    "Model, where it is a GPT-2": ("gpt2",),
    "Model, where it is a LLaMA, a Mistral or a Qwen": ("llama", *FAMILIES),
    "Model, where it has experts": MIXTURES,
}
# Defaults of Megatron-LM that are not those of a recipe, which a translation therefore writes out.
DEFAULTS = {
    "attention-dropout": "0.1",
    "hidden-dropout": "0.1",
    "weight-decay": "0.01",
    "adam-beta2": "0.999",
    "lr-decay-style": "linear",
    "lr-warmup-iters": "0",
    "log-interval": "100",
    "eval-iters": "100",
}


def entries_of(architecture: str) -> dict[str, Answer]:
    """Return the answer to each option for models of an architecture."""
    dense = architecture not in MIXTURES
    sections = OPTIONS if dense else {title: each for title, each in OPTIONS.items() if each is not NO_EXPERTS}
    return flat(
        {
            title: section
            for title, section in sections.items()
            if architecture in OF_ARCHITECTURE.get(title, (architecture,))
        }
    )

"""`dtgpt translate`, from a script or a command to a recipe that loads, or to a command of dtgpt."""

import math
import struct
import subprocess
import sys
from dataclasses import replace

import pytest

from dtgpt.util.shared.environment import child_environment
from tests.support.disks import files_of_at_most
from tests.translate.conftest import recipe_of

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
TRAINING = "--micro-batch-size 2 --lr 1e-4 --train-iters 100"
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=4; NODES=${NODES:-1}
WORLD=$(($GPUS*$NODES))
CKPT=$1 #<Specify path>
DATA=$2
MODEL_ARGS=(
    --num-layers 4   # blocks
    # --num-experts 8
    --hidden-size 64 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32
)
TRAIN_ARGS="
    --micro-batch-size 2 --global-batch-size $((4 * $WORLD)) \\
    --lr 6.0e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-warmup-fraction .01 \\
    --train-iters 100 --lr-decay-iters 80 --weight-decay 0.1 --clip-grad 1.0 --fp16
"
torchrun --nproc_per_node $GPUS --nnodes $NODES --master_addr ${MASTER_ADDR:-localhost} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} $TRAIN_ARGS \\
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \\
    --data-path $DATA --split 949,50,1 --vocab-file v.json --merge-file m.txt \\
    --save $CKPT --load $CKPT --save-interval 50 --eval-interval 10 --eval-iters 3
"""


def test_a_script_of_megatron_lm(run, tmp_path):
    (tmp_path / "train.sh").write_text(SCRIPT)
    code, out = run("train.sh", "ckpt", "my_text_document")
    assert code == 0, out
    recipe = recipe_of(tmp_path)
    model, optimizer = recipe.model, recipe.optimizer
    assert (recipe.name, recipe.plan, recipe.precision, recipe.steps) == ("my_recipe", "tp2_sp_zero1", "fp16", 100)
    assert (model.num_layers, model.hidden_size, model.num_heads, model.seq_length) == (4, 64, 4, 32)
    assert (model.dropout, model.vocab_size, recipe.micro_batch_size, recipe.global_batch_size) == (0.1, 50257, 2, 16)
    assert (optimizer.lr, optimizer.min_lr, optimizer.schedule) == (6e-5, 6e-6, "cosine")
    assert (optimizer.warmup, optimizer.decay_steps, optimizer.weight_decay) == (0.01, 80, 0.1)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.clip) == (0.9, 0.999, 1e-8, 1.0)  # the defaults
    assert (recipe.data.path, recipe.data.split, recipe.data.vocab_file) == ("my_text_document", "949,50,1", "v.json")
    assert (recipe.runs, recipe.resume, recipe.checkpoint.interval, recipe.checkpoint.keep_last) == (
        "ckpt",
        "auto",
        50,
        0,
    )
    assert (recipe.log.eval_interval, recipe.log.eval_samples, recipe.log.interval) == (10, 48, 100)
    assert out.splitlines()[-1] == "sbatch --nodes=2 slurm.sbatch my_recipe.py"
    assert "experts" not in out and "--max-position-embeddings 32" in out
    text = (tmp_path / "my_recipe.py").read_text()
    assert "        steps=100,  # --train-iters 100\n" in text
    assert "            beta2=0.999,  # default --adam-beta2 0.999\n" in text
    assert max(map(len, text.splitlines())) <= 120
    with_options = run("train.sh", "c", "d", "--", "--lr", "1e-3", "--decoupled-lr", "1e-2")[1]
    assert "have the same learning rate" in with_options and recipe_of(tmp_path).optimizer.lr == 1e-3


def test_defaults_of_megatron_lm(translated):
    recipe, out = translated(f"python pretrain_gpt.py {MODEL} {TRAINING} --data-path x")
    optimizer = recipe.optimizer
    assert (recipe.plan, recipe.precision, recipe.global_batch_size, recipe.attention) == ("dp", "fp32", 2, "auto")
    assert (optimizer.schedule, optimizer.warmup, optimizer.min_lr, optimizer.weight_decay) == ("linear", 0, 0, 0.01)
    assert (recipe.log.eval_interval, recipe.checkpoint.interval, recipe.seed) == (0, 0, 1234)
    assert "cannot be done" not in out and out.endswith("\npython my_recipe.py\n")


@pytest.mark.parametrize(
    "words, values",
    [
        ("--bf16 --recompute-activations", {"precision": "bf16", "recompute": "selective"}),
        ("--recompute-granularity full --recompute-method uniform", {"recompute": "full"}),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
         {"recompute": "full", "recompute_blocks": None}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1",
         {"recompute": "full", "recompute_blocks": 1}),
        ("--recompute-activations --recompute-num-layers 1", {"recompute": "selective", "recompute_blocks": None}),
        ("--bf16 --fp8-format hybrid", {"precision": "fp8"}),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", {"plan": "pp2_interleaved2"}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"plan": "zero2"}),
        ("--use-torch-fsdp2", {"plan": "zero3"}),
        ("--sequence-parallel", {"plan": "dp"}),
        ("--attention-backend local", {"attention": "fused_softmax"}),
        ("--transformer-impl local", {"attention": "fused_softmax"}),
        ("--transformer-impl local --no-masked-softmax-fusion", {"attention": "explicit"}),
        ("--transformer-impl local --use-flash-attn", {"attention": "flash"}),
        ("--attention-backend fused", {"attention": "auto"}),
        ("--rampup-batch-size 2 2 12 --global-batch-size 8", {"rampup_batch_size": "2 2 12", "global_batch_size": 8}),
        ("--step-batch-size-schedule 0:2,64:4,128:6,192:8", {"rampup_batch_size": "2 2 6", "global_batch_size": 8}),
        ("--step-batch-size-schedule 0:2,64:8,1K:16", {"rampup_batch_size": None, "global_batch_size": 16}),
        ("--distributed-timeout-minutes 20", {"timeout": 1200}),
        ("--max-position-embeddings 64", {"model.seq_length": 64, "seq_length": 32}),
        ("--load a --finetune", {"init_from": "a", "resume": None}),
        ("--load a --save b --save-interval 5 --no-load-optim", {"init_from": "a", "runs": "b"}),
        ("--load a", {"resume": "a"}),
        ("--load a --save a --save-interval 5", {"resume": "auto", "runs": "a"}),
        ("--hidden-dropout 0 --attention-dropout 0.0", {"model.dropout": 0}),
        ("--norm-epsilon 1e-6 --ffn-hidden-size 256 --kv-channels 16", {"model.layer_norm_eps": 1e-6}),
        ("--lr-decay-style wsd --lr-wsd-decay-iters 10", {"optimizer.schedule": "wsd", "optimizer.wsd_decay": 0.1}),
        ("--lr-warmup-iters 5", {"optimizer.warmup": 5}),
        ("--save-interval 5 --save-retain-interval 20 --save x",
         {"checkpoint.interval": 5, "checkpoint.keep_every": 20, "checkpoint.keep_last": 1}),
        ("--data-path 0.3 A 0.7 B", {"data.path": "0.3 A 0.7 B"}),
        ("--train-data-path A --valid-data-path B --split 1,2,3", {"data.valid_path": "B", "data.split": "969,30,1"}),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model t.json --vocab-size 300",
         {"data.tokenizer_file": "t.json", "model.vocab_size": 300}),
        ("--data-path x --tokenizer-type NullTokenizer --vocab-size 99",
         {"data.tokenizer": "ids", "model.vocab_size": 99}),
        ("--eval-iters 0", {"log.eval_interval": 0}),
        ("--tensorboard-dir x --timing-log-level 2", {"log.tensorboard": True, "log.timers": True}),
        ("--wandb-project p --wandb-exp-name e", {"log.wandb_project": "p", "name": "e"}),
        ("--disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope --num-query-groups 2 "
         "--group-query-attention --untie-embeddings-and-output-weights --use-rope-scaling",
         {"model.architecture": "llama", "model.num_kv_heads": 2, "model.ffn_hidden_size": 128, "model.head_dim": 16,
          "model.tied": False, "model.rope_factor": 8}),
    ],
)  # fmt: skip
def test_options_of_megatron_lm_together(run, tmp_path, words, values):
    code, out = run("--", *f"pretrain_gpt.py {MODEL} {TRAINING} {words}".split())
    assert code == 0, out
    recipe = recipe_of(tmp_path)
    for name, wanted in values.items():
        found = recipe
        for part in name.split("."):
            found = getattr(found, part)
        assert found == wanted, name
    for word in words.split():  # whatever it became, it is told
        assert not word.startswith("--") or word in out


@pytest.mark.parametrize(
    "launcher, wanted",
    [
        ("srun -n 2 torchrun --nproc_per_node 4 --nnodes=2", "srun -n 2 torchrun --nnodes 2 --nproc-per-node 4 "),
        ("srun torchrun --nproc_per_node 4 --nnodes=2 --rdzv_id=$ID --rdzv_endpoint $HEAD:1234",
         "srun torchrun --nnodes 2 --nproc-per-node 4 --rdzv-id $ID --rdzv-endpoint $HEAD:1234 my_recipe.py"),
        ("mpirun -np 4 python", "torchrun --nproc-per-node 4 my_recipe.py"),
        ("python -m torch.distributed.launch --nproc_per_node=2", "torchrun --nproc-per-node 2 my_recipe.py"),
        ("torchrun --nproc_per_node $GPUS", "torchrun --nproc-per-node N my_recipe.py"),
        ("srun --nodes=2 --ntasks-per-node 8 env X=1 python -u", "srun --ntasks-per-node 1 torchrun --nnodes 2 "),
    ],
)  # fmt: skip
def test_processes_are_those_of_the_launcher(run, tmp_path, launcher, wanted):
    (tmp_path / "x.sh").write_text(f"{launcher} /m/pretrain_gpt.py {MODEL} {TRAINING}")
    assert run("x.sh")[1].splitlines()[-1].startswith(wanted)


def test_train_samples(translated):
    words = "--train-samples 1000 --lr-decay-samples 800 --lr-warmup-samples 100"
    recipe, _ = translated(f"pretrain_gpt.py {MODEL} --micro-batch-size 2 --lr 1e-4 {words}")
    assert (recipe.train_samples, recipe.steps, recipe.optimizer.warmup_samples) == (1000, None, 100)
    assert recipe.optimizer.decay_samples == 800


@pytest.mark.parametrize("words, told", [
    ("--hidden-dropout 0.2", "all sites have the same dropout: 0.2"),
    ("--fp8-format hybrid --fp8-amax-history-len 1024", "of the last 16 steps"),
    ("--mock-data", "in place of random tokens"), ("--seed 1", "no --data-path"),
    ("--tokenizer-type Llama2Tokenizer --tokenizer-model t.model", "set --model.vocab_size"),
    ("--my-own-option 3", "dtgpt does not know this option"),
    ("--tensor-model-parallel-size 4", "the plan needs 4, or a multiple")
])  # fmt: skip
def test_what_cannot_be_done_is_told_and_stands_in_the_recipe(run, tmp_path, words, told):
    code, out = run("--", *f"torchrun --nproc_per_node 2 pretrain_gpt.py {MODEL} {TRAINING} {words}".split())
    assert code == 0 and told in " ".join(out.partition("cannot be done")[2].split())
    docstring = (tmp_path / "my_recipe.py").read_text().split('"""')[1]
    assert told in " ".join(docstring.split()) and "Not the same:" in docstring


LLAMA = "--disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope"


@pytest.mark.parametrize(
    "words, told",
    [
        ("--num-experts 2", "--num-experts 2 (begin with a recipe of a mixture of experts"),
        ("--multi-latent-attention --q-lora-rank 16", "--multi-latent-attention (attention has plain"),
        ("--window-size 128,0", "--window-size 128,0 (it belongs to LLaMA"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1 (no model here has it"),
        ("--position-embedding-type alibi", "no model here has it"),
        ("--apply-residual-connection-post-layernorm --qk-l2-norm",
         "--apply-residual-connection-post-layernorm (no model here has it; it is not available), --qk-l2-norm ("),
        (f"{LLAMA} --rotary-percent 0.5", "--rotary-percent 0.5 (all columns of a head always rotate"),
        (f"{LLAMA} --quick-geglu --glu-linear-offset 2", "--glu-linear-offset 2 (a gate is clamped at 7"),
        ("--hybrid-override-pattern M-M*", "blocks are always transformer blocks"),
        ("--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", "code of another model is not run"),
        ("--swiglu", "--swiglu (it belongs to LLaMA"), ("--untie-embeddings-and-output-weights", "belongs to LLaMA"),
        ("--disable-bias-linear", "it belongs to LLaMA"), ("--normalization RMSNorm", "it belongs to LLaMA"),
        ("--swiglu --normalization RMSNorm", "no --position-embedding-type rope (a LLaMA always has it"),
        ("--swiglu --normalization RMSNorm --position-embedding-type rope", "no --disable-bias-linear (a LLaMA"),
        ("--ffn-hidden-size 100", "--ffn-hidden-size 100 (a GPT-2 always has another width)"),
        ("--kv-channels 8", "--kv-channels 8 (a GPT-2 always has another width)"),
    ],
)  # fmt: skip
def test_what_makes_another_model_is_refused(run, tmp_path, words, told):
    code, error = run("--", *f"pretrain_gpt.py {MODEL} {TRAINING} --data-path x {words}".split())
    assert code == 2 and told in error and error.count("\n") == 1
    assert "of a model that dtgpt does not have" in error and not (tmp_path / "my_recipe.py").exists()


LLMC = "-i a_*.bin -j b_*.bin -o log -v 250 -s 20000 -g 144 -h 1 -b 4 -t 32 -d 2048 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.1"


def test_a_command_of_llm_c(translated):
    recipe, out = translated(
        f"mpirun -np 8 ./train_gpt2cu {LLMC} -u 700 -n 5000 -nk 5 -y 1 -x 1000 -sl 7.0 -sg 6 -e d12"
    )
    optimizer = recipe.optimizer
    assert (recipe.model.num_layers, recipe.model.hidden_size, recipe.model.seq_length) == (12, 768, 32)
    assert (recipe.micro_batch_size, recipe.global_batch_size, recipe.steps, recipe.plan) == (4, 64, 1000, "zero1")
    assert (optimizer.lr, optimizer.min_lr, optimizer.warmup, optimizer.weight_decay) == (6e-4, 6e-5, 700, 0.1)
    assert (recipe.runs, recipe.resume, recipe.precision, recipe.data.tokenizer) == ("log", "auto", "bf16", "gpt2")
    assert (recipe.checkpoint.keep_last, recipe.log.eval_samples, recipe.data.valid_path) == (5, 20 * 4 * 8, "b_*.bin")
    assert (optimizer.skip_loss_z, optimizer.skip_grad_norm_z) == (7, 6)
    assert "hellaswag:" in out and "torchrun --nproc-per-node 8 my_recipe.py" in out


def test_defaults_of_llm_c(translated):
    recipe, _ = translated("./train_gpt2cu -e gpt3:c768 -x 5")
    assert (recipe.model.seq_length, recipe.global_batch_size, recipe.plan) == (1024, 4, "dp")
    assert (recipe.optimizer.lr, recipe.optimizer.min_lr, recipe.optimizer.weight_decay) == (3e-4, 3e-4, 0)
    words = "--input_bin=x.bin --num_iterations 7 --model d12 --total_batch_size 256 --zero_stage 1 --dtype bfloat16"
    recipe, _ = translated(f"torchrun --standalone --nproc_per_node=2 train_gpt2.py {words}")
    assert (recipe.steps, recipe.global_batch_size, recipe.plan, recipe.precision) == (7, 4, "zero1", "bf16")


def test_an_epoch_of_llm_c_is_counted_from_the_headers(run, tmp_path):
    for number, tokens in enumerate((1000, 3000)):
        (tmp_path / f"a_{number}.bin").write_bytes(struct.pack("<3i", 20240520, 1, tokens) + bytes(1012))
    assert run("--", *f"./train_gpt2cu -e d12 {LLMC.replace('-d 2048', '-d 128')}".split())[0] == 0
    assert recipe_of(tmp_path).steps == 31
    code, told = run("--", "./train_gpt2cu", "-e", "d12", "-i", "none_*.bin")
    assert code == 2 and "add the number of steps after --" in told


CONFIG = """# a model of characters
import time
out_dir = 'out-char'
wandb_run_name = 'run' + str(time.time())
dataset = 'shakespeare_char'
gradient_accumulation_steps = 5 * 8
batch_size = 64
block_size = 256  # context
n_layer = n_head = 6
n_layer: int = 6
n_head = 6
n_embd = n_head * 64
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = max_iters
min_lr = learning_rate / 10
beta2 = 0.99
warmup_iters = 100
mine = 3
open('mark', 'w')
"""


def test_a_config_of_nanogpt_is_read_and_not_run(run, tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    code, out = run("config.py")
    assert code == 0, out
    assert not (tmp_path / "mark").exists()
    recipe = recipe_of(tmp_path)
    recipe = replace(recipe, data=replace(recipe.data, path=None, valid_path=None))
    recipe.validate()
    assert (recipe.model.num_layers, recipe.model.hidden_size, recipe.model.vocab_size) == (6, 384, 65)
    assert (recipe.micro_batch_size, recipe.global_batch_size, recipe.runs) == (64, 2560, "out-char")
    optimizer = recipe.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.beta2, optimizer.warmup) == (1e-3, 1e-4, 0.99, 100)
    assert (recipe.log.eval_interval, recipe.log.eval_samples, recipe.log.interval) == (2000, 200 * 64, 1)
    for told in ("nanoGPT does not have it", "computed by a program", "always has biases", "tanh form"):
        assert told in out


@pytest.mark.parametrize(
    "value", ["9**9**9", "'a' * 9", "'%99999d' % 1", "(-8) ** 0.5", "open('x')", "1/0", "[1]", "-'a'"]
)
def test_a_value_of_a_config_that_is_no_literal_is_left_out(run, tmp_path, value):
    (tmp_path / "config.py").write_text(f"n_layer = 2\ndropout = {value}\n")
    code, out = run("config.py")
    assert code == 0 and "computed by a program" in out and recipe_of(tmp_path).model.dropout == 0


def test_a_command_of_nanogpt(run, tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    words = "torchrun --standalone --nproc_per_node=4 train.py config.py --batch_size=8 --decay_lr=False --device=cpu"
    _, out = run("--", *words.split(), "--dtype=float16")
    recipe = recipe_of(tmp_path)
    assert (recipe.micro_batch_size, recipe.optimizer.schedule, recipe.optimizer.warmup) == (8, "constant", 0)
    assert (recipe.device, recipe.precision) == ("cpu", "fp16") and "torchrun --nproc-per-node 4 my_recipe.py" in out


TOOLS = {
    "python tools/preprocess_data.py --input a.json --output-prefix p --tokenizer-type GPT2BPETokenizer "
    "--json-keys a b --vocab-file v --merge-file m --append-eod --workers 8 --partitions 2": "dtgpt prepare "
    "--input a.json --output-prefix p --tokenizer-type GPT2BPETokenizer --json-keys a b --vocab-file v "
    "--merge-file m --append-eod on --workers 8",
    "python tools/checkpoint/convert.py --model-type GPT --loader core --saver core --load-dir a --save-dir b "
    "--target-tensor-parallel-size 2": "dtgpt convert a b --to megatron --target-tensor-parallel-size 2 "
    "--transformer-impl transformer_engine",
    "python tools/checkpoint_util.py --model-type GPT --load-dir a --save-dir b": "dtgpt convert a b --to megatron",
    "python -m torch.distributed.launch --nproc_per_node 2 tools/run_text_generation_server.py --load a --port 5001 "
    "--tensor-model-parallel-size 2 --num-layers 24 --top_p 0.9 --fp16": "torchrun --nproc-per-node 2 -m dtgpt serve a "
    "--port 5001 --precision fp16 --plan tp2",
    "python ./tasks/main.py --task LAMBADA --valid-data l.json --strict-lambada --load a --num-layers 24 "
    "--tensor-model-parallel-size 1": "dtgpt eval a --task lambada --data l.json --strict on",
}


@pytest.mark.parametrize("words, wanted", TOOLS.items())
def test_other_programs_become_commands(run, words, wanted):
    code, out = run("--", *words.split())
    assert code == 0 and out.splitlines()[-1] == wanted


@pytest.mark.parametrize(
    "script, words, told",
    [
        ("echo pretrain_gpt.py\nmake train_gpt2cu", [], "no command of Megatron-LM, nanoGPT or llm.c was found"),
        ("python train.py x\npython train.py y", [], "2 commands that can be translated (1 in line 1, 2 in line 2)"),
        ("python train.py x", ["--nth", "2"], "--nth is 2, but"),
        (f"pretrain_gpt.py {MODEL} {TRAINING} --data-path $DATA --save $1 --save-interval $(id)", [],
         "$DATA, $(id) and $1 are not known; give 1 word after the script, DATA=VALUE and the options that have them"),
        ("pretrain_gpt.py --num-layers 24 --lr 1", [], "has no --hidden-size, --num-attention-heads"),
        (f"pretrain_gpt.py {MODEL} {TRAINING} --pipeline-model-parallel-size 0", [], "is not a whole number above 0"),
        ("python train.py --micro-batch-size 3", [], "taken for nanoGPT's"),
        (f"pretrain_gpt.py {MODEL} {TRAINING} --seed abc", [], "--seed abc: 'abc' is not a number"),
        ("python pretrain_bert.py --x", [], "pretrain_bert.py cannot be translated: dtgpt trains decoders"),
        ("./train_gpt2cu -e", [], "takes options with a value each"),
        ("./train_gpt2cu -x 5 -e d13", [], "not a model of llm.c"),
        ("python train.py --eval_only=True", [], "use dtgpt eval MODEL"),
        ("python train.py none.py", [], "none.py: No such file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(run, tmp_path, script, words, told):
    (tmp_path / "x.sh").write_text(script)
    code, error = run("x.sh", *words)
    assert code == 2 and error.startswith("dtgpt: x.sh: ") and told in error and error.count("\n") == 1


def test_a_recipe_is_written_whole_or_not_at_all(run, tmp_path):
    (tmp_path / "x.sh").write_text(f"python pretrain_gpt.py {MODEL} {TRAINING}")
    with files_of_at_most(200):
        code, err = run("x.sh")
    assert code == 2 and err.count("\n") == 1
    assert "my_recipe.py cannot be written (File too large); raise the limit" in err
    assert [path.name for path in tmp_path.iterdir()] == ["x.sh"]


def test_a_config_of_nanogpt_is_read_in_utf_8_whatever_the_terminal_has(tmp_path):
    (tmp_path / "config.py").write_bytes("# Zürich\nn_layer = 2\n".encode())
    words = [sys.executable, "-m", "dtgpt", "translate", "--", "python", "train.py", "config.py"]
    of_terminal = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(words, cwd=tmp_path, env=child_environment() | of_terminal, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "my_recipe.py").is_file()


def test_files_that_are_no_scripts(run, tmp_path):
    (tmp_path / "my.py").write_text("print('hello')\n")
    assert "sets nothing that nanoGPT's train.py has" in run("my.py")[1]
    assert "there is no file none.sh" in run("none.sh")[1]
    assert "needs a script or a command" in run()[1]
    assert "not a recipe file" in run("--output", "x.txt", "--", *f"pretrain_gpt.py {MODEL} {TRAINING}".split())[1]
    assert (
        "already; give another --output"
        in run("--output", "my.py", "--", *f"pretrain_gpt.py {MODEL} {TRAINING}".split())[1]
    )


LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
GATE = "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0"
OSS = (
    f"--position-embedding-type yarn --normalization RMSNorm {GATE} --softmax-type learnable "
    "--yarn-rotary-scaling-factor 32 --yarn-original-max-position-embeddings 4096 "
    "--no-yarn-correction-range-round-to-int --window-size 127,0 --window-attn-skip-freq 2 --rotary-base 150000 "
    "--yarn-mscale 1.0 --yarn-mscale-all-dim 0.0"
)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("--squared-relu", {"activation": "relu2"}),
        (f"{LLAMA} --add-qkv-bias", {"attention_bias": "qkv"}),
        (f"{LLAMA} --window-size (127,0) --window-attn-skip-freq 4", {"window": 128, "window_pattern": "LLLG"}),
        (f"{LLAMA} --window-size 127,0 --window-attn-skip-freq [1]*3+[0]", {"window": 128, "window_pattern": "LLLG"}),
        (f"{LLAMA} --window-size -1,0", {"window": 0}),
        (f"{LLAMA} --rotary-seq-len-interpolation-factor 4", {"rope_factor": 4, "rope_scaling": "linear"}),
        (f"{LLAMA.replace('rope', 'yarn')} --yarn-rotary-scaling-factor 4 --yarn-beta-fast 16 --yarn-beta-slow 2",
         {"rope_scaling": "yarn", "rope_factor": 4, "rope_beta_fast": 16, "rope_beta_slow": 2, "rope_truncate": True,
          "rope_attention_factor": 0}),
        (OSS, {"architecture": "gpt_oss", "activation": "clamped_swiglu", "window": 128, "window_pattern": "LG",
               "rope_factor": 32, "rope_original_length": 4096, "rope_truncate": False, "rope_theta": 150000}),
        (f"{LLAMA.replace('--disable-bias-linear', '')} --softmax-type learnable",
         {"architecture": "gpt_oss", "activation": "silu", "window": 0, "rope_factor": 1, "rope_theta": 10000}),
    ],
)  # fmt: skip
def test_what_models_here_have_is_translated(translated, words, values):
    recipe, _ = translated(f"pretrain_gpt.py {MODEL} {TRAINING} {words}")
    assert {name: getattr(recipe.model, name) for name in values} == values


def test_the_factor_of_yarn_is_the_ratio_of_both_scales(translated):
    recipe, _ = translated(f"pretrain_gpt.py {MODEL} {TRAINING} {OSS}")
    assert recipe.model.rope_attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    assert recipe.model.rotation.amplitude == recipe.model.rope_attention_factor


def test_muon_has_its_own_config(translated, tmp_path):
    words = "--optimizer muon --muon-momentum 0.9 --muon-num-ns-steps 6"
    optimizer = translated(f"pretrain_gpt.py {MODEL} {TRAINING} {words}")[0].optimizer
    assert (optimizer.kind, optimizer.momentum, optimizer.nesterov) == ("muon", 0.9, False)
    assert optimizer.newton_schulz_steps == 6 and optimizer.lr == 1e-4
    (tmp_path / "muon.py").write_text("optimizer_type = 'muon'\nlearning_rate = 0.02\n")
    optimizer = translated("train.py muon.py")[0].optimizer
    assert (optimizer.kind, optimizer.lr) == ("muon", 0.02)


@pytest.mark.parametrize("value", ["$(date +%Y --utc)", "$(basename $PWD)-x", "`hostname -s`"])
def test_what_is_unknown_in_a_text_of_options_leaves_the_others_known(run, tmp_path, value):
    script = f'OPTIONS="{MODEL} {TRAINING} --profile-x {value} --global-batch-size $(expr 4 \\* 8)"'
    (tmp_path / "x.sh").write_text(f"{script}\npython pretrain_gpt.py $OPTIONS")
    code, out = run("x.sh")
    assert code == 0, out
    assert recipe_of(tmp_path).global_batch_size == 32
    (tmp_path / "x.sh").write_text(f"{script.replace('--profile-x', '--seed')}\npython pretrain_gpt.py $OPTIONS")
    code, out = run("x.sh")
    assert code == 2 and "known; give the options that have them, after --" in out.replace("\n", " "), out
    assert "no --num" not in out


@pytest.mark.parametrize("text", ["$CMD", '"$CMD"'])
def test_eval_reads_quotes_once_more(run, tmp_path, text):
    lines = f"CMD=\"python pretrain_gpt.py {MODEL} {TRAINING} --seed '12' --profile-x '$(date -u)'\"\neval {text}"
    (tmp_path / "x.sh").write_text(lines)
    code, out = run("x.sh")
    assert code == 0 and recipe_of(tmp_path).seed == 12, out


def test_a_job_of_slurm_ends_with_its_sbatch_line(run, tmp_path):
    (tmp_path / "x.sh").write_text(
        "#!/bin/bash\n#SBATCH --nodes=4 --partition big\n#SBATCH --ntasks-per-node=1\n#SBATCH -A me\n"
        f"srun torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES pretrain_gpt.py {MODEL} {TRAINING}"
    )
    out = run("x.sh")[1]
    assert out.splitlines()[-2:] == [  # in any folder, not only in a checkout
        "dtgpt recipe slurm > slurm.sbatch",
        "sbatch --nodes=4 --partition big -A me slurm.sbatch my_recipe.py",
    ]
    assert recipe_of(tmp_path).global_batch_size == 32 * recipe_of(tmp_path).micro_batch_size


def test_lines_of_slurm_are_read_as_slurm_reads_them(run, tmp_path):
    (tmp_path / "x.sh").write_text(
        '#!/bin/bash\n#SBATCH -N4 -n32  # four nodes\n#SBATCH --job-name="my job"\n##SBATCH -p debug\n'
        f"srun python pretrain_gpt.py {MODEL} {TRAINING} --tensor-model-parallel-size 2"
    )
    code, out = run("x.sh")
    assert code == 0 and out.splitlines()[-1] == "sbatch -N 4 '--job-name=my job' slurm.sbatch my_recipe.py"
    (tmp_path / "x.sh").write_text(f"#SBATCH --comment='a\npython pretrain_gpt.py {MODEL} {TRAINING}")
    assert 'the line #SBATCH "--comment=\'a" cannot be read (No closing quotation); mend it' in run("x.sh")[1]


@pytest.mark.parametrize(("launcher", "last"), [
    ("torchrun --standalone --nproc-per-node=gpu", "torchrun --nproc-per-node N y.py"),
    ("deepspeed --num_gpus 8", "torchrun --nproc-per-node 8 y.py"),
    ("accelerate launch --num_processes 4", "torchrun --nproc-per-node 4 y.py"),
    ("srun -N2 -n16 python", "torchrun --nnodes 2 --nproc-per-node 8 "),
])  # fmt: skip
def test_launchers_say_how_many_processes_they_start(run, launcher, last):
    code, out = run("--output", "y.py", "--", *f"{launcher} pretrain_gpt.py {MODEL} {TRAINING}".split())
    assert code == 0 and last in out.splitlines()[-1]


@pytest.mark.parametrize("launcher", ["python", "torchrun --nproc_per_node 2"])
def test_no_command_starts_fewer_processes_than_the_plan_needs(run, launcher):
    words = f"{launcher} pretrain_gpt.py {MODEL} {TRAINING} --pipeline-model-parallel-size 4"
    last = run("--", *words.split())[1].splitlines()[-1]
    assert last.startswith("its plan needs 4 processes, or a multiple, but the command starts ")

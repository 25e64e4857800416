"""The commands of nanoGPT's README, as they stand there: each works, or the answer names the command that does."""

import pytest

CONFIGS = {  # the values that its configs set
    "train_shakespeare_char": "out_dir = 'out-shakespeare-char'\neval_interval = 250\neval_iters = 200\n"
    "log_interval = 10\ndataset = 'shakespeare_char'\ngradient_accumulation_steps = 1\nbatch_size = 64\n"
    "block_size = 256\nn_layer = 6\nn_head = 6\nn_embd = 384\ndropout = 0.2\nlearning_rate = 1e-3\nmax_iters = 5000\n"
    "lr_decay_iters = 5000\nmin_lr = 1e-4\nbeta2 = 0.99\nwarmup_iters = 100\nalways_save_checkpoint = False\n",
    "train_gpt2": "batch_size = 12\nblock_size = 1024\ngradient_accumulation_steps = 5 * 8\nmax_iters = 600000\n"
    "lr_decay_iters = 600000\neval_interval = 1000\neval_iters = 200\nlog_interval = 10\nweight_decay = 1e-1\n",
    "finetune_shakespeare": "out_dir = 'out-shakespeare'\ndataset = 'shakespeare'\ninit_from = 'gpt2-xl'\n"
    "batch_size = 1\ngradient_accumulation_steps = 32\nmax_iters = 20\nlearning_rate = 3e-5\ndecay_lr = False\n",
    "eval_gpt2": "batch_size = 8\neval_iters = 500\neval_only = True\nwandb_log = False\ninit_from = 'gpt2'\n",
}
SMALL = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 "
    "--n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)


@pytest.fixture(autouse=True)
def configs(tmp_path):
    (tmp_path / "config").mkdir()
    for name, text in CONFIGS.items():
        (tmp_path / "config" / f"{name}.py").write_text(text)


def test_characters_of_shakespeare_on_a_gpu_and_on_a_cpu(run, translated):
    recipe, out = translated("python train.py config/train_shakespeare_char.py")
    model = recipe.model
    assert (model.num_layers, model.num_heads, model.hidden_size, model.seq_length) == (6, 6, 384, 256)
    assert (recipe.micro_batch_size, recipe.steps, recipe.data.tokenizer, model.vocab_size) == (64, 5000, "char", 65)
    assert recipe.data.path == "data/shakespeare_char/train.bin" and out.splitlines()[-1] == "python my_recipe.py"
    small, _ = translated(f"python train.py config/train_shakespeare_char.py {SMALL}")
    assert (small.device, small.steps, small.model.hidden_size, small.optimizer.beta2) == ("cpu", 2000, 128, 0.99)


@pytest.mark.parametrize("command, last", [
    ("torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py",
     "torchrun --nproc-per-node 8 my_recipe.py"),
    ("torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=123.456.123.456 --master_port=1234 train.py",
     "torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr 123.456.123.456 --master-port 1234 "
     "my_recipe.py"),
    ("python train.py", "python my_recipe.py"),
])  # fmt: skip
def test_gpt2_of_124m(translated, command, last):
    recipe, out = translated(command)
    assert (recipe.global_batch_size, recipe.steps, recipe.optimizer.lr) == (480, 600_000, 6e-4)
    assert out.splitlines()[-1] == last


def test_fine_tuning_begins_with_a_model(translated):
    recipe, _ = translated("python train.py config/finetune_shakespeare.py")
    assert (recipe.init_from, recipe.model.num_layers, recipe.optimizer.schedule) == ("gpt2-xl", 48, "constant")


GENERATE = "use dtgpt generate MODEL --prompt TEXT --num-samples N --max-new-tokens N --temperature X --top-k N"


@pytest.mark.parametrize("command, told", [
    ("python data/shakespeare_char/prepare.py", "run it as it is: its .bin files are what --data.path reads"),
    ("python data/openwebtext/prepare.py", "run it as it is: its .bin files are what --data.path reads"),
    ("python sample.py --out_dir=out-shakespeare-char --device=cpu", GENERATE),
    ("python sample.py --init_from=gpt2-xl --start=What --num_samples=5 --max_new_tokens=100", GENERATE),
    ("python train.py config/eval_gpt2.py", "use dtgpt eval MODEL"),
    ("python bench.py", "use python benchmarks/train_step.py"),
])  # fmt: skip
def test_other_commands_are_answered(run, command, told):
    code, error = run("--", *command.split())
    assert code == 2 and told in error and error.count("\n") == 1

"""The commands of llm.c's README and scripts, as they stand there: each works, or the answer names the command that
does."""

import struct

import pytest

FINEWEB = "-i dev/data/fineweb10B/fineweb_train_*.bin -j dev/data/fineweb10B/fineweb_val_*.bin"
SCHEDULE = "-d 524288 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000"


def test_124m_as_its_script_trains_it(translated):
    words = f"{FINEWEB} -o log124M -v 250 -s 20000 -g 144 -h 1 -b 64 -t 1024 {SCHEDULE} -y 1 -e d12 -x 18865"
    recipe, out = translated(f"mpirun -np 8 ./train_gpt2cu {words} -sl 7.0 -sg 7.0")
    optimizer = recipe.optimizer
    assert (recipe.steps, recipe.global_batch_size, recipe.micro_batch_size, recipe.plan) == (18865, 512, 64, "zero1")
    assert (optimizer.lr, optimizer.min_lr, optimizer.warmup, optimizer.weight_decay) == (6e-4, 0, 700, 0.1)
    assert (optimizer.skip_loss_z, optimizer.skip_grad_norm_z) == (7, 7)
    assert out.splitlines()[-1] == "torchrun --nproc-per-node 8 my_recipe.py"


@pytest.mark.parametrize("command, steps", [
    ("python train_gpt2.py", 10),
    ("torchrun --standalone --nproc_per_node=8 train_gpt2.py --input_bin dev/data/tinyshakespeare/x.bin "
     "--num_iterations 200 --total_batch_size 65536 --sequence_length 1024 --batch_size 8 --model d12", 200),
    ("./train_gpt2cu -e d12 -b 4 -t 64 -x 22", 22),
])  # fmt: skip
def test_short_runs(translated, command, steps):
    assert translated(command)[0].steps == steps


def test_without_a_number_of_steps_an_epoch_is_counted_or_asked_for(run, tmp_path):
    """`./train_gpt2cu` alone trains for an epoch of the file that tinyshakespeare.py writes."""
    told = run("--", "./train_gpt2cu", "-e", "d12")[1]
    assert "no such file of tokens is here" in told and "add the number of steps after --" in told
    folder = tmp_path / "dev" / "data" / "tinyshakespeare"
    folder.mkdir(parents=True)
    (folder / "tiny_shakespeare_train.bin").write_bytes(struct.pack("<3i", 20240520, 1, 305_260) + bytes(1012))
    code, out = run("--", "./train_gpt2cu", "-e", "d12")
    assert code == 0 and "steps=74," in (tmp_path / "my_recipe.py").read_text(), out


@pytest.mark.parametrize("command, told", [
    ("./dev/download_starter_pack.sh", "run it as it is: its .bin files are what --data.path and --init_from read"),
    ("python dev/data/tinyshakespeare.py", "run it as it is: its .bin files are what --data.path reads"),
    ("python dev/data/fineweb.py --version 10B", "run it as it is: its .bin files are what --data.path reads"),
    ("python dev/data/hellaswag.py", "dtgpt eval MODEL --task hellaswag --data hellaswag_val.jsonl"),
    ("OMP_NUM_THREADS=8 ./train_gpt2", "give the command of train_gpt2cu"),
    ("./train_gpt2fp32cu", "give the command of train_gpt2cu, and --precision fp32 to the recipe"),
    ("./test_gpt2", "use python -m pytest"),
    ("./test_gpt2cu", "use python -m pytest -m cuda"),
    ("./profile_gpt2cu", "use python benchmarks/train_step.py --profile"),
    ("python dev/eval/export_hf.py --input log124M/model_19560.bin --output gpt2_124M",
     "use dtgpt convert FILE.bin TARGET --to hf"),
])  # fmt: skip
def test_other_commands_are_answered(run, command, told):
    code, error = run("--", *command.split())
    assert code == 2 and told in error and error.count("\n") == 1

"""Every test: one thread (two pytest workers share two cores), a cache of its own, a fresh compiler."""

import os
import signal
import sys
from contextlib import nullcontext

os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes that tests start
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_SILENT"] = "true"

import pytest
import torch

from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, LogConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.util.environment import child_environment
from dtgpt.util.hardware import why_no_compiler
from tests.support.pictures import no_pictures
from tests.support.week import VARIABLE, seed_of_the_week

torch.set_num_threads(1)
os.environ.update(child_environment())  # processes that tests start, in any folder, import the code under test

# Under nohup, or in the background of a script, this process ignores a signal, and so would the programs that it
# starts. What handles a signal is not inherited by them.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


# Files that are not part of `-m quick`. A file that is not listed is: where it is slow, the two minutes show it.
SLOW = {
    "test_against_transformers", "test_batch_size", "test_benchmarks", "test_checkpoint_damage",
    "test_checkpoint_kill", "test_checkpoint_memory", "test_checkpoint_save", "test_cli", "test_connection",
    "test_convert", "test_data", "test_engine", "test_eval_command", "test_extension", "test_failing_disk",
    "test_foreign_files",
    "test_fp8_parity", "test_fp8_runs", "test_fuzz",
    "test_generate_command", "test_generate_llama", "test_graphs", "test_harness", "test_hostile",
    "test_huggingface_round_trip", "test_inference",
    "test_interop_huggingface", "test_interval_loss", "test_last_step", "test_life", "test_llama",
    "test_llama_block", "test_llama_parity", "test_llama_runs", "test_lm_eval", "test_lost_peers",
    "test_megatron_own", "test_nodes", "test_one_rank", "test_openai_client", "test_optim",
    "test_own_tokenizer", "test_page_browser",
    "test_parity", "test_pickles", "test_pipeline", "test_plan_command", "test_precision", "test_prepare",
    "test_prepare_command", "test_prepared", "test_random_plans", "test_ranks", "test_recipe_file",
    "test_recompute", "test_reshard", "test_resume", "test_resume_plans", "test_run_folder", "test_same_text",
    "test_samples_of_training", "test_sampling", "test_sampling_kernels", "test_scoring", "test_server",
    "test_settle", "test_shards", "test_signals", "test_slurm", "test_storage", "test_task_metrics", "test_timers",
    "test_token_properties", "test_tokenizer_beside", "test_tokenizer_export", "test_tokenizer_of_run",
    "test_torch_dist_resume", "test_train", "test_waiting_ranks", "test_watch",
}  # fmt: skip
# Of those files, one plan of each kind against one process is part of it nevertheless.
KINDS = ("dp2_zero0", "dp2_zero3", "tp2_sp", "pp2_1f1b", "tp2_pp2")
NARROW = ("dp2_zero3-bf16", "pp2_zbv-fp16")
QUICK_IN_SLOW = {
    *(f"test_the_plan_follows_one_process[{kind}]" for kind in KINDS),
    *(f"test_a_plan_in_16_bits_follows_one_process_in_16_bits[{kind}]" for kind in NARROW),
    "test_all_ranks_skip_a_step_in_which_one_overflows[dp2_zero3]",
}


def pytest_report_header():
    return f"random cases: seed of the week {seed_of_the_week()} ({VARIABLE} repeats another one)"


def pytest_collection_modifyitems(items):
    for item in items:
        is_quick = item.path.stem not in SLOW or item.name in QUICK_IN_SLOW
        if is_quick and item.get_closest_marker("long") is None:
            item.add_marker(pytest.mark.quick)
    missing = {"compiler": why_no_compiler(torch.device("cpu"))}
    if not torch.cuda.is_available():
        missing["cuda"] = "needs a CUDA device"
    for item in items:
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def fresh_compiler():
    """torch.compile allows a function few variants in a process; tests of many shapes must not add up."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(autouse=True)
def pictures(request):
    """Runs of a test without the mark `picture` draw none."""
    with nullcontext() if request.node.get_closest_marker("picture") else no_pictures():
        yield


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """Tokens and vocabularies made in tests stay out of the user's cache."""
    os.environ["DTGPT_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def text(tmp_path):
    """A .txt file that a tiny model can learn."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(400)))
    return path


@pytest.fixture
def documents(tmp_path):
    """A .jsonl file of short documents of five lengths."""
    path = tmp_path / "documents.jsonl"
    lines = [f'{{"text": "{"so " * (i % 5)}{i} and {i + 1} make {2 * i + 1}."}}\n' for i in range(400)]
    path.write_text("".join(lines))
    return path


@pytest.fixture
def recipe(tmp_path, text):
    """A run of a few seconds, dropout and accumulation on."""
    return Recipe(
        name="test",
        model=GPT2Config(num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=257, dropout=0.1),
        optimizer=OptimizerConfig(lr=3e-3, warmup=2),
        steps=10,
        micro_batch_size=4,
        global_batch_size=8,
        device="cpu",
        runs=str(tmp_path / "runs"),
        data=DataConfig(path=str(text), tokenizer="bytes"),
        log=LogConfig(interval=1, eval_interval=5, eval_samples=8, sample_tokens=5),
    )

"""Every test: one thread (two pytest workers share two cores), a cache of its own, a fresh compiler."""

import gc
import os
import signal
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes that tests start
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_SILENT"] = "true"
# Ask the driver's library, not CUDA, whether there is a GPU: a process that has asked CUDA cannot use it after a fork,
# and programs of tests are forks.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import hypothesis
import pytest
import torch

import tests.support.kept_weights  # noqa: F401
from dtgpt.config.recipe import Recipe
from dtgpt.config.sections import DataConfig, LogConfig, OptimizerConfig
from dtgpt.models.gpt2 import GPT2Config
from tests.support import changed, covered_lines, cpu_seconds, recorded_map, refusals
from tests.support.budgets import asks_for_all, budget_of, slowness, wrong_marks
from tests.support.pictures import no_pictures, pictures

gc.disable()  # until all is collected, see tests/support/imported.py
# Every run tries the same examples; a test states what else differs from hypothesis' defaults.
hypothesis.settings.register_profile("fixed", derandomize=True, database=None)
hypothesis.settings.load_profile("fixed")
torch.set_num_threads(1)
# Processes that tests start, in any folder, import the code under test.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Under nohup, or in the background of a script, this process ignores a signal, and so would the programs that it
# starts. What handles a signal is not inherited by them.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


# Of the slow tests, one plan of each kind against one process is part of `-m quick` nevertheless.
KINDS = ("dp2_zero0", "dp2_zero3", "tp2_sp", "pp2_1f1b", "tp2_pp2")
NARROW = ("dp2_zero3-bf16", "pp2_zbv-fp16")
QUICK_THOUGH_SLOW = {
    *(f"test_the_plan_follows_one_process[{kind}]" for kind in KINDS),
    *(f"test_a_plan_in_16_bits_follows_one_process_in_16_bits[{kind}]" for kind in NARROW),
    "test_all_ranks_skip_a_step_in_which_one_overflows[dp2_zero3]",
    *(
        f"test_logits_loss_and_every_gradient_agree_with_transformers[{family}]"
        for family in ("gpt2", "gpt2 far", "gpt_neo", "olmo3", "gemma3", "gpt_oss", "olmoe")
    ),
    "test_the_tables_of_what_can_be_combined_are_those_of_the_checks",
    # These alone find a planted fault.
    "test_replicas_are_summed_once_and_while_backward_goes_on[torch.bfloat16-2]",
    "test_uneven_parts_of_three_ranks_are_pushed[dp3_zero3]",
    "test_every_plan_follows_one_process[pp2_zbv]",
}


def pytest_addoption(parser):
    group = parser.getgroup("dtgpt")
    group.addoption("--changed", nargs="?", const="", metavar="COMMIT", help=changed.HELP)
    group.addoption("--cpu-seconds", metavar="FILE", help=cpu_seconds.HELP)
    group.addoption("--record-lines", metavar="FILE", help=covered_lines.HELP)
    group.addoption("--record-map", action="store_true", help=recorded_map.HELP)
    group.addoption("--record-refusals", metavar="FILE", help=refusals.HELP)


def pytest_configure(config):
    changed.configure(config)
    cpu_seconds.configure(config)
    recorded_map.configure(config)
    refusals.configure(config)


def pytest_unconfigure(config):
    changed.finish(config)
    cpu_seconds.finish(config)
    recorded_map.finish(config)


def pytest_collection_finish():
    """Let Python search for garbage among what tests make, not among all that is imported and collected."""
    import tests.support.imported  # noqa: F401


def pytest_report_header(config):
    return config.stash[changed.KEY].lines if config.option.changed is not None else []


def pytest_collection_modifyitems(config, items):
    for item in items:
        item.user_properties.append(("budget", budget_of(item)))
        is_quick = item.get_closest_marker("slow") is None or item.name in QUICK_THOUGH_SLOW
        if is_quick and item.get_closest_marker("long") is None:
            item.add_marker(pytest.mark.quick)
    missing = {"compiler": "nothing here compiles"}
    with suppress(ImportError):  # where the core is tested alone
        from dtgpt.parallel.compiled.choice import why_no_compiler

        missing["compiler"] = why_no_compiler(torch.device("cpu"))
    if not torch.cuda.is_available():
        missing["cuda"] = "needs a CUDA device"
    for item in items:
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
    changed.deselect(config, items)


def pytest_terminal_summary(terminalreporter, config):
    """Say what `--changed` chose where `-q` has hidden it, and, after all tests or the quick ones, which marks `slow`
    are missing or wrong."""
    if config.option.verbose < 0 and config.option.changed is not None:
        for line in config.stash[changed.KEY].lines:
            terminalreporter.write_line(line)
    if asks_for_all(config) and config.option.markexpr in ("not long", "quick"):
        reports = [report for kind in terminalreporter.stats.values() for report in kind]
        found = [
            (*budget, report.duration)
            for report in reports
            if hasattr(report, "duration") and (budget := dict(report.user_properties).get("budget"))
        ]  # a test that ended its process has none
        skipped = {
            dict(report.user_properties).get("budget", [""])[0]
            for report in terminalreporter.stats.get("skipped", [])
            if hasattr(report, "duration")
        }
        times, all_ran = slowness(config.option.numprocesses or 1), config.option.markexpr != "quick"
        times *= recorded_map.TIMES if recorded_map.records(config) else 1
        for line in wrong_marks(found, times, all_ran, skipped):
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """torch.compile allows a function few variants in a process; tests of many shapes must not add up."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(autouse=True, scope="session")
def without_pictures():
    """Runs draw none, those of fixtures that tests share neither."""
    with no_pictures():
        yield


@pytest.fixture(autouse=True)
def with_pictures(request, without_pictures):
    """Runs of a test with the mark `picture` draw."""
    with pictures() if request.node.get_closest_marker("picture") else nullcontext():
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

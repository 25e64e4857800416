"""The time of a step: against measured steps, and against what formulas say of its parts."""

import importlib.util
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from dtgpt.models.shared.flops import flops_per_token
from dtgpt.planning.gpus import HOW_WELL, SHEETS, find_gpu, known_gpu, name_of
from dtgpt.planning.operation_time import PRODUCT_START
from dtgpt.planning.step_time import (
    HOP,
    HOST,
    LATENCY,
    NETWORK_LATENCY,
    compute_time,
    idle_time,
    message_seconds,
    step_time,
)
from dtgpt.planning.traffic import Collective, bubble
from dtgpt.train.start import load_recipe
from dtgpt.util.errors import UserError

ROOT = Path(__file__).parents[2]
H200 = known_gpu("H200").rates


def settings_of(name: str, plan: str, *options: str, world: int | None = None):
    return load_recipe(ROOT / "recipes" / f"{name}.py", ["--plan", plan, *options]).planned(world)


def test_measured_steps_are_predicted_as_well_as_reports_and_the_page_say():
    """The constants came from some of these cases: the page says which."""
    spec = importlib.util.spec_from_file_location("predicted_steps", ROOT / "benchmarks" / "predicted_steps.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "planning.md").read_text()
    cases = json.loads((ROOT / "benchmarks" / "measured_steps.json").read_text())["cases"]
    sizes: dict[str, list[float]] = {}
    errors: dict[tuple[str, bool], list[float]] = {}
    for case in cases:
        measured, predicted = script.predicted(case)
        error = predicted / measured - 1
        sizes.setdefault(case["gpu"], []).append(abs(error))
        errors.setdefault((case["gpu"], case.get("fit", False)), []).append(error)
    assert all(script.summary(*which, found) in page for which, found in errors.items())
    said = re.fullmatch(r"(\d+) % .* of (\d+) .*, (\d+) % at most", HOW_WELL["H200"])
    median, count, most = map(float, said.groups())
    assert len(sizes["H200"]) == count
    assert statistics.median(sizes["H200"]) <= (median + 0.5) / 100 and max(sizes["H200"]) <= (most + 0.5) / 100
    assert sorted(sizes["H200"])[-2] < 0.12
    assert len(sizes["H100"]) == 3 and max(sizes["H100"]) < 0.105


@pytest.mark.parametrize("name", ["gpt2_345m", "llama32_1b"])
def test_products_are_those_that_the_model_counts(name):
    """6 N for each token, of the weights that are multiplied; vocabularies and widths are whole tiles."""
    options = "--micro_batch_size", "4", "--global_batch_size", "4", "--model.dropout", "0"
    settings = settings_of(name, "single", *options)
    model, tokens = settings.model, 4 * settings.seq_length
    cores = 12 * model.num_layers * model.num_heads * model.head_dim * settings.seq_length
    flops = (flops_per_token(model, settings.seq_length) - cores) * tokens
    time = step_time(settings, H200)
    starts = (3 * 4 * model.num_layers + 3) * PRODUCT_START
    assert time.work.products == pytest.approx(flops / H200.products + starts, rel=0.003)
    assert not any(time.messages.values()) and time.bubble == time.again == time.host == 0


def test_a_step_is_its_parts_and_more_than_its_operations():
    for plan, options in (("tp2_sp", ()), ("pp2_interleaved", ()), ("dp2_zero3", ("--recompute", "full"))):
        settings = settings_of("gpt2_345m", plan, "--micro_batch_size", "2", "--global_batch_size", "16", *options)
        time = step_time(settings, H200)
        parts = [*vars(time.work).values(), time.again, time.optimizer, *time.messages.values(), time.bubble, time.host]
        assert time.total == pytest.approx(sum(parts))
        assert compute_time(settings, H200) < time.total
        assert all(part >= 0 for part in parts)


def test_recomputation_costs_the_forward_pass_of_blocks():
    options = ("--micro_batch_size", "8", "--global_batch_size", "8", "--model.dropout", "0")
    without = step_time(settings_of("gpt2_345m", "single", *options), H200)
    full = step_time(settings_of("gpt2_345m", "single", *options, "--recompute", "full"), H200)
    assert full.work == without.work
    assert 0.25 < full.again / without.work.total < 0.34  # a third, less the head


@pytest.mark.parametrize("plan", ["pp4", "pp4_gpipe", "pp4_interleaved2", "pp4_interleaved3", "pp4_zbv"])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(plan):
    settings = settings_of("gpt2_345m", plan, "--micro_batch_size", "1", "--global_batch_size", "12")
    idle = idle_time(settings, [0.25] * 4)
    assert idle / (12 * 0.25 + idle) == pytest.approx(bubble(settings.plan, 12))


def test_the_slowest_stage_decides_and_others_fill_the_pipeline_once():
    settings = settings_of("gpt2_345m", "pp2", "--micro_batch_size", "1", "--global_batch_size", "8")
    assert idle_time(settings, [3.0, 2.0]) == 2.0


@pytest.mark.parametrize(
    "plan, world, over, seconds",
    [
        ("dp8", 8, "dp", LATENCY + 7 / 8 * 1e9 / H200.link),
        ("tp8", 16, "tp", 2.5e-6 + 7 / 8 * 1e9 / H200.link_kernels),
        ("tp8", 32, "dp", NETWORK_LATENCY + 3 * HOP + 3 / 4 * 1e9 / H200.network),  # a rank of each host
        ("tp4", 32, "dp", NETWORK_LATENCY + 3 * HOP + 7 / 8 * 1e9 / (2 * H200.network)),  # two share its adapters
        ("dp", 64, "dp", NETWORK_LATENCY + 7 * HOP + 63 / 64 * 1e9 / H200.link_kernels),
    ],
)
def test_a_gather_takes_what_a_ring_over_links_and_network_takes(plan, world, over, seconds):
    settings = settings_of("gpt2_345m", plan, "--global_batch_size", "64", "--micro_batch_size", "1", world=world)
    gather = Collective("all-gather", over, "weights", 1, 10**9)
    assert message_seconds(gather, settings, H200) == pytest.approx(seconds)
    both = message_seconds(replace(gather, kind="all-reduce"), settings, H200)
    assert both > 1.7 * message_seconds(gather, settings, H200) - 4 * NETWORK_LATENCY


def test_without_graphs_the_host_holds_a_small_step():
    options = ("--micro_batch_size", "1", "--global_batch_size", "1")
    held = step_time(settings_of("gpt2_345m", "single", *options, "--graph", "off", "--compile", "off"), H200)
    assert held.total == pytest.approx(24 * HOST["plain"]) and held.host > 0
    assert step_time(settings_of("gpt2_345m", "single", *options), H200).host == 0


@pytest.mark.parametrize(
    "words, name",
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"), ("NVIDIA L40S", "L40S"), ("NVIDIA L4", "L4"), ("NVIDIA A10", "A10"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"), ("Tesla V100-SXM2-32GB", "V100"), ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA H100 PCIe", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA H20", None),
    ],
)  # fmt: skip
def test_names_of_cuda_lead_to_rates(words, name):
    assert name_of(words) == name


@pytest.mark.parametrize(
    "given, name",
    [
        ("A100-80GB", "A100"), ("a100-sxm4-40gb", "A100-40GB"), ("nvidia h100 80gb hbm3", "H100"),
        ("H100-SXM5", "H100"), ("rtx_4090", "RTX4090"), ("RTX 4090", "RTX4090"), ("a100 40 GB", "A100-40GB"),
    ],
)  # fmt: skip
def test_a_gpu_is_named_as_machines_and_clouds_name_it(given, name):
    assert find_gpu(given).name == name


@pytest.mark.parametrize("given", ["H100 pcie", "RTX 4090 laptop", "H100-NVL", "H1000"])
def test_another_chip_of_the_same_name_is_not_known(given):
    with pytest.raises(UserError, match=r"is not known; .*use one of"):
        find_gpu(given)


def test_each_gpu_can_less_than_its_data_sheet_says():
    for name, sheet in SHEETS.items():
        rates = find_gpu(name.lower()).rates
        assert 0 < rates.products < sheet.bits_16 * 1e12 and rates.memory < sheet.bandwidth * 1e12
        assert (rates.products_fp8 == 0) == (sheet.capability < (8, 9))

"""Messages between pipeline stages through memory that ranks share: where each goes, and, on two GPUs, the same bits as
by NCCL."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtgpt.compare.record import Record, record
from dtgpt.config.plan_choice import parse_plan
from dtgpt.parallel.graphs.captured import WARM_UP
from dtgpt.parallel.launch import end_process_group, start_process_group
from dtgpt.parallel.mesh import RankCoordinates
from dtgpt.parallel.shared_memory.arena import SWITCH
from dtgpt.parallel.shared_memory.edges import Edges, most_edges
from dtgpt.parallel.stages import places_of_edge
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import load_recipe
from dtgpt.util.peers import Process
from tests.support.bodies_edges import bits_over_edges
from tests.support.bodies_exact import bits_of_steps
from tests.support.gpus import run_on_two_gpus
from tests.support.pipeline_orders import least_places
from tests.support.ranks import pool

RECIPES = Path(__file__).parents[3] / "recipes"
OPTIONS = "--model.num_layers 4 --model.dropout 0.1 --micro_batch_size 1 --global_batch_size 8 --compile off"
MICRO_BATCHES = 3


class Recorded:
    """In place of `Messages`: what one rank asked for."""

    def __init__(self):
        self.sent: list[tuple[int, int, int | None]] = []
        self.signals: list[tuple[int, int]] = []

    def send(self, message: torch.Tensor, rank: int, index: int, after: int | None = None) -> None:
        self.sent.append((rank, index, after))

    def signal(self, rank: int, index: int) -> None:
        self.signals.append((rank, index))

    def receive(self, index: int) -> int:
        return index


@pytest.mark.parametrize(("name", "world"), [
    ("pp2", 2), ("pp4", 4), ("pp2_interleaved", 2), ("pp3_interleaved3", 3), ("pp2_zbv", 2), ("pp4_zbv", 4),
    ("dp2_tp2_pp3", 12)
])  # fmt: skip
def test_each_message_has_a_place_of_its_own_where_its_receiver_looks(name, world):
    plan = parse_plan(name).for_world(world)
    pipeline = [RankCoordinates(plan, world // plan.pp * pp + world // plan.pp - 1) for pp in range(plan.pp)]
    most = most_edges(pipeline[0])
    ranks = [Edges(place, Recorded(), MICRO_BATCHES) for place in pipeline]
    expected, sent, awaited = set(), set(), set()
    for edges in ranks:
        edges.begin()
        for stage in edges.place.stages:
            for beside in (stage - 1, stage + 1):
                assert edges.joins(beside, stage) == (edges.place.rank_of(beside) is not None)
                if not edges.joins(beside, stage):
                    continue
                for micro_batch in range(MICRO_BATCHES):
                    edges.send(torch.empty(0), stage, beside, micro_batch)
                    index = edges.receive(beside, stage, micro_batch)
                    expected.add((edges.place.pp, index, beside, stage, micro_batch))
                    rank, index, after = edges.messages.sent[-1]
                    sent.add((rank, index, stage, beside, micro_batch))
                    assert (after is not None) == (micro_batch == 0)  # the first one waits until the receiver begins
                    awaited |= {(edges.place.pp, after)} - {(edges.place.pp, None)}
    assert sent == expected and len(sent) == len({place[:2] for place in sent})
    assert all(index < most * MICRO_BATCHES for _, index, *_ in sent)
    signals = [signal for edges in ranks for signal in edges.messages.signals]
    assert set(signals) == awaited and len(signals) == len(awaited)
    assert all(0 <= index - most * MICRO_BATCHES < most for _, index in signals)


@pytest.mark.slow(2)
@pytest.mark.parametrize("schedule", ["", "_gpipe", "_interleaved", "_interleaved3", "_zbv"])
def test_an_edge_has_the_fewest_places_that_no_message_enters_too_early(schedule):
    """By the order of torch's schedules alone, whatever time passes take."""
    for ranks in range(2, 6):
        plan = parse_plan(f"pp{ranks}{schedule}").for_world(ranks)
        for count in (n for n in range(1, 5 * ranks + 1) if plan._schedule_runs(n)):
            assert places_of_edge(plan, count) == least_places(plan, count), (plan.name, count)


def test_micro_batches_use_the_places_of_an_edge_in_turn():
    plan = parse_plan("pp2").for_world(2)
    edges = Edges(RankCoordinates(plan, 1), Recorded(), 2)
    assert [edges.receive(0, 1, index) for index in range(5)] == [0, 1, 0, 1, 0]


@pytest.mark.slow(5)
@pytest.mark.parametrize(("plan", "stages"), [("pp2", 1), ("pp2_interleaved", 2), ("pp2_zbv", 2)])
def test_stages_that_send_over_edges_have_the_bits_of_those_that_torch_lets_send(recipe, plan, stages):
    made = replace(recipe, plan=plan, model=replace(recipe.model, num_layers=4))
    (over_edges, number), expected = (pool().run(2, work, made)[0] for work in (bits_over_edges, bits_of_steps))
    assert over_edges == expected and len(expected) > 20 and number == stages


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_send_what_nccl_would(tmp_path):
    run_on_two_gpus(tmp_path, "from tests.parallel.shared_memory.test_edges import check; check()")


def check() -> None:
    """Compare, as one of the ranks, records of steps in which copy engines send with records of those in which NCCL
    does."""
    process = Process.from_environment()
    start_process_group(torch.device("cuda", process.local_rank), 120.0)
    captured = [("on", plan) for plan in ("pp2", "pp2_gpipe", "pp2_interleaved", "pp2_zbv")]
    for graph, plan in [*captured, ("off", "pp2_interleaved")]:
        ours, expected = (run_plan(plan, graph, switch) for switch in "10")
        if ours and expected:  # on rank 0
            assert ours.losses == expected.losses, (plan, graph)
            assert all(torch.equal(ours.tensors[name], tensor) for name, tensor in expected.tensors.items())
    end_process_group()


def run_plan(plan: str, graph: str, switch: str) -> Record | None:
    os.environ[SWITCH] = switch
    options = f"{OPTIONS} --plan {plan} --graph {graph}".split()
    with open_trainer(load_recipe(RECIPES / "gpt2_tiny.py", options)) as trainer:
        assert (trainer.engine.edges is not None) == (switch == "1")
        return record(trainer, WARM_UP + 4)

"""Which shapes a warm-up runs."""

import pytest

from dtgpt.inference.captured.step import CapturedStep
from dtgpt.inference.model import Need
from dtgpt.inference.step import Step
from dtgpt.serve.warm_up import warm_up
from tests.support.eager_graphs import with_prompts_together
from tests.support.server import bytes_tokenizer, generator_of, tiny_model


@pytest.fixture
def shapes(monkeypatch):
    """Run a warm-up; return the lengths of prefills, and rows and filters of decode steps."""
    prefills, steps = set(), set()
    read, decode = Step.read, Step.decode

    def seen_read(step, slots, prompts, first):
        prefills.update(map(len, prompts))
        read(step, slots, prompts, first)

    def seen_decode(step, slots, count, variant):
        steps.add((len(slots), variant.filters))
        return decode(step, slots, count, variant)

    monkeypatch.setattr(Step, "read", seen_read)
    monkeypatch.setattr(Step, "decode", seen_decode)

    def run(slots, positions, graphs):
        generator = generator_of(tiny_model(seq_length=positions), bytes_tokenizer(), slots)
        generator.run(lambda: (Need(slots, 1), None), lambda engine, _: warm_up(engine, slots, positions, graphs))
        return prefills, steps

    return run


def test_every_shape_of_a_graph_is_run(shapes):
    prefills, steps = shapes(slots=12, positions=64, graphs=True)
    assert {16, 32, 62} <= prefills  # the last one is padded to 64
    assert steps >= {(rows, filters) for rows in (1, 2, 4, 8, 12) for filters in (False, True)}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("positions", [1, 2, 3])
def test_models_of_few_positions_are_warmed_up_as_far_as_they_generate(shapes, positions, graphs):
    _, steps = shapes(slots=2, positions=positions, graphs=graphs)
    assert bool(steps) == (positions > 1)


def test_few_rows_take_whole_rounds_too(monkeypatch):
    rounds, decode = set(), Step.decode

    def seen(step, slots, count, variant):
        rounds.add((len(slots), count, variant.filters))
        return decode(step, slots, count, variant)

    monkeypatch.setattr(Step, "decode", seen)
    generator = generator_of(tiny_model(seq_length=64), bytes_tokenizer(), 12)
    generator.run(lambda: (Need(12, 1), None), lambda engine, _: warm_up(engine, 12, 64, graphs=True))
    few = (1, 2, 4, 8)
    assert rounds >= {(rows, steps, filters) for rows in few for steps in (1, 8) for filters in (False, True)}


def test_prompts_are_read_in_batches_of_every_size(monkeypatch):
    batches, read = set(), CapturedStep.read

    def seen(step, slots, prompts, first):
        batches.add((len(prompts), len(prompts[0])))
        read(step, slots, prompts, first)

    def work(engine, _):
        with_prompts_together(engine, 512)
        engine._forget()
        warm_up(engine, 20, 64, graphs=True)

    monkeypatch.setattr(CapturedStep, "read", seen)
    generator_of(tiny_model(), bytes_tokenizer(), 20).run(lambda: (Need(20, 1), None), work)
    assert batches >= {(16, 16), (8, 32), (16, 32), (4, 62), (8, 62)}


def test_many_rows_are_several_requests(shapes):
    assert max(rows for rows, _ in shapes(slots=140, positions=8, graphs=True)[1]) == 140


@pytest.mark.parametrize("positions", [3, 64])
def test_without_graphs_one_request_is_enough(shapes, positions):
    prefills, steps = shapes(slots=4, positions=positions, graphs=False)
    assert prefills == {1} and steps == {(1, False)}

"""Where a rank stands in a plan, and what ranks decide together."""

import pytest
import torch
from safetensors import SafetensorError

from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.parallel.layout import chunk
from dtgpt.parallel.mesh import Mesh, RankCoordinates
from dtgpt.util.errors import UserError
from tests.support.bodies_mesh import (
    agree_on,
    agreement,
    coordinates,
    errors,
    number_of_groups,
    open_and_close,
    read_texts,
    reductions,
    timeouts,
)
from tests.support.ranks import pool

LARGE = ["dp3_tp4_pp2", "dp4_zero3_tp2_pp3_zbv", "dp1", "tp5", "pp3_interleaved2", "dp2_zero1_pp2_gpipe"]


def places(name: str) -> list[RankCoordinates]:
    plan = parse_plan(name)
    plan = plan.for_world(plan.world)
    return [RankCoordinates(plan, rank) for rank in range(plan.world)]


@pytest.mark.parametrize("name", LARGE)
def test_every_rank_has_a_place_of_its_own_with_tp_fastest(name):
    all_places = places(name)
    plan = all_places[0].plan
    expected = [
        (pp, dp, tp) for pp in range(plan.pp) for dp in range(plan.dp) for tp in range(plan.tp)
    ]  # the last one fastest
    assert [(p.pp, p.dp, p.tp) for p in all_places] == expected
    assert all(p.shard == (p.dp if plan.zero else 0) for p in all_places)


@pytest.mark.parametrize("name", LARGE)
def test_a_neighbour_differs_in_the_pipeline_coordinate_alone(name):
    for place in places(name):
        for pp in range(place.plan.pp):
            other = RankCoordinates(place.plan, place.neighbour(pp))
            assert (other.pp, other.dp, other.tp) == (pp, place.dp, place.tp)
        assert place.neighbour(place.pp) == place.rank


@pytest.mark.parametrize("name", LARGE)
def test_every_stage_is_on_one_pipeline_rank(name):
    column = [place for place in places(name) if (place.dp, place.tp) == (0, 0)]
    stages = [stage for place in column for stage in place.stages]
    assert sorted(stages) == list(range(column[0].plan.num_stages))
    assert all(place.stages == sorted(place.stages) for place in column)


@pytest.mark.parametrize("plan", ["tp2_pp2", "dp2_tp2", "dp2_zero3_pp2_zbv", "dp4_zero1", "pp4"])
def test_places_are_those_of_the_device_mesh(plan):
    degrees = parse_plan(plan).for_world(4)
    answers = pool().run(4, coordinates, degrees)
    assert len({ours for ours, _, _ in answers}) == 4
    for rank, (ours, theirs, groups) in enumerate(answers):
        place = RankCoordinates(degrees, rank)
        assert ours == theirs
        assert groups.get("tp") == ([rank - place.tp + i for i in range(2)] if degrees.tp > 1 else None)
        assert groups["pp"] == [place.neighbour(pp) for pp in range(degrees.pp)]
        last = degrees.stage_rank(degrees.num_stages - 1)
        pair = [place.neighbour(0), place.neighbour(last)]
        assert groups.get("tied") == (pair if last and place.pp in (0, last) else None)


def test_a_chunk_is_that_of_torch():
    for length in range(70):
        for pieces in range(1, 12):
            theirs = [t.tolist() for t in torch.arange(100, 100 + length).chunk(pieces)]
            theirs += [[]] * (pieces - len(theirs))
            ours = [chunk(range(100, 100 + length), pieces, index) for index in range(pieces)]
            assert [list(r) for r in ours] == theirs
            assert all(r.step == 1 for r in ours)


def test_a_chunk_of_a_chunk_has_global_indices():
    assert chunk(chunk(range(384), 2, 1), 3, 2) == range(320, 384)
    assert len(chunk(range(3), 4, 3)) == 0


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_ranks_decide_together_is_the_same_on_all(world):
    answers = pool().run(world, reductions, world)
    ranks = list(range(world))
    for answer in answers:
        assert answer["sum"] == [sum(ranks), world / 2, world * (2.0**40 + 1)]
        assert answer["dtype"] == torch.float64
        assert answer["max"] == (world - 1) * 1.5
        assert answer["any"] == [False, True, True]
        assert answer["vote"] == [[False, True], [True, False], [False, False]]
        assert answer["gather"] == [{"rank": rank} for rank in ranks]
        assert answer["turns"] == [rank * 10 if rank % 2 else None for rank in ranks]
        assert answer["on_rank_0"] == "by 0"


@pytest.mark.parametrize("world, failing, error", [
    (2, 0, UserError("no; mend it")), (4, 2, OSError(28, "No space left on device")), (2, 0, OSError()),
    (4, 2, SafetensorError("cut off")),
])  # fmt: skip
def test_an_error_on_one_rank_reaches_all_and_leaves_them_in_step(world, failing, error):
    words = "No space left on device; free space there" if isinstance(error, OSError) and error.errno else str(error)
    for rank, (sentence, total, worked) in enumerate(pool().run(world, errors, world, failing, error)):
        assert sentence is not None and words in sentence
        assert total == [world] and worked == ([rank] if rank <= failing else [])


def test_one_process_keeps_its_own_errors():
    """Which `dtgpt.cli` knows how to tell."""

    def refuse():
        raise PermissionError(13, "Permission denied")

    with pytest.raises(PermissionError):
        Mesh(ResolvedPlan(dp=1), torch.device("cpu")).on_rank_0(refuse)


@pytest.mark.parametrize("what, words", [
    ("recipe", ["rank 1", "optimizer.lr: 0.125 there, 0.003 on rank 0"]),
    ("plan", ["rank 1", "the plan", '"blocks_per_stage": [1, 3]', '"blocks_per_stage": null']),
    ("code", ["rank 1", "the code of ops/dropout.py: 0ther there"]),
    ("file", ["rank 1", "the code of mine.py: 0ther there, None on rank 0"]),
    ("torch", ["rank 1", f"torch: 2.0.0 there, {torch.__version__} on rank 0"])
])  # fmt: skip
def test_ranks_that_do_not_run_the_same_are_named(recipe, what, words):
    answers = pool().run(2, agreement, recipe, ResolvedPlan(dp=1, pp=2), what)
    assert len(set(answers)) == 1
    assert all(word in answers[0] for word in [*words, "start every rank with the same command"]), answers[0]


@pytest.mark.parametrize("what", ["nothing", "style"])
def test_ranks_that_run_the_same_agree(recipe, what):
    assert pool().run(2, agreement, recipe, ResolvedPlan(dp=1, tp=2, sequence_parallel=True), what) == [None, None]


def test_a_mesh_leaves_a_group_that_it_did_not_begin(recipe):
    assert pool().run(2, open_and_close, recipe, ResolvedPlan(dp=2)) == [None, None]


def test_values_that_differ_are_refused_with_the_rank_on_every_rank():
    same = {"the text": "abc", "size": 3}
    assert pool().run(4, agree_on, [same] * 4) == [None] * 4
    answers = pool().run(4, agree_on, [same, same, {"the text": "xyz", "size": 4}, same])
    assert len(set(answers)) == 1
    assert "rank 2" in answers[0] and "4 there, 3 on rank 0" in answers[0] and "; make them equal" in answers[0]
    (missing, _) = pool().run(2, agree_on, [same, {"size": 3}])
    assert "rank 1 differs from rank 0 in the text: None there, abc on rank 0" in missing


def test_another_text_on_one_rank_is_refused(recipe, tmp_path):
    paths = [tmp_path / f"{rank}.txt" for rank in range(2)]
    paths[0].write_text("one and two make three. " * 200)
    paths[1].write_text("one and two make three. " * 200)
    assert pool().run(2, read_texts, recipe, paths) == [None, None]
    paths[1].write_text("one and two make thr3e. " * 200)
    answers = pool().run(2, read_texts, recipe, paths)
    assert answers[0] == answers[1]
    assert "rank 1 differs from rank 0 in the text: " in answers[0] and "give every node the same data" in answers[0]
    paths[1].unlink()
    answers = pool().run(2, read_texts, recipe, paths)
    assert answers[0] == answers[1] and "1.txt does not exist" in answers[0]


def test_the_timeout_reaches_every_group():
    assert pool().run(4, timeouts, parse_plan("tp2_pp2").for_world(4), 7.0)[0] == [7.0] * 5


@pytest.mark.parametrize("plan", ["pp3", "pp4", "dp2_pp2", "cp2_tp2"])
def test_all_ranks_are_in_equally_many_groups(plan):
    """Else groups of a later mesh have other names on some ranks, which then wait for ever where they share memory."""
    resolved = parse_plan(plan, {}).for_world(3 if plan == "pp3" else 4)
    assert len(set(pool().run(resolved.world, number_of_groups, resolved))) == 1

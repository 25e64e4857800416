"""Which process is lost, by the times at which heartbeats and verdicts come."""

import json

import pytest

from dtgpt.liveness.peers import BEAT, ENDED, TICK, Accuse, End, Peers

LOST_AFTER = 10.0


def peers() -> Peers:
    return Peers(rank=0, host="here", next_rank=1, next_host="there", lost_after=LOST_AFTER, now=0.0)


def accused(action: Accuse | End | None) -> str:
    assert isinstance(action, Accuse), action
    return json.loads(action.verdict)["text"]


def test_heartbeats_differ_and_tell_the_step():
    one = peers()
    assert [one.own_beat(0), one.own_beat(0), one.own_beat(7)] == ["1 0", "2 0", "3 7"]


def test_a_process_whose_heartbeats_change_is_never_lost():
    one = peers()
    assert not any(one.hear(BEAT * turn, f"{turn} 5", "") for turn in range(1, 100))


def test_a_silent_process_is_lost_after_the_time_and_not_before():
    one = peers()
    one.hear(0.0, "3 51", "")
    found = {turn: one.hear(BEAT * turn, "3 51", "") for turn in range(1, 6)}
    assert [turn for turn, action in found.items() if action] == [LOST_AFTER / BEAT]
    assert accused(found[5]) == "rank 1 on there (last step 51) is lost: no sign of life for 10 s"


@pytest.mark.parametrize("heard_nothing", [False, True])
def test_seconds_in_which_this_process_was_suspended_or_had_no_store_accuse_nobody(heard_nothing):
    one = peers()
    one.hear(0.0, "3 51", "")
    if heard_nothing:
        assert one.hear_nothing(1000.0, store_has_ended=False) is None
    assert one.hear(1000.0, "3 51", "") is None
    assert one.hear(1000.0 + BEAT, "3 51", "") is None


def test_a_closed_connection_is_a_loss_at_once():
    one = peers()
    one.gone = True
    assert accused(one.hear(0.1, "3 51", "")) == "rank 1 on there (last step 51) is lost: its process has ended"


@pytest.mark.parametrize("gone", [False, True])
def test_a_process_that_has_ended_its_part_is_not_lost(gone):
    one = peers()
    one.gone = gone
    assert not any(one.hear(BEAT * turn, ENDED, "") for turn in range(1, 20))
    assert not one.gone


def test_a_verdict_ends_every_process_with_its_words():
    verdict = peers().fail("no more data", step=9).verdict
    expected = End("rank 0 on here (last step 9) ended: no more data", by=0)
    other = peers()
    other.gone = True
    assert other.hear(0.1, "1 0", verdict) == expected


def test_without_the_store_a_process_ends_later_than_it_would_accuse_another():
    one = peers()
    ticks = [TICK * turn for turn in range(1, 20)]
    found = [now for now in ticks if one.wait(now, "node0:29500")]
    assert found[0] == LOST_AFTER + BEAT
    text = "rank 0 on here (last step 0) has not reached the store of the run at node0:29500 for 10 s: its node, or"
    assert one.wait(20.0, "node0:29500") == End(f"{text} the network, is lost", by=0)
    one.hear(20.5, "1 0", "")
    assert one.wait(21.0, "node0:29500") is None
    assert one.wait(5000.0, "node0:29500") is None  # suspended in between


def test_where_rank_0_had_the_store_its_end_is_that_of_rank_0():
    one = peers()
    one.own_beat(4)
    found = one.hear_nothing(2.0, store_has_ended=True)
    assert found == End("rank 0 (last step 4) is lost: its process has ended", by=1)

"""Who asks a run to end, and what it then says."""

from dtgpt.run.stop_request import StopRequest


def test_the_first_who_asks_counts_and_nobody_asks_by_default(capfd):
    stop = StopRequest()
    assert not stop and stop.reason == "" and not stop.ends_after(3, 9)
    stop.ask(15)
    stop.ask(2)
    assert stop and stop.requested == 15 and stop.reason == ""

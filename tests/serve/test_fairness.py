"""Slots are shared between clients by the tokens that each got."""

from collections import Counter

import pytest

from dtgpt.inference.options import Options
from dtgpt.inference.scheduler import Scheduler
from dtgpt.serve.fairness import FairScheduler
from tests.support.requests import make_request


def of(client: str):
    return make_request([1], Options(), client=client)


def test_the_engines_scheduler_is_fair():
    assert isinstance(Scheduler(slots=1), FairScheduler)


def simulate(slots: int, seconds: int, clients: dict[str, tuple[int, int, int]]) -> Counter:
    """Return the tokens of prompts and texts that each client gets. clients: (connections, choices, new tokens of a
    request), each of which sends its next request as soon as the last one has ended. A round is a second."""
    scheduler, owners, left, tokens = FairScheduler(slots), {}, {}, Counter()

    def send(client: str) -> None:
        _, choices, new = clients[client]
        owners[request := len(owners)] = client
        left.update({(request, choice): new for choice in range(choices)})
        scheduler.add(request, 10, choices, new, asked=of(client))
        tokens[client] += 10

    for client, (connections, _, _) in clients.items():
        for _ in range(connections):
            send(client)
    for _ in range(seconds):
        work = scheduler.next_round()
        for row in work.rows if work else ():
            new = min(work.steps, left[row[:2]])
            left[row[:2]] -= new
            tokens[owners[row.request]] += new
        for row in work.rows if work else ():
            if not left[row[:2]]:
                scheduler.finish(*row[:2])
                del left[row[:2]]
                if not any(request == row.request for request, _ in left):
                    send(owners[row.request])
    return tokens


@pytest.mark.parametrize("greedy", [(8, 1, 50), (16, 4, 50), (64, 1, 400)])
def test_a_client_of_many_connections_does_not_starve_another(greedy):
    """Slots are shared by tokens, whatever the number, the width and the length of requests."""
    alone = simulate(4, 2000, {"modest": (1, 1, 20)})
    tokens = simulate(4, 2000, {"greedy": greedy, "modest": (1, 1, 20)})
    assert tokens["modest"] > alone["modest"] / (greedy[2] / 20 + 3), (alone, tokens)
    equal = simulate(4, 4000, {"one": greedy, "two": (4, 1, 20), "three": (4, 1, 20)})
    assert min(equal.values()) > 0.8 * max(equal.values()), equal


def test_who_comes_later_has_no_claim_to_what_others_had_before():
    scheduler = FairScheduler(slots=1)
    for request in range(50):
        scheduler.add(request, 1, 1, 8, asked=of("first"))
    for request in range(20):
        assert scheduler.next_round().starts[0].request == request
        assert scheduler.next_round().steps == 7
        scheduler.finish(request, 0)
    for request in range(50, 60):
        scheduler.add(request, 1, 1, 8, asked=of("second"))
    order = []
    for _ in range(6):
        (start,) = scheduler.next_round().starts
        scheduler.next_round()
        scheduler.finish(start.request, 0)
        order.append("second" if start.request >= 50 else "first")
    assert order.count("first") == 3, order


def test_clients_that_have_gone_are_forgotten():
    scheduler = FairScheduler(slots=1)
    for request in range(3000):
        scheduler.add(request, 1, 1, 1, asked=of(str(request)))
        scheduler.next_round()
        scheduler.finish(request, 0)
    assert len(scheduler._tokens) < 1100


def test_prompts_of_clients_are_read_in_turn():
    scheduler = FairScheduler(slots=8, chunk=4)
    for request in range(4):
        scheduler.add(request, prefill=40, choices=1, new_tokens=1, asked=of("many"))
    scheduler.next_round()
    scheduler.add(4, prefill=4, choices=1, new_tokens=1, asked=of("few"))
    read = [scheduler.next_round().chunks[0].request for _ in range(3)]
    assert 4 in read

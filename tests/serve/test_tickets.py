"""Jobs of requests on an engine of another thread: tickets, limits, cancelling, the end of the server."""

import asyncio
import os
import threading
import time
from dataclasses import replace

import pytest

from dtgpt.inference.engine import Engine
from dtgpt.inference.options import Options
from dtgpt.inference.request import PromptJob
from dtgpt.serve.app import make_app
from dtgpt.serve.limits import RequestLimits
from dtgpt.serve.signals import end_where_a_rank_is_silent
from dtgpt.serve.ticket import TimeLimit
from dtgpt.serve.worker import EngineFailed, EngineWorker, Refused
from dtgpt.util.errors import UserError
from tests.support.scripted_engine import ScriptedEngine
from tests.support.server import client, served, tiny_model, wait_until

ENDLESS = {"max_new_tokens": 1000}


def model():
    return tiny_model(seq_length=1024)


def job(index=0, prompt=b"abc", **options):
    return PromptJob(list(prompt), Options(**{"max_new_tokens": 12, "seed": 5, "ends": False, **options}), index)


def of(client, **options):
    return replace(job(**options), client=client)


@pytest.fixture(scope="module")
def service():
    with served(model()) as service:
        yield service


def idle(service):
    return service.worker.status().running == service.worker.status().waiting == 0 and not service.worker._places


async def first_round(ticket):
    async for updates in ticket.rounds():
        return updates


def test_updates_of_rounds_are_the_completions(service):
    async def read():
        jobs = [job(0), job(1, num_return_sequences=3)]
        ticket = service.worker.submit(jobs)
        updates = [update async for updates in ticket.rounds() for update in updates]
        return updates, await service.worker.submit(jobs).completions()

    updates, completions = asyncio.run(read())
    for index, sequences in enumerate(completions):
        for choice, sequence in enumerate(sequences):
            own = [update for update in updates if (update.job, update.choice) == (index, choice)]
            assert [i for update in own for i in update.ids] == sequence.ids and len(sequence.ids) == 12
    assert [len(sequences) for sequences in completions] == [1, 3]
    assert idle(service)


def test_requests_are_taken_when_the_worker_says_that_it_is_ready():
    """Or a client that reads the server's first line, and asks at once, would be told that it is starting."""
    worker, states = EngineWorker(lambda _: None, lambda: 4), []

    def ready() -> None:
        states.append(worker.status().state)
        worker.stop()

    assert worker.status().state == "starting"
    worker.run(ScriptedEngine(lambda *_: []), ready)
    assert states == ["ready"]


def test_a_ticket_that_nobody_reads_on_frees_its_slots(service):
    async def leave():
        early, ticket = service.worker.submit([job(**ENDLESS)]), service.worker.submit([job(**ENDLESS)] * 8)
        early.cancel()  # perhaps before the engine has seen it
        assert await first_round(ticket)
        ticket.cancel()
        ticket.cancel()

    asyncio.run(leave())
    wait_until(lambda: idle(service), 1)


def test_a_request_has_a_time_limit():
    async def wait(service):
        with pytest.raises(TimeLimit, match=r"0\.6 s"):
            await service.worker.submit([job(**ENDLESS)] * 3).completions()
        return await service.worker.submit([job()]).completions()

    with served(model(), limits=RequestLimits(seconds=0.6)) as service:
        assert len(asyncio.run(wait(service))[0][0].ids) == 12
        wait_until(lambda: idle(service), 1)


def test_the_queue_is_limited_and_the_refusal_says_when_to_ask_again():
    async def fill(service):
        tickets = [service.worker.submit([job(num_return_sequences=2, **ENDLESS)]) for _ in range(5)]
        with pytest.raises(Refused) as caught:
            service.worker.submit([job()])
        status = service.worker.status()
        for ticket in tickets:
            ticket.cancel()
        return caught.value, status, await service.worker.submit([job()]).completions()

    with served(model(), slots=4, limits=RequestLimits(queue=10)) as service:
        with pytest.raises(UserError, match="10 at most"):
            service.worker.submit([job()] * 11)
        with pytest.raises(UserError, match="more than the 4"):
            service.worker.submit([job(num_return_sequences=5)])
        refused, status, found = asyncio.run(fill(service))
    assert (refused.status, refused.headers) == (429, {"Retry-After": "1"}) and "10 sequences" in refused.message
    assert (status.waiting, status.running, status.slots) == (6, 4, 4)
    assert len(found[0][0].ids) == 12


def test_a_full_queue_has_room_for_a_client_without_its_share():
    async def fill(service):
        submit = service.worker.submit
        greedy = [submit([of("greedy", **ENDLESS)]) for _ in range(12)]
        modest = [submit([of("modest", **ENDLESS)]) for _ in range(6)]
        for name in ("greedy", "modest"):
            with pytest.raises(Refused):
                submit([of(name)])
        third = submit([of("third", **ENDLESS)] * 4)
        status = service.worker.status()
        for ticket in (*greedy, *modest, third):
            ticket.cancel()
        return status, service.worker.status(), await submit([of("modest")]).completions()

    with served(model(), slots=4, limits=RequestLimits(queue=12)) as service:
        full, empty, found = asyncio.run(fill(service))
    assert full.clients == {"greedy": 12, "modest": 6, "third": 4} and full.waiting + full.running == 22
    assert empty.clients == {} and empty.waiting == 0 and len(found[0][0].ids) == 12


@pytest.mark.slow(2)
def test_a_client_with_many_requests_does_not_hold_another_up():
    """The other's requests run as soon as a slot is free, before those that have been waiting for longer."""

    async def ask(service):
        greedy = [service.worker.submit([of("greedy", max_new_tokens=200)]) for _ in range(40)]
        await first_round(service.worker.submit([of("modest")]))
        found = [await service.worker.submit([of("modest")]).completions() for _ in range(5)]
        ended = sum(not ticket._left for ticket in greedy)
        for ticket in greedy:
            ticket.cancel()
        return len(found), ended

    with served(model(), slots=4, limits=RequestLimits(queue=64)) as service:
        found, ended = asyncio.run(ask(service))
    assert found == 5 and ended < 36


def test_an_ending_server_refuses_and_gives_what_it_has():
    """A request without a token gets no answer that looks complete: another server can take it."""

    async def drain(service):
        running, waiting = service.worker.submit([job(**ENDLESS)] * 9), service.worker.submit([job(**ENDLESS)])
        while running.first is None:
            await asyncio.sleep(0.01)
        service.worker.drain(0.3)
        wait_until(lambda: service.worker.status().state == "draining")
        with pytest.raises(Refused, match="ending") as caught:
            service.worker.submit([job()])
        answers = await asyncio.gather(running.completions(), waiting.completions(), return_exceptions=True)
        return caught.value.status, answers

    with served(model(), slots=8) as service:
        status, (found, refused) = asyncio.run(drain(service))
        with client(make_app(service)) as http:
            assert http.get("/health").status_code == 503
    ended = [one for sequences in found for one in sequences]
    assert status == 503 and {one.finish_reason for one in ended} == {"length"} and len(ended) == 9
    assert [bool(one.ids) for one in ended] == [True] * 8 + [False] and max(len(one.ids) for one in ended) < 1000
    assert isinstance(refused, Refused) and refused.status == 503 and refused.headers == {"Retry-After": "1"}


def test_all_requests_are_answered_where_the_engine_fails(monkeypatch):
    async def fail(service):
        tickets = [service.worker.submit([job(**ENDLESS)]) for _ in range(3)]
        await first_round(service.worker.submit([job()]))
        monkeypatch.setattr("dtgpt.inference.engine.Engine._launch", lambda *_: 1 / 0)
        found = await asyncio.gather(*(ticket.completions() for ticket in tickets), return_exceptions=True)
        with pytest.raises(EngineFailed, match="division by zero"):
            service.worker.submit([job()])
        return found

    with pytest.raises(ZeroDivisionError), served(model()) as service:  # which ends the program, too
        assert all(isinstance(one, EngineFailed) and one.status == 500 for one in asyncio.run(fail(service)))
        with client(make_app(service)) as http:
            answer = http.get("/health")
            assert answer.status_code == 503 and answer.json()["status"] == "failed"


def test_a_server_without_rounds_is_not_healthy():
    with served(model(), limits=RequestLimits(stalled=0.2)) as service, client(make_app(service)) as http:
        service.worker._commands.put(lambda engine: time.sleep(1))
        asyncio.run(submit_and_leave(service))
        wait_until(lambda: http.get("/health").json()["status"] == "stalled", 1)
        wait_until(lambda: idle(service))
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_step_that_hangs_shows_also_when_its_client_gives_up(monkeypatch, gives_up):
    """The clock runs with the step, not with the requests that wait for it."""
    hangs, goes_on = threading.Event(), threading.Event()
    step = Engine.step

    def hang(engine):
        hangs.set()
        goes_on.wait(60)
        return step(engine)

    async def ask(service):
        ticket = service.worker.submit([job()])
        if gives_up:
            ticket.cancel()

    with served(model(), limits=RequestLimits(stalled=0.2)) as service, client(make_app(service)) as http:
        monkeypatch.setattr(Engine, "step", hang)
        asyncio.run(ask(service))
        assert hangs.wait(60)
        wait_until(lambda: http.get("/health").json()["status"] == "stalled", 5)
        assert http.get("/metrics").text.count("dtgpt_ready 0") == 1
        goes_on.set()
        wait_until(lambda: http.get("/health").status_code == 200)


def test_a_ping_that_hangs_shows_and_ends_the_server_where_no_client_waits(monkeypatch):
    monkeypatch.setattr("dtgpt.serve.worker.HEARTBEAT", 0.01)
    goes_on, codes = threading.Event(), []
    monkeypatch.setattr(Engine, "ping", lambda engine: goes_on.wait(60))
    monkeypatch.setattr(os, "_exit", codes.append)

    async def watch(worker):
        end_where_a_rank_is_silent(worker, 60)
        assert worker.status().state == "stalled"
        end_where_a_rank_is_silent(worker, 0.2)
        await asyncio.sleep(1.1)

    with served(model(), limits=RequestLimits(stalled=0.2)) as service:
        wait_until(lambda: service.worker.status().state == "stalled", 5)
        asyncio.run(watch(service.worker))
        assert codes == [1] and service.worker.status().state == "failed"
        goes_on.set()


def test_an_idle_server_is_ready_between_its_pings():
    with served(model(), limits=RequestLimits(stalled=0.05)) as service:
        wait_until(lambda: service.worker.status().state == "ready")
        time.sleep(0.3)  # waits for requests: no step and no ping is under way
        assert service.worker.status().state == "ready" and service.worker.seconds_under_way() == 0


async def submit_and_leave(service):
    service.worker.submit([job()])  # its loop ends before it does


def test_an_idle_server_asks_whether_the_other_ranks_run(monkeypatch):
    monkeypatch.setattr("dtgpt.serve.worker.HEARTBEAT", 0.01)
    seen = []
    monkeypatch.setattr("dtgpt.inference.engine.Engine.ping", lambda engine: seen.append(engine))
    with served(model()):
        wait_until(lambda: len(seen) > 2)

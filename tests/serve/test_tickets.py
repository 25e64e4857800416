"""Jobs of requests on an engine of another thread: tickets, limits, the end of the server."""

import asyncio

import pytest

from dtgpt.inference.options import Options
from dtgpt.inference.session import Job
from tests.support.server import served, tiny_model


def job(index=0, prompt=b"abc", **options):
    return Job(list(prompt), Options(**{"max_new_tokens": 12, "seed": 5, "ends": False, **options}), index)


@pytest.fixture(scope="module")
def service():
    with served(tiny_model()) as service:
        yield service


def test_updates_of_rounds_are_the_completions(service):
    async def read():
        ticket = service.worker.submit([job(0), job(1, num_return_sequences=3)])
        updates = [update async for updates in ticket.rounds() for update in updates]
        return updates, await service.worker.submit([job(0), job(1, num_return_sequences=3)]).completions()

    updates, completions = asyncio.run(read())
    for index, sequences in enumerate(completions):
        for choice, sequence in enumerate(sequences):
            own = [update for update in updates if (update.job, update.choice) == (index, choice)]
            assert [i for update in own for i in update.ids] == sequence.ids and len(sequence.ids) == 12
    assert [len(sequences) for sequences in completions] == [1, 3]
    assert service.worker.status().waiting + service.worker.status().running == 0

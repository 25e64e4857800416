"""The meeting of the processes of a run, where one of them never comes."""

import socket
import threading
import time

import pytest
import torch
from torch.distributed import DistError, FileStore, TCPStore

from dtgpt.liveness import rendezvous
from dtgpt.parallel import launch
from dtgpt.util.errors import UserError
from dtgpt.util.peers import Process
from tests.support.ports import held_port

TORCHRUNS = "TORCHELASTIC_USE_AGENT_STORE"


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(TORCHRUNS, raising=False)
    with held_port() as number:
        monkeypatch.setenv("MASTER_PORT", str(number))
        yield number


@pytest.mark.slow(3)
@pytest.mark.parametrize("rank", [0, 1])
def test_without_torchrun_nobody_waits_long_for_a_process_that_has_died(port, monkeypatch, rank):
    """The timeout of the run is 10 minutes, and nobody would end those who wait."""
    monkeypatch.setattr(rendezvous, "ALONE", 1.0)
    monkeypatch.setenv("RANK", str(rank))
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"did not find each other .*came within 1 s.*start all of them with torchrun"):
        rendezvous.meet(Process(rank=rank, world=2), 600)
    assert time.monotonic() - begin < 60


@pytest.mark.slow(1)
def test_a_store_that_is_gone_at_once_is_one_sentence(port, monkeypatch, capfd):
    """It answers the first connection alone. torch would print C++ frames before it raises its error."""
    monkeypatch.setattr(rendezvous, "ALONE", 1.0)
    monkeypatch.setenv("RANK", "1")
    server = socket.create_server(("127.0.0.1", port))

    def answer_once():
        server.accept()[0].close()
        server.close()

    thread = threading.Thread(target=answer_once)
    thread.start()
    with pytest.raises(UserError, match=r"the processes did not find each other"):
        rendezvous.meet(Process(rank=1, world=2), 600)
    thread.join()
    assert "frame #" not in capfd.readouterr().err


@pytest.mark.slow(2)
@pytest.mark.parametrize("taken", [1, 2])
def test_a_store_whose_process_ends_while_it_is_connected_to_is_not_awaited(port, monkeypatch, taken):
    """The kernel closes what a process had one after the other: connections, and the port later."""
    monkeypatch.setattr(rendezvous, "CONNECT", 1.0)
    monkeypatch.setenv("RANK", "1")
    server = socket.create_server(("127.0.0.1", port))

    def end():
        first = server.accept()[0]
        if taken == 1:
            first.close()
        else:  # the connection after the one that finds whether the process is there
            server.accept()[0].close()
        server.close()

    thread = threading.Thread(target=end)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(DistError):
        rendezvous.open_store(30, patience=0.5)
    assert time.monotonic() - begin < 15 and rendezvous.is_refused()
    thread.join()


@pytest.mark.slow(1)
def test_torchrun_ends_those_who_wait_so_that_they_may_wait_for_long(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "ALONE", 0.0)
    monkeypatch.setenv(TORCHRUNS, "True")
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"rank 1 of 2 did not come in time"):
        rendezvous.meet(Process(rank=0, world=2), 1.0)
    assert time.monotonic() - begin >= 1.0 and rendezvous.patience(600) == 600 and store is not None


@pytest.mark.slow(2)
def test_a_process_that_dies_before_the_group_is_complete_is_not_awaited_for_long(port, monkeypatch, tmp_path):
    monkeypatch.setattr(rendezvous, "ALONE", 1.0)
    monkeypatch.setattr(launch, "was_in_group", False)
    begin = time.monotonic()
    with pytest.raises(UserError, match="not all of them came within 1 s"):
        launch.start_process_group(
            torch.device("cpu"), 600, store=FileStore(str(tmp_path / "store"), 2), rank=0, world_size=2
        )
    assert time.monotonic() - begin < 60

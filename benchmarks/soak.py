"""A server under mixed load for some minutes: do its memory, slots, tasks and files stay the same?

    python benchmarks/soak.py                # 20 minutes
    python benchmarks/soak.py --minutes 1    # a look

A tiny model of random weights is served in a process of its own, on loopback. A few clients send completions of many
sizes, streamed and not, some of which they leave in the middle, wrong requests and keys, halves of requests, bodies of
one-byte chunks, and Megatron-LM's requests; some end their half of the connection at once. Their number is bounded.
Each minute prints what the server's process holds while nobody asks. The exit code is 1 where memory grows after the
first quarter, a slot or a file is lost, or an answer is not what it should be.
"""

import argparse
import asyncio
import json
import os
import random
import re
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from serve import server, write_model
from serve_clients import HOST, Client

CLIENTS = 8  # at the same time
PAUSE = 0.02  # seconds between two requests of a client, on average
FILES = 2  # connections that may be about to close
GROWTH = 16 << 20  # bytes that memory may grow after the first quarter: the allocator's own movements
WRONG = (b"{", b"[]", b'{"prompt": NaN}', b'{"prompt": 1}', b'{"prompt": "x", "n": 0}', b"[" * 1000)
KEYS = ("one", "two", "three")  # of clients
NAMES = ("dtgpt_running", "dtgpt_waiting")


class Held(NamedTuple):
    """What a server holds while nobody asks."""

    resident: int  # bytes
    threads: int
    files: int
    running: int
    waiting: int


def held_by(process: int, port: int) -> Held:
    """What the server's process holds, once no request is under way."""
    end = time.monotonic() + 5
    while (numbers := gauges(port))["dtgpt_running"] + numbers["dtgpt_waiting"] and time.monotonic() < end:
        time.sleep(0.05)
    status = Path(f"/proc/{process}/status").read_text()
    found = dict(re.findall(r"^(VmRSS|Threads):\s+([0-9]+)", status, re.MULTILINE))
    files = len(os.listdir(f"/proc/{process}/fd"))
    return Held(
        1024 * int(found["VmRSS"]), int(found["Threads"]), files, numbers["dtgpt_running"], numbers["dtgpt_waiting"]
    )


def gauges(port: int) -> dict[str, int]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.addheaders = [("Authorization", f"Bearer {KEYS[0]}")]
    with opener.open(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: int(value) for name, _, value in (line.rpartition(" ") for line in lines) if name in NAMES}


def completion(draw: random.Random) -> dict[str, Any]:
    """A request of any size that the server takes."""
    return {
        "prompt": [draw.randrange(256) for _ in range(draw.randint(1, 30))], "max_tokens": draw.randint(1, 30),
        "n": draw.choice((1, 1, 1, 4)), "seed": draw.randrange(1000), "temperature": draw.choice((0, 0.7, 1.0)),
        "logprobs": draw.choice((None, 0, 3)), "echo": draw.random() < 0.2,
        "stop": draw.choice((None, "e", ["\n", "a"])),
    }  # fmt: skip


async def send(
    port: int, method: str, path: str, body: bytes, part: int | None = None, key: str = KEYS[0],
    chunks: bool = False, half: bool = False,
) -> tuple[int, bytes]:  # fmt: skip
    """Send a request, or the first `part` bytes of it and leave. Return status and body. chunks: of a byte each. half:
    end this half of the connection at once."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        length = "Transfer-Encoding: chunked" if chunks else f"Content-Length: {len(body)}"
        content = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n" if chunks else body
        writer.write((f"{head}Authorization: Bearer {key}\r\n{length}\r\n\r\n".encode() + content)[:part])
        if half:
            writer.write_eof()
        await writer.drain()
        if part is not None:
            return 0, b""
        answer = await asyncio.wait_for(reader.read(), 60)
        return int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]
    finally:
        writer.close()


async def one_request(port: int, draw: random.Random, expected: list[Any]) -> None:
    """Do one of the things that clients do. `expected`: a request and its answer, which never changes."""
    kind = draw.random()
    body = json.dumps(completion(draw)).encode()
    key = draw.choice(KEYS)
    if kind < 0.1:
        chunks = draw.random() < 0.5
        status, answer = await send(port, "POST", "/v1/completions", body, key=key, chunks=chunks, half=not chunks)
        assert status == 200, answer
    elif kind < 0.15:
        wrong = b" " * draw.choice((10, 20_000, 60_000))
        status, answer = await send(port, "POST", "/v1/completions", wrong, key="wrong", chunks=True)
        assert status in (400, 401, 413), answer  # the first and the last: of a server without keys
    elif kind < 0.4:
        status, answer = await send(port, "POST", "/v1/completions", body, key=key)
        assert status == 200, answer
    elif kind < 0.6:
        client = Client(port, key)
        try:
            limit = draw.choice((60, 60, 0.01))  # the last one leaves in the middle
            await asyncio.wait_for(client.stream({**json.loads(body), "n": 1}), limit)
        except TimeoutError:
            pass
        finally:
            client.close()
    elif kind < 0.7:
        await send(port, "POST", "/v1/completions", body, part=draw.randint(1, 150))
    elif kind < 0.8:
        status, answer = await send(port, "POST", "/v1/completions", draw.choice(WRONG))
        assert status == 400, (status, answer)
    elif kind < 0.9:
        asked = {"prompts": ["Hello"] * draw.randint(1, 4), "tokens_to_generate": draw.randint(1, 20)}
        status, answer = await send(port, "PUT", "/api", json.dumps(asked).encode())
        assert status == 200, answer
    else:
        status, answer = await send(port, "POST", "/v1/completions", json.dumps(expected[0]).encode())
        text = json.loads(answer)["choices"][0]["text"]
        expected[1:] = expected[1:] or [text]
        assert status == 200 and text == expected[1], "the same request has another answer"


async def load(port: int, seconds: float, seed: int, expected: list[Any]) -> int:
    """Let the clients work for a time. Return the number of requests."""
    end = time.monotonic() + seconds

    async def client(index: int) -> int:
        draw, count = random.Random(f"{seed}/{index}"), 0
        while time.monotonic() < end:
            await one_request(port, draw, expected)
            await asyncio.sleep(draw.uniform(0, 2 * PAUSE))
            count += 1
        return count

    return sum(await asyncio.gather(*map(client, range(CLIENTS))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--lap", type=float, default=60, help="seconds between two looks")
    args = parser.parse_args()
    options = argparse.Namespace(clients=16, device="cpu")
    os.environ["DTGPT_API_KEY"] = ",".join(KEYS)
    expected: list[Any] = [{"prompt": "Hello", "max_tokens": 20, "seed": 3}]
    with tempfile.TemporaryDirectory() as temporary:
        write_model("tiny", Path(temporary, "model"), "cpu")
        with server(Path(temporary, "model"), options) as running:
            laps = look(running.port, running.process, args, expected)
    settled = laps[len(laps) // 4]
    growth = laps[-1].resident - settled.resident
    lost = any(lap.running or lap.waiting or lap.files > laps[0].files + FILES for lap in laps)
    flat = growth < GROWTH and not lost and laps[-1].threads <= settled.threads
    print(f"memory grew by {growth / 2**20:.1f} MiB after the first quarter: {'flat' if flat else 'NOT FLAT'}")
    return 0 if flat else 1


def look(port: int, process: int, args: argparse.Namespace, expected: list[Any]) -> list[Held]:
    """Put load on the server, and return what it holds before, after each lap and at the end."""
    print("minute  requests  resident MiB  threads  files  running  waiting")
    begin, requests, laps = time.monotonic(), 0, [held_by(process, port)]
    while True:
        minute = (time.monotonic() - begin) / 60
        now = laps[-1]
        columns = f"{now.resident / 2**20:13.1f} {now.threads:8} {now.files:6} {now.running:8} {now.waiting:8}"
        print(f"{minute:6.1f} {requests:9,} {columns}", flush=True)
        left = 60 * args.minutes - (time.monotonic() - begin)
        if left <= 0:
            return laps
        requests += asyncio.run(load(port, min(args.lap, left), len(laps), expected))
        time.sleep(1)  # for connections to close
        laps.append(held_by(process, port))


if __name__ == "__main__":
    raise SystemExit(main())

"""Programs that begin with torch and nothing of dtgpt: forks of one process of a session, which has imported torch.

What a program loads of dtgpt, and from which folder, is its own, as after a start, at a third of the price.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SERVER = """
import json, os, runpy, sys
import numpy, torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor.parallel

def begin(words, folder, environment, out, err):
    os.environ.clear()
    os.environ.update(environment)
    for path, number in (os.devnull, 0), (out, 1), (err, 2):
        os.dup2(os.open(path, os.O_RDWR), number)
    os.chdir(folder)
    first, *rest = words
    sys.path[:0] = ["" if first == "-c" else os.getcwd(), *filter(None, environment.get("PYTHONPATH", "").split(":"))]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})

sys.path[:] = [path for path in sys.path if path not in ("", ROOT)]
for line in sys.stdin:
    child = os.fork()
    if not child:
        begin(*json.loads(line))  # after which this process ends as any other
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def server(**variables: str) -> subprocess.Popen:
    """Return the process whose forks the programs of this pytest worker are that begin with these variables."""
    root, pipe = str(Path(__file__).parents[2]), subprocess.PIPE
    code, environment = f"ROOT = {root!r}\n{SERVER}", os.environ | variables
    started = subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=pipe, stdout=pipe, text=True)
    atexit.register(started.stdin.close)
    return started


def run_fresh(
    words: Sequence, cwd: str | Path, env: dict[str, str] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Return the ended `python -m MODULE ...` or `python -c CODE ...`, as subprocess.run does. variables: of the
    environment, which imports of torch read."""
    environment = dict(os.environ if env is None else env) | variables
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        for file in (out, err):
            file.touch()
        given = [str(word) for word in words], str(cwd), environment, str(out), str(err)
        process = server(**variables)
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())

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
import json, os, runpy, subprocess, sys
import numpy, torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor.parallel

SPARE = []  # processes of `--nproc`, forked before anything of dtgpt is loaded, each with the pipe for its words

class Popen(subprocess.Popen):
    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        if not SPARE or args[0] != sys.executable:
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)
        self._child_created = True
        self.pid, pipe = SPARE.pop(0)
        os.write(pipe, json.dumps([args[1:], env]).encode())
        os.close(pipe)

def keep_spare(count):
    for _ in range(count):
        read, write = os.pipe()
        process = os.fork()
        if not process:
            for pipe in (write, *(pipe for _, pipe in SPARE)):
                os.close(pipe)
            SPARE.clear()
            given = os.fdopen(read).read()
            return json.loads(given) if given else os._exit(0)
        os.close(read)
        SPARE.append((process, write))
    subprocess.Popen = Popen

def begin(words, folder, environment, out, err):
    os.environ.clear()
    os.environ.update(environment)
    for path, number in (os.devnull, 0), (out, 1), (err, 2):
        os.dup2(os.open(path, os.O_RDWR), number)
    os.chdir(folder)
    given = keep_spare(int(words[words.index("--nproc") + 1])) if "--nproc" in words else None
    if given:
        words, environment = given
        os.environ.clear()
        os.environ.update(environment)
    first, *rest = words
    sys.path[:0] = ["" if first == "-c" else os.getcwd(), *filter(None, environment.get("PYTHONPATH", "").split(":"))]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})

sys.path[:] = [path for path in sys.path if path not in ("", ROOT)]
# Of an editable install, which would find what is deleted from a copy.
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
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

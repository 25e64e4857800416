"""Tokenizing speed of `dtgpt prepare`, with and without fastokens, and of Megatron-LM's tools/preprocess_data.py where
a checkout is given.

    python benchmarks/prepare.py --vocab-file vocab.json --merge-file merges.txt --megatron path/to/Megatron-LM
    python benchmarks/prepare.py --tokenizer Llama-3.2-1B/tokenizer.json --megabytes 20

The text: the .py files of this Python's standard library and site-packages, each content once, one JSON object a file,
in an order drawn by the seed 0, until `--megabytes` is reached. Libraries keep what they encoded before, so a text that
repeats would flatter them: where all files are fewer bytes, they come again, and what is printed says how often. All
take the whole command's time, start and tokenizer included, run in turns, and must write the same bytes. MB are 10^6
bytes of the JSONL file; CPU seconds are those of all processes.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from figures import note

RUN = "from dtgpt.data.prepare.command import command; sys.exit(command(sys.argv[1:]))"
WITHOUT = "sys.modules.update(fastokens=None, orjson=None)"  # as where the extra is not installed


def write_corpus(path: Path, size: int) -> str:
    """At least `size` bytes of JSON lines; returns what they are."""
    lines = {}
    for root in map(Path, {sysconfig.get_paths()[name]: None for name in ("stdlib", "purelib")}):
        for source in sorted(root.rglob("*.py")):
            text = source.read_bytes().decode("utf-8", "replace") if source.is_file() else ""
            fields = {"text": text, "path": str(source.relative_to(root))}
            lines.setdefault(hashlib.sha256(text.encode()).digest(), (json.dumps(fields) + "\n").encode())
    order = list(lines.values())
    random.Random(0).shuffle(order)
    written = number = 0
    with path.open("wb") as file:
        while written < size:
            written += file.write(order[number % len(order)])
            number += 1
    return f"{written / 1e6:.1f} MB: {number:,} files, each {max(number / len(order), 1):.2f} times"


def place_gpt2(folder: Path, vocab: str, merges: str) -> None:
    """Megatron-LM's tool asks transformers for the model "gpt2": found in the working folder, it needs no network."""
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "vocab.json").symlink_to(Path(vocab).resolve())
    (folder / "gpt2" / "merges.txt").symlink_to(Path(merges).resolve())
    (folder / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')


def cpu_seconds() -> float:
    """CPU seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(command: list[str], prefix: Path, environment: dict[str, str]) -> tuple[float, float, str]:
    """Seconds and CPU seconds of `command`, and the digest of the dataset `prefix` that it wrote."""
    log = prefix.with_name("log")
    began, before = time.perf_counter(), cpu_seconds()
    with log.open("w") as output:
        run = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=prefix.parent)
    code = run.returncode
    seconds, used = time.perf_counter() - began, cpu_seconds() - before
    if code:
        raise SystemExit(f"{' '.join(command)[:200]} ended with code {code}:\n{log.read_text()[-2000:]}")
    digest = hashlib.sha256()
    for suffix in (".bin", ".idx"):
        path = Path(f"{prefix}_text_document{suffix}")
        digest.update(path.read_bytes())
        path.unlink()
    Path(f"{prefix}_text_document.tokenizer.json").unlink(missing_ok=True)  # which dtgpt alone writes
    return seconds, used, digest.hexdigest()


def commands(args: argparse.Namespace, corpus: Path, prefix: Path, workers: int) -> dict[str, list[str]]:
    shared = ["--input", str(corpus), "--output-prefix", str(prefix), "--append-eod", "--workers", str(workers)]
    if args.tokenizer:
        shared += ["--tokenizer", str(Path(args.tokenizer).resolve())]
    else:
        vocab, merges = (str(Path(file).resolve()) for file in (args.vocab_file, args.merge_file))
        shared += ["--vocab-file", vocab, "--merge-file", merges]
    tools = {"dtgpt": [sys.executable, "-c", f"import sys; {RUN}", *shared]}
    if find_spec("fastokens"):
        tools["dtgpt without fastokens"] = [sys.executable, "-c", f"import sys; {WITHOUT}; {RUN}", *shared]
    if args.megatron:
        script = str(Path(args.megatron, "tools", "preprocess_data.py").resolve())
        tools["Megatron-LM"] = [sys.executable, script, *shared, "--tokenizer-type", "GPT2BPETokenizer"]
    return tools


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vocab-file")
    parser.add_argument("--merge-file")
    parser.add_argument("--tokenizer", help="a tokenizer.json instead of these two, for dtgpt alone")
    parser.add_argument("--megatron", help="a checkout of Megatron-LM; left out: dtgpt alone")
    parser.add_argument("--megabytes", type=float, default=65)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=1, help="the fastest counts")
    args = parser.parse_args()
    if bool(args.tokenizer) == bool(args.vocab_file and args.merge_file) or (args.tokenizer and args.megatron):
        parser.error("give --tokenizer, without --megatron, or --vocab-file and --merge-file")
    same = True
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        if args.megatron:
            place_gpt2(Path(folder), args.vocab_file, args.merge_file)
        print(write_corpus(corpus, int(args.megabytes * 1e6)))
        places = [
            str(Path(__file__).parent.parent),
            args.megatron and str(Path(args.megatron).resolve()),
            os.environ.get("PYTHONPATH"),
        ]
        environment = {"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        for workers in args.workers:
            best, digests = {}, set()
            for _ in range(args.repeats):
                for tool, command in commands(args, corpus, Path(folder, "out"), workers).items():
                    seconds, used, digest = measure(command, Path(folder, "out"), environment)
                    best[tool] = min((seconds, used), best.get(tool, (seconds, used)))
                    digests.add(digest)
            same = same and len(digests) == 1
            size = corpus.stat().st_size / 1e6
            for tool, (seconds, used) in best.items():
                rates = {"MB/s": size / seconds, "MB/CPU s": size / used}
                note(f"{tool}, {workers} workers", rates)
                print(f"{workers} workers  {tool:<24}{seconds:8.1f} s {rates['MB/s']:7.2f} MB/s {used:8.1f} CPU s "
                      f"{rates['MB/CPU s']:7.2f} MB a CPU second", flush=True)  # fmt: skip
            print(f"{workers} workers  the same bytes: {'yes' if len(digests) == 1 else 'NO'}")
            if args.megatron:
                print(f"{workers} workers  {best['Megatron-LM'][0] / best['dtgpt'][0]:.1f} times as fast")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

"""Tokenizing speed of `dtgpt prepare`, and of Megatron-LM's tools/preprocess_data.py where a checkout is given.

    python benchmarks/prepare.py --vocab-file vocab.json --merge-file merges.txt --megatron path/to/Megatron-LM

The text: the .py files of this Python's standard library (without site-packages), one JSON object a file, in the order
of their paths, and again from the first until `--megabytes` is reached (the last round may be incomplete; what is
printed says how many rounds). Both tools take the whole command's time, start and tokenizer included, run in turns,
and must write the same bytes. MB are 10^6 bytes of the JSONL file.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from figures import note

RUN = "import sys; from dtgpt.data.prepare.command import command; sys.exit(command(sys.argv[1:]))"


def write_corpus(path: Path, size: int) -> str:
    """At least `size` bytes of JSON lines; returns what they are."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
    lines = []
    for source in sources:
        text = source.read_bytes().decode("utf-8", "replace")
        lines.append((json.dumps({"text": text, "path": str(source.relative_to(root))}) + "\n").encode())
    once = sum(map(len, lines))
    written = 0
    with path.open("wb") as file:
        while written < size:
            written += file.write(lines[0])
            lines.append(lines.pop(0))
    return f"{written / 1e6:.1f} MB: {len(sources)} files of {once / 1e6:.1f} MB, {written / once:.2f} times"


def place_gpt2(folder: Path, vocab: str, merges: str) -> None:
    """Megatron-LM's tool asks transformers for the model "gpt2": found in the working folder, it needs no network."""
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "vocab.json").symlink_to(Path(vocab).resolve())
    (folder / "gpt2" / "merges.txt").symlink_to(Path(merges).resolve())
    (folder / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')


def measure(command: list[str], prefix: Path, environment: dict[str, str]) -> tuple[float, str]:
    """Seconds of `command`, and the digest of the dataset `prefix` that it wrote."""
    log = prefix.with_name("log")
    began = time.perf_counter()
    with log.open("w") as output:
        run = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=prefix.parent)
    code = run.returncode
    seconds = time.perf_counter() - began
    if code:
        raise SystemExit(f"{' '.join(command)[:200]} ended with code {code}:\n{log.read_text()[-2000:]}")
    digest = hashlib.sha256()
    for suffix in (".bin", ".idx"):
        path = Path(f"{prefix}_text_document{suffix}")
        digest.update(path.read_bytes())
        path.unlink()
    return seconds, digest.hexdigest()


def commands(args: argparse.Namespace, corpus: Path, prefix: Path, workers: int) -> dict[str, list[str]]:
    shared = ["--input", str(corpus), "--output-prefix", str(prefix), "--append-eod", "--workers", str(workers)]
    shared += [
        "--vocab-file",
        str(Path(args.vocab_file).resolve()),
        "--merge-file",
        str(Path(args.merge_file).resolve()),
    ]
    tools = {"dtgpt": [sys.executable, "-c", RUN, *shared]}
    if args.megatron:
        script = str(Path(args.megatron, "tools", "preprocess_data.py").resolve())
        tools["Megatron-LM"] = [sys.executable, script, *shared, "--tokenizer-type", "GPT2BPETokenizer"]
    return tools


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument("--megatron", help="a checkout of Megatron-LM; left out: dtgpt alone")
    parser.add_argument("--megabytes", type=float, default=65)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=1, help="the fastest counts")
    args = parser.parse_args()
    same = True
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
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
                    seconds, digest = measure(command, Path(folder, "out"), environment)
                    best[tool] = min(seconds, best.get(tool, seconds))
                    digests.add(digest)
            same = same and len(digests) == 1
            for tool, seconds in best.items():
                rate = corpus.stat().st_size / 1e6 / seconds
                note(f"{tool}, {workers} workers", {"MB/s": rate})
                print(f"{workers} workers  {tool:<12}{seconds:8.1f} s {rate:7.2f} MB/s", flush=True)
            if len(best) == 2:
                print(f"{workers} workers  {best['Megatron-LM'] / best['dtgpt']:.1f} times as fast; "
                      f"the same bytes: {'yes' if len(digests) == 1 else 'NO'}")  # fmt: skip
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

"""modded-nanogpt's track 3 in its own script and in ours, on one GPU: losses by step, ms a step, tokens/s.

    python benchmarks/against_track3.py --theirs train_gpt_simple.py --steps 60 --out track3.json

`--theirs`: their records/track_3_optimization/train_gpt_simple.py, of which a temporary copy runs with another number
of steps, validation at the end alone on `--eval_samples` samples, the loss of each step recorded, and our initial
weights (`--own_weights`: with its own). `--again N`: it runs once more in micro-batches of N samples, which shows how
far rounding alone moves its losses. All take the same shards, in the same order: those of `--data`, a folder with
fineweb_train_*.bin and fineweb_val_*.bin, or else `--tokens` tokens of the sources that are installed with Python, by
a tokenizer of 1024 tokens. Options that it does not know are those of our recipe.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from figures import note
from torch import Tensor

from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.data.tokenizers.tokenizer import Tokenizer
from dtgpt.models.decoder import unique_parameters
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.train.start import load_recipe
from dtgpt.util.errors import UserError
from tests.support.whole_model import build_model

BATCH, LENGTH = 512 * 1024, 1024
RECIPE = Path(__file__).parent.parent / "recipes" / "track3.py"
REPLACED = (  # in their script: pattern, what takes its place
    (r"train_steps = \d+", "train_steps = {steps}"),
    (r"val_tokens = .*", "val_tokens = {eval_tokens}"),
    (r"\nmbs = \d+", "\nmbs = {micro}"),
    (r"( +)# create the optimizer\(s\)\n", r"\1{load}\n\1# create the optimizer(s)\n"),
    (r"if step == train_steps or step % val_step_freq == 0:", "if step == train_steps:"),
    (
        r"( +)for i in range\(len\(inputs\) // mbs\):\n +model\((.*)\)\.backward\(\)\n",
        r"\1total = 0\n\1for i in range(len(inputs) // mbs):\n\1    loss = model(\2)\n"
        r"\1    total = total + loss.detach()\n\1    loss.backward()\n",
    ),
    (
        r"( +)model\.zero_grad\(set_to_none=True\)\n",
        r"\1model.zero_grad(set_to_none=True)\n\1torch.cuda.synchronize()\n"
        r"\1print(f'curve {{step}} {{total.item() / batch_size}} {{time.perf_counter()}}', flush=True)\n",
    ),
)


def patched(script: str, steps: int, eval_tokens: int, weights: bool, micro: int) -> str:
    """Return their script with the replacements. Raises UserError where it is another version."""
    load = "model.load_state_dict(torch.load('weights.pt'), strict=False)" if weights else ""
    for pattern, text in REPLACED:
        script, count = re.subn(
            pattern, text.format(steps=steps, eval_tokens=eval_tokens, load=load, micro=micro), script
        )
        if count != 1:
            raise UserError(f"--theirs has {count} places such as {pattern!r}, not one; it is another version")
    return script


def their_weights() -> dict[str, Tensor]:
    """Return our initial weights by their names. Their heads rotate the other way round, and so have the second half of
    the rows of q and of k with the other sign. Biases are 0 and gains 1 in both."""
    own = load_recipe(RECIPE, [])
    config, key = own.model, fold(root_key(own.seed), "weights")
    weights = unique_parameters(build_model(config, torch.device("cpu"), torch.float32, key))
    signs = torch.ones(config.head_dim, 1)
    signs[config.head_dim // 2 :] = -1
    found = {"embed.weight": weights["embedding.tokens.weight"], "proj.weight": weights["head.output.weight"]}
    for i in range(config.num_layers):
        at = f"blocks.{i}"
        q, k, v = weights[f"{at}.attn.qkv.weight"].unflatten(0, (config.num_heads, 3, config.head_dim)).unbind(1)
        for name, rows in (("q", q * signs), ("k", k * signs), ("v", v)):
            found[f"{at}.attn.{name}.weight"] = rows.flatten(0, 1)
        for name in ("attn.proj", "mlp.fc", "mlp.proj"):
            found[f"{at}.{name}.weight"] = weights[f"{at}.{name}.weight"]
    return {name: tensor.detach() for name, tensor in found.items()}


def read(path: Path) -> str:
    return path.read_text(errors="ignore")


def encode(job: tuple[Tokenizer, list[str]]) -> np.ndarray:
    tokenizer, documents = job
    return np.asarray(tokenizer.encode_documents(documents), "<u2")


def write_shard(path: Path, tokens: np.ndarray) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def make_shards(folder: Path, wanted: int, validation: int) -> None:
    """Write shards of installed sources to the folder: `validation` tokens, and up to `wanted` for training."""
    roots = [Path(sys.prefix), Path(os.__file__).parent, Path("/usr/include")]
    files = [file for root in roots for end in ("py", "pyi", "h", "hpp") for file in sorted(root.rglob(f"*.{end}"))]
    unique = {file.resolve(): None for file in files if file.is_file()}
    texts, size = [], 0
    for file in unique:
        texts.append(read(file))
        size += len(texts[-1])
        if size > 4 * (wanted + validation):
            break
    np.random.RandomState(0).shuffle(texts)  # of one library there would be many in a row
    tokenizer = make_tokenizer("bpe", texts[:200], 1024)
    jobs = [(tokenizer, texts[i : i + 64]) for i in range(0, len(texts), 64)]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as workers:
        tokens = np.concatenate(list(workers.map(encode, jobs)))[: wanted + validation]
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "fineweb_val_000000.bin", tokens[:validation])
    write_shard(folder / "fineweb_train_000001.bin", tokens[validation:])
    print(f"{len(texts):,} files, {len(tokens):,} tokens")


def summary(losses: list[float], seconds: list[float], validation: float | None) -> dict:
    """Return the curve of a run, and its speed by the median of the steps after the first five."""
    step = float(np.median(seconds[5:])) if len(seconds) > 5 else float("nan")
    return {"losses": losses, "ms": 1e3 * step, "tokens_per_second": BATCH / step, "validation": validation}


def run_theirs(script: Path, folder: Path, steps: int, eval_tokens: int, weights: bool, micro: int = 64) -> dict:
    """Run a copy of their script as one process. weights: with our initial weights. micro: samples of a micro-batch."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "data").mkdir()
        (work / "data" / "fineweb10B").symlink_to(folder.resolve())
        (work / "theirs.py").write_text(patched(script.read_text(), steps, eval_tokens, weights, micro))
        if weights:
            torch.save(their_weights(), work / "weights.pt")
        own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29531"}
        done = subprocess.run(
            [sys.executable, "theirs.py"], cwd=work, env=os.environ | own, capture_output=True, text=True
        )
    if done.returncode:
        raise UserError(f"their script ended with {done.returncode}:\n{done.stderr[-3000:]}")
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("curve ")]
    times = [float(row[3]) for row in rows]
    final = re.findall(r"val_loss:(\S+)", done.stdout)
    return summary([float(row[2]) for row in rows], np.diff(times).tolist(), float(final[-1]) if final else None)


def run_ours(folder: Path, steps: int, eval_samples: int, options: list[str]) -> dict:
    """Run our recipe in a process of its own, with a progress line for each step."""
    with tempfile.TemporaryDirectory() as runs:
        words = {
            "steps": steps, "runs": runs, "data.path": f"{folder}/fineweb_train_*.bin", "data.tokenizer": "ids",
            "data.valid_path": f"{folder}/fineweb_val_*.bin", "log.interval": 1, "log.eval_interval": 0,
            "log.eval_samples": eval_samples, "log.sample_tokens": 0, "checkpoint.interval": 10**6,
        }  # fmt: skip
        command = [sys.executable, str(RECIPE), *(f"--{name}={value}" for name, value in words.items()), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"our recipe ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
        lines = next(Path(runs).rglob("metrics.jsonl")).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    trained = [r for r in records if "loss" in r]
    seconds = [r["seconds_per_step"] for r in trained if "seconds_per_step" in r]
    validation = next((r["validation_loss"] for r in reversed(records) if "validation_loss" in r), None)
    return summary([r["loss"] for r in trained], seconds, validation)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--theirs", type=Path, help="their train_gpt_simple.py; without it ours runs alone")
    parser.add_argument(
        "--again", type=int, metavar="N", help="run theirs a second time, in micro-batches of N samples"
    )
    parser.add_argument("--data", type=Path, help="folder of shards; made where it has none")
    parser.add_argument("--tokens", type=int, default=60_000_000, help="tokens for training, where shards are made")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--own_weights", action="store_true", help="their own initial weights, not ours")
    parser.add_argument("--eval_samples", type=int, default=1024, help="of 1024 tokens, a multiple of 64")
    parser.add_argument("--out", type=Path, default=Path("against_track3.json"))
    args, options = parser.parse_known_args()
    folder = args.data or Path(tempfile.mkdtemp())
    eval_tokens = args.eval_samples * LENGTH
    try:
        begin = time.perf_counter()
        if not list(folder.glob("fineweb_train_*.bin")):
            make_shards(folder, args.tokens, eval_tokens + LENGTH + 2)
            print(f"shards in {time.perf_counter() - begin:.0f} s", flush=True)
        held = sum(file.stat().st_size // 2 - 512 for file in folder.glob("fineweb_train_*.bin"))
        if args.steps * BATCH + 1 >= held:
            args.steps = (held - 2) // BATCH
            print(f"{held:,} tokens are enough for {args.steps} steps")
        found = {"dtgpt": run_ours(folder, args.steps, args.eval_samples, options)}
        args.out.write_text(json.dumps(found))
        if args.theirs:
            found["theirs"] = run_theirs(args.theirs, folder, args.steps, eval_tokens, not args.own_weights)
            args.out.write_text(json.dumps(found))
        if args.theirs and args.again:
            again = run_theirs(args.theirs, folder, args.steps, eval_tokens, not args.own_weights, args.again)
            found[f"by {args.again}"] = again
            args.out.write_text(json.dumps(found))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for name, run in found.items():
        note(name, {"ms": run["ms"], "tokens/s": run["tokens_per_second"], "validation loss": run["validation"]})
        print(f"{name:<8}{run['ms']:8.1f} ms a step {run['tokens_per_second']:12,.0f} tokens/s, ", end="")
        print(f"validation loss {run['validation']}")
    names = list(found)
    print("step    " + "".join(f"{name:>12}" for name in names))
    for step in sorted({*range(0, args.steps, max(1, args.steps // 12)), args.steps - 1}):
        print(f"{step + 1:<8}" + "".join(f"{found[name]['losses'][step]:12.4f}" for name in names))
    for name in names:
        if name != "theirs" and "theirs" in found:
            apart = np.abs(np.subtract(found[name]["losses"], found["theirs"]["losses"]))
            print(f"{name} and theirs: mean {apart.mean():.4f}, largest {apart.max():.4f} in step {apart.argmax() + 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

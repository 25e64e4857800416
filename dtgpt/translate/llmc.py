"""Commands of llm.c's train_gpt2cu and train_gpt2.py (May 2025, f1e2ace6) as recipes."""

import struct
from collections.abc import Sequence
from glob import glob

from dtgpt.translate.options import GivenOption, Table, count, flat, no, number, skip, to, together
from dtgpt.translate.translation import Launch, Translation
from dtgpt.util.errors import UserError, shown

LAUNCHER = skip("torchrun says it to each process")
OPTIONS: dict[str, Table] = {
    "train_gpt2cu": {
        "i FILE": to("--data.path {FILE} --data.tokenizer gpt2"),
        "j FILE": to("--data.valid_path {FILE}"),
        "e NAME": together("the sizes of the model, or --init_from FILE.bin"),
        "o DIR": to("--runs {DIR}"),
        "n N": to("--checkpoint.interval {N}"),
        "nk N": to("--checkpoint.keep_last {N}"),
        "nm N": to("--checkpoint.keep_every {N}"),
        "y 1": to("--resume auto"),
        "y 0": skip("each start begins a new run"),
        "b N": to("--micro_batch_size {N}"),
        "t N": to("--model.seq_length {N}"),
        "d N": together("--global_batch_size S, where S is {N} / the tokens of a sample"),
        "x N": together("--steps {N}"),
        "k STYLE": to("--optimizer.schedule {STYLE}"),
        "l X": to("--optimizer.lr {X}"),
        "u N": together("--optimizer.warmup {N}"),
        "q X": together("--optimizer.min_lr Y, where Y is {X} x the learning rate"),
        "c X": to("--optimizer.weight_decay {X}"),
        "sl 0, sl 0.0, sg 0, sg 0.0": skip("no update is skipped"),
        "sl X": to("--optimizer.skip_loss_z {X}"),
        "sg X": to("--optimizer.skip_grad_norm_z {X}"),
        "v N": to("--log.eval_interval {N}"),
        "m N": together("--log.eval_samples S, where S is {N} x -b x processes"),
        "s N": to("--log.sample_interval {N}"),
        "g N": to("--log.sample_tokens {N}"),
        "h 0": skip("no task is measured"),
        "h 1": no("give the task's file: --log.eval_tasks hellaswag:hellaswag_val.jsonl"),
        "a 0": skip("all batches are taken"),
        "a 1": to("--data.overfit on"),
        "z N": together("add zero{N} to the plan"),
        "r 0": skip("nothing is recomputed"),
        "r N": skip("GELU and norms are not kept for backward; --recompute selective or full saves more"),
        "w 1": skip("master weights are always fp32"),
        "w 0": no("master weights are always fp32"),
        "f N": skip("matrix products have the type of --precision"),
        "ge N": skip("GELU is always fused"),
        "lg N": skip("metrics.jsonl has the memory"),
        "pn N, pr N, pg N, pi NAME, pm NAME, ps NAME, pf DIR, pp DIR": LAUNCHER,
    },
    "train_gpt2.py": {
        "grad_clip X": to("--optimizer.clip {X}"),
        "dtype bfloat16": to("--precision bf16"),
        "dtype float16": to("--precision fp16"),
        "dtype float32": to("--precision fp32"),
        "device NAME": skip("--device auto takes the GPU"),
        "flash 1": to("--attention auto"),
        "flash 0": to("--attention explicit"),
        "compile N, tensorcores N": skip("kernels are chosen for the device"),
        "write_tensors N": skip("tensors for tests of llm.c are not needed"),
        "inference_only 0": skip("it trains"),
        "inference_only N": no("use dtgpt generate"),
    },
}
SAME = {  # options of train_gpt2.py -> those of train_gpt2cu
    "input_bin": "i",
    "input_val_bin": "j",
    "output_dir": "o",
    "model": "e",
    "batch_size": "b",
    "sequence_length": "t",
    "total_batch_size": "d",
    "num_iterations": "x",
    "learning_rate": "l",
    "warmup_iters": "u",
    "learning_rate_decay_frac": "q",
    "weight_decay": "c",
    "val_loss_every": "v",
    "val_max_steps": "m",
    "sample_every": "s",
    "overfit_single_batch": "a",
    "zero_stage": "z",
}
DEFAULTS = {
    "train_gpt2cu": {
        "i": "dev/data/tinyshakespeare/tiny_shakespeare_train.bin",
        "j": "dev/data/tinyshakespeare/tiny_shakespeare_val.bin",
        "e": "gpt2_124M_bf16.bin",
        "n": "0",
        "nk": "0",
        "b": "4",
        "t": "1024",
        "k": "cosine",
        "l": "3e-4",
        "u": "0",
        "q": "1.0",
        "c": "0.0",
        "v": "20",
        "m": "20",
        "s": "20",
        "g": "64",
    },
    "train_gpt2.py": {
        "input_bin": "dev/data/tinyshakespeare/tiny_shakespeare_val.bin",
        "model": "gpt2",
        "batch_size": "4",
        "sequence_length": "64",
        "total_batch_size": "256",
        "num_iterations": "10",
        "learning_rate": "1e-4",
        "warmup_iters": "0",
        "learning_rate_decay_frac": "1.0",
        "weight_decay": "0.0",
        "val_loss_every": "0",
        "val_max_steps": "20",
        "sample_every": "0",
        "overfit_single_batch": "1",
        "dtype": "float32",
        "flash": "0",
    },
}
GPT2 = {
    6: (384, 6),
    12: (768, 12),
    24: (1024, 16),
    36: (1280, 20),
    48: (1600, 25),
    60: (1920, 30),
    72: (2880, 30),
    84: (3456, 36),
}  # blocks: width, heads
GPT3 = {
    384: (6, 6),
    768: (12, 12),
    1024: (24, 16),
    1536: (24, 16),
    2048: (24, 16),
    2560: (32, 32),
    4096: (32, 32),
    12288: (96, 96),
}  # width: blocks, heads
NAMED = {
    "gpt2": 12,
    "gpt2-medium": 24,
    "gpt2-large": 36,
    "gpt2-xl": 48,
    "124M": 12,
    "350M": 24,
    "774M": 36,
    "1558M": 48,
}
SHARD = 20240520  # the first number of a file of tokens


def translate(program: str, words: Sequence[str], launch: Launch) -> Translation:
    """Return the recipe of a command of train_gpt2cu or train_gpt2.py, `words` being those after the program. Raises
    UserError where they are not options, or values are not known."""
    given: dict[str, GivenOption] = {}
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if len(rest) % 2:
        raise UserError(
            f"{program} takes options with a value each, and {shown(rest[-1])} has none; correct the command"
        )
    for typed, value in zip(rest[::2], rest[1::2], strict=True):
        name = typed.lstrip("-")
        if not typed.startswith("-"):
            raise UserError(f"{shown(typed)} is not an option of {program}; correct the command")
        given[SAME.get(name, name)] = GivenOption(SAME.get(name, name), value, f"{typed} {value}")
    defaults = {SAME.get(name, name): (name, value) for name, value in DEFAULTS[program].items()}
    dashes = "-" if program == "train_gpt2cu" else "--"
    for name, (typed, value) in defaults.items():
        given.setdefault(name, GivenOption(name, value, f"default {dashes}{typed} {value}"))
    result = Translation(f"llm.c's {program}", launch=launch)
    result.apply(given.values(), flat(OPTIONS))
    if program == "train_gpt2cu":
        result.set("train_gpt2cu is built for bf16", precision="bf16")
    _model(result, given["e"])
    _batch(result, given)
    _schedule(result, given)
    return result


def _model(result: Translation, option: GivenOption) -> None:
    name = option.value.removeprefix("gpt2:")
    width = int(name[6:]) if name.startswith("gpt3:c") and name[6:].isdecimal() else 0
    depth = NAMED.get(name) or (int(name[1:]) if name[:1] == "d" and name[1:].isdecimal() else 0)
    if name.endswith(".bin"):
        depth = next((blocks for size, blocks in NAMED.items() if size in name), 12)
        result.set(option.source, init_from=option.value)
    elif name in NAMED:
        result.set(option.source, init_from=option.value)
    if width in GPT3:
        layers, heads = GPT3[width]
        result.set(option.source, model__num_layers=layers, model__hidden_size=width, model__num_heads=heads)
    elif depth in GPT2:
        width, heads = GPT2[depth]
        result.set(option.source, model__num_layers=depth, model__hidden_size=width, model__num_heads=heads)
    else:
        raise UserError(f"{option.source} is not a model of llm.c; use one such as d12, gpt3:c768 or a .bin file")


def _batch(result: Translation, given: dict[str, GivenOption]) -> None:
    micro, length, world = count(given["b"]), count(given["t"]), result.launch.world or 1
    zero = given.get("z")
    if zero is not None and zero.value != "0" and world > 1:
        result.set(zero.source, plan="zero1")  # llm.c has no other level
    else:
        result.set("one replica for each process", plan="dp")
        if zero is not None:
            result.skip(zero.source, "nothing is sharded over one process" if world == 1 else "nothing is sharded")
    if "d" not in given:
        result.set("default -d", global_batch_size=micro * world)
    elif (tokens := count(given["d"])) % length:
        raise UserError(
            f"{given['d'].source} is not a multiple of the {length} tokens of a sample; correct the command"
        )
    else:
        result.set(given["d"].source, global_batch_size=tokens // length)
    batches = number(given["m"])
    words = given["m"].source
    result.set(words, log__eval_samples=batches * micro * world if batches > 0 else 1_000_000_000)
    if "x" in given and given["x"].value != "-1":
        result.set(given["x"].source, steps=number(given["x"]))
    else:
        tokens = count_tokens(result.value("data.path"))
        step = result.value("global_batch_size") * length
        result.set(f"default -x: one epoch of {tokens:,} tokens", steps=max(1, tokens // step))


def count_tokens(pattern: str) -> int:
    """Return the tokens in llm.c's files of a pattern, by their headers. Raises UserError where there is none."""
    found = 0
    for path in sorted(glob(pattern)):
        with open(path, "rb") as file:
            header = file.read(12)
        magic, _, tokens = struct.unpack("<3i", header) if len(header) == 12 else (0, 0, 0)
        if magic == SHARD:
            found += tokens
    if not found:
        raise UserError(
            f"without -x, llm.c trains for one epoch of {pattern}, but no such file of tokens is here to count them; "
            "add the number of steps after --, as in -- -x 18865"
        )
    return found


def _schedule(result: Translation, given: dict[str, GivenOption]) -> None:
    rate, shape = result.value("optimizer.lr"), result.value("optimizer.schedule", "cosine")
    result.set(given["q"].source, optimizer__min_lr=float(f"{rate * number(given['q']):.6g}"))
    if shape == "constant":
        result.set("llm.c's constant schedule", optimizer__warmup=0)
        if given["u"].value != "0":
            result.skip(given["u"].source, "llm.c's constant schedule has no warmup")
    else:
        result.set(given["u"].source, optimizer__warmup=number(given["u"]))
    if shape == "wsd":
        result.refuse(given["k"].source, "the decay at the end is linear, where llm.c's follows a square root")

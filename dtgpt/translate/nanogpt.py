"""Configs and commands of nanoGPT's train.py (November 2025, 3adf61e1) as recipes. A config is Python: its assignments
of numbers and texts are read, and nothing is run."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtgpt.translate.literals import evaluate
from dtgpt.translate.options import GivenOption, Table, count, flat, no, number, skip, to, together
from dtgpt.translate.script import readable, unknown_names
from dtgpt.translate.translation import Launch, Translation
from dtgpt.util.errors import UserError
from dtgpt.util.storage import read_regular

OPTIONS: dict[str, Table] = {
    "train.py": {
        "out_dir DIR": to("--runs {DIR}"),
        "eval_interval N": to("--log.eval_interval {N} --checkpoint.interval {N} --checkpoint.keep_last 1"),
        "log_interval N": to("--log.interval {N}"),
        "eval_iters N": together("--log.eval_samples S, where S is {N} x batch_size"),
        "eval_only False": skip("it trains"),
        "eval_only True": no("a run always trains; use dtgpt eval MODEL"),
        "always_save_checkpoint True": skip("a checkpoint is saved at every --checkpoint.interval"),
        "always_save_checkpoint False": no("checkpoints are saved at every interval, also where the loss has grown"),
        "init_from scratch": skip("weights are random without --init_from"),
        "init_from resume": to("--resume auto"),
        "init_from NAME": to("--init_from {NAME}, the folder of this model of Hugging Face"),
        "wandb_log True": to("--log.wandb online"),
        "wandb_log False": skip("--log.wandb is off"),
        "wandb_project NAME": to("--log.wandb_project {NAME}"),
        "wandb_run_name NAME": skip("a run has the name of the recipe"),
        "dataset NAME": together("--data.path data/{NAME}/train.bin --data.valid_path data/{NAME}/val.bin"),
        "gradient_accumulation_steps N": together("--global_batch_size S, where S is {N} x batch_size"),
        "batch_size N": to("--micro_batch_size {N}"),
        "block_size N": to("--model.seq_length {N}"),
        "n_layer N": to("--model.num_layers {N}"),
        "n_head N": to("--model.num_heads {N}"),
        "n_embd N": to("--model.hidden_size {N}"),
        "dropout P": to("--model.dropout {P}"),
        "bias True": skip("a GPT-2 always has biases"),
        "bias False": no("a GPT-2 always has biases, which begin at 0"),
        "optimizer_type adamw": skip("AdamW is the default"),
        "optimizer_type NAME": to("--optimizer.kind {NAME}, of adamw, muon and normuon"),
        "learning_rate X": to("--optimizer.lr {X}"),
        "max_iters N": to("--steps {N}, where nanoGPT takes one more"),
        "weight_decay X": to("--optimizer.weight_decay {X}"),
        "beta1 X": to("--optimizer.beta1 {X}"),
        "beta2 X": to("--optimizer.beta2 {X}"),
        "grad_clip X": to("--optimizer.clip {X}"),
        "decay_lr BOOL": together("--optimizer.schedule cosine, or constant"),
        "warmup_iters N": together("--optimizer.warmup {N}"),
        "lr_decay_iters N": together("--optimizer.decay_steps {N}"),
        "min_lr X": together("--optimizer.min_lr {X}"),
        "backend NAME": skip("GPUs always use NCCL and CPUs gloo"),
        "device cpu": to("--device cpu"),
        "device mps": no("GPUs of Apple are not available; --device cpu"),
        "device NAME": skip("--device auto takes the GPU"),
        "dtype float32": to("--precision fp32"),
        "dtype bfloat16": to("--precision bf16"),
        "dtype float16": to("--precision fp16"),
        "compile BOOL": skip("kernels are chosen for the device"),
    }
}
DEFAULTS = {  # of train.py, where a recipe has other values, or none
    "out_dir": "out",
    "eval_interval": 2000,
    "log_interval": 1,
    "eval_iters": 200,
    "dataset": "openwebtext",
    "gradient_accumulation_steps": 40,
    "batch_size": 12,
    "block_size": 1024,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "bias": False,
    "learning_rate": 6e-4,
    "max_iters": 600_000,
    "decay_lr": True,
    "warmup_iters": 2000,
    "lr_decay_iters": 600_000,
    "min_lr": 6e-5,
}
SIZES = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}
NONE = GivenOption("", "", "")
LARGEST = 1 << 20  # bytes of a config
CHARACTERS = 65  # in the text of data/shakespeare_char


def translate(words: Sequence[str], launch: Launch) -> Translation:
    """Return the recipe of a command, `words` being those after train.py: config files, and `--name=value`. Raises
    UserError for what train.py does not take, and where nothing would be trained."""
    result = Translation("nanoGPT's train.py", launch=launch)
    given: dict[str, GivenOption] = {}
    for word in words:
        if unknown_names(word):
            raise UserError(f"{readable(word)} is known to a shell alone; write it out")
        if not word.startswith("--"):
            given |= read_config(Path(word), result)
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            raise UserError(f"train.py is taken for nanoGPT's, whose options are --name=value, and {word} is none")
        given[name] = GivenOption(name, value, word)
    if given.get("eval_only", NONE).value == "True":
        raise UserError(
            "eval_only = True measures a model and trains nothing; use dtgpt eval MODEL, or train with -- "
            "--eval_only=False"
        )
    begin = given.get("init_from", NONE).value
    if begin in SIZES:
        sizes = dict(zip(("n_layer", "n_head", "n_embd"), SIZES[begin], strict=True)) | {"bias": True}
        given |= {name: GivenOption(name, str(value), f"{name} of {begin}") for name, value in sizes.items()}
    for name, default in DEFAULTS.items():
        given.setdefault(name, GivenOption(name, str(default), f"default {name} = {default!r}"))
    result.apply(given.values(), flat(OPTIONS))
    _together(result, given)
    return result


def read_config(path: Path, result: Translation) -> dict[str, GivenOption]:
    """Return what a config file assigns. Raises UserError where that is nothing."""
    try:
        tree = ast.parse(read_regular(path, LARGEST))  # whose encoding is not the terminal's
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        reason = "nested too deeply" if isinstance(error, RecursionError | MemoryError) else reason
        raise UserError(f"{path}: {reason}; give a config file of nanoGPT") from None
    names: dict[str, Any] = {}
    found: dict[str, GivenOption] = {}
    known = {key.split()[0] for key in flat(OPTIONS)}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.AST() as value):
                pass
            case _:
                continue
        try:
            source = f"{name} = {ast.unparse(value)}"
        except RecursionError:
            raise UserError(f"{path}, line {node.lineno}: nested too deeply; give a config file of nanoGPT") from None
        try:
            names[name] = evaluate(value, names)
            if isinstance(names[name], list):
                raise ValueError("no option is a list")
        except (ValueError, RecursionError):
            result.refuse(source, "it is computed by a program, which is not run")
            continue
        if name in known:
            found[name] = GivenOption(name, str(names[name]), source)
        elif not name.startswith("_"):
            result.refuse(source, "nanoGPT does not have it")
    if not found:
        raise UserError(f"{path} sets nothing that nanoGPT's train.py has; give a config such as config/train_gpt2.py")
    return found


def _together(result: Translation, given: dict[str, GivenOption]) -> None:
    """Translate the options that depend on others."""
    micro = count(given["batch_size"])
    for name, to_name in (("gradient_accumulation_steps", "global_batch_size"), ("eval_iters", "log.eval_samples")):
        result.assign(given[name].source, {to_name: micro * count(given[name])})
    dataset = given["dataset"].value
    folder = f"data/{dataset}"
    result.set(given["dataset"].source, data__path=f"{folder}/train.bin", data__valid_path=f"{folder}/val.bin")
    if dataset.endswith("_char"):
        result.set(f"the characters of {dataset}", data__tokenizer="char", model__vocab_size=CHARACTERS)
    else:
        result.set(f"the tokens of {dataset}", data__tokenizer="gpt2")
    decays = given["decay_lr"].value != "False"
    result.set(given["decay_lr"].source, optimizer__schedule="cosine" if decays else "constant")
    for name, to_name in (("warmup_iters", "warmup"), ("lr_decay_iters", "decay_steps"), ("min_lr", "min_lr")):
        if decays:
            result.assign(given[name].source, {f"optimizer.{to_name}": number(given[name])})
        else:
            result.skip(given[name].source, "the learning rate is constant")
    if not decays:
        result.set("no warmup", optimizer__warmup=0)
    result.refuse("exact GELU", "a GPT-2 has the tanh form of GELU; --model.activation gelu is the exact one")
    result.refuse("random windows", "each window is taken once in an epoch, in a shuffled order")

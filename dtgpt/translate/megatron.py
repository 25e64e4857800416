"""Commands of Megatron-LM's pretrain_gpt.py as recipes."""

import math
import re
from collections.abc import Sequence

from dtgpt.translate.megatron_experts import MixtureOptions
from dtgpt.translate.megatron_table import DEFAULTS, entries_of
from dtgpt.translate.options import GivenOption, read_options
from dtgpt.translate.translation import Launch, Translation
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError

NEEDED = {  # options that Megatron-LM needs, too, and others in their place
    "num-layers": ("encoder-num-layers",),
    "hidden-size": (),
    "num-attention-heads": (),
    "seq-length": ("encoder-seq-length",),
    "micro-batch-size": ("batch-size",),
    "lr": (),
    "train-iters": ("train-samples",),
}
WARMUPS = {"lr-warmup-fraction", "lr-warmup-iters", "lr-warmup-samples"}
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
SHARDING = {"no_shard": "", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}


def translate_training(words: Sequence[str], launch: Launch) -> Translation:
    """Return the recipe of a command, `words` being those after pretrain_gpt.py. Raises UserError where it lacks an
    option that Megatron-LM needs, or values are not known."""
    free, given = read_options(words)
    missing = [name for name, others in NEEDED.items() if not {name, *others} & given.keys()]
    if missing:
        raise UserError(
            f"the command has no {', '.join(f'--{name}' for name in missing)}, which Megatron-LM needs; add "
            f"{'it' if len(missing) == 1 else 'them'} after --"
        )
    training = Training(given, launch)
    for word in free:
        training.result.refuse(word, "it belongs to no option")
    return training.run()


class Training(MixtureOptions):
    """All options of a command."""

    def run(self) -> Translation:
        result = self.result
        result.architecture = self._architecture()
        for name, value in DEFAULTS.items():
            if name not in self.given and not (name in WARMUPS and WARMUPS & self.given.keys()):
                self.given[name] = GivenOption(name, value, f"default --{name} {value}")
        result.apply(self.given.values(), entries_of(result.architecture))
        self._model()
        self._experts()
        self._attention()
        self._recompute()
        self._precision()
        self._muon()
        self._schedule()
        plan = self._plan()
        self._batch(plan)
        self._data()
        self._checkpoints()
        result.check_model()
        return result

    def _recompute(self) -> None:
        name = "recompute-num-layers"
        in_blocks = self._text("recompute-granularity") == "full" and self._text("recompute-method") == "block"
        if in_blocks and self._has(name):
            self.result.set(self._words(name), recompute_blocks=self._count(name))
        else:
            self._skip("each block that is recomputed keeps its own input", name)

    def _precision(self) -> None:
        result = self.result
        fp8 = [name for name in ("fp8-format", "fp8-hybrid", "fp8-e4m3") if self._has(name)]
        if fp8:
            result.settings["precision"] = "fp8", self._words(*fp8)  # in place of bf16, which is given, too
        elif not self._has("fp16") and not self._has("bf16"):
            result.set("neither --fp16 nor --bf16", precision="fp32")
        for name in ("fp8-recipe", "fp8-amax-history-len", "fp8-amax-compute-algo", "fp8-margin", "fp8-interval"):
            if self._has(name) and self._text(name) == "delayed":
                result.skip(self._words(name), "scales always follow from earlier steps")
            elif self._has(name):
                result.refuse(self._words(name), "scales always follow from the largest values of the last 16 steps")
        if self._has("loss-scale"):
            scale = self._number("loss-scale")
            result.refuse(self._words("loss-scale"), "the loss scale is dynamic: it starts with this value")
            result.settings["loss_scale.initial"] = scale, self._words("loss-scale")
        if self._has("distributed-timeout-minutes"):
            minutes = self._number("distributed-timeout-minutes")
            result.set(self._words("distributed-timeout-minutes"), timeout=60 * minutes)

    def _muon(self) -> None:
        """Set what belongs to Muon alone."""
        names = {"muon-momentum": "momentum", "muon-num-ns-steps": "newton_schulz_steps"}
        nesterov = "muon-use-nesterov"
        if self.result.value("optimizer.kind") != "muon":
            self._skip("it has no effect without --optimizer muon", *names, nesterov)
            return
        for name, to_name in names.items():
            if self._has(name):
                self.result.assign(self._words(name), {f"optimizer.{to_name}": self._number(name)})
        self.result.set(self._words(nesterov) or f"no --{nesterov}", optimizer__nesterov=self._has(nesterov))

    def _schedule(self) -> None:
        for name, ends in (
            ("lr-wsd-decay-iters", ("lr-decay-iters", "train-iters")),
            ("lr-wsd-decay-samples", ("lr-decay-samples", "train-samples")),
        ):
            end = next((self._number(other) for other in ends if self._has(other)), None)
            if self._has(name) and end:
                self.result.set(self._words(name), optimizer__wsd_decay=self._number(name) / end)

    def _plan(self) -> dict[str, int]:
        """Set the plan; return its degrees."""
        result = self.result
        tp = "tensor-model-parallel-size" if not self._has("model-parallel-size") else "model-parallel-size"
        pp = "pipeline-model-parallel-size"
        options = {"cp": "context-parallel-size", "tp": tp, "pp": pp}
        if self._count("num-experts", 0):
            options = {**options, "ep": "expert-model-parallel-size"}
        degrees = {part: self._count(option, 1) for part, option in options.items()}
        parts = [f"{part}{degree}" for part, degree in degrees.items() if degree > 1]
        sources = [*options.values()]
        if self._has("sequence-parallel") and degrees["tp"] > 1:
            parts.append("sp")
            sources.append("sequence-parallel")
        elif self._has("sequence-parallel"):
            result.skip("--sequence-parallel", "it has no effect without tensor parallelism")
        per_stage, stages = "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"
        if degrees["pp"] > 1 and (self._has(per_stage) or self._has(stages)):
            layers = (self._count("num-layers") or self._count("encoder-num-layers")) // degrees["pp"]
            parts.append(f"interleaved{self._count(stages) or layers // self._count(per_stage)}")
            sources += [per_stage, stages]
        sharded = [n for n in ("use-distributed-optimizer", "use-torch-fsdp2", "use-megatron-fsdp") if self._has(n)]
        strategy = "data-parallel-sharding-strategy"
        if sharded:
            fsdp = sharded[-1] != "use-distributed-optimizer"
            zero = SHARDING.get(self._text(strategy, "optim_grads_params"), "zero3") if fsdp else "zero1"
            parts += [zero] * bool(zero)
            sources += [*sharded, strategy]
        else:
            self._skip("it has no effect without --use-megatron-fsdp", strategy)
        result.set(self._words(*sources) or "no option of parallelism", plan="_".join(parts) or "dp")
        ep = degrees.pop("ep", 1)  # among the ranks of data
        needed = math.prod(degrees.values()) * ep // math.gcd(ep, degrees["cp"])
        world = result.launch.world
        result.needs = needed
        if world is not None and world % needed:
            result.refuse(counted(world, "process", "processes"), f"the plan needs {needed}, or a multiple")
        return degrees

    def _batch(self, degrees: dict[str, int]) -> None:
        result = self.result
        micro = self._count("micro-batch-size") or self._count("batch-size")
        if not self._has("global-batch-size") and not self._has("step-batch-size-schedule"):
            replicas = max(1, (result.launch.world or 1) // math.prod(degrees.values()))
            result.set("default --global-batch-size", global_batch_size=micro * replicas)
        ramp = "rampup-batch-size"
        if self._has(ramp):
            result.set(self._words(ramp), rampup_batch_size=self._text(ramp))
        if self._has("step-batch-size-schedule"):
            self._steps_of_batch()
        whole = result.value("global_batch_size")
        samples = self._number("eval-iters") * whole
        measured = {"log.eval_samples": samples} if samples else {"log.eval_interval": 0}
        result.assign(self._words("eval-iters"), measured)
        if not self._has("eval-interval"):
            result.set("no --eval-interval", log__eval_interval=0)

    def _steps_of_batch(self) -> None:
        """Translate a schedule of batch sizes that grows by equal steps at equal distances."""
        words = self._words("step-batch-size-schedule")
        length = self._length()
        text = self._text("step-batch-size-schedule").strip("\"'").upper().replace(",", " ")
        found = re.findall(r"([\d.]+)([KMBT]?):(\d+)", text)
        pieces = [(int(float(tokens) * UNITS[unit]) // length, int(size)) for tokens, unit, size in found]
        if len(found) < len(text.split()) or not found:
            raise UserError(f"{words} is not THRESHOLD:SIZE ..., as in '0:16 2.4B:320'; correct the command")
        (_, first), (end, last) = pieces[0], pieces[-1]
        self.result.settings["global_batch_size"] = last, words
        if len(pieces) == 1:
            self.result.set(words, global_batch_size=last)
            return
        steps, growth = len(pieces) - 1, (last - first) // (len(pieces) - 1)
        if pieces == [(end * n // steps, first + growth * n) for n in range(len(pieces))]:
            self.result.set(words, global_batch_size=last, rampup_batch_size=f"{first} {growth} {end}")
        else:
            self.result.refuse(words, f"batches grow by equal steps only; the recipe begins with the last size, {last}")

    def _data(self) -> None:
        result = self.result
        if self._has("valid-data-path") or self._has("test-data-path"):
            self._skip("each path is used entirely", "split")
        elif self._has("split"):
            result.set(self._words("split"), data__split=self._text("split").strip("\"'"))
        if self._has("data-cache-path"):
            cache = self._text("data-cache-path")
            result.environment["DTGPT_CACHE"] = cache
            result.note(self._words("data-cache-path"), f"DTGPT_CACHE={cache}")
        if self._has("mock-data"):
            result.refuse("--mock-data", "the recipe trains on a text included in Python, in place of random tokens")
        elif not {"data-path", "train-data-path"} & self.given.keys():
            result.refuse("no --data-path", "the recipe trains on a text included in Python; give --data.path")
        kind = self._text("tokenizer-type", "GPT2BPETokenizer")
        if kind == "NullTokenizer" and not self._has("mock-data"):
            result.set(self._words("tokenizer-type"), data__tokenizer="ids")
        elif kind != "GPT2BPETokenizer":
            why = "the tokenizer is that of the data" if self._has("mock-data") else "its file says what it is"
            self._skip(why, "tokenizer-type")
        if kind == "GPT2BPETokenizer" and not self._has("vocab-size"):
            result.set("the tokenizer of GPT-2", model__vocab_size=50257)
        elif not self._has("vocab-size"):
            result.refuse("no --vocab-size", "it is that of the tokenizer: set --model.vocab_size")

    def _checkpoints(self) -> None:
        result, load = self.result, self._text("load")
        if self._has("save-retain-interval"):
            result.settings["checkpoint.keep_last"] = 1, self._words("save-retain-interval")
        if not self._has("save"):
            result.set("no --save", checkpoint__interval=0)
        begins, goes_on = ("finetune", "no-load-optim"), load == self._text("save")
        if not self._has("load"):
            self._skip("it has no effect without --load", *begins)
        elif self._has("finetune") or (self._has("no-load-optim") and not goes_on):
            result.set(self._words("load", *begins), init_from=load)
        else:
            result.set(self._words("load"), resume="auto" if goes_on else load)
            self._skip("a run goes on with its optimizer", *begins)

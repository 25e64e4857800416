"""The model that a command of Megatron-LM's pretrain_gpt.py describes: a GPT-2, a LLaMA or a GPT-OSS, and
a LLaMA to which experts (`megatron_experts.py`) are added."""

import ast
import math
import re
from typing import Any

from dtgpt.translate.literals import evaluate
from dtgpt.translate.options import GivenOption, count, number
from dtgpt.translate.translation import Launch, Translation
from dtgpt.util.errors import UserError

LOCAL, GLOBAL = "L", "G"  # of --model.window_pattern
MOST_KINDS = 1000  # its letters


class ModelOptions:
    """One command: its options, by their names without dashes, and what those of the model become."""

    def __init__(self, given: dict[str, GivenOption], launch: Launch):
        self.given = given
        self.result = Translation("Megatron-LM's pretrain_gpt.py", launch=launch)

    def _has(self, name: str) -> bool:
        return name in self.given

    def _text(self, name: str, otherwise: str = "") -> str:
        return self.given[name].value if name in self.given else otherwise

    def _number(self, name: str, otherwise: Any = None) -> Any:
        option = self.given.get(name)
        return otherwise if option is None else number(option)

    def _count(self, name: str, otherwise: Any = None) -> Any:
        option = self.given.get(name)
        return otherwise if option is None else count(option)

    def _words(self, *names: str) -> str:
        """Return the options among `names` that were given, as typed."""
        return " ".join(self.given[name].source for name in names if name in self.given)

    def _skip(self, why: str, *names: str) -> None:
        """Say of each option among `names` that was given why it is not needed."""
        for name in names:
            if self._has(name):
                self.result.skip(self._words(name), why)

    def _architecture(self) -> str:
        positions = self._text("position-embedding-type")
        signs = {
            "--position-embedding-type rope": self._has("use-rotary-position-embeddings")
            or positions in ("rope", "yarn"),
            "--normalization RMSNorm": self._text("normalization") == "RMSNorm",
            "--swiglu": self._has("swiglu") or self._has("quick-geglu"),
        }
        if sum(signs.values()) < 2:
            return "gpt2"
        sinks = self._text("softmax-type") == "learnable"
        if not sinks:
            signs["--disable-bias-linear"] = self._has("disable-bias-linear")
        elif self._has("disable-bias-linear"):
            self.result.differ("--disable-bias-linear", "a GPT-OSS, whose heads have sinks, always has biases")
        title = "GPT-OSS" if sinks else "LLaMA"
        for sign, found in signs.items():
            if not found:
                self.result.differ(
                    f"no {sign}", f"a {title} always has it, and no model here has the others without it"
                )
        return "gpt_oss" if sinks else "llama"

    def _length(self) -> int:
        return self._count("seq-length") or self._count("encoder-seq-length")

    def _default_width(self) -> int:
        """Return the width of a gated MLP for which the command gives none."""
        return int(4 * self._count("hidden-size") * 2 / 3 / 64) * 64

    def _model(self) -> None:
        length, positions = self._length(), self._number("max-position-embeddings")
        if positions is None:
            self.result.set("no --max-position-embeddings", model__seq_length=length)
        elif positions == length:  # which is the default
            del self.result.settings["seq_length"]
        result = self.result
        hidden, heads = result.value("model.hidden_size"), result.value("model.num_heads")
        if result.architecture == "gpt2":
            for name, product, size in (("ffn-hidden-size", 1, 4 * hidden), ("kv-channels", heads, hidden)):
                if self._has(name):
                    fits = self._number(name) * product == size
                    why = "a GPT-2 always has this width" if fits else "a GPT-2 always has another width"
                    (result.skip if fits else result.differ)(self._words(name), why)
        else:
            self._llama(hidden, heads)
        dropouts = [self._number(f"{part}-dropout") for part in ("hidden", "attention")]
        result.set(self._words("hidden-dropout"), model__dropout=dropouts[0])
        if dropouts[0] == dropouts[1]:
            result.set(self._words("attention-dropout"), model__dropout=dropouts[0])
        else:
            result.refuse(self._words("attention-dropout"), f"all sites have the same dropout: {dropouts[0]}")

    def _llama(self, hidden: int, heads: int) -> None:
        result = self.result
        if not self._has("group-query-attention"):
            result.set("no --group-query-attention", model__num_kv_heads=heads)
        if not self._has("kv-channels"):
            result.set("default --kv-channels", model__head_dim=hidden // heads)
        if not self._has("ffn-hidden-size"):
            result.set("default --ffn-hidden-size", model__ffn_hidden_size=self._default_width())
        untied = "untie-embeddings-and-output-weights"
        result.set(self._words(untied) or f"no --{untied}", model__tied=not self._has(untied))
        if self._has("use-rope-scaling"):
            words = self._words("use-rope-scaling", "rope-scaling-factor")
            result.set(words, model__rope_factor=self._number("rope-scaling-factor", 8))
        else:
            self._skip("it has no effect without --use-rope-scaling", "rope-scaling-factor")
        sinks = result.architecture == "gpt_oss"
        own = (("qk-layernorm", "qk_norm", True), ("add-qkv-bias", "attention_bias", "qkv"))
        for name, field, value in own if result.architecture in ("llama", "gpt_oss") else ():
            if self._has(name) and sinks:
                result.differ(self._words(name), "a GPT-OSS has no norm of heads, and all biases")
            elif self._has(name):
                result.assign(self._words(name), {f"model.{field}": value})
        self._gate()
        self._yarn()
        self._windows()
        if sinks:
            self._unlike_gpt_oss()

    def _gate(self) -> None:
        """Set the function of the gate: SwiGLU, or gpt-oss's."""
        names = ("quick-geglu", "glu-linear-offset", "activation-func-clamp-value")
        found = self._has(names[0]), self._number(names[1], 0), self._number(names[2], 0)
        if found == (True, 1, 7):
            self.result.set(self._words(*names), model__activation="clamped_swiglu")
        elif any(found):
            why = "a gate is clamped at 7, with --quick-geglu and --glu-linear-offset 1, or is SwiGLU's"
            self.result.differ(self._words(*names), f"{why}; choose --model.activation")

    def _yarn(self) -> None:
        """Set the factor of cosines and sines, which is YaRN's own unless there are two scales."""
        names = "yarn-mscale", "yarn-mscale-all-dim"
        scales = [self._number(name) for name in names]
        given, factor = self._words(*names), self._number("yarn-rotary-scaling-factor", 1)
        if self._text("position-embedding-type") != "yarn":
            if given:
                self.result.skip(given, "it has no effect without --position-embedding-type yarn")
        elif None not in scales:
            of_scales = [0.1 * scale * math.log(max(factor, 1)) + 1 for scale in scales]
            self.result.set(given, model__rope_attention_factor=of_scales[0] / of_scales[1])
        elif given:
            self.result.skip(given, "one scale without the other has no effect")

    def _windows(self) -> None:
        """Set which blocks attend to how many of the last tokens."""
        size, frequency = self._words("window-size"), "window-attn-skip-freq"
        if not size:
            self._skip("it has no effect without --window-size", frequency)
            return
        left, _, right = self._text("window-size").strip("\"'()[] ").replace(",", " ").partition(" ")
        if not re.fullmatch(r"-1|\d{1,9}", left) or right.strip() not in ("", "0"):
            raise UserError(f"{size} is not a window of a causal model, as in 127,0; correct the command")
        self.result.set(size, model__window=int(left) + 1)
        if not self._has(frequency):
            return
        try:
            value = evaluate(ast.parse(self._text(frequency).strip("\"'"), mode="eval"), {})
        except (ValueError, SyntaxError, RecursionError):
            value = None
        if isinstance(value, int) and 0 < value <= MOST_KINDS:
            pattern = LOCAL * (value - 1) + GLOBAL
        elif isinstance(value, list) and len(value) == self.result.value("model.num_layers"):
            pattern = "".join(LOCAL if one else GLOBAL for one in value)
        else:
            self.result.differ(self._words(frequency), "set --model.window_pattern, a text of L (window) and G (none)")
            return
        self.result.set(self._words(frequency), model__window_pattern=pattern)

    def _unlike_gpt_oss(self) -> None:
        """Write out what a GPT-OSS would have, and a command without these options has not."""
        self.result.note(self._words("softmax-type"), "a recipe of a GPT-OSS")
        yarn = self._text("position-embedding-type") == "yarn"
        own = {"activation": "silu", "rope_theta": 10000.0, "window": 0, "window_pattern": LOCAL, "norm_eps": 1e-5}
        own |= {"rope_truncate": True} if yarn else {"rope_factor": 1.0}
        missing = {f"model.{name}": value for name, value in own.items() if f"model.{name}" not in self.result.settings}
        self.result.assign("no option of GPT-OSS's own", missing)

    def _attention(self) -> None:
        words = [name for name in ("transformer-impl", "attention-backend") if self._text(name) == "local"]
        unfused = "no-masked-softmax-fusion"
        if words and not self._has("use-flash-attn"):
            core = "explicit" if self._has(unfused) else "fused_softmax"
            self.result.set(self._words(*words, unfused), attention=core)
            return
        self._skip("there is one implementation of each model", *words)
        self._skip("it has no effect with this attention", unfused)

"""Options of Megatron-LM for experts: what becomes of each, and the family that a command describes."""

import ast
from typing import Any

from dtgpt.interop.megatron.experts import FAMILIES, TITLES, fields_of, lacks_of, with_experts
from dtgpt.translate.literals import evaluate
from dtgpt.translate.megatron_model import ModelOptions
from dtgpt.translate.options import GivenOption, count, flat, no, number, other, skip, together
from dtgpt.util.errors import UserError, shown

LOADS = "even loads out by --balance.loss or --balance.bias_step"
CAPACITY = no(f"no token is dropped, as the plan would decide which one; {LOADS}")
FORCED = no("a token always goes to the experts that it chooses")
MOVED = skip("the way of tokens to their experts follows from the plan")
FAMILY = together("the family: Mixtral, Qwen2-MoE, Qwen3-MoE, GPT-OSS or GLM-4.5")
BALANCE = together("--balance.loss, over the sequence or the global batch, in place of a micro-batch")
EXPERTS = {
    "num-experts N": together("--model.num_experts {N}"),
    "moe-router-topk N": together("--model.experts_per_token {N}"),
    "moe-ffn-hidden-size N, moe-shared-expert-intermediate-size N": together(
        "--model.expert_size, or ffn_hidden_size of Mixtral and GPT-OSS; --model.shared_size"
    ),
    "moe-layer-freq N": together("--model.expert_pattern, such as ED for 2, or --model.dense_blocks of GLM-4.5"),
    "moe-router-score-function NAME, moe-router-pre-softmax, moe-shared-expert-gate": FAMILY,
    "moe-router-num-groups N, moe-router-group-topk N, moe-router-topk-scaling-factor X, rotary-percent X": together(
        "--model.expert_groups, --model.open_groups, --model.routed_factor, --model.rotated"
    ),
    "moe-router-load-balancing-type NAMES, moe-aux-loss-coeff X": BALANCE,
    "moe-z-loss-coeff X": together("--balance.z_loss Z, where Z is {X} x the layers with experts"),
    "moe-router-bias-update-rate X, moe-router-enable-expert-bias": together("--balance.bias_step {X}"),
    "moe-router-dtype fp32": skip("routers always multiply in fp32"),
    "moe-router-dtype TYPE": no("routers always multiply in fp32"),
    "expert-model-parallel-size 1, expert-tensor-parallel-num-weight-shards 1": skip("that is so without the option"),
    "expert-model-parallel-size N": together("add ep{N} to the plan, as in --plan dp8_ep8_zero1"),
    "expert-tensor-parallel-size N": skip("the plan cuts experts as it cuts attention"),
    "moe-grouped-gemm, moe-use-legacy-grouped-gemm, moe-use-grouped-tensor, moe-single-grouped-*, use-grouped-gemm-*, "
    "moe-permute-fusion*, moe-router-fusion, moe-mlp-glu-interleave-size N, moe-shared-expert-glu-interleave-size N, "
    "use-fused-weighted-squared-relu, moe-router-padding-*": skip(
        "the products of all experts are always grouped, without padding, and operations fused"
    ),
    "moe-token-dispatcher-type NAME, moe-enable-deepep, moe-flex-*, moe-deepep-*, moe-hybridep-*, moe-ncclep-*, "
    "moe-dispatch-*, moe-combine-*, overlap-moe-*, overlap-dispatch-*, ep-overlap-*, high-priority-a2a-*, "
    "moe-shared-expert-overlap": MOVED,
    "moe-per-layer-logging": skip("records have the loads of each layer, such as load_max_3"),
    "moe-enable-routing-replay, moe-paged-stash*": skip("choices are computed again from the same bits"),
    "moe-layer-recompute": no("--recompute full recomputes blocks whole, with their experts"),
    "moe-expert-capacity-factor X, moe-expert-rank-capacity-factor X, moe-pad-expert-input-to-capacity, "
    "moe-pad-experts-for-cuda-graph-inference, moe-token-drop-policy NAME": CAPACITY,
    "moe-input-jitter-eps X": no(f"no noise is added to routers, as choices would differ between plans; {LOADS}"),
    "moe-router-force-load-balancing, moe-router-force-biased X": FORCED,
    "moe-router-quantile-balancing-ema X": no(f"no quantiles choose experts; {LOADS}"),
    "moe-router-topk-limited-devices N": no("groups of experts do not follow devices: --model.open_groups"),
    "moe-extended-tp, expert-tensor-parallel-num-weight-shards N": no("zero3 in the plan shards weights of experts"),
    "moe-use-upcycling, moe-upcycling-granularity N": no("no dense model becomes a mixture; experts begin anew"),
    "moe-latent-size N, moe-apply-probs-on-input": other("experts always see a token's own activations"),
    "moe-*, no-moe-*, expert-*": no("dtgpt has no equivalent of it; docs/moe.md has its options of experts"),
}
NONE = "it has no effect on a model without experts"
NO_EXPERTS = {
    "num-experts 0": skip("there are none"),
    "num-experts N": other("begin with a recipe of a mixture of experts, such as recipes/moe_tiny.py"),
    "moe-*, no-moe-*, expert-*, overlap-moe-*, overlap-dispatch-*, ep-overlap-*, high-priority-a2a-*, "
    "use-grouped-gemm-*, use-fused-weighted-squared-relu": skip(NONE),
}


def _words(option: GivenOption) -> str:
    return option.value.strip("\"'")


def _pattern(option: GivenOption) -> Any:
    """Return N of one layer in N, or 0 or 1 for each layer. Raise UserError for another value."""
    try:
        value = evaluate(ast.parse(_words(option), mode="eval"), {})
    except (ValueError, SyntaxError, RecursionError):
        value = None
    if (type(value) is int and value > 0) or (isinstance(value, list) and set(value) <= {0, 1}):
        return value
    raise UserError(f"{option.source}: {shown(option.value)} is not as in 2 or '([0]*3+[1]*45)'; correct the command")


def _on(option: GivenOption) -> bool:
    return True


# Of a model: option -> how its value is read.
ARGUMENTS = {
    **dict.fromkeys(
        (
            "num-experts",
            "moe-router-topk",
            "moe-ffn-hidden-size",
            "moe-shared-expert-intermediate-size",
            "moe-router-num-groups",
            "moe-router-group-topk",
        ),
        count,
    ),
    **dict.fromkeys(("moe-router-topk-scaling-factor", "rotary-percent"), number),
    **dict.fromkeys(
        (
            "moe-router-pre-softmax",
            "moe-router-enable-expert-bias",
            "moe-shared-expert-gate",
            "qk-layernorm",
            "add-qkv-bias",
        ),
        _on,
    ),
    "moe-router-score-function": _words,
    "moe-layer-freq": _pattern,
}
# Field of a config -> options from which it comes.
SOURCES = {
    "num_experts": ("num-experts",),
    "experts_per_token": ("moe-router-topk",),
    "ffn_hidden_size": ("ffn-hidden-size", "moe-ffn-hidden-size"),
    "expert_size": ("moe-ffn-hidden-size",),
    "shared_size": ("moe-shared-expert-intermediate-size",),
    "expert_pattern": ("moe-layer-freq",),
    "dense_blocks": ("moe-layer-freq",),
    "expert_groups": ("moe-router-num-groups",),
    "open_groups": ("moe-router-group-topk",),
    "normalise_weights": ("moe-router-pre-softmax", "moe-router-score-function"),
    "routed_factor": ("moe-router-topk-scaling-factor",),
    "rotated": ("rotary-percent",),
    "qk_norm": ("qk-layernorm",),
    "attention_bias": ("add-qkv-bias",),
}
TOGETHER = {key.partition(" ")[0] for key, answer in flat({"": EXPERTS}).items() if answer.together}
DECIDING = ("moe-router-score-function", "moe-shared-expert-gate")


class MixtureOptions(ModelOptions):
    """One command, with its experts."""

    def _is_mixture(self) -> bool:
        return self._text("num-experts", "0") != "0"

    def _arguments(self) -> dict[str, Any]:
        """Return what the command says of experts, by the names of Megatron-LM's args."""
        found = {name.replace("-", "_"): read(self.given[name]) for name, read in ARGUMENTS.items() if self._has(name)}
        types = self._text("moe-router-load-balancing-type", "aux_loss").split()
        layers = self._count("num-layers") or self._count("encoder-num-layers")
        width = self._count("ffn-hidden-size") or self._default_width()
        found |= {"num_layers": layers, "ffn_hidden_size": width, "moe_router_load_balancing_type": types}
        frequency = found.get("moe_layer_freq")
        if isinstance(frequency, list) and len(frequency) != layers:
            raise UserError(
                f"{self._words('moe-layer-freq')} is of {len(frequency)} layers, and the model has {layers}; correct "
                "the command"
            )
        return found

    def _architecture(self) -> str:
        kind = super()._architecture()
        if not self._is_mixture() or kind == "gpt2":
            return kind
        given = self._arguments()
        names = [name for name in FAMILIES if (name == "gpt_oss") == (kind == "gpt_oss")]
        lacks = {name: lacks_of(name, given) for name in names}
        chosen = min(names, key=lambda name: len(lacks[name]))
        for argument, lack in lacks[chosen].items():
            option = argument.replace("_", "-")
            says = f"{lack}, which a {TITLES[chosen]} does not have, the closest family here"
            self.result.differ(self._words(option) or f"no --{option}", says)
        if chosen != "glm4_moe" and given.get("rotary_percent", 1) != 1:
            self.result.differ(self._words("rotary-percent"), f"all columns rotate in a {TITLES[chosen]}")
        return chosen

    def _experts(self) -> None:
        """Set the fields of the family, and the balance."""
        if not self._is_mixture():
            if self.result.architecture == "gpt_oss":  # with one expert
                self._skip(NONE, *(name for name in self.given if name.startswith("moe-") and name in TOGETHER))
            return
        if self.result.other_model:
            return  # it is refused
        given, result = self._arguments(), self.result
        fields = fields_of(result.architecture, given)
        told: set[str] = set()
        if "expert_size" in fields:
            del fields["ffn_hidden_size"]  # that of blocks without experts, which is set
        for field, value in fields.items():
            options = SOURCES[field]
            words = self._words(*options)
            told.update(options)
            result.assign(words or f"no --{options[0]}", {f"model.{field}": value})
        named = [name for name in (*ARGUMENTS, *DECIDING) if name not in told and name in self.given]
        if named := [name for name in dict.fromkeys(named) if name != "moe-router-enable-expert-bias"]:
            result.note(self._words(*named), f"a recipe of a {TITLES[result.architecture]}")
        self._balance(sum(with_experts(given)), fields["experts_per_token"])

    def _balance(self, layers: int, chosen: int) -> None:
        """Set what keeps experts even. layers: those with experts, over which Megatron-LM adds losses up, while these
        are means here. chosen: experts of a token, of which Megatron-LM's loads are parts."""
        result, kinds, factor = self.result, "moe-router-load-balancing-type", "moe-aux-loss-coeff"
        rate, corrects = "moe-router-bias-update-rate", "moe-router-enable-expert-bias"
        if self._has(corrects):
            result.set(self._words(corrects, rate), balance__bias_step=self._number(rate, 0.001))
        else:
            self._skip(f"it has no effect without --{corrects}", rate)
        if self._has("moe-z-loss-coeff"):
            value = exact(self._number("moe-z-loss-coeff") * layers)
            result.set(self._words("moe-z-loss-coeff"), balance__z_loss=value)
        names = self._text(kinds, "aux_loss").split()
        texts = self._text(factor, "0").split()
        words = self._words(kinds, factor)
        if len(names) != len(texts) and self._has(factor):
            raise UserError(f"{words} are {len(names)} kinds and {len(texts)} coefficients; correct the command")
        values = [number(GivenOption(factor, text, words)) for text in texts]
        losses = [(name, value) for name, value in zip(names, values, strict=False) if value and name != "none"]
        if not losses:
            self._skip("no loss has a coefficient", kinds, factor)
            return
        for name, _ in losses[1:]:
            result.refuse(f"--{kinds} {name}", "a recipe has one auxiliary loss, the first one here")
        name, value = losses[0]
        if name == "seq_aux_loss" or (name == "aux_loss" and self._micro_batch() == 1):
            result.set(words, balance__loss=exact(value * layers), balance__over="sequence")
            return
        found = {"balance.loss": exact(value * layers / chosen), "balance.layers": "apart"}
        if name == "global_aux_loss" or self._micro_batch() == self._count("global-batch-size"):
            result.assign(words, found)
            return
        result.settings.update({field: (value, words) for field, value in found.items()})
        loss = f"--balance.loss {found['balance.loss']} of the global batch"
        result.refuse(words, f"that of a micro-batch would depend on the plan; the recipe has {loss}")

    def _micro_batch(self) -> Any:
        return self._count("micro-batch-size") or self._count("batch-size")


def exact(value: float) -> float:
    """Return a product of short numbers without what its binary form adds to the last digits."""
    return float(f"{value:.12g}")

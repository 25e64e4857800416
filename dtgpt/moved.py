"""Old names of modules that stand in another place now. They can be imported for one version, with a warning."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# (old folder, new folder): names of modules in it, "old>new" where the name is another one.
FOLDERS = {
    (
        "dtgpt.train",
        "dtgpt.compare",
    ): "compare record verdict gate trace pairing own_check shared_state finding float64",
    ("dtgpt.run", "dtgpt.compare"): "two_runs two_runs_report history starts",
    ("dtgpt.run", "dtgpt.run"): "sinks>records",
    ("dtgpt.run", "dtgpt.run.stops"): "signals",
    ("dtgpt.commands", "dtgpt.compare"): "compare>command compare_runs>command",
    ("dtgpt.commands", "dtgpt.charts"): "plot>command",
    ("dtgpt.liveness", "dtgpt.liveness"): "losses>lost_peers",
    ("dtgpt.run", "dtgpt.charts"): "plot tensorboard",
    ("dtgpt.train", "dtgpt.evaluation"): "tasks>in_training",
    ("dtgpt", "dtgpt.compare"): "fuzz",
    ("dtgpt.fuzz", "dtgpt.compare.fuzz"): "case drawing judge measure pool report run shrink",
    ("dtgpt.data", "dtgpt.posttrain"): "chats",
    ("dtgpt.data.chats", "dtgpt.posttrain.chats"): "encode examples fields messages packed places sandbox template",
    ("dtgpt.data.chats", "dtgpt.posttrain.dpo"): "pairs preferences",
    ("dtgpt.config", "dtgpt.posttrain.dpo"): "dpo>config",
    ("dtgpt.train", "dtgpt.posttrain.dpo"): "preferences>reference",
    ("dtgpt.ops.loss", "dtgpt.posttrain.dpo"): "preference>loss",
    ("dtgpt.config", "dtgpt.posttrain.grpo"): "grpo>config",
    ("dtgpt.train", "dtgpt.posttrain.grpo"): "rollouts answers recipe_calls gsm8k",
    ("dtgpt.config", "dtgpt.posttrain.lora"): "lora>config",
    ("dtgpt.parallel", "dtgpt.posttrain.lora"): "lora>adapters",
    ("dtgpt.checkpoint", "dtgpt.posttrain.lora"): "adapter>checkpoint",
    ("dtgpt.optim", "dtgpt.optim.fp8"): "fp8_scales>scales",
    ("dtgpt.optim", "dtgpt.optim.z_scores"): "outliers>detector",
    ("dtgpt", "dtgpt.parallel"): "comm>shared_memory",
    (
        "dtgpt.comm",
        "dtgpt.parallel.shared_memory",
    ): "all_to_all arena barrier collectives gather kernels message pieces reduce scatter",
    ("dtgpt.comm", "dtgpt.ops.kernels.decode"): "exchange",
    ("dtgpt.parallel.shared_memory", "dtgpt.parallel.shared_memory"): "exchange>transport",
    ("dtgpt.parallel", "dtgpt.parallel.shared_memory"): "edges pushed_shards",
    ("dtgpt.parallel", "dtgpt.parallel.context_parallel"): "context>slices exchange",
    ("dtgpt.parallel", "dtgpt.optim.muon"): "matrices",
    ("dtgpt.util", "dtgpt.ops.kernels"): "extension",
    ("dtgpt.util", "dtgpt.data.library_tokenizers"): "unpickler",
    ("dtgpt.util", "dtgpt.interop"): "pickles",
    ("dtgpt.util", "dtgpt.train.timers"): "timers>parts",
    ("dtgpt.interop.hf", "dtgpt.interop.hf"): "activation>architecture groups>architecture",
    ("dtgpt.commands", "dtgpt"): "tools",
    ("dtgpt.parallel", "dtgpt.parallel.exact_sums"): "exact>sums exact_buckets>buckets",
    ("dtgpt.interop", "dtgpt.checkpoint"): "open ends>open tokenizer>open",
    (
        "dtgpt.train",
        "dtgpt.train",
    ): "ending>checkpoints saving>checkpoints evaluate>objective samples>texts.generate progress>observer job>start "
    "settle>start startup>setup processes>setup",
    ("dtgpt.train", "dtgpt.checkpoint"): "own_tokenizer>open",
    ("dtgpt.commands", "dtgpt.interop"): "convert inspect>inspect_command",
    ("dtgpt.commands", "dtgpt.data.prepare"): "prepare>command tokenizer>tokenizer_command",
    ("dtgpt.commands", "dtgpt.serve"): "serve>command",
    (
        "dtgpt.serve",
        "dtgpt.serve",
    ): "guard>access client>access life>signals token_names>openai_logprobs megatron_jobs>megatron",
    ("dtgpt.commands", "dtgpt.evaluation"): "eval>command lm_eval>harness_command",
    ("dtgpt.commands", "dtgpt.liveness"): "launcher",
    ("dtgpt.commands", "dtgpt.commands"): "help>command",
    ("dtgpt.commands", "dtgpt.tools"): "doctor progress recipe recipes results",
    ("dtgpt.commands", "dtgpt.translate"): "translate>command",
    ("dtgpt.commands", "dtgpt.inference"): "prompt_files>prompt_sources",
    ("dtgpt.commands", "dtgpt.inference.prompt_sources"): "generated>terminal prompts>files",
    ("dtgpt.commands.prompt_files", "dtgpt.inference.prompt_sources"): "options>file_options prompts>files results",
    ("dtgpt.commands", "dtgpt.posttrain.chats"): "chat>command",
    ("dtgpt.inference", "dtgpt.posttrain.chats"): "chat>prompts",
    ("dtgpt.inference", "dtgpt.serve"): "warm_up",
    ("dtgpt.inference", "dtgpt.planning"): "memory_report>generation",
    ("dtgpt.ops.sampling", "dtgpt.ops.sampling"): "reference>sample record>sample",
    ("dtgpt.ops.sampling", "dtgpt.inference.rules"): "edits",
    ("dtgpt.ops.sampling", "dtgpt.inference.scores"): "scores>tokens",
    (
        "dtgpt.inference",
        "dtgpt.inference",
    ): "generator>model runner>step prefill>step leader>commands messages>commands slot_state>cache results>step "
    "beam>beams.search beam_slots>beams.search fused>kernels.stages forward>step broadcast>commands finite>request "
    "completion>request sampling>request text>prompts graphs>captured.graphs prompt_batches>captured.prompt_batches",
    ("dtgpt.inference", "dtgpt.inference.library"): "load",
    ("dtgpt.inference", "dtgpt.parallel"): "memory>cache_sizes",
    ("dtgpt.ops", "dtgpt.ops.kernels"): "fast>devices fused_softmax",
    ("dtgpt.ops.fused_softmax", "dtgpt.ops.kernels.fused_softmax"): "softmax softmax_kernels",
    ("dtgpt.ops.attention", "dtgpt.ops.kernels.attention"): (
        "flash flash_kernels flash_launch flash_mask flash_tiles descriptor_kernels warp_kernels warp_tiles "
        "cached_kernels exact_kernels shared_kernels packed window"
    ),
    ("dtgpt.ops.decode", "dtgpt.ops.kernels.decode"): "blocks exact kernels rows weights",
    ("dtgpt.ops.sampling", "dtgpt.ops.kernels.sampling"): (
        "edit_kernels filter_kernels kernels primitives record_kernels"
    ),
    ("dtgpt.ops.norm", "dtgpt.ops.kernels"): "norm_kernels column_kernels",
    ("dtgpt.ops.pointwise", "dtgpt.ops.kernels"): "gelu_kernels swiglu_kernels machine bias",
    ("dtgpt.ops.loss", "dtgpt.ops.kernels"): "cross_entropy_kernels",
    ("dtgpt.ops.rotary", "dtgpt.ops.kernels"): "rotary_kernels",
    ("dtgpt.ops.random", "dtgpt.ops.kernels"): "dropout_kernels triton_philox",
    ("dtgpt.ops.optim", "dtgpt.ops.kernels"): "adamw_kernels fixed_point_kernels",
    ("dtgpt.ops.fp8", "dtgpt.ops.kernels"): "activation_kernels quantize_kernels",
    ("dtgpt.config", "dtgpt.optim.fp8"): "fp8>precision",
    ("dtgpt.config", "dtgpt.config"): "plan_names>plan_choice batch_size>schedule checks>recipe_rules",
    ("dtgpt.data", "dtgpt.data"): "array_cache>cache checks>open",
    ("dtgpt.data", "dtgpt.data.cached"): "cache>folders file_array",
    ("dtgpt.data.megatron", "dtgpt.data.cached"): "file_array",
    ("dtgpt.checkpoint", "dtgpt.checkpoint"): "ends>open staging>shard_file tokenizer>open",
    ("dtgpt.checkpoint", "dtgpt.interop"): "export>weights_alone",
    ("dtgpt.checkpoint", "dtgpt.train"): "state>checkpoints",
    ("dtgpt.optim", "dtgpt.optim"): "states>update loss_scale>fp16.loss_scale muon_kinds>muon",
    ("dtgpt.util", "dtgpt.util"): "environment>hardware allocator>hardware matmul>torch_private process>peers",
    ("dtgpt.util", "dtgpt.util.machine"): "threads",
    ("dtgpt.models", "dtgpt.models"): "architectures>config windows>rotary",
    ("dtgpt.models", "dtgpt.models.families"): "gemma3 gpt_neo gpt_oss olmo3 track3",
    ("dtgpt.optim", "dtgpt.optim.muon"): "muon_memory>memory normuon",
    ("dtgpt.ops.optim", "dtgpt.optim.muon"): "newton_schulz",
    ("dtgpt.ops.optim", "dtgpt.ops.optim"): "gradients>optimizer",
    ("dtgpt.ops.random", "dtgpt.ops.random"): "few>philox sliced>dropout",
    # Of folders that are one file now; a folder has to be found before what was in it.
    ("dtgpt.ops", "dtgpt"): "pointwise>ops norm>ops rotary>ops",
    ("dtgpt.ops", "dtgpt.ops"): "local_linear>linear serve>operation",
    (
        "dtgpt.ops.pointwise",
        "dtgpt.ops",
    ): "activation>activations gated>activations gelu>activations relu2>activations swiglu>activations linear",
    ("dtgpt.ops.norm", "dtgpt.ops"): "norm>norms residual>norms",
    ("dtgpt.ops.rotary", "dtgpt.ops"): "rotary>rotary_positions table>rotary_positions",
    ("dtgpt.optim", "dtgpt.config"): "kinds>recipe_file",
    ("dtgpt.data", "dtgpt.data.documents"): "document_masks>masks",
    ("dtgpt.data", "dtgpt.data.prefetched"): "prefetch>prefetcher",
    (
        "dtgpt.parallel",
        "dtgpt.parallel",
    ): "between>tensor coordinates>mesh fsdp>build local>inference transport>collectives",
    ("dtgpt.commands", "dtgpt.planning"): "plan>command",
    ("dtgpt.planning", "dtgpt.planning"): "alive>meta_block allocator>memory auto_report>report fit>what_fits "
    "held>parameters message_time>step_time moments>fullest_moment table>report work>operation_time "
    "zero_bubble>split_backward",
    (
        "dtgpt.data.tokenizers",
        "dtgpt.data.library_tokenizers",
    ): "char>characters added_tokens bpe_files byte_level export folder libraries rank_files "
    "sentencepiece_export special_names>base",
}


def _moved() -> dict[str, str]:
    found = {}
    for (old, new), names in FOLDERS.items():
        for name in names.split():
            before, _, after = name.partition(">")
            found[f"{old}.{before}"] = f"{new}.{after or before}"
    return found


MOVED = _moved()


class _Old(MetaPathFinder, Loader):
    """Answers an import of an old name with the module of today, so that both are one."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is {new} now; the old name ends with the next version", FutureWarning, stacklevel=2)
        module = importlib.import_module(new)
        # From now on before the search on disk, which would find a module of a moved folder again, by its old name.
        sys.meta_path.remove(self)
        sys.meta_path.insert(0, self)
        self._specs[spec.name] = module.__spec__  # which the import replaces by that of the old name
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def serve_old_names() -> None:
    """Let the old names be imported."""
    sys.meta_path.append(_Old())  # after the search on disk, so that an import of today's names does not come here

"""The capabilities of dtgpt: what there is beside the core. Remove a line and the folder that it names, and the core
works as before.

They are listed, and not found by a search of folders or of installed packages: which there are, what each may import of
others and in which order they are asked are facts that a reader sees and a test checks. Nothing named here is imported
before the core asks for it.
"""

# The module that describes the capability, and those of the capabilities whose modules it imports. Sections of recipes
# stand in this order, in `--help` too, and formats are asked in it: pairs of answers are chats, too, and these are
# token files; that of library_tokenizers takes every file. A run that interop does not know is dtgpt's: init_from.
CAPABILITIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dtgpt.ops.kernels", ()),
    ("dtgpt.util.locks", ()),
    ("dtgpt.charts", ()),
    ("dtgpt.commands.option_help", ()),
    ("dtgpt.run.differences", ()),
    ("dtgpt.checkpoint.background", ()),
    ("dtgpt.checkpoint.verification", ()),
    ("dtgpt.train.texts", ()),
    ("dtgpt.train.rehearsal", ("dtgpt.ops.kernels",)),
    ("dtgpt.train.timers", ()),
    ("dtgpt.liveness", ()),
    ("dtgpt.parallel.shared_memory", ("dtgpt.ops.kernels",)),
    ("dtgpt.parallel.context_parallel", ("dtgpt.parallel.shared_memory",)),
    ("dtgpt.parallel.own_styles", ()),
    ("dtgpt.parallel.local_weights", ()),
    ("dtgpt.parallel.more_styles", ()),
    ("dtgpt.parallel.graphs", ()),
    ("dtgpt.parallel.exact_sums", ("dtgpt.parallel.shared_memory",)),
    ("dtgpt.models.moe", ()),
    ("dtgpt.models.families", ("dtgpt.models.moe",)),
    ("dtgpt.optim.muon", ()),
    ("dtgpt.optim.fp8", ()),
    ("dtgpt.optim.z_scores", ()),
    ("dtgpt.data.cached", ()),
    ("dtgpt.data.prepare", ("dtgpt.data.library_tokenizers", "dtgpt.data.megatron")),
    ("dtgpt.posttrain.lora", ("dtgpt.train.init_from",)),
    ("dtgpt.posttrain.dpo", ("dtgpt.data.megatron", "dtgpt.posttrain.chats")),
    (
        "dtgpt.posttrain.chats",
        (
            "dtgpt.data.library_tokenizers",
            "dtgpt.data.megatron",
            "dtgpt.data.prepare",
            "dtgpt.inference.prompt_sources",
        ),
    ),
    ("dtgpt.data.megatron", ("dtgpt.data.cached",)),
    ("dtgpt.data.library_tokenizers", ()),
    (
        "dtgpt.posttrain.grpo",
        ("dtgpt.evaluation", "dtgpt.parallel.context_parallel", "dtgpt.posttrain.chats", "dtgpt.posttrain.lora"),
    ),
    (
        "dtgpt.interop",
        (
            "dtgpt.checkpoint.verification",
            "dtgpt.data.library_tokenizers",
            "dtgpt.data.megatron",
            "dtgpt.data.prepare",
            "dtgpt.models.families",
            "dtgpt.optim.fp16",
            "dtgpt.posttrain.lora",
            "dtgpt.train.init_from",
        ),
    ),
    ("dtgpt.train.init_from", ()),
    ("dtgpt.translate", ()),
    (
        "dtgpt.planning",
        (
            "dtgpt.ops.kernels",
            "dtgpt.optim.fp8",
            "dtgpt.parallel.context_parallel",
            "dtgpt.parallel.shared_memory",
            "dtgpt.posttrain.lora",
            "dtgpt.tools",
        ),
    ),
    (
        "dtgpt.compare",
        (
            "dtgpt.charts",
            "dtgpt.data.prepare",
            "dtgpt.models.families",
            "dtgpt.models.moe",
            "dtgpt.optim.fp8",
            "dtgpt.parallel.context_parallel",
            "dtgpt.planning",
            "dtgpt.posttrain.grpo",
            "dtgpt.posttrain.lora",
            "dtgpt.tools",
            "dtgpt.train.init_from",
            "dtgpt.train.texts",
        ),
    ),
    ("dtgpt.receipts", ("dtgpt.compare", "dtgpt.posttrain.grpo", "dtgpt.tools")),
    ("dtgpt.optim.fp16", ()),
    (
        "dtgpt.evaluation",
        (
            "dtgpt.data.library_tokenizers",
            "dtgpt.data.prepare",
            "dtgpt.inference.library",
            "dtgpt.inference.rules",
            "dtgpt.inference.scores",
            "dtgpt.interop",
            "dtgpt.parallel.context_parallel",
            "dtgpt.posttrain.lora",
            "dtgpt.tools",
        ),
    ),
    ("dtgpt.inference.beams", ()),
    ("dtgpt.inference.rules", ()),
    ("dtgpt.inference.scores", ()),
    ("dtgpt.inference.library", ()),
    ("dtgpt.inference.captured", ("dtgpt.parallel.graphs",)),
    ("dtgpt.inference.kernels", ("dtgpt.ops.kernels",)),
    (
        "dtgpt.serve",
        (
            "dtgpt.data.library_tokenizers",
            "dtgpt.inference.beams",
            "dtgpt.inference.captured",
            "dtgpt.inference.library",
            "dtgpt.posttrain.chats",
        ),
    ),
    ("dtgpt.inference.prompt_sources", ("dtgpt.tools",)),
    ("dtgpt.tools", ()),
)

"""Text files -> token files: `dtgpt prepare` and `dtgpt tokenizer train`; from Python:

    from dtgpt.data.prepare import PrepareConfig, prepare
    summary = prepare(PrepareConfig(input="a.jsonl", output_prefix="mine", append_eod=True))

`job.prepare` does it: `config.py` says what can be asked for, `inputs.py` finds and cuts the files, `documents.py`
reads what stands in them, `encode.py` makes tokens in the processes of `pool.py`, `data/megatron/indexed.py` writes
them under names that `target.py` locks, and `progress.py` reports how far it is and which lines are left out.
"""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    datasets=("dtgpt.data.prepare.format:FILES",),
    commands={
        "prepare": CommandEntry(
            "dtgpt.data.prepare.command:command",
            "dtgpt prepare INPUT ... --output-prefix PREFIX\n"
            "    encode text into Megatron-LM's PREFIX_text_document.bin and .idx",
            place=10,
        ),
        "tokenizer": CommandEntry(
            "dtgpt.data.prepare.tokenizer_command:command",
            "dtgpt tokenizer train INPUT ...\n    train a byte-level BPE on your own text",
            place=20,
        ),
    },
)


def __getattr__(name: str):
    """Import what does the work when it is asked for, so that a command answers at once."""
    if name in ("PrepareConfig", "prepare"):
        from dtgpt.data.prepare import job

        return getattr(job, name)
    raise AttributeError(f"module 'dtgpt.data.prepare' has no attribute {name!r}")

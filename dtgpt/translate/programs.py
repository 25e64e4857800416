"""Which program a command runs, and its translation."""

import re
from collections.abc import Sequence

from dtgpt.translate import llmc, nanogpt
from dtgpt.translate.megatron import translate_training
from dtgpt.translate.megatron_tools import PROGRAMS, translate_tool
from dtgpt.translate.script import Found
from dtgpt.translate.translation import Launch, Translation, program_at
from dtgpt.util.errors import UserError

NOT_RUN = ("echo", "printf", "make", "scp", "cp", "rsync", "cat", "ls", "grep", "rm", "chmod", "pip", "git", "mkdir")
MEGATRON = ("pretrain_gpt.py",)
LLMC = ("train_gpt2cu", "train_gpt2.py")
NANOGPT = ("train.py",)
OTHERS = {  # programs of which dtgpt has no equivalent -> why
    **{
        f"pretrain_{name}.py": "dtgpt trains decoders of transformer blocks on text alone"
        for name in (
            "bert",
            "t5",
            "mamba",
            "hybrid",
            "vlm",
            "ict",
            "retro",
            "vision_classify",
            "vision_dino",
            "vision_inpaint",
        )
    },
    "merge_mp_partitions.py": "use dtgpt convert TREE TARGET --to megatron",
    "generate_samples_gpt.py": "use dtgpt generate MODEL --prompt TEXT, or --prompts-file FILE --output FILE",
    "generate_samples_gpt2.py": "use dtgpt generate MODEL --prompt TEXT, or --prompts-file FILE --output FILE",
    "text_generation_cli.py": "it runs as it is, with the address of dtgpt serve MODEL",
    "convert_megatron_gpt2_checkpoint.py": "use dtgpt convert TREE TARGET --to hf",
    "checkpoint_reshaping_and_interoperability.py": "use dtgpt convert MODEL TARGET --to hf, or --to megatron",
    "train_gpt2": "it is llm.c's reference in C; give the command of train_gpt2cu",
    "train_gpt2fp32cu": "it has fewer options; give the command of train_gpt2cu, and --precision fp32 to the recipe",
    "test_gpt2": "it tests llm.c; use python -m pytest",
    "test_gpt2cu": "it tests llm.c; use python -m pytest -m cuda",
    "profile_gpt2cu": "use python benchmarks/train_step.py --profile",
    "profile_gpt2cu.py": "use python benchmarks/train_step.py --profile",
    "export_hf.py": "use dtgpt convert FILE.bin TARGET --to hf",
    **{
        f"dev/data/{name}": "run it as it is: its .bin files are what --data.path reads"
        for name in (
            "tinyshakespeare.py",
            "tinystories.py",
            "fineweb.py",
            "fineweb.sh",
            "edu_fineweb.sh",
        )
    },
    "download_starter_pack.sh": "run it as it is: its .bin files are what --data.path and --init_from read",
    "dev/data/hellaswag.py": "dtgpt eval MODEL --task hellaswag --data hellaswag_val.jsonl reads what it downloads",
    "prepare.py": "run it as it is: its .bin files are what --data.path reads",
    "sample.py": "use dtgpt generate MODEL --prompt TEXT --num-samples N --max-new-tokens N --temperature X --top-k N",
    "bench.py": "use python benchmarks/train_step.py",
}
MOST_WORDS = 20_000  # of a command
LONG_NUMBER = re.compile(r"\d{1000,}")  # which Python may not read
KNOWN = (*MEGATRON, *LLMC, *NANOGPT, *PROGRAMS, *OTHERS)


def choose(commands: Sequence[Found], nth: int | None) -> Found:
    """Return the command of a known program, the `nth` of several. Raises UserError where there is none, or it is not
    said which."""
    known = [one for one in commands if one.words[0] not in NOT_RUN and program_at(one.words, KNOWN) is not None]
    if not known:
        raise UserError(
            "no command of Megatron-LM, nanoGPT or llm.c was found, such as pretrain_gpt.py, train.py or train_gpt2cu; "
            "give the command itself after --"
        )
    if nth is None and len(known) > 1:
        said = ", ".join(f"{number} in line {one.line}" for number, one in enumerate(known, 1))
        raise UserError(
            f"the script has {len(known)} commands that can be translated ({said}); choose one with --nth N"
        )
    if nth is not None and nth > len(known):
        raise UserError(
            f"--nth is {nth}, but the commands that can be translated are {len(known)}; use 1 to {len(known)}"
        )
    return known[(nth or 1) - 1]


def translate_command(words: Sequence[str], slurm: Sequence[str] = ()) -> Translation:
    """Return the translation of a command with a known program. slurm: words of the #SBATCH lines of its script. Raises
    UserError."""
    if len(words) > MOST_WORDS:
        raise UserError(f"the command has {len(words):,} words, of which {MOST_WORDS:,} are read; leave some out")
    if number := next(filter(None, map(LONG_NUMBER.search, words)), None):
        raise UserError(f"{number[0][:20]}... is a number of {len(number[0]):,} digits; correct the command")
    at = program_at(words, KNOWN)
    if at is None:
        raise UserError(f"{' '.join(words[:3])} ... runs no program of Megatron-LM, nanoGPT or llm.c that is known")
    rest = list(words[at + 1 :])
    launch = Launch.of(words[:at], slurm)
    program = next(name for name in KNOWN if program_at([words[at]], [name]) is not None)
    if program in MEGATRON:
        return translate_training(rest, launch)
    if program in LLMC:
        return llmc.translate(program, rest, launch)
    if program in NANOGPT:
        return nanogpt.translate(rest, launch)
    if program in PROGRAMS:
        return translate_tool(program, rest, launch)
    raise UserError(f"{program} cannot be translated: {OTHERS[program]}")

"""`dtgpt prepare`: encode text files into token files."""

import signal
import sys
import threading
from typing import Any

from dtgpt.commands.command import Command
from dtgpt.data.prepare.job import PrepareConfig, join_datasets
from dtgpt.data.prepare.job import prepare as encode
from dtgpt.util.console import counted, say

ALIASES = {"tokenizer_model": "tokenizer"}  # Megatron-LM's name
DOC = """Encode text into token files PREFIX_KEY_document.bin and .idx, in the format of Megatron-LM's
preprocess_data.py.

INPUT is a path, a quoted glob or - (standard input): .jsonl or .json (one object per line), or .txt, plain or
compressed (.gz, .xz, .zst, .bz2). Broken lines are skipped and reported. An on|off option without a value is on."""


def prepare(options: PrepareConfig) -> None:
    """Encode texts, or join datasets. Raises UserError; then no file is left."""
    with SignalsAsExit():
        if options.merge:
            target, count = join_datasets(options)
            say(f"{target}: {counted(count, 'dataset')} joined")
        else:
            say(str(encode(options)))


class SignalsAsExit:
    """Turn SIGTERM, and SIGHUP of a closed terminal, into SystemExit, so that partial files are removed. Under nohup
    SIGHUP stays ignored."""

    def __enter__(self) -> None:
        self._former: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, lambda number, _: sys.exit(128 + number))

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)


command = Command(
    "prepare INPUT ... --output-prefix PREFIX",
    PrepareConfig,
    prepare,
    "corpus.jsonl --output-prefix corpus",
    doc=DOC,
    aliases=ALIASES,
)

"""What a translation found: the values of a recipe, or a command, and what became of each option."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any

from dtgpt.translate.options import GivenOption, Kind, Table, find
from dtgpt.translate.script import is_count, readable, unknown_names
from dtgpt.translate.shell import PLACEHOLDER
from dtgpt.util.console import counted
from dtgpt.util.errors import UserError
from dtgpt.util.shared.option_words import value_text

PROCESSES = {  # options of launchers, without dashes -> what they count
    "nproc-per-node": "per_node",
    "nproc_per_node": "per_node",
    "ntasks-per-node": "per_node",
    "nnodes": "nodes",
    "nodes": "nodes",
    "N": "nodes",
    "np": "all",
    "n": "all",
    "ntasks": "all",
    "num_gpus": "per_node",
    "num_nodes": "nodes",  # of deepspeed
    "num_processes": "all",
    "num_machines": "nodes",  # of accelerate
}
RENDEZVOUS = (  # options of torchrun that say where nodes meet
    "node-rank",
    "master-addr",
    "master-port",
    "rdzv-backend",
    "rdzv-id",
    "rdzv-endpoint",
    "rdzv-conf",
)
OF_TASKS = ("ntasks", "n", "ntasks-per-node", "signal", "requeue", "open-mode")  # of sbatch, which slurm.sbatch sets
SLURM = "slurm.sbatch"  # which `dtgpt recipe` prints


@dataclass(frozen=True)
class Launch:
    """How many processes a command starts; None: it does not say."""

    per_node: int | None = None
    nodes: int | None = None
    all: int | None = None
    several: bool = False  # where it says a number that is not known
    rendezvous: tuple[str, ...] = ()  # words of torchrun
    srun: tuple[str, ...] = ()  # what stands before torchrun
    slurm: tuple[str, ...] = ()  # of #SBATCH lines

    @classmethod
    def of(cls, words: Sequence[str], slurm: Sequence[str] = ()) -> "Launch":
        """Return what the words before a program say, those of torchrun, srun, mpirun and `python -m
        torch.distributed.launch`, and where they do not, the words of a script's #SBATCH lines."""
        words, slurm = _apart(words), _apart(slurm)
        own, job = cls._of(words), cls._of(slurm)
        return replace(
            own,
            nodes=own.nodes or job.nodes,
            per_node=own.per_node or (job.per_node if own.all is None else None),
            all=own.all or (job.all if own.per_node is None else None),
            slurm=tuple(slurm),
        )

    @classmethod
    def _of(cls, words: Sequence[str]) -> "Launch":
        found: dict[str, Any] = {}
        several = False
        meeting: list[str] = []
        for word, following in zip(words, [*words[1:], ""], strict=False):
            name, equals, value = word.lstrip("-").partition("=")
            value = value if equals else following
            if word.startswith("--") and name.replace("_", "-") in RENDEZVOUS:
                meeting += [f"--{name.replace('_', '-')}", readable(value) if unknown_names(value) else quote(value)]
            value = value.rpartition(":")[2]  # of --nnodes 1:4, the most
            if not word.startswith("-") or name not in PROCESSES:
                continue
            several = several or bool(unknown_names(value)) or value in ("gpu", "auto", "cpu", "xpu")
            if is_count(value) and int(value) > 0:
                found[PROCESSES[name]] = int(value)
                if name.startswith("nproc"):  # of a torchrun that srun or mpirun starts on each node
                    found.pop("all", None)
        starts = next((at for at, word in enumerate(words) if word.rpartition("/")[2] == "torchrun"), 0)
        srun: tuple[str, ...] = ()
        if words and words[0] == "srun":
            srun = tuple(map(quote, map(readable, words[:starts]))) or ("srun", "--ntasks-per-node", "1")
        return cls(**found, several=several, rendezvous=tuple(meeting), srun=srun)

    @property
    def world(self) -> int | None:
        if self.all is None and self.per_node is None:
            return None
        return self.all or (self.per_node or 1) * (self.nodes or 1)

    def command(self, program: str) -> str:
        """Return a command that runs a recipe file, or `-m dtgpt ...`, in as many processes."""
        world = self.world or 1
        per_node = self.per_node or (-(-world // self.nodes) if self.nodes else min(world, 8))
        nodes = self.nodes or -(-world // per_node)
        if self.slurm and not program.startswith("-m"):
            return " ".join(["sbatch", *self._of_job(), SLURM, program])
        if nodes > 1:
            meeting = self.rendezvous or ("--rdzv-backend c10d --rdzv-id 1 --rdzv-endpoint HOST:29500",)
            words = [*self.srun, "torchrun", f"--nnodes {nodes} --nproc-per-node {per_node}", *meeting, program]
            return " ".join(words)
        if self.world is None and self.several:
            return f"torchrun --nproc-per-node N {program}"
        return f"torchrun --nproc-per-node {world} {program}" if world > 1 else f"python {program}"

    def _of_job(self) -> Iterator[str]:
        """Yield the words of the job, but for those of its tasks."""
        skips = False
        for word in self.slurm:
            if word.startswith("-"):
                skips = word.lstrip("-").partition("=")[0] in OF_TASKS
            if not skips:
                yield quote(word)


def _apart(words: Sequence[str]) -> list[str]:
    """Return the words of a launcher with -N4 as -N 4."""
    found = [re.fullmatch(r"(-[Nn])(\d+)", word) for word in words]
    return [part for word, match in zip(words, found, strict=True) for part in (match.groups() if match else [word])]


@dataclass(frozen=True)
class TableRow:
    """What became of an option, in words."""

    source: str
    kind: Kind
    text: str


@dataclass
class Translation:
    """program: what was translated, as in "Megatron-LM's pretrain_gpt.py"."""

    program: str
    architecture: str = "gpt2"
    rows: list[TableRow] = field(default_factory=list)
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)  # of a recipe: value, and where it is from
    words: list[str] = field(default_factory=list)  # of a command of dtgpt, in place of a recipe
    environment: dict[str, str] = field(default_factory=dict)
    launch: Launch = Launch()
    needs: int = 1  # processes of the plan
    other_model: list[TableRow] = field(default_factory=list)  # rows that ask for a model which dtgpt does not have

    def set(self, source: str, **values: Any) -> None:
        """Set values of the recipe, named with `__` in place of the dot."""
        self.assign(source, {name.replace("__", "."): value for name, value in values.items()})

    def assign(self, source: str, values: dict[str, Any]) -> None:
        self.settings.update({name: (value, source) for name, value in values.items()})
        self.note(source, " ".join(f"--{name} {quote(value_text(value))}" for name, value in values.items()))

    def note(self, source: str, text: str) -> None:
        self.rows.append(TableRow(source, "translated", text))

    def skip(self, source: str, why: str) -> None:
        self.rows.append(TableRow(source, "not needed", why))

    def refuse(self, source: str, why: str) -> None:
        self.rows.append(TableRow(source, "cannot be done", why))

    def differ(self, source: str, why: str) -> None:
        """Refuse an option that makes another model."""
        self.refuse(source, why)
        self.other_model.append(self.rows[-1])

    def check_model(self) -> None:
        """Raise UserError where a recipe would be of another model than the command's."""
        if self.other_model:
            told = ", ".join(f"{row.source} ({row.text})" for row in self.other_model)
            raise UserError(
                f"the command is of a model that dtgpt does not have: {told}; leave such options out of it to "
                "translate the rest"
            )

    def value(self, name: str, otherwise: Any = None) -> Any:
        return self.settings.get(name, (otherwise,))[0]

    def apply(self, options: Iterable[GivenOption], table: Table) -> None:
        """Take the options that the table answers without others. Raises UserError for a value that is not known."""
        answered = [(option, find(table, option.name, option.value)) for option in options]
        check_known([option for option, found in answered if found and found[1].kind == "translated"])
        for option, found in answered:
            source = readable(option.source)
            if found is None:
                self.refuse(source, "dtgpt does not know this option")
                continue
            wanted, answer = found
            if answer.of_model:
                self.differ(source, answer.filled(wanted, readable(option.value)))
            elif answer.kind != "translated":
                self.rows.append(TableRow(source, answer.kind, answer.filled(wanted, readable(option.value))))
            elif not answer.together:
                self.assign(source, answer.settings(option))


def check_known(options: Iterable[GivenOption]) -> None:
    """Raise UserError where values are not known: variables of the environment, arguments that were not given, output
    of commands, and placeholders."""
    wanted: list[str] = []
    for option in options:
        wanted += [f"${name}" for name in unknown_names(option.value)]
        wanted += [match[0] for match in PLACEHOLDER.finditer(option.value)]
    if wanted := list(dict.fromkeys(wanted)):
        wanted.sort(key=lambda name: int(name[1:]) if name[1:].isdecimal() else 0)
        numbers = [name for name in wanted if name[1:].isdecimal()]
        names = [name[1:] for name in wanted if re.fullmatch(r"\$[A-Za-z_]\w*", name)]
        ways = [f"{counted(int(numbers[-1][1:]), 'word')} after the script"] if numbers else []
        ways += [" ".join(f"{name}=VALUE" for name in names)] if names else []
        if len(numbers) + len(names) < len(wanted):
            ways.append("the options that have them, after --")
        raise UserError(
            f"the script is not run, so that {_listed(wanted)} {'is' if len(wanted) == 1 else 'are'} not known; give "
            f"{_listed(ways)}"
        )


def program_at(words: Sequence[str], names: Iterable[str]) -> int | None:
    """Return where the first word stands that names one of the programs by the end of its path."""
    known = [tuple(name.split("/")) for name in names]
    for at, word in enumerate(words):
        parts = tuple(readable(word).split(os.sep))
        if any(parts[-len(name) :] == name for name in known):
            return at
    return None


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)

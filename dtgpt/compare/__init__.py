"""What judges runs: steps of several plans compared, verdicts, the first tensor that differs, curves of two runs."""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    former_starts=("dtgpt.compare.starts:keep_start",),
    commands={
        "compare": CommandEntry(
            "dtgpt.compare.command:command",
            "dtgpt compare RECIPE.py --plans NAME [NAME ...] [--steps N]\n"
            "    run the same steps under several plans and on one process, and compare\n"
            "dtgpt compare RUN_A RUN_B\n"
            "    show where the curves of two runs diverge, and in what the runs differ",
            place=50,
        ),
        "record": CommandEntry("dtgpt.compare.command:record"),  # which `dtgpt compare` starts
    },
)

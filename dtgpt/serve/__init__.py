"""`dtgpt serve`: an HTTP server on one engine, for Megatron-LM's clients, OpenAI's clients and a web page."""

from dtgpt.util.seams import Capability, CommandEntry

CAPABILITY = Capability(
    commands={
        "serve": CommandEntry(
            "dtgpt.serve.command:command",
            "dtgpt serve MODEL [--host ADDRESS] [--port N]\n"
            "    answer Megatron-LM's and OpenAI's clients over HTTP, and a web page",
            place=80,
        ),
    },
    schedulers=("dtgpt.serve.fairness:FairScheduler",),
    explanations=("dtgpt.serve.explanations:EXPLANATIONS",),
)

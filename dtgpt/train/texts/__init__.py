"""Texts that a run generates between its steps, for people to read how far a model is."""

from typing import Annotated

from dtgpt.util.field_types import Bounds
from dtgpt.util.rules import Changed, Is, Rule, Rules
from dtgpt.util.seams import Capability, When


class LogFields:
    sample_interval: Annotated[int, "number of steps between generated texts; 0: at the end only", Bounds(0)] = 0
    sample_tokens: Annotated[int, "number of tokens to generate; 0: no generated texts", Bounds(0)] = 200
    prompt: Annotated[
        str, "beginning of generated texts; empty: the model begins a document, or answers validation chats"
    ] = ""
    temperature: Annotated[float, "sampling temperature; 0: always the likeliest token", Bounds(0, 100)] = 0.8
    top_k: Annotated[int, "number of likeliest tokens to choose from; 0: all", Bounds(0, 2**31 - 1)] = 50


NOTES: Rules = (
    Rule(
        "{field}={value} has no effect with log.sample_tokens=0",
        Changed("log.sample_interval", "log.prompt", "log.temperature", "log.top_k"),
        Is("log.sample_tokens", "==", 0),
    ),
)
CAPABILITY = Capability(
    log_fields=("dtgpt.train.texts:LogFields",),
    recipe_notes=("dtgpt.train.texts:NOTES",),
    observers=(When("dtgpt.train.texts.observer:Texts", ("log.sample_tokens",)),),
)

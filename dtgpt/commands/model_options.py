"""Options that several commands have: how a model is opened, and which tokenizer it has."""

from typing import Annotated, Literal

from dtgpt.util.field_types import PATH, Bounds

PlanName = Annotated[
    str | None, "parallel plan, such as tp2_pp2; none: tensor parallel over all processes that torchrun started"
]
Device = Annotated[Literal["auto", "cpu", "cuda"], "device; auto: cuda if there is one"]
Precision = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"], "type of weights and activations; auto: bf16 on cuda, else fp32"
]
Exact = Annotated[
    bool, "log-probabilities of tokens with the bits of training's forward pass: on a GPU, tp2 at most; slower"
]
MaxLength = Annotated[
    int | None, "largest number of tokens of a sequence, with its prompt; less memory for each; none: the model's",
    Bounds(1),
]  # fmt: skip
Adapter = Annotated[
    str | None, "adapter (LoRA) to add to the weights: a run or checkpoint with adapters, or a folder of peft", PATH
]
RecipeFile = Annotated[
    str | None, "recipe file of the run, where the class of its model is not dtgpt's; it is executed", PATH
]
TokenizerName = Annotated[
    str | None, "tokenizer file, or a name such as gpt2; none: the tokenizer saved with the model"
]
VocabFile = Annotated[str | None, "vocab.json of a BPE like GPT-2's, with --merge-file"]
MergeFile = Annotated[str | None, "merges.txt, with --vocab-file"]

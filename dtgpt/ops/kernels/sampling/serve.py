"""What serves the choice of tokens: Triton kernels, which read the logits of rows in chunks: two launches; filters cost
three more, rules on logits two. torch would launch six to record the tokens of a step."""

from torch import Tensor

from dtgpt.ops.kernels.devices import by_triton, has_triton
from dtgpt.ops.sampling.sequences import Sampled, Sequences, Variant
from dtgpt.util import seams


def _takes(
    logits: Tensor, sequences: Sequences, slots: Tensor, vocab_size: int, variant: Variant, columns: int | None
) -> bool:
    return not variant.candidates and has_triton(logits)  # a beam search draws nothing


def _sample(
    logits: Tensor, sequences: Sequences, slots: Tensor, vocab_size: int, variant: Variant, columns: int | None
) -> Sampled:
    from dtgpt.ops.kernels.sampling.edit_kernels import launch_edits  # imported on first use, since they need Triton
    from dtgpt.ops.kernels.sampling.kernels import launch_sample

    measured = logits if logits.stride(1) == 1 else logits.contiguous()
    edited = launch_edits(measured, sequences, slots, variant) if variant.edits or variant.ngram else measured
    for rule in seams.listed("logit_rules", variant._replace(edits=False, ngram=0)):  # those that are left
        _, edited = rule(measured, edited, sequences, slots, variant)
    return launch_sample(measured, edited, sequences, slots, vocab_size, variant, columns or vocab_size)


def _record(tokens: Tensor, slots: Tensor, sequences: Sequences) -> None:
    from dtgpt.ops.kernels.sampling.record_kernels import launch_record  # imported on first use, since it needs Triton

    launch_record(sequences, slots, tokens)


SAMPLE = (by_triton(_sample, _takes, "on GPUs, but for the candidates of beams"),)
RECORD = (by_triton(_record),)

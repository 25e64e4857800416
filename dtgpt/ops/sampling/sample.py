"""The next token of each sequence, as a function of its own logits, parameters and position alone.

The order of rules: logits in fp32; no newline after a colon; *log-probabilities are measured here*; logit bias;
frequency and presence penalty; no repeated n-grams; no ending before `min_new_tokens`; the likeliest id if temperature
is 0 or top_k 1; else temperature, top-k (ties with the k-th stay), top-p, and a draw by the Gumbel-max trick. Its noise
is a pure function of (key, position, id). The smallest id wins among equals. If every id is banned, id 0 is chosen.

Reference: `reference.py`. Fast path: Triton kernels after the rules on logits, which both have from `edits.py`. A row
without such rules costs two launches, filters two more. The candidates of beams have no fast path.
"""

from torch import Tensor

from dtgpt.ops.fast import has_triton
from dtgpt.ops.sampling.edits import edit
from dtgpt.ops.sampling.reference import sample_reference
from dtgpt.ops.sampling.sequences import Sampled, Sequences, Variant, unpack


def sample(logits: Tensor, sequences: Sequences, slots: Tensor, vocab_size: int, variant: Variant) -> Sampled:
    """Choose a token for each row of logits `[B, V]`, any float dtype, V >= vocab_size; ids stay below vocab_size.

    slots: int64 `[B]`, the row of `sequences` that each row of logits belongs to. Nothing is synchronised with the
    host, and all shapes follow from those of the arguments: a CUDA graph can capture the call.
    """
    if variant.beams or not has_triton(logits):  # a beam search draws nothing
        return sample_reference(logits, sequences, slots, vocab_size, variant)
    from dtgpt.ops.sampling.kernels import launch_sample

    if not variant.edits and not variant.ngram:
        values = logits if logits.stride(1) == 1 else logits.contiguous()
        return launch_sample(values, values, sequences, slots, vocab_size, variant)
    values = logits[:, :vocab_size].float()
    measured, edited = edit(values, sequences, slots, unpack(sequences.parameters[slots]), variant)
    return launch_sample(measured.contiguous(), edited, sequences, slots, vocab_size, variant)

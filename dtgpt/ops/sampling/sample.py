"""The next token of each sequence, as a function of its own logits, parameters and position alone.

The order of rules: logits in fp32; no newline after a colon; *log-probabilities are measured here*; logit bias;
frequency and presence penalty; no repeated n-grams; no ending before `min_new_tokens`; the likeliest id if temperature
is 0 or top_k 1; else temperature, top-k (ties with the k-th stay), top-p, min-p, and a draw by the Gumbel-max trick.
Its noise is a pure function of (key, position, id). The smallest id wins among equals. If every id is banned, id 0 is
chosen.
"""

from torch import Tensor

from dtgpt.ops.sampling.reference import sample_reference
from dtgpt.ops.sampling.sequences import Sampled, Sequences, Variant
from dtgpt.ops.serve import Operation

SAMPLE = Operation("sample", sample_reference, "argmax of logits / temperature + Gumbel noise, of the ids that stay")


def sample(
    logits: Tensor, sequences: Sequences, slots: Tensor, vocab_size: int, variant: Variant, columns: int | None = None
) -> Sampled:
    """Choose a token for each row of logits `[B, V]`, any float dtype, V >= columns >= vocab_size; ids stay below
    vocab_size. Log-probabilities are those of the softmax over the first `columns`, the tokens of the model; None: over
    vocab_size. They are NaN for a row where one of these logits is NaN or plus infinity.

    slots: int64 `[B]`, the row of `sequences` that each row of logits belongs to. Nothing is synchronised with the
    host, and all shapes follow from those of the arguments: a CUDA graph can capture the call.
    """
    return SAMPLE(logits, sequences, slots, vocab_size, variant, columns)

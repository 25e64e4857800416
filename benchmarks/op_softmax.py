"""Scaled masked softmax of unfused attention at 345M: scores [32, 16, 1024, 1024], causal, forward and backward.

The floor counts what a causal kernel must move: the half that is shown read, and whole rows written.
"""

import torch
from cases import Case, run_cases

from dtgpt.ops.kernels.fused_softmax.softmax import cuda_backward, cuda_forward, plain_backward, plain_forward
from dtgpt.ops.kernels.fused_softmax.softmax_kernels import SoftmaxLaunch, built
from dtgpt.ops.random.philox import fold, root_key

BATCH, HEADS, LENGTH = 32, 16, 1024
LAUNCHES = [SoftmaxLaunch(*sizes) for sizes in [(128, 4), (256, 4), (64, 4), (128, 2), (128, 1)]]


def cases() -> list[Case]:
    if built(torch.device("cuda", torch.cuda.current_device())) is None:
        raise SystemExit("the kernels cannot be built here")
    shape = (BATCH, HEADS, LENGTH, LENGTH)
    scores, grad = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    key = fold(root_key(1), torch.arange(BATCH)).cuda()
    whole = 2 * scores.numel()
    shown = whole * (LENGTH + 8) // (2 * LENGTH)  # in accesses of eight columns
    found = []
    for name, k in (("", None), (", dropout 0.1", key)):
        settings = (None, k, 0.125, True, 0.1, (0, 0, 0))
        result, log_sums = cuda_forward(scores, *settings)
        kept = (result if k is None else scores, log_sums)
        found += [
            pair(f"forward{name}", plain_forward, cuda_forward, (scores, *settings), shown + whole),
            pair(f"backward{name}", plain_backward, cuda_backward, (grad, *kept, *settings), 2 * shown + whole),
        ]
    return found


def pair(name: str, plain, kernel, args: tuple, moved: int) -> Case:
    compiled = torch.compile(plain, fullgraph=True, dynamic=False)
    variants = {"torch eager": lambda: plain(*args), "torch.compile": lambda: compiled(*args)}
    for how in LAUNCHES:
        variants[f"ours, {how.threads} threads, {how.most_octets} octets"] = lambda how=how: kernel(*args, how=how)
    return Case(f"softmax {name} B{BATCH} H{HEADS} T{LENGTH} bf16 causal", variants, bytes=moved)


if __name__ == "__main__":
    run_cases(cases())

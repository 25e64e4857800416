"""AdamW, gradient norm and accumulation over the 355M parameters of the 345M model, against PyTorch's."""

import torch
from cases import Case, run_cases
from torch import Tensor

from dtgpt.models.decoder import Decoder, unique_parameters
from dtgpt.models.gpt2 import GPT2_345M
from dtgpt.ops.kernels import adamw_kernels
from dtgpt.ops.optim.adamw import AdamW, Slot
from dtgpt.ops.optim.optimizer import Accumulator, squared_norm

CUDA = torch.device("cuda")
LAUNCHES = [(1024, 4), (2048, 8), (2048, 4), (4096, 8)]  # elements of a program, warps


def shapes() -> list[torch.Size]:
    with torch.device("meta"):
        model = Decoder(GPT2_345M, torch.bfloat16)
    return [parameter.shape for parameter in unique_parameters(model).values()]


def tensors(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, device=CUDA).mul_(0.02).to(dtype) for shape in shapes()]


def with_launch(make, chunk: int, warps: int):
    """What `make` makes while these are the kernels' launch parameters."""
    usual = adamw_kernels.CHUNK, adamw_kernels.WARPS
    adamw_kernels.CHUNK, adamw_kernels.WARPS = chunk, warps
    try:
        return make()
    finally:
        adamw_kernels.CHUNK, adamw_kernels.WARPS = usual


def fused_adamw(weights: list[Tensor], gradients: list[Tensor]) -> torch.optim.AdamW:
    parameters = [torch.nn.Parameter(w) for w in weights]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-4, device=CUDA), fused=True, capturable=True)


def step_case(masters: list[Tensor], gradients: list[Tensor], narrow: bool) -> Case:
    slots = [Slot(m, m.bfloat16() if narrow else None, m.dim() > 1) for m in masters]
    lr, scale = torch.tensor(1e-4, device=CUDA), torch.tensor(0.5, device=CUDA)
    skip = torch.tensor(False, device=CUDA)

    def variant(chunk: int, warps: int):
        optimizer = with_launch(lambda: AdamW(slots, 0.9, 0.95, 1e-8, 0.1), chunk, warps)
        return lambda: optimizer.step(gradients, lr, scale, skip)

    launches = LAUNCHES if narrow else [(adamw_kernels.CHUNK, adamw_kernels.WARPS)]
    variants = {f"ours {chunk} x {warps} warps": variant(chunk, warps) for chunk, warps in launches}
    if not narrow:
        variants["torch fused"] = fused_adamw(masters, gradients).step
    count = sum(m.numel() for m in masters)
    each = 24 + gradients[0].element_size() + 2 * narrow
    return Case(f"AdamW, {gradients[0].dtype} gradients{', bf16 weights' * narrow}", variants, bytes=each * count)


def norm_case(gradients: list[Tensor]) -> Case:
    variants = {"ours (torch._foreach_norm)": lambda: squared_norm(gradients)}
    if gradients[0].dtype == torch.float32:
        parameters = [torch.nn.Parameter(torch.empty_like(g)) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        variants["clip_grad_norm_"] = lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9, foreach=True)
    bytes_ = sum(g.numel() * g.element_size() for g in gradients)
    return Case(f"sums of squares, {gradients[0].dtype}", variants, bytes=bytes_)


def sum_cases(totals: list[Tensor], gradients: list[Tensor]) -> list[Case]:
    def variant(chunk: int, warps: int):
        accumulator = with_launch(lambda: Accumulator(totals), chunk, warps)
        return lambda: accumulator.add(gradients)

    count = sum(t.numel() for t in totals)
    adds = {f"ours {chunk} x {warps} warps": variant(chunk, warps) for chunk, warps in LAUNCHES[1:]}
    adds["torch._foreach_add_"] = lambda: torch._foreach_add_(totals, gradients)
    accumulator = Accumulator(totals)
    stores = {"ours (torch._foreach_copy_)": lambda: accumulator.store(gradients)}
    return [
        Case("totals += bf16 gradients", adds, bytes=10 * count),
        Case("totals = bf16 gradients", stores, bytes=6 * count),
    ]


def cases() -> list[Case]:
    masters, wide, gradients = tensors(torch.float32), tensors(torch.float32), tensors(torch.bfloat16)
    return [
        step_case(masters, gradients, narrow=True),
        step_case(masters, wide, narrow=False),
        norm_case(gradients),
        norm_case(wide),
        *sum_cases(tensors(torch.float32), gradients),
    ]


if __name__ == "__main__":
    run_cases(cases())

"""A block of LLaMA with the fused operations, against the same block in plain torch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dtgpt.models.layers import Context
from dtgpt.models.llama import LlamaConfig
from dtgpt.ops.operation import split_backward
from tests.support.bodies_norm import capture, custom_ops, keys_of

pytestmark = pytest.mark.slow(6)

CONFIG = LlamaConfig(
    num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=10, ffn_hidden_size=24, seq_length=16,
    vocab_size=300, qk_norm=True, dropout=0.1,
)  # fmt: skip
NORMED = pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "normed"])


class Work:
    """A block with its input and a gradient of its output."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        self.block = config.make_block(0).to(dtype)
        for parameter in self.block.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
        self.block = self.block.to(device)
        shape = 3, config.seq_length, config.hidden_size
        self.x, self.gradient = (torch.randn(shape).to(dtype).to(device) for _ in range(2))
        positions = torch.arange(config.seq_length).repeat(3, 1) // 2
        self.context = Context(keys_of(3, device)[:, None].expand(3, 3, 2), positions.to(device))

    def results(self, compiled=None) -> list[Tensor]:
        """The output, and the gradients of the input and of each weight."""
        leaf = self.x.clone().requires_grad_()
        block = self.block if compiled is None else compiled
        out = block(leaf, self.context)
        return [out.detach(), *torch.autograd.grad(out, [leaf, *self.block.parameters()], self.gradient)]


@NORMED
def test_fused_and_compiled_operations_follow_plain_torch(qk_norm):
    work = Work(replace(CONFIG, qk_norm=qk_norm))
    plain = work.results()
    with custom_ops():
        fused = work.results()
        compiled = work.results(torch.compile(work.block, fullgraph=True, dynamic=False, backend="aot_eager"))
    for true, *others in zip(plain, fused, compiled, strict=True):
        for other in others:
            assert (other - true).norm() <= 1e-5 * true.norm()


@NORMED
@pytest.mark.cuda
def test_on_a_gpu_the_block_follows_plain_torch_compiled_and_in_a_graph(qk_norm):
    config = replace(
        CONFIG, qk_norm=qk_norm, dropout=0.0, hidden_size=256, head_dim=64, seq_length=128, ffn_hidden_size=512
    )
    work = Work(config, torch.bfloat16, "cuda")
    with split_backward():
        plain = work.results()
    fused, again = work.results(), work.results()
    compiled = work.results(torch.compile(work.block, fullgraph=True, dynamic=False))
    replayed = capture(work.results)
    for true, one, other, third, fourth in zip(plain, fused, again, compiled, replayed, strict=True):
        assert torch.equal(one, other) and torch.equal(one, fourth)
        for found in (one, third):
            assert (found - true).float().norm() <= 0.02 * true.float().norm()

"""What is private in PyTorch, and used where blocks are compiled."""

import torch


def unmark_attention() -> None:
    """Tell torch's compiler that attention on CPUs draws no numbers: the operation takes no dropout, but is marked as
    if it did. Where such an operation runs again in backward, a compiled block saves the generator's state; torch 2.13
    puts it behind the meshes of DTensors, where tensors are not expected, and fails."""
    marks = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default.tags
    if torch.Tag.nondeterministic_seeded in marks:
        marks.remove(torch.Tag.nondeterministic_seeded)

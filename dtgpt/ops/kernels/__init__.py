"""Kernels that serve operations: Triton, CUDA, and PyTorch's own where it is told which to take.

A module `NAME.py` has the conditions under which kernels serve, the ops of PyTorch around them with their gradients,
and what `dtgpt doctor` says of them. `NAME_kernels.py` needs Triton, and is imported at the first launch.
"""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    kernels={
        "attention": "dtgpt.ops.kernels.attention.serve:ATTENTION",
        "flash": "dtgpt.ops.kernels.attention.flash_launch:FLASH",
        "split_qkv": "dtgpt.ops.kernels.attention.serve:SPLIT_QKV",
        "attend_rows": "dtgpt.ops.kernels.attention.cached:ATTEND_ROWS",
        "write_prompts": "dtgpt.ops.kernels.attention.cached:WRITE_PROMPTS",
        "sample": "dtgpt.ops.kernels.sampling.serve:SAMPLE",
        "record": "dtgpt.ops.kernels.sampling.serve:RECORD",
        "sum_rows": "dtgpt.ops.kernels.attention.serve:SUM_ROWS",
        "decode_blocks": "dtgpt.ops.kernels.decode.blocks:BLOCKS",
        "norm_and_pass": "dtgpt.ops.kernels.norm:NORM_AND_PASS",
        "residual_norm": "dtgpt.ops.kernels.norm:RESIDUAL_NORM",
        "residual": "dtgpt.ops.kernels.norm:RESIDUAL",
        "bias_gelu": "dtgpt.ops.kernels.pointwise:BIAS_GELU",
        "bias_relu2": "dtgpt.ops.kernels.pointwise:BIAS_RELU2",
        "swiglu": "dtgpt.ops.kernels.pointwise:SWIGLU",
        "gated": "dtgpt.ops.kernels.pointwise:GATED",
        "choice": "dtgpt.ops.kernels.decode.experts:CHOICE",
        "expert_sums": "dtgpt.ops.kernels.decode.experts:SUMS",
        "ranked": "dtgpt.ops.kernels.experts:RANKED",
        "sorted_rows": "dtgpt.ops.kernels.experts:SORTED_ROWS",
        "grouped_product": "dtgpt.ops.kernels.experts:GROUPED_PRODUCT",
        "grouped_outer": "dtgpt.ops.kernels.experts:GROUPED_OUTER",
        "spread_rows": "dtgpt.ops.kernels.experts:SPREAD_ROWS",
        "weighted_rows": "dtgpt.ops.kernels.experts:WEIGHTED_ROWS",
        "weighted_rows_gradients": "dtgpt.ops.kernels.experts:WEIGHTED_ROWS_GRADIENTS",
        "joint_rotary": "dtgpt.ops.kernels.joint_rotary:JOINT",
        "linear": "dtgpt.ops.kernels.linear:LINEAR",
        "linear_into": "dtgpt.ops.kernels.linear:LINEAR_INTO",
        "rotary_qkv": "dtgpt.ops.kernels.rotary:ROTARY_QKV",
        "dropout": "dtgpt.ops.kernels.dropout:DROPOUT",
        "dropout_keys": "dtgpt.ops.kernels.dropout:DROPOUT_KEYS",
        "cross_entropy_terms": "dtgpt.ops.kernels.cross_entropy:TERMS",
        "cross_entropy_gradient": "dtgpt.ops.kernels.cross_entropy:GRADIENT",
        "cross_entropy_losses": "dtgpt.ops.kernels.cross_entropy:LOSSES",
        "scaled": "dtgpt.ops.kernels.cross_entropy:SCALED",
        "adamw": "dtgpt.ops.kernels.optim:ADAMW",
        "accumulate": "dtgpt.ops.kernels.optim:ACCUMULATE",
        "accumulate_fixed_point": "dtgpt.ops.kernels.optim:ACCUMULATE_FIXED",
        "add_fixed_point_of_ranks": "dtgpt.ops.kernels.optim:ADD_OF_RANKS",
        "squares_of_rows": "dtgpt.ops.kernels.optim:SQUARES_OF_ROWS",
    },
    device_checks=("dtgpt.ops.kernels.devices:check_kernels",),
    device_notes=("dtgpt.ops.kernels.devices:below_ampere",),
)

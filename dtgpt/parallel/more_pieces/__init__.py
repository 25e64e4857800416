"""`--reduce exact_tp` of the roles that GPT-2 and LLaMA do not have: experts, and norms of all heads together."""

from dtgpt.util.seams import Capability, When

PART = "dtgpt.parallel.more_pieces"
ON = ("settings.reduce=exact_tp",)
CAPABILITY = Capability(
    roles_in_pieces=(f"{PART}.roles:ROLES",),
    tp_tables=(When(f"{PART}.build:leave_whole", ON),),
    build=tuple(When(f"{PART}.build:{name}", ON) for name in ("TRAINED", "SERVED")),
    kernels={
        "addends_of_stacks": f"{PART}.serve:ADDENDS",
        "columns_of_stacks": f"{PART}.serve:COLUMNS",
        "weight_gradient_of_stacks": f"{PART}.serve:WEIGHT_GRADIENT",
    },
)

"""`--reduce exact_tp`: the bits of `--reduce exact`, for any number of tensor-parallel ranks, too."""

from dtgpt.util.seams import Capability, When

NAME = "exact_tp"  # of the value of `--reduce`, and of the section
PART = "dtgpt.parallel.exact_tp"
CAPABILITY = Capability(
    sections={NAME: f"{PART}.config:PiecesConfig"},
    sums={NAME: f"{PART}.sums:PiecewiseSums"},
    plan_rules=(
        When(f"{PART}.config:PLAN_RULES", (f"reduce={NAME}",)),
        When(f"{PART}.config:POSITION_RULES", ("data.reset_position_ids",)),
    ),
    settings_rules=(When(f"{PART}.config:SETTINGS_RULES", (f"reduce={NAME}",)),),
    tp_tables=(When(f"{PART}.build:add_in_trees", (f"settings.reduce={NAME}",)),),
    build=tuple(When(f"{PART}.build:{name}", (f"settings.reduce={NAME}",)) for name in ("PIECES", "SERVED")),
    kernels={
        "addends_of_pieces": f"{PART}.serve:ADDENDS",
        "columns_of_pieces": f"{PART}.serve:COLUMNS",
        "weight_gradient_of_pieces": f"{PART}.serve:WEIGHT_GRADIENT",
        "column_sums_of_pieces": f"{PART}.serve:COLUMN_SUMS",
        "row_sums_of_pieces": f"{PART}.serve:PIECE_SUMS",
        "activated_in_pieces": f"{PART}.serve:ACTIVATED",
        "norm_in_pieces": f"{PART}.serve:NORM_IN_PIECES",
        "tree_of_stack": f"{PART}.serve:TREE_OF_STACK",
    },
)

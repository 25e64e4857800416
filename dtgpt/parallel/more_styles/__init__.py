"""Styles of tensor parallelism for the roles that GPT-2 and LLaMA do not have."""

from dtgpt.util.seams import Capability

STYLES = "dtgpt.parallel.more_styles.styles"
CAPABILITY = Capability(
    role_styles={
        "ENTRY": f"{STYLES}:branch_entry",
        "EXIT": f"{STYLES}:branch_exit",
        "INNER_COLUMN": f"{STYLES}:inner_column",
        "INNER_ROW": f"{STYLES}:inner_row",
        "ROUTER": f"{STYLES}:router",
        "COLUMN_STACK": f"{STYLES}:column_stack",
        "ROW_STACK": f"{STYLES}:row_stack",
        "SINKS": f"{STYLES}:sinks",
        "JOINT_NORM": f"{STYLES}:joint_norm",
    }
)

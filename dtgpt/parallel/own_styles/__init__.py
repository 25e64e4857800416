"""Plans that a recipe defines, and the styles of tensor parallelism that their own `table` gives some modules."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    degrees={"table": "dtgpt.parallel.own_styles.table:check_plan"},
    own_plans=("dtgpt.parallel.own_styles.plans:check_own_plans",),
    own_tables=("dtgpt.parallel.own_styles.values:check_values",),
    own_styles=("dtgpt.parallel.own_styles.table:with_own_styles",),
    head_degrees=("dtgpt.parallel.own_styles.heads:degrees_of_heads",),
    table_tests=("dtgpt.parallel.own_styles.table:smoke_test_table",),
)

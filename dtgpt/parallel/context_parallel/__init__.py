"""Context parallelism: each rank has a slice of the tokens of every sample."""

from dtgpt.util.seams import Capability, When

CAPABILITY = Capability(
    batch_parts=("dtgpt.parallel.context_parallel.batches:own_slice",),
    cp_groups=("dtgpt.parallel.context_parallel.batches:make_group",),
    degrees={"cp": "dtgpt.parallel.context_parallel.degrees:check_plan"},
    build=(
        When("dtgpt.parallel.context_parallel.slices:DROPOUT", ("mesh.cp_group",)),
        When("dtgpt.parallel.context_parallel.slices:HEADS", ("mesh.cp_group",)),
    ),
)

"""Expert parallelism: each of some neighbouring ranks of data has other experts of every mixture; and sums of experts'
gradients over micro-batches, under every plan."""

from dtgpt.util.seams import Capability, When

CAPABILITY = Capability(
    idle_degrees={"ep": "expert parallelism"},
    plan_rules=(When("dtgpt.parallel.expert_parallel.degrees:PLAN_RULES", ("graph=on", "compile=on")),),
    buckets=(When("dtgpt.parallel.expert_parallel.filled_buckets:FilledBucket", ("model.num_experts",)),),
    degrees={"ep": "dtgpt.parallel.expert_parallel.degrees:check_plan"},
    build=(
        When("dtgpt.parallel.expert_parallel.experts:WEIGHTS", ("mesh.own_devices",)),
        When("dtgpt.parallel.expert_parallel.experts:ROWS", ("mesh.own_devices",)),
        When("dtgpt.parallel.expert_parallel.experts:ZERO", ("mesh.own_devices",)),
    ),
)

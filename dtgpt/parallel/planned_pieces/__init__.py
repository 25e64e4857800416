"""What `dtgpt plan` tells of `--reduce exact_tp`, which needs neither plans nor mixtures of experts by itself."""

from dtgpt.util.seams import Capability, When

CAPABILITY = Capability(sum_costs=(When("dtgpt.parallel.planned_pieces.costs:PiecewiseCosts", ("reduce=exact_tp",)),))

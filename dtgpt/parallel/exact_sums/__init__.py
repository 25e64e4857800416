"""`--reduce exact`: gradients with the same bits under every plan."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(sums={"exact": "dtgpt.parallel.exact_sums.sums:ExactSums"})

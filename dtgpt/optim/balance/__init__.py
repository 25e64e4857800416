"""Balance of experts: the correction of a router's choice, losses that keep experts evenly used, and what records say
of their loads."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    sections={"balance": "dtgpt.optim.balance.config:BalanceConfig"},
    step_states=("dtgpt.optim.balance.make:make_balance",),
    observers=("dtgpt.optim.balance.picture:load_picture",),
    explanations=("dtgpt.optim.balance.explanations:EXPLANATIONS",),
)

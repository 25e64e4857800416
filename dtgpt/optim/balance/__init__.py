"""Balance of experts: the correction of a router's choice, losses that keep experts evenly used, and what records say
of their loads."""

from dtgpt.util.seams import Capability, When

EXPERTS = ("model.num_experts",)
CAPABILITY = Capability(
    sections={"balance": "dtgpt.optim.balance.config:BalanceConfig"},
    step_states=(When("dtgpt.optim.balance.make:make_balance", EXPERTS),),
    observers=(When("dtgpt.optim.balance.picture:load_picture", EXPERTS),),
    explanations=("dtgpt.optim.balance.explanations:EXPLANATIONS",),
)

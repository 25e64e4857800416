"""What to use in place of options by which others balance experts, and which would let the loss depend on the plan."""

from dtgpt.util.shared.explanations import Explanations

NO_CAPACITY = (
    "dtgpt never drops a token for lack of room, since which one is dropped would depend on the plan; leave "
    "{name} out, and even loads out by --balance.loss or --balance.bias_step"
)
NO_JITTER = (
    "dtgpt adds no noise to routers, since choices would differ between plans; leave {name} out, and even loads "
    "out by --balance.loss or --balance.bias_step"
)
SENTENCES = {"capacity": NO_CAPACITY, "drop_tokens": NO_CAPACITY, "token_drop": NO_CAPACITY, "jitter": NO_JITTER}


class OfBalance(Explanations):
    def of_recipe(self, architecture: str, name: str, value: str) -> str | None:
        plain = name.replace("-", "_")
        found = next((sentence for word, sentence in SENTENCES.items() if word in plain), None)
        return found and found.format(name=f"--{name}")


EXPLANATIONS = OfBalance()

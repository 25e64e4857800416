"""What an optimizer costs, as the planner asks for it."""

from typing import Any

from dtgpt.config.sections import OptimizerConfig
from dtgpt.models.config import ModelConfig
from dtgpt.models.inventory import Shape
from dtgpt.models.roles import Role


class OptimizerCosts:
    """What the config of an optimizer says in methods of these names; one that says nothing keeps two moments of each
    element in fp32, and updates them where they are. shape: of a whole parameter; role: of its module."""

    def __init__(self, optimizer: OptimizerConfig):
        self._optimizer = optimizer

    def state_bytes(self, shape: Shape, role: Role | None) -> int:
        """Return the bytes of state per element of a parameter."""
        return self._ask("state_bytes", 8, shape, role)

    def needs_whole(self, shape: Shape, role: Role | None) -> bool:
        """Return whether a step needs the whole of a parameter, which then travels to one rank and back."""
        return self._ask("needs_whole", False, shape, role)

    def whole_flops(self, shape: Shape, role: Role | None) -> int:
        """Return the FLOPs of the products in a step of a parameter that it `needs_whole`; 0 for any other."""
        return self._ask("whole_flops", 0, shape, role)

    def update_bytes(self, model: ModelConfig, blocks: tuple[int, ...], ranks: int, parts: int, width: int) -> int:
        """Return the bytes that an update works with. blocks: indices of the blocks of a rank; ranks: how many hold the
        same blocks; parts: into how many they cut each weight; width: bytes of an element of activations."""
        return self._ask("update_bytes", 0, model, blocks, ranks, parts, width)

    def _ask(self, name: str, otherwise: Any, *of: Any) -> Any:
        say = getattr(self._optimizer, name, None)
        return otherwise if say is None else say(*of)

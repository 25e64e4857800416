"""What the planner uses of PyTorch although it is private."""

from typing import Any, cast

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode


class EagerDispatchMode(TorchDispatchMode):
    """A mode that is never compiled. Others tell torch.compile so before their first operation, and import it, half a
    second, for that."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def input_gradient(ends: list[Any], gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x, given that of the only output of the one node in `ends`, which is taken out.
    torch.autograd.grad compares their shapes by symbols, and imports SymPy, half a second, for that."""
    edge = GradientEdge(ends.pop(), 0)
    return Variable._execution_engine.run_backward(
        (edge,), (gradient,), False, False, (x,), False, accumulate_grad=False
    )[0]


def backward_of_inputs(outputs: Any, gradients: Any, inputs: Any, weights: Any) -> list[dict[str, Any]]:
    """Run the half of a backward pass that pipeline schedules compute first. Returns the groups of weights that the
    other half, `backward_of_weights(weights, groups)`, is for."""
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(outputs, gradients, inputs, weights)[1]


def backward_of_weights(weights: Any, groups: list[dict[str, Any]]) -> None:
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(weights, groups)


_HALVES = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def zero_bubble_order(ranks: int, micro_batches: int, rank: int) -> list[tuple[str, int]]:
    """Return (F, I or W; stage) of what pipeline rank `rank` of torch's ZBV schedule computes in turn: the
    forward pass, and the halves of backward for inputs and for weights."""
    from types import SimpleNamespace

    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    shape = SimpleNamespace(pp_group_size=ranks, _n_microbatches=micro_batches, num_stages=2 * ranks)
    found = ScheduleZBVZeroBubble._calculate_single_rank_operations(cast(Any, shape), rank)
    return [(_HALVES[action.computation_type.name], action.stage_index) for action in found if action is not None]

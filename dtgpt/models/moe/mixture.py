"""The MLP of a block as a mixture of experts (Shazeer et al. 2017; Fedus et al. 2021): a router chooses a few of E
experts for each token, whose outputs are added with the router's weights.

Shapes: B samples, T positions, H hidden size, E experts, k of each token, F width of an expert, M = B T k rows.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dtgpt.models.binding import PLAIN, Binding
from dtgpt.models.layers import Branch, DeferredBiasLinear, Linear, mlp
from dtgpt.models.moe.config import ExpertsConfig
from dtgpt.ops.activations import activation
from dtgpt.ops.experts import few
from dtgpt.ops.experts.inner import INNER
from dtgpt.ops.experts.products import Groups, filled_part, filler
from dtgpt.ops.experts.routing import Choice, choose, router_logits, weigh
from dtgpt.ops.experts.rows import gathered, sorted_rows, summed
from dtgpt.ops.local_tensors import local
from dtgpt.ops.norms import RowSums, row_sums
from dtgpt.util.torch_private import is_dtensor


class Balance(Protocol):
    """What keeps the experts of a router evenly used; a capability gives it to a `Router`.

    correction: fp32 `[E]`, in place of the router's own where the router has one; None: its own.
    """

    correction: Tensor | None

    def watch(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Return the logits `[B, T, E]`, of which `experts` int64 `[B, T, k]` were chosen; their gradient may get
        addends. Called in each forward pass, also where backward runs it again: what is counted is counted in backward,
        which runs once for each micro-batch, and not in evaluation."""


class Correction(nn.Module):
    """What is added to the scores of a router for the choice, fp32 `[E]` also where other weights have 16 bits: its
    steps are smaller than theirs. No gradient changes it."""

    def __init__(self, count: int):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(count, dtype=torch.float32))

    def _apply(self, fn: Any, recurse: bool = True) -> "Correction":
        """Let a cast of the model change the device alone."""
        return super()._apply(lambda x: made if (made := fn(x)).dtype == x.dtype else x.to(made.device), recurse)

    def forward(self, logits: Tensor) -> Tensor:
        """Return the logits, of which this is a part whose gradient is zero: every parameter has one."""
        return logits + 0 * self.bias.to(logits.dtype)


class Router(nn.Module):
    """x `[B, T, H]` -> the experts of each token and their weights, `[B, T, k]`."""

    balance: Balance | None = None  # set before the first step
    # Of what compares runs: is told logits, their choice and the correction, and returns the choice to go on with.
    seen: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None

    def __init__(self, config: ExpertsConfig):
        super().__init__()
        self.rule = config.routing
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.expert_biases else None
        self.correction = Correction(config.num_experts) if config.corrects_choice else None

    def forward(self, x: Tensor) -> Choice:
        if self.correction is self.balance is self.seen is None and not torch.is_grad_enabled():
            return few.CHOICE(x, self.weight, self.bias, self.rule)
        logits, correction = router_logits(x, self.weight, self.bias), None
        if self.correction is not None:
            logits, correction = self.correction(logits), self.correction.bias.detach()
        if self.balance is not None and self.balance.correction is not None:
            correction = self.balance.correction
        experts = choose(logits, self.rule, correction)
        if self.seen is not None:
            experts = self.seen(logits, experts, correction)
        if self.balance is not None:
            logits = self.balance.watch(logits, experts)
        return Choice(experts, weigh(logits, experts, self.rule))


class Stack(nn.Module):
    """A linear map of each expert, `[E, out, in]`: rows x `[M, in]` -> `[M, out]`, or on a tp rank its part or
    its addend of the outputs."""

    bound: Binding = PLAIN

    def __init__(self, count: int, columns: int, rows: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, rows, columns))
        self.bias = nn.Parameter(torch.empty(count, rows)) if bias else None

    def forward(self, x: Tensor, ends: Tensor, filled: bool = True) -> Tensor:
        """ends: int32 `[E]`, the row behind the last one of each expert. filled: whether no rows lie behind these."""
        given, groups = (x, *self.held(x)), Groups(ends, filled)
        return groups(*given) if self.bound.product is None else self.bound.product(*given, groups)

    def held(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what this rank has of weight and bias, in the type of x."""
        bias = None if self.bias is None else self._held(self.bias, x)
        if bias is not None and self.bound.through is not None:
            bias = self.bound.through(bias)
        return self._held(self.weight, x), bias

    def _held(self, parameter: nn.Parameter, x: Tensor) -> Tensor:
        """Return what this rank has of a parameter, in the type of x."""
        plain = self.bound.use is self.bound.product is None and not torch.compiler.is_compiling()
        if plain and is_dtensor(parameter) and parameter.dtype == x.dtype and (fill := filler(parameter)):
            return filled_part(local(parameter.detach()), fill)
        return local(self.bound.use(parameter) if self.bound.use else parameter).to(x.dtype)


class Experts(nn.Module):
    """SwiGLUs, or MLPs with another function of the gate, `[B, T, H]` -> `[B, T, H]`: for each token the sum over its
    choice. Rows of each first matrix: gate 0, up 0, gate 1, up 1, ..."""

    # For experts of which a rank has some: `run` in place of `of_tokens`, which gets what `into` returns, too.
    bound: Binding = PLAIN

    def __init__(self, config: ExpertsConfig):
        super().__init__()
        count, bias = config.num_experts, config.expert_biases
        self.count, self.activation_name = count, config.activation
        self.activation = activation(config.activation, gated=True)
        self.gate_up = Stack(count, config.hidden_size, 2 * config.expert_size, bias)
        self.down = Stack(count, config.expert_size, config.hidden_size, bias)

    def begin(self, x: Tensor) -> Any:
        """Return what `forward` is to get of tokens that have not chosen yet: they may be on their way meanwhile."""
        return None if self.bound.into is None else self.bound.into(x)

    def forward(self, x: Tensor, choice: Choice, begun: Any = None) -> Tensor:
        given = (x, choice) if begun is None else (x, choice, begun)
        return (self.bound.run or self.of_tokens)(*given).view_as(x)

    def of_tokens(self, x: Tensor, choice: Choice, run: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """Return the sums `[N, H]` of tokens x `[.., H]`, N of them. run: in place of `products`."""
        x, choice = x.flatten(0, -2), choice.flat()
        if run is None and self._is_plain() and not torch.is_grad_enabled():
            return few.SUMS(x, choice, *self.gate_up.held(x), *self.down.held(x), self.activation_name)
        order = sorted_rows(choice.experts, self.count)
        made = (run or self.products)(gathered(x, order), order.ends)
        return summed(made, choice.weights, order)

    def _is_plain(self) -> bool:
        return self.gate_up.bound.product is self.down.bound.product is None

    def _is_whole(self) -> bool:
        """Return whether nobody asks for what is between product and activation: a kernel may have both."""
        return self._is_plain() and type(row_sums()) is RowSums and not self.gate_up._forward_hooks

    def products(self, rows: Tensor, ends: Tensor, filled: bool = True) -> Tensor:
        """Return what experts make of rows `[M, H]`. ends: int32 `[E]`, the row behind the last one of each expert.
        filled: whether no rows lie behind these; what is made of those is not to be read."""
        if rows.is_cuda and self.gate_up.bias is None and self._is_whole():
            made = INNER(rows, *self.gate_up.held(rows), ends, self.activation_name)
        else:
            made = row_sums().activated(self.activation, self.down.weight.shape[2], self.gate_up(rows, ends, filled))
        return self.down(made, ends, filled)


class Shared(nn.Module):
    """The MLP that every token goes through, `[B, T, H]` -> `[B, T, H]`."""

    def __init__(self, config: ExpertsConfig):
        super().__init__()
        self.activation = activation(config.activation, gated=True)
        self.gate_up = Linear(config.hidden_size, 2 * config.shared_size, bias=False)
        self.down = DeferredBiasLinear(config.shared_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return mlp(x, self.gate_up, self.down, self.activation)


class Mixture(nn.Module):
    """The MLP of a block, `[B, T, H]` -> `[B, T, H]`: the experts of each token, and what all tokens share."""

    def __init__(self, config: ExpertsConfig):
        super().__init__()
        self.entry = nn.Identity()
        self.router, self.experts = Router(config), Experts(config)
        self.shared = Shared(config) if config.shared_size else None
        self.shared_gate = Linear(config.hidden_size, 1, bias=False) if config.gates_shared else None
        self.exit = nn.Identity()

    def forward(self, x: Tensor) -> Branch:
        x = self.entry(x)
        begun = self.experts.begin(x)
        total = self.experts(x, self.router(x), begun)
        if self.shared is not None:
            own = self.shared(x)
            total = total + (own if self.shared_gate is None else own * self.shared_gate(x).sigmoid())
        return Branch(self.exit(total), None)


def routers(module: nn.Module) -> list[Router]:
    """Return the routers in a module, in the order of blocks."""
    return [each for each in module.modules() if isinstance(each, Router)]

"""Muon: momentum whose update is made orthogonal, for filters, next to SGD for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Of the quintic iteration, chosen for the steepest slope at 0 (K. Jordan et al., Muon, 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

# What the update of a rows × columns matrix is multiplied by: nothing, as Jordan's CIFAR-10 speed runs do; the two others
# are what torch.optim.Muon calls by these names (Jordan's for language models; Liu et al., Muon is Scalable, 2025).
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "none": lambda rows, columns: 1.0,
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
}
PRODUCTS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Muon(Optimizer):
    """Muon (K. Jordan et al., 2024) for groups with `orthogonal`, SGD with decoupled weight decay for the others.

    A parameter with `orthogonal` has two dimensions or more and counts as a matrix of its first dimension × the rest; all
    matrices of a shape are orthogonalised as one batched product. One step, with g the gradient:

        buffer = momentum · buffer + g;  u = g + momentum · buffer  (u = buffer without `nesterov`)
        u = u made orthogonal, times `adjust`                       (with `orthogonal`)
        p = p · √rows / ‖p‖                                         (with `orthogonal` and `rescale`)
        p = p · (1 − lr · weight_decay) − lr · u

    torch.optim.Muon averages (1 − momentum) · g where this sums g; as only the direction of u counts, the two agree.

    A step never waits for the device. `lr` may be a 0-dim tensor on the parameters' device, which a captured step reads
    anew each time; a rate below 0 counts as 0. Buffers are made in the first step, so capture after an eager one.

    Attributes:
        found_inf: None, or a float tensor of one element on the parameters' device: where it is 1, a step leaves
            parameters and state as they were, whatever the gradients are (the same name as in torch's fused optimizers).

    Args:
        params: parameters, or groups of them, each with any of the settings below.
        lr: the rate, 0 or more.
        momentum: 0 or more, below 1.
        nesterov: Nesterov's form of the momentum.
        weight_decay: decoupled; each step takes the share lr · weight_decay off.
        orthogonal: whether a group gets Muon (True) or SGD (False).
        rescale: before each update, bring a parameter's norm to √rows; leaves weight decay nothing to do.
        steps: Newton-Schulz iterations: 5 give singular values of about 0.7 … 1.2, 3 suffice for small nets.
        coefficients: of the iteration x → a·x + b·x³ + c·x⁵.
        adjust: one of ADJUSTMENTS.
        products: dtype of the iteration's products, bfloat16 or float32.

    Raises ValueError for settings out of these ranges.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        orthogonal: bool = True,
        rescale: bool = False,
        steps: int = 5,
        coefficients: tuple[float, float, float] = COEFFICIENTS,
        adjust: str = "none",
        products: str = "bfloat16",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "orthogonal": orthogonal,
            "rescale": rescale,
            "steps": steps,
            "coefficients": coefficients,
            "adjust": adjust,
            "products": products,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does, once its settings are known to be in range."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # rates in tensors are not looked at, as that would wait for the device
        if not isinstance(group["lr"], Tensor) and not group["lr"] >= 0:
            raise ValueError(f"lr must be 0 or more, not {group['lr']}")
        if not 0 <= group["momentum"] < 1 or not group["weight_decay"] >= 0 or group["steps"] < 1:
            raise ValueError("momentum must be in 0 … 1 without the 1, weight_decay 0 or more, steps 1 or more")
        if group["adjust"] not in ADJUSTMENTS or group["products"] not in PRODUCTS:
            raise ValueError(f"adjust must be one of {list(ADJUSTMENTS)}, products one of {list(PRODUCTS)}")
        if group["orthogonal"] and any(parameter.ndim < 2 for parameter in group["params"]):
            raise ValueError("a vector cannot be made orthogonal: put it in a group with orthogonal=False")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on all parameters that have a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip = None if self.found_inf is None else self.found_inf.reshape(()) > 0
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step(group, parameters, skip)
        return loss

    def _step(self, group: dict[str, Any], parameters: list[Tensor], skip: Tensor | None) -> None:
        """`skip`: a 0-dim bool on the device; where it is true every factor below is exactly 1, every summand 0."""
        buffers = [self._buffer(parameter) for parameter in parameters]
        grads: list[Tensor] = [parameter.grad for parameter in parameters]  # type: ignore[misc]
        lr = group["lr"]
        rate: float | Tensor = lr.reshape(()).clamp(min=0) if isinstance(lr, Tensor) else max(lr, 0.0)
        keep: float | Tensor = group["momentum"]
        skipped: Tensor | None = None
        if skip is not None:
            skipped = skip.to(torch.float32)
            grads = [grad.masked_fill(skip, 0.0) for grad in grads]  # a product would not do: 0 · nan is nan
            rate = rate * (1 - skipped)
            keep = keep * (1 - skipped) + skipped
        torch._foreach_mul_(buffers, keep)
        torch._foreach_add_(buffers, grads)
        updates = buffers
        if group["nesterov"]:
            updates = list(torch._foreach_add(grads, buffers, alpha=group["momentum"]))
        if group["orthogonal"]:
            updates = _orthogonal_updates(updates, group)
            if group["rescale"]:
                _rescale(parameters, skipped)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, torch._foreach_mul(updates, -rate))

    def _buffer(self, parameter: Tensor) -> Tensor:
        """The momentum of a parameter, in its dtype and memory format."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def orthogonalized(
    matrices: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7
) -> Tensor:
    """Each of `matrices` (n, rows, columns) with singular values near 1 and its singular vectors as they were.

    Computed in the dtype of `matrices` by `steps` Newton-Schulz iterations x → a·x + b·x³ + c·x⁵ on the singular values,
    after a division by the Frobenius norm, or by `eps` where that is smaller: zeros stay zeros.
    """
    a, b, c = coefficients
    x = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=eps)
    tall = x.shape[1] > x.shape[2]
    if tall:  # the smaller of the two Gram matrices has the same singular values
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _orthogonal_updates(updates: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """`updates` made orthogonal and adjusted, in their own shapes and dtypes, with one batch for each shape of matrix."""
    made: list[Tensor] = list(updates)
    for (rows, columns), members in _by_shape(tuple((len(update), update.numel() // len(update)) for update in updates)):
        chosen = [updates[index] for index in members]
        batch = chosen[0].new_empty((len(members), rows, columns), dtype=PRODUCTS[group["products"]])
        torch._foreach_copy_([matrix.view(update.shape) for matrix, update in zip(batch, chosen, strict=True)], chosen)
        # back in the updates' dtype before the rate is multiplied in, which bfloat16 would round
        result = orthogonalized(batch, group["steps"], tuple(group["coefficients"])).to(chosen[0].dtype)
        factor = ADJUSTMENTS[group["adjust"]](rows, columns)
        if factor != 1:
            result = result * factor
        for index, matrix in zip(members, result, strict=True):
            made[index] = matrix.reshape(updates[index].shape)
    return made


@lru_cache(maxsize=64)
def _by_shape(shapes: tuple[tuple[int, int], ...]) -> tuple[tuple[tuple[int, int], tuple[int, ...]], ...]:
    """The places in `shapes` of each shape; the same at every step, so kept."""
    places: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        places.setdefault(shape, []).append(index)
    return tuple((shape, tuple(indices)) for shape, indices in places.items())


def _rescale(parameters: list[Tensor], skipped: Tensor | None, eps: float = 1e-7) -> None:
    """Brings each parameter's norm to the root of its first dimension, or leaves all alone where `skipped` is 1."""
    factors = torch._foreach_reciprocal(torch._foreach_clamp_min(torch._foreach_norm(parameters), eps))
    torch._foreach_mul_(factors, [len(parameter) ** 0.5 for parameter in parameters])
    if skipped is not None:
        torch._foreach_mul_(factors, 1 - skipped)
        torch._foreach_add_(factors, [skipped] * len(factors))
    torch._foreach_mul_(parameters, factors)

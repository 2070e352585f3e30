"""Muon: orthogonalised momentum updates for filters, SGD for the other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Coefficients of the quintic iteration, selected for the steepest slope at 0 (K. Jordan et al., Muon, 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # smallest norm to divide by

PRODUCTS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Muon(Optimizer):
    """Muon (K. Jordan et al., 2024) for groups with `orthogonal`, SGD with decoupled weight decay for other groups.

    With `orthogonal`, a parameter is treated as a matrix of its first dimension × all others. A step with gradient g:

        buffer = momentum · buffer + g;  u = g + momentum · buffer  (u = buffer without `nesterov`)
        u = orthogonalised u                                        (with `orthogonal`)
        p = p · √rows / ‖p‖                                         (with `orthogonal` and `rescale`)
        p = p · (1 − lr · weight_decay) − lr · u

    torch.optim.Muon accumulates (1 − momentum) · g instead. Only the direction of u matters, so the updates agree,
    except for a factor of torch's learning rate that depends on the shape.

    A step never synchronises the device. A rate below 0 counts as 0.

    Args:
        params: parameters, or groups of them with any of the settings from `lr` to `rescale`.
        lr: learning rate.
        momentum: from 0 to below 1.
        weight_decay: decoupled weight decay; a step removes the share lr · weight_decay.
        orthogonal: Muon (True) or SGD (False).
        rescale: set the norm of each parameter to √rows before the update. Weight decay then has no effect.
        steps: Newton-Schulz iterations. 5 give singular values of about 0.7 … 1.2; 3 suffice for small nets.
        products: dtype of the matrix products, bfloat16 or float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        orthogonal: bool = True,
        rescale: bool = False,
        steps: int = 5,
        products: str = "bfloat16",
    ) -> None:
        self._steps, self._products = steps, PRODUCTS[products]
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "orthogonal": orthogonal, "rescale": rescale})

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Update all parameters that have a gradient. Return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step(group, parameters)
        return loss

    def _step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update the parameters of a group."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers: list[Tensor] = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        grads: list[Tensor] = [parameter.grad for parameter in parameters]  # type: ignore[misc]
        rate = max(group["lr"], 0.0)
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, grads)
        updates = buffers
        if group["nesterov"]:
            updates = list(torch._foreach_add(grads, buffers, alpha=group["momentum"]))
        if group["orthogonal"]:
            updates = self._orthogonal_updates(updates)
            if group["rescale"]:
                factors = torch._foreach_reciprocal(torch._foreach_clamp_min(torch._foreach_norm(parameters), EPS))
                torch._foreach_mul_(factors, [len(parameter) ** 0.5 for parameter in parameters])
                torch._foreach_mul_(parameters, factors)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, torch._foreach_mul(updates, -rate))

    def _orthogonal_updates(self, updates: list[Tensor]) -> list[Tensor]:
        """Return the orthogonalised updates, in one batch per shape of matrix."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index, update in enumerate(updates):
            by_shape.setdefault((len(update), update.numel() // len(update)), []).append(index)
        results = list(updates)
        for shape, indices in by_shape.items():
            same_shape = [updates[index] for index in indices]
            batch = same_shape[0].new_empty((len(indices), *shape), dtype=self._products)
            views = [matrix.view(update.shape) for matrix, update in zip(batch, same_shape, strict=True)]
            torch._foreach_copy_(views, same_shape)
            # Convert before the multiplication by the rate, which bfloat16 would round.
            matrices = orthogonalized(batch, self._steps).to(same_shape[0].dtype)
            for index, matrix in zip(indices, matrices, strict=True):
                results[index] = matrix.reshape(updates[index].shape)
        return results


def orthogonalized(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return matrices (n, rows, columns) with the same singular vectors and singular values near 1; zeros stay zeros.

    After a division by the Frobenius norm, `steps` Newton-Schulz iterations x → a·x + b·x³ + c·x⁵ act on the singular
    values.
    """
    a, b, c = COEFFICIENTS
    x = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=EPS)
    tall = x.shape[1] > x.shape[2]
    if tall:  # Use the smaller Gram matrix.
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if tall:
        x = x.mT
    return x

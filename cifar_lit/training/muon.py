"""Muon: orthogonalised momentum updates for filters, SGD for the other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
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

    A step never synchronises the device. A rate below 0 counts as 0. Run an eager step, which creates the buffers,
    before a capture.

    Attributes:
        found_inf: None, or a float tensor with one element on the device of the parameters. If it is 1, a step changes
            neither parameters nor state, as in torch's fused optimizers.

    Args:
        params: parameters, or groups of them with any of the settings below.
        lr: learning rate, a float or a 0-dim tensor on the device of the parameters, which captured steps read.
        momentum: from 0 to below 1.
        weight_decay: decoupled weight decay; a step removes the share lr · weight_decay.
        orthogonal: Muon (True) or SGD (False).
        rescale: set the norm of each parameter to √rows before the update. Weight decay then has no effect.
        steps: Newton-Schulz iterations. 5 give singular values of about 0.7 … 1.2; 3 suffice for small nets.
        products: dtype of the matrix products, bfloat16 or float32.
        branches: orthogonalise the filters of each shape in a separate stream, so that captured steps run them in
            parallel.

    Raises:
        ValueError: for a vector in a group with `orthogonal`.
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
        products: str = "bfloat16",
        branches: bool = False,
    ) -> None:
        self._branches = branches
        self._streams: dict[tuple[int, int], Any] = {}  # by shape
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        orthogonal_settings = {"orthogonal": orthogonal, "rescale": rescale, "steps": steps, "products": products}
        super().__init__(params, settings | orthogonal_settings)

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add a group."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["orthogonal"] and any(parameter.ndim < 2 for parameter in group["params"]):
            raise ValueError("a vector cannot be orthogonalised: put it in a group with orthogonal=False")

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Update all parameters that have a gradient. Return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip = None
        if self.found_inf is not None:
            skip = self.found_inf.reshape(()) > 0
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step(group, parameters, skip)
        return loss

    def _step(self, group: dict[str, Any], parameters: list[Tensor], skip: Tensor | None) -> None:
        """Update the parameters of a group. skip: 0-dim bool; if true, all factors below are 1 and all summands 0."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers: list[Tensor] = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        grads: list[Tensor] = [parameter.grad for parameter in parameters]  # type: ignore[misc]
        rate: float | Tensor
        if isinstance(group["lr"], Tensor):
            rate = group["lr"].reshape(()).clamp(min=0)
        else:
            rate = max(group["lr"], 0.0)
        momentum: float | Tensor = group["momentum"]
        skipped: Tensor | None = None
        if skip is not None:
            skipped = skip.to(torch.float32)
            grads = [grad.masked_fill(skip, 0.0) for grad in grads]  # not a product: 0 · nan is nan
            rate = rate * (1 - skipped)
            momentum = momentum * (1 - skipped) + skipped
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads)
        updates = buffers
        if group["nesterov"]:
            updates = list(torch._foreach_add(grads, buffers, alpha=group["momentum"]))
        if group["orthogonal"]:
            updates = self._orthogonal_updates(updates, group["steps"], PRODUCTS[group["products"]])
        if group["orthogonal"] and group["rescale"]:
            factors = torch._foreach_reciprocal(torch._foreach_clamp_min(torch._foreach_norm(parameters), EPS))
            torch._foreach_mul_(factors, [len(parameter) ** 0.5 for parameter in parameters])
            if skipped is not None:
                torch._foreach_mul_(factors, 1 - skipped)
                torch._foreach_add_(factors, [skipped] * len(factors))
            torch._foreach_mul_(parameters, factors)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, torch._foreach_mul(updates, -rate))

    def _orthogonal_updates(self, updates: list[Tensor], steps: int, products: torch.dtype) -> list[Tensor]:
        """Return the orthogonalised updates, in one batch per shape of matrix."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index, update in enumerate(updates):
            by_shape.setdefault((len(update), update.numel() // len(update)), []).append(index)
        results = list(updates)
        for shape, indices in by_shape.items():
            same_shape = [updates[index] for index in indices]
            with self._branch(shape, same_shape[0].device):
                batch = same_shape[0].new_empty((len(indices), *shape), dtype=products)
                views = [matrix.view(update.shape) for matrix, update in zip(batch, same_shape, strict=True)]
                torch._foreach_copy_(views, same_shape)
                # Convert before the multiplication by the rate, which bfloat16 would round.
                matrices = orthogonalized(batch, steps).to(same_shape[0].dtype)
                for index, matrix in zip(indices, matrices, strict=True):
                    results[index] = matrix.reshape(updates[index].shape)
        for shape in by_shape:
            if shape in self._streams:
                torch.get_device_module(updates[0].device).current_stream().wait_stream(self._streams[shape])
        return results

    def _branch(self, shape: tuple[int, int], device: torch.device) -> AbstractContextManager[None]:
        """Return the context of a separate stream that starts after the current one; a null context without `branches`.

        Memory allocated on it is freed on the current stream, for which it waits before it reuses the memory.
        """
        if not self._branches:
            return nullcontext()
        module = torch.get_device_module(device)
        if shape not in self._streams:
            self._streams[shape] = module.Stream()
        stream = self._streams[shape]
        stream.wait_stream(module.current_stream())
        return module.stream(stream)


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

"""Muon: momentum whose update is made orthogonal, for filters, next to SGD for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# Of the quintic iteration, chosen for the steepest slope at 0 (K. Jordan et al., Muon, 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # below which a norm is not divided by

PRODUCTS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Muon(Optimizer):
    """Muon (K. Jordan et al., 2024) for groups with `orthogonal`, SGD with decoupled weight decay for the others.

    A parameter with `orthogonal` counts as a matrix of its first dimension × the rest. One step, with g the gradient:

        buffer = momentum · buffer + g;  u = g + momentum · buffer  (u = buffer without `nesterov`)
        u = u made orthogonal                                       (with `orthogonal`)
        p = p · √rows / ‖p‖                                         (with `orthogonal` and `rescale`)
        p = p · (1 − lr · weight_decay) − lr · u

    torch.optim.Muon averages (1 − momentum) · g where this sums g; as only the direction of u counts, the two agree, but for a
    factor of torch's on the rate that depends on the shape.

    A step never waits for the device. `lr` may be a 0-dim tensor on the parameters' device, which a captured step reads
    anew each time; a rate below 0 counts as 0. Buffers are made in the first step, so capture after an eager one.

    Attributes:
        found_inf: None, or a float tensor of one element on the parameters' device: where it is 1, a step leaves
            parameters and state as they were, whatever the gradients are (the same name as in torch's fused optimizers).

    Args:
        params: parameters, or groups of them, each with any of the settings below.
        lr: the rate.
        momentum: 0 or more, below 1.
        nesterov: Nesterov's form of the momentum.
        weight_decay: decoupled; each step takes the share lr · weight_decay off.
        orthogonal: whether a group gets Muon (True) or SGD (False).
        rescale: before each update, bring a parameter's norm to √rows; leaves weight decay nothing to do.
        steps: Newton-Schulz iterations: 5 give singular values of about 0.7 … 1.2, 3 suffice for small nets.
        products: dtype of the iteration's products, bfloat16 or float32.
        branches: make the filters of each shape orthogonal in a stream of their own, which a captured step replays side by side.

    Raises ValueError for a vector in a group with `orthogonal`.
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
        settings = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "orthogonal": orthogonal,
        }
        super().__init__(params, {**settings, "rescale": rescale, "steps": steps, "products": products})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
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
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers: list[Tensor] = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
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
        updates = list(torch._foreach_add(grads, buffers, alpha=group["momentum"])) if group["nesterov"] else buffers
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
        """`updates` made orthogonal, in their own shapes and dtypes, with one batch for each shape of matrix."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index, update in enumerate(updates):
            by_shape.setdefault((len(update), update.numel() // len(update)), []).append(index)
        made = list(updates)
        for shape, members in by_shape.items():
            chosen = [updates[index] for index in members]
            with self._branch(shape, chosen[0].device):
                batch = chosen[0].new_empty((len(members), *shape), dtype=products)
                torch._foreach_copy_(
                    [matrix.view(update.shape) for matrix, update in zip(batch, chosen, strict=True)], chosen
                )
                # back in the updates' dtype before the rate is multiplied in, which bfloat16 would round
                matrices = orthogonalized(batch, steps).to(chosen[0].dtype)
                for index, matrix in zip(members, matrices, strict=True):
                    made[index] = matrix.reshape(updates[index].shape)
        for stream in [self._streams[shape] for shape in by_shape if shape in self._streams]:
            torch.get_device_module(updates[0].device).current_stream().wait_stream(stream)
        return made

    def _branch(self, shape: tuple[int, int], device: torch.device) -> AbstractContextManager[None]:
        """A context in which the device works beside its current stream, once that has come here; nothing without `branches`.

        What is made in it is freed by the current stream's work, for which the branch waits in the next step before it uses the
        memory again.
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
    """Each of `matrices` (n, rows, columns) with singular values near 1 and its singular vectors as they were.

    Computed in the dtype of `matrices` by `steps` Newton-Schulz iterations x → a·x + b·x³ + c·x⁵ on the singular values,
    after a division by the Frobenius norm; zeros stay zeros.
    """
    a, b, c = COEFFICIENTS
    x = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=EPS)
    tall = x.shape[1] > x.shape[2]
    if tall:  # the smaller of the two Gram matrices has the same singular values
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x

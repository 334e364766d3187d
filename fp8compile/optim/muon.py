"""Muon with FP8 momentum: one byte per parameter plus scales, instead of four bytes in float32.

momentum codes --one graph for all--> momentum codes, bfloat16 update --gather over ranks, orthogonalize--> parameter
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp8compile._compat import is_dtensor, local_itself, muon_lr, orthogonalized, untraced
from fp8compile.nn.layer.redistribute_like import redistribute_like, wrapped_like
from fp8compile.optim.compiled_step import Job, Rule
from fp8compile.optim.moment_optimizer import AUTO, Backend, MomentOptimizer, check_number
from fp8compile.optim.moments import CODES

__all__ = ["Muon"]

ADJUSTMENTS = (None, "original", "match_rms_adamw")


def _rule(
    parameter: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    """Compute Muon's momentum of one parameter in float32; return the update (Nesterov or plain) and the momentum.

    ``scalars`` are the learning rate, which is unused, and the result of `Muon.scalars`.
    """
    _, momentum, rest, look_ahead = scalars
    (buffer,) = moments
    buffer = buffer * momentum + grad * rest
    return grad + look_ahead * (buffer - grad), (buffer,)


class Muon(MomentOptimizer):
    """Muon with FP8 momentum (e4m3) and the interface of ``torch.optim.Muon``.

    A single compiled graph computes the momentum of all parameters. PyTorch's own function orthogonalizes each update.
    If a matrix is sharded, its update is all-gathered in bfloat16 once per step, and each rank applies its shard of
    the result.

    The state has ``momentum_buffer_codes`` and ``momentum_buffer_scale``, or ``momentum_buffer`` if the momentum is
    not quantized, as for a matrix with fewer than 4096 elements or with rows of fewer than 16. Blocks, rounding, seeds
    and state dicts work as in ``AdamW``.

    Args:
        params: Matrices, or groups of matrices. Use another optimizer for embeddings, norms and biases. Groups may
            override all options below except ``backend``.
        lr: Learning rate, a float or a one-element tensor.
        weight_decay: Decoupled weight decay.
        momentum: Decay rate of the momentum, at least 0 and below 1.
        nesterov: Whether to use Nesterov momentum.
        ns_coefficients: Coefficients of the Newton-Schulz iteration.
        eps: Lower bound of the norm that divides an update.
        ns_steps: Number of Newton-Schulz iterations.
        adjust_lr_fn: How the learning rate depends on a matrix's shape, as in ``torch.optim.Muon``: None or
            ``"original"``, or ``"match_rms_adamw"``.
        momentum_buffer_dtype: Dtype of the momentum: ``torch.float8_e4m3fn``, ``torch.bfloat16`` or ``torch.float32``.
        rounding: Rounding mode for quantizing the momentum, ``"stochastic"`` or ``"nearest"``.
        seed: Seed of stochastic rounding.
        backend: Backend of ``torch.compile`` for the momentum; None runs in eager mode. ``"auto"`` is ``"inductor"``
            on a GPU and None on a CPU.

    Raises:
        TypeError: A parameter is quantized (use ``fp8compile.MasterWeights``), or not float32, bfloat16 or float16.
        ValueError: A parameter is not a matrix, an option has a value that is not allowed, or a shard boundary divides
            a block.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """

    moments: ClassVar[dict[str, bool]] = {"momentum_buffer": False}
    rule: ClassVar[Rule] = staticmethod(_rule)
    refused: ClassVar[dict[str, str]] = {
        "bf16_stochastic_round": "updates are added to parameters outside of the graph, with rounding to nearest",
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,  # the place that it has in torch.optim
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        momentum_buffer_dtype: torch.dtype = CODES,
        rounding: str = "stochastic",
        seed: int = 0,
        backend: Backend = AUTO,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "momentum_buffer_dtype": momentum_buffer_dtype,
            "rounding": rounding,
            "seed": seed,
            "bf16_stochastic_round": False,
        }
        super().__init__(params, defaults, backend)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise a ValueError or TypeError if an option or a parameter of a parameter group is not allowed."""
        for name in ("lr", "eps", "weight_decay"):
            check_number("Muon", name, group[name])
        check_number("Muon", "momentum", group["momentum"], below=1.0)
        if group["adjust_lr_fn"] not in ADJUSTMENTS:
            raise ValueError(f"Muon: `adjust_lr_fn` is {group['adjust_lr_fn']!r}; it must be one of {ADJUSTMENTS}.")
        for p in group["params"]:
            if p.ndim != 2:
                raise ValueError(
                    f"Muon: a parameter has shape {tuple(p.shape)}; it must have two dims. Pass other parameters to "
                    "another optimizer, such as fp8compile.optim.AdamW."
                )
        super().check_group(group)

    def scalars(self, group: dict[str, Any], step: float) -> Sequence[float]:
        """Return the numbers that ``_rule`` takes after the learning rate, as Python floats; ``step`` is not used."""
        momentum = float(group["momentum"])
        return momentum, 1 - momentum, momentum if group["nesterov"] else 1.0

    def job(self, p: Tensor, group: dict[str, Any]) -> Job:
        """Return the tensors that a step reads and writes for ``p``; the update goes into a new bfloat16 tensor."""
        found = super().job(p, group)
        self._updates[p] = torch.empty(found.parameter.shape, dtype=torch.bfloat16, device=p.device)
        return replace(found, target=self._updates[p])

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step. If ``closure`` is given, first call it with gradients enabled, and return its result.

        Parameters without a gradient, and their states, do not change.
        """
        self._updates: dict[Tensor, Tensor] = {}
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._apply(p, self._updates.pop(p), group)
        self._updates.clear()
        return loss

    def adapted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a ``state_dict`` of this optimizer, or one of ``torch.optim.Muon`` with the step count 0."""
        state = {index: {"step": 0.0, **each} for index, each in state_dict["state"].items()}
        return {**state_dict, "state": state}

    def _apply(self, p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        whole: Any = wrapped_like(update, p)
        whole = whole.full_tensor() if is_dtensor(whole) else whole
        found = orthogonalized(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        part, local, lr = local_itself(redistribute_like(found, p)), local_itself(p), float(group["lr"])
        local.mul_(1 - lr * float(group["weight_decay"]))
        local.add_(part, alpha=-muon_lr(lr, group["adjust_lr_fn"], p.shape))

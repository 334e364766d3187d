"""AdamW with FP8 moments: two bytes per parameter plus scales, instead of eight bytes in float32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp8compile.optim.compiled_step import Rule
from fp8compile.optim.moment_optimizer import AUTO, Backend, MomentOptimizer, check_number
from fp8compile.optim.moments import CODES, LARGEST_ROOT
from fp8compile.quantizers.scale_rules import exact_root

__all__ = ["AdamW"]

ONE_GRAPH = "the step is already one compiled graph for all parameters"


def _rule(
    parameter: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    """Compute AdamW's update of one parameter in float32; return the new parameter and the new moments.

    ``scalars`` are the learning rate and `AdamW.scalars`. Finite gradients are clamped to `LARGEST_ROOT` in both
    moments, so that their squares are finite and the update stays bounded. Source: Loshchilov and Hutter 2019,
    arXiv:1711.05101.
    """
    exp_avg, exp_avg_sq = moments
    lr, decay, sign, beta1, rest1, beta2, rest2, correction1, root_correction2, eps = scalars
    grad = grad * sign
    # infinities and NaN stay; `clamp` would take twice the instructions, because it propagates NaN
    size, largest = grad.abs(), grad.new_full((), LARGEST_ROOT)
    grad = torch.where((size > LARGEST_ROOT) & (size < torch.inf), largest.copysign(grad), grad)
    exp_avg = exp_avg * beta1 + grad * rest1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * rest2
    update = (exp_avg / correction1) / (exact_root(exp_avg_sq) / root_correction2 + eps)
    return parameter * (1 - lr * decay) - lr * update, (exp_avg, exp_avg_sq)


class AdamW(MomentOptimizer):
    """AdamW with FP8 optimizer states (e4m3) and the interface of ``torch.optim.AdamW``.

    A step dequantizes the moments, computes the update in float32, and quantizes the new moments once. A single
    compiled graph updates all parameters. If rows are a multiple of the block size, the graph does not write float32
    moments to memory. Learning rates and other hyperparameters are inputs of the graph, so schedules do not recompile.
    ``exp_avg_sq`` is stored as its square root, and a positive value is never rounded to 0
    (``fp8compile.quantizers.RootScaling``). Finite gradient elements are clamped to ±1.8e19, because the square of a
    larger one would overflow.

    Each block of 128 values in a row shares one scale. Moments stay in float32 if a parameter has fewer than 4096
    elements, fewer than two dims, or rows of fewer than 16 elements.

    The state of a parameter has ``exp_avg_codes``, ``exp_avg_scale``, ``exp_avg_sq_codes`` and ``exp_avg_sq_scale``. A
    moment that is not quantized is ``exp_avg`` or ``exp_avg_sq``. For a DTensor parameter, all of these are DTensors.

    Args:
        params: Parameters, named parameters or parameter groups, as in ``torch.optim``. Groups may override all
            options below except ``backend`` and those that must be False or None.
        lr: Learning rate, a float or a one-element tensor.
        betas: Decay rates of the two moments, each at least 0 and below 1.
        eps: Term added to the square root of the second moment.
        weight_decay: Decoupled weight decay.
        amsgrad: Must be False.
        maximize: Whether the objective is maximized.
        foreach: Must be None or False, because a single graph already updates all parameters.
        capturable: Must be False. Steps are counted on the host, so a CUDA graph can't capture a step.
        differentiable: Must be False.
        fused: Must be None or False, because the graph is already fused.
        exp_avg_dtype: Dtype of the first moment: ``torch.float8_e4m3fn``, ``torch.bfloat16`` or ``torch.float32``.
        exp_avg_sq_dtype: Dtype of the second moment, as for ``exp_avg_dtype``.
        rounding: Rounding mode for quantizing the moments. ``"stochastic"`` rounds up or down at random. With
            ``"nearest"``, each step loses changes smaller than half the FP8 spacing. With ``betas[1]`` close to 1, the
            second moment then only follows the largest value of its block.
        seed: Seed of stochastic rounding. The noise depends on the seed, the step, the position in the unsharded
            parameter and the value. A resumed run therefore rounds the same way on any number of ranks.
        bf16_stochastic_round: Whether bfloat16 parameters are also rounded stochastically, as in torchao.
        backend: Backend of ``torch.compile`` for the step. None runs in eager mode, with float32 moments for one
            parameter at a time. ``"auto"`` is ``"inductor"`` on a GPU and None on a CPU.

    Raises:
        TypeError: A parameter is quantized (use ``fp8compile.MasterWeights``), or not float32, bfloat16 or float16.
        ValueError: An option has a value that is not allowed, or a shard boundary divides a block.
    """

    moments: ClassVar[dict[str, bool]] = {"exp_avg": False, "exp_avg_sq": True}
    rule: ClassVar[Rule] = staticmethod(_rule)
    refused: ClassVar[dict[str, str]] = {
        "amsgrad": "a third state (the maximum) is not supported in FP8",
        "foreach": ONE_GRAPH,
        "fused": ONE_GRAPH,
        "capturable": "the number of steps is counted on the host; use torch.optim.AdamW for capture",
        "differentiable": "FP8 states are not differentiable",
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,  # the place that it has in torch.optim
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        exp_avg_dtype: torch.dtype = CODES,
        exp_avg_sq_dtype: torch.dtype = CODES,
        rounding: str = "stochastic",
        seed: int = 0,
        bf16_stochastic_round: bool = False,
        backend: Backend = AUTO,
    ) -> None:
        refused = {
            "amsgrad": amsgrad,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        self.check_refused(refused)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "exp_avg_dtype": exp_avg_dtype,
            "exp_avg_sq_dtype": exp_avg_sq_dtype,
            "rounding": rounding,
            "seed": seed,
            "bf16_stochastic_round": bf16_stochastic_round,
        }
        super().__init__(params, defaults, backend)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise a ValueError or TypeError if an option or a parameter of a parameter group is not allowed."""
        for name in ("lr", "eps", "weight_decay"):
            check_number("AdamW", name, group[name])
        for index, beta in enumerate(group["betas"]):
            check_number("AdamW", f"betas[{index}]", beta, below=1.0)
        super().check_group(group)

    def adapted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a ``state_dict`` of this optimizer or of ``torch.optim.AdamW`` as it is.

        Raises:
            ValueError: The state was trained with ``amsgrad``, whose third moment is not supported.
        """
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise ValueError(
                "AdamW: the loaded state was trained with amsgrad=True, which this optimizer does not support. "
                "Continue with torch.optim.AdamW, or set amsgrad to False in the state's param_groups to continue "
                "without it."
            )
        return state_dict

    def scalars(self, group: dict[str, Any], step: float) -> Sequence[float]:
        """Return the numbers that ``_rule`` takes after the learning rate, for step number ``step``.

        Bias corrections are computed as Python floats (float64). The step rounds all numbers to float32.
        """
        beta1, beta2 = map(float, group["betas"])
        return (
            float(group["weight_decay"]),
            -1.0 if group["maximize"] else 1.0,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            1 - beta1**step,
            (1 - beta2**step) ** 0.5,
            float(group["eps"]),
        )

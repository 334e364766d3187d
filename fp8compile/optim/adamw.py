"""AdamW with FP8 moments: two bytes per parameter plus scales, instead of eight bytes in float32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp8compile.optim.compiled_step import Rule
from fp8compile.optim.moment_optimizer import Backend, MomentOptimizer, check_number
from fp8compile.optim.moments import CODES, LARGEST_ROOT
from fp8compile.quantizers.scale_rules import exact_root

__all__ = ["AdamW"]

ONE_GRAPH = "the step is one compiled graph for all parameters already"


def _rule(
    parameter: Tensor, grad: Tensor, moments: Sequence[Tensor], scalars: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    """Compute AdamW's update of one parameter in float32; return the new parameter and the new moments.

    ``scalars`` are the learning rate and `AdamW.scalars`. A finite gradient beyond `LARGEST_ROOT` counts as that
    number in both moments, so that its square is finite and its update as bounded as others. Source: Loshchilov and
    Hutter 2019, arXiv:1711.05101.
    """
    exp_avg, exp_avg_sq = moments
    lr, decay, sign, beta1, rest1, beta2, rest2, correction1, root_correction2, eps = scalars
    grad = grad * sign
    grad = torch.where(grad.isinf(), grad, grad.clamp(-LARGEST_ROOT, LARGEST_ROOT))
    exp_avg = exp_avg * beta1 + grad * rest1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * rest2
    update = (exp_avg / correction1) / (exact_root(exp_avg_sq) / root_correction2 + eps)
    return parameter * (1 - lr * decay) - lr * update, (exp_avg, exp_avg_sq)


class AdamW(MomentOptimizer):
    """AdamW with the interface of ``torch.optim.AdamW`` that stores its moments as e4m3 codes.

    A step dequantizes the moments, computes in float32, and quantizes once. One compiled graph updates all parameters;
    if rows consist of whole blocks, the graph writes no float32 moments to memory. Learning rates and other
    hyperparameters are inputs of the graph, so that schedules do not recompile. ``exp_avg_sq`` is stored as its square
    root, and a positive value never gets the code 0 (``fp8compile.quantizers.RootScaling``). A finite element of a
    gradient beyond ±1.8e19, whose square would overflow, counts as ±1.8e19.

    A block, which shares one scale, is 128 values of a row. Moments stay float32 if a parameter has fewer than 4096
    elements, fewer than two dims, or rows of fewer than 16 elements.

    The state of a parameter has ``exp_avg_codes``, ``exp_avg_scale``, ``exp_avg_sq_codes`` and ``exp_avg_sq_scale``;
    a moment that is not quantized is ``exp_avg`` or ``exp_avg_sq``. For a DTensor parameter, all are DTensors.

    Args:
        params: Parameters, named parameters or parameter groups, as in ``torch.optim``. Groups may override each
            option below except ``backend`` and those that must be False or None.
        lr: Learning rate, a float or a tensor of one element.
        betas: Decay rates of the two moments, each at least 0 and below 1.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        amsgrad: Only False.
        maximize: Whether the objective is maximized.
        foreach: None or False: the step is one graph for all parameters.
        capturable: Only False: the host counts the steps, so a CUDA graph can't capture a step.
        differentiable: Only False.
        fused: None or False: the graph is fused already.
        exp_avg_dtype: ``torch.float8_e4m3fn`` for codes; ``torch.bfloat16`` or ``torch.float32`` for values.
        exp_avg_sq_dtype: Dtype of the second moment, as for ``exp_avg_dtype``.
        rounding: Rounding of moments to codes. ``"stochastic"``: up or down at random. ``"nearest"``: each step loses
            changes below half the distance between codes; with ``betas[1]`` near 1 the second moment then only follows
            the largest value of its block.
        seed: Seed of stochastic rounding. The noise depends on seed, step, position in the unsharded parameter, and
            value; a resumed run therefore rounds the same way on any number of ranks.
        bf16_stochastic_round: Whether bfloat16 parameters are rounded stochastically too (the name is torchao's).
        backend: Backend of ``torch.compile`` for the step; None runs eagerly, with float32 moments of one parameter
            at a time.

    Raises:
        TypeError: A parameter is quantized (use ``fp8compile.MasterWeights``), or not float32, bfloat16 or float16.
        ValueError: An option has a value that is not allowed, or a shard boundary divides a block.
    """

    moments: ClassVar[dict[str, bool]] = {"exp_avg": False, "exp_avg_sq": True}
    rule: ClassVar[Rule] = staticmethod(_rule)
    refused: ClassVar[dict[str, str]] = {
        "amsgrad": "a third moment, a maximum, has no codes here",
        "foreach": ONE_GRAPH,
        "fused": ONE_GRAPH,
        "capturable": "the host counts the steps; torch.optim.AdamW can be captured",
        "differentiable": "codes have no derivative",
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
        backend: Backend = "inductor",
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
            ValueError: The state was trained with ``amsgrad``, whose third moment has no counterpart here.
        """
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise ValueError(
                "AdamW: the loaded state was trained with amsgrad=True, and this optimizer keeps no maximum of "
                "second moments. Train on with torch.optim.AdamW; or, to go on without it, set amsgrad to False in "
                "the state's param_groups."
            )
        return state_dict

    def scalars(self, group: dict[str, Any], step: float) -> Sequence[float]:
        """Return the numbers that ``_rule`` takes after the learning rate, for step number ``step``.

        Python floats keep bias corrections in float64; the step rounds all numbers to float32.
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

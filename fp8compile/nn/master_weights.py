"""MasterWeights: an optimizer of torch.optim that computes in float32 and rounds quantized weights once a step.

p.grad --to float32--> master.grad --torch.optim--> master float32 --(one amax message for all)--> codes, scale
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8compile._compat import local_itself
from fp8compile.nn.local import wrapped_like
from fp8compile.quantizers import CurrentScaling, Quantizer
from fp8compile.tensor import QuantizedParameter, assign, count_write, quantized_anew, shown

__all__ = ["MasterWeights"]

MASTER = "master"  # its name in an optimizer's state


class MasterWeights(Optimizer):
    """An optimizer whose quantized weights have float32 masters: it updates those, and rounds them once a step.

    After each step codes and scales are those of the masters, quantized by the weights' own quantizers, with one amax
    message for all weights whose scales ranks share. Where something else wrote to a weight (``load_state_dict`` of a
    model without its optimizer), its master starts anew from what the codes stand for. Other parameters are updated as
    the optimizer does. Learning rate schedulers work on it, ``add_param_group`` does not; its state dict is that of
    the optimizer, with the master beside each weight's moments.

    Args:
        optimizer: A class of ``torch.optim``, or one like it.
        params: Parameters, or groups of them, as it takes them.
        keep: Whether masters stay from step to step. If not, a step starts from what the codes stand for, and updates
            that are smaller than half a step between codes are lost, but for stochastic rounding.
        rounding: Of masters to codes: ``"nearest"``, or ``"stochastic"``, by noise that is another one each step.
            Shards of a weight get other noise than the whole.
        seed: Of stochastic rounding.
        options: Of the optimizer.

    Raises:
        TypeError: ``optimizer`` is no class of optimizers.
        ValueError: ``rounding`` is none of the two, or stochastic for a quantizer that is no ``CurrentScaling``.
    """

    def __init__(
        self,
        optimizer: type[Optimizer],
        params: Iterable[Any],
        *,
        keep: bool = True,
        rounding: str = "nearest",
        seed: int = 0,
        **options: Any,
    ) -> None:
        if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
            raise TypeError(
                f"MasterWeights: optimizer is {shown(optimizer)}; it is a class such as torch.optim.AdamW."
            )
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"MasterWeights: rounding is {rounding!r}; it is 'nearest' or 'stochastic'.")
        groups = [dict(each) if isinstance(each, dict) else each for each in params]
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for group in groups:
            given = group["params"]
            group["params"] = [given] if isinstance(given, Tensor) else list(given)
        self._keep, self._rounding, self._seed, self._steps = keep, rounding, seed, 0
        self._masters = {p: self._master_of(p) for group in groups for p in group["params"] if _is_quantized(p)}
        inner_groups = [{**each, "params": [self._masters.get(p, p) for p in each["params"]]} for each in groups]
        self.inner = optimizer(inner_groups, **options)
        super().__init__(groups, self.inner.defaults)
        self._ready = True
        self._show_hyperparameters()
        self._free()

    def _master_of(self, p: Tensor) -> Tensor:
        local = local_itself(p)
        if self._rounding == "stochastic" and not isinstance(local.quantizer, CurrentScaling):
            raise ValueError(f"MasterWeights: {local.quantizer!r} has no stochastic rounding; CurrentScaling has.")
        initial, local.initial = local.initial, None
        values = local.dequantize(torch.float32) if initial is None else initial.to(local.device, torch.float32)
        return wrapped_like(values, p).requires_grad_()

    # ------------------------------------------------------------------ what a step does

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer, then one rounding of every quantized weight that had a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in group.items() if name != "params"})
        updated = [p for p in self._masters if p.grad is not None]
        for p in updated:
            local_itself(p).check_writable("a step")
            self._masters[p].grad = p.grad.to(torch.float32)
        self._take_over(updated)
        self._fill(updated)
        self.inner.step()
        self._steps += 1
        assign(*self._as_written(updated))
        for p in updated:
            count_write(p)
            self._masters[p].grad = None
            local_itself(p).written = False
        self._free()
        self._show_state()
        return loss

    def _as_written(self, params: list[Tensor]) -> tuple[list, ...]:
        """What `assign` takes: local weights, their masters, and how these are rounded."""
        weights = [local_itself(p) for p in params]
        # as a copy of the master in the weight's dtype would be; noise is for the digits that such a copy loses
        dtypes = [w.dtype if self._rounding == "nearest" else torch.float32 for w in weights]
        values = [local_itself(self._masters[p]).detach() for p in params]
        return weights, values, dtypes, [self._rounding_of(weight.quantizer) for weight in weights]

    def _take_over(self, params: list[Tensor]) -> None:
        """Weights that something else wrote to win: masters that are not theirs start from what they stand for.

        After a checkpoint was loaded masters are theirs, whichever of model and optimizer came first.
        """
        written = [p for p in params if self._keep and local_itself(p).written]
        for p, (codes, scale) in zip(written, quantized_anew(*self._as_written(written)), strict=True):
            local = local_itself(p)
            if not (torch.equal(codes, local.codes) and torch.equal(scale, local.scale)):
                local_itself(self._masters[p]).copy_(local.dequantize(torch.float32))

    def _rounding_of(self, quantizer: Quantizer) -> Quantizer:
        if self._rounding == "nearest":
            return quantizer
        return replace(quantizer, rounding="stochastic", seed=(self._seed + 65537 * self._steps) & 0x7FFFFFFF)

    def _fill(self, params: list[Tensor]) -> None:
        """Without kept masters: what the codes stand for."""
        for p in params if not self._keep else ():
            master, local = local_itself(self._masters[p]), local_itself(p)
            master.untyped_storage().resize_(master.numel() * master.element_size())
            master.copy_(local.dequantize(torch.float32))

    def _free(self) -> None:
        for master in self._masters.values() if not self._keep else ():
            local_itself(master).untyped_storage().resize_(0)

    # ------------------------------------------------------------------ what schedulers and checkpoints see

    def _show_hyperparameters(self) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({name: value for name, value in inner.items() if name != "params"})

    def _show_state(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                master = self._masters.get(p, p)
                if master in self.inner.state:
                    kept = {MASTER: master.detach()} if p in self._masters and self._keep else {}
                    self.state[p] = {**self.inner.state[master], **kept}

    def state_dict(self) -> dict[str, Any]:
        """As of the optimizer, each quantized weight's master beside its moments, and the number of steps."""
        self._show_state()
        if self._keep:  # before the first step too: a run that is resumed then starts from the same masters
            for p, master in self._masters.items():
                self.state[p] = {**self.state.get(p, {}), MASTER: master.detach()}
        found = super().state_dict()
        for group in found["param_groups"]:
            group["master_steps"] = self._steps
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave. Weights are not changed: they are in the model's own state."""
        state = {index: dict(each) for index, each in state_dict["state"].items()}
        groups = [dict(group) for group in state_dict["param_groups"]]
        params = [p for group in self.param_groups for p in group["params"]]
        places = [index for group in groups for index in group["params"]]
        steps = [group.pop("master_steps") for group in groups]
        for p, index in zip(params, places, strict=True):
            master = state.get(index, {}).pop(MASTER, None)
            if p in self._masters and self._keep:
                if master is None:
                    raise ValueError(
                        "MasterWeights: the state has no master for a quantized weight; it is of an optimizer without "
                        "masters. Start a new MasterWeights from the weights, or load into one with keep=False."
                    )
                local_itself(self._masters[p]).copy_(local_itself(master))
        self.inner.load_state_dict({"state": {i: each for i, each in state.items() if each}, "param_groups": groups})
        self._steps = max(steps, default=0)
        self._show_hyperparameters()
        self.state.clear()
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: masters are those of the first groups."""
        if hasattr(self, "_ready"):
            raise NotImplementedError("MasterWeights: give all groups at once.")
        super().add_param_group(param_group)


def _is_quantized(p: Tensor) -> bool:
    return isinstance(local_itself(p), QuantizedParameter)

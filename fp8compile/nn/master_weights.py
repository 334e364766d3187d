"""MasterWeights: an optimizer of torch.optim that computes in float32 and rounds quantized weights once a step.

p.grad --to float32--> master.grad --torch.optim--> master float32 --(one amax message for all)--> codes, scale

Both optimizers have the same groups, the dicts themselves: what a scheduler writes there the inner one reads, and what
an algorithm counts there is seen and saved. While the inner one runs they hold masters in place of weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8compile._compat import is_dtensor, local_itself, set_local_itself
from fp8compile.nn.local import wrapped_like
from fp8compile.quantizers import CurrentScaling, Quantizer, TwoLevelScaling
from fp8compile.tensor import (
    assign,
    count_write,
    is_quantized_parameter,
    sharding_of,
    share_scale_of_part,
    shown,
    stand_for,
)

__all__ = ["MasterWeights"]

MASTER = "master"  # its name in an optimizer's state
STOCHASTIC = CurrentScaling, TwoLevelScaling  # quantizers that may round so


class MasterWeights(Optimizer):
    """An optimizer that keeps float32 masters of quantized weights, updates those, and rounds them once a step.

    After each step, codes and scales are the masters' values, quantized by the weights' own quantizers. Ranks that
    share scales exchange one amax message for all weights. If something else wrote to a weight (``load_state_dict`` of
    a model without its optimizer), its master starts anew from the values of the codes. Other parameters are updated
    by the optimizer directly. Learning rate schedulers work on it, ``add_param_group`` does not. Its state dict is
    that of the optimizer, with the master beside each weight's moments. It has ``train`` and ``eval`` if the optimizer
    has them, such as a schedule-free one. A deep copy or a pickle of it has weights of its own; a copy of ``(model,
    optimizer)`` has the weights of the copied model.

    Args:
        optimizer: A class of ``torch.optim``, or one like it, whose step needs no closure.
        params: Parameters, named or not, or groups of them, as ``torch.optim`` takes them.
        keep: Whether masters stay from step to step. If not, a step starts from the values of the codes, and without
            stochastic rounding it loses updates that are smaller than half the distance between codes.
        rounding: Rounding of masters to codes, ``"nearest"`` or ``"stochastic"``. The noise differs from step to step,
            and a shard has the noise of the whole weight.
        seed: Seed of stochastic rounding.
        options: Options of the optimizer.

    Raises:
        TypeError: ``optimizer`` is no class of optimizers, or its step needs a closure, as that of LBFGS.
        ValueError: ``rounding`` is none of the two, or stochastic for a quantizer that can't round so, for a part of a
            tensor parallel weight that begins or ends within a block, or for experts that ranks share.
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
        _check_closure(optimizer)
        super().__init__(params, {})
        self._keep, self._rounding, self._seed, self._steps = keep, rounding, seed, 0
        weights = [p for group in self.param_groups for p in group["params"]]
        self._masters = {p: self._master_of(p) for p in weights if _is_quantized(p)}
        with self._lent(self.param_groups):
            self.inner: Optimizer = optimizer([dict(group) for group in self.param_groups], **options)
        self._share_groups([group["params"] for group in self.param_groups])
        self.defaults: dict[str, Any] = self.inner.defaults
        self._ready = True
        self._free()

    def _master_of(self, p: Tensor) -> Tensor:
        local = local_itself(p)
        others = [each.quantizer for each in local.sets() if not isinstance(each.quantizer, STOCHASTIC)]
        if self._rounding == "stochastic" and others:
            names = " and ".join(each.__name__ for each in STOCHASTIC)
            raise ValueError(f"MasterWeights: {others[0]!r} has no stochastic rounding; {names} have.")
        if self._rounding == "stochastic" and p.ndim == 3 and is_dtensor(p):
            raise ValueError(
                "MasterWeights: stochastic rounding of experts that ranks share: its noise would be that of each "
                "rank's own experts, and not that of one process. Take rounding='nearest'."
            )
        if local.has_all_scales or is_dtensor(p):
            share_scale_of_part(p)  # says which part it is; a resumed run steps before its first forward
        if local.has_all_scales and self._rounding == "stochastic" and len(sharding_of(p)) > 1:
            raise ValueError(
                "MasterWeights: stochastic rounding of a weight that tensor parallel ranks have parts of, whose "
                "blocks FSDP2 cuts: its noise would be that of other places. Take rounding='nearest', or shapes "
                f"of which each rank of FSDP2 has a multiple of {local.sets()[-1].quantizer.block[0]} rows."
            )
        initial, local.initial = local.initial, None
        values = local.detach().dequantize(torch.float32) if initial is None else initial
        values = values.to(local.device, torch.float32)
        return wrapped_like(values, p).requires_grad_()

    # ------------------------------------------------------------------ what a step does

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step of the optimizer, then round every quantized weight that had a gradient once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._computing([p for p in self._masters if p.grad is not None], rounds=not self._stands_still()):
            self.inner.step()
            self._steps += 1
        return loss

    def _stands_still(self) -> bool:
        """Whether no group has a learning rate, as in the step by which `torch.distributed.checkpoint` makes states.

        Codes that were just loaded are not rounded anew by it: of two sets, the second would be made of the first.
        """
        rates = [group.get("lr") for group in self.param_groups]
        return all(not (isinstance(rate, Tensor) and not rate.is_cpu) and rate == 0 for rate in rates)

    def __getattr__(self, name: str) -> Any:
        """Find ``train`` and ``eval`` of the optimizer; they change weights, so they run on the masters."""
        inner = vars(self).get("inner")
        if name in ("train", "eval") and hasattr(inner, name):
            return partial(self._switch, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @torch.no_grad()
    def _switch(self, name: str) -> None:
        with self._computing(list(self._masters)):
            getattr(self.inner, name)()

    @contextmanager
    def _computing(self, params: list[Tensor], *, rounds: bool = True) -> Iterator[None]:
        """Let the inner optimizer run on up-to-date masters of ``params``; if told so, round each once afterwards."""
        for p in params:
            local_itself(p).check_writable("a step")
        self._check_exchanged()
        self._take_over(params)
        self._fill(params)
        try:
            for p in params:
                self._masters[p].grad = None if p.grad is None else p.grad.to(torch.float32)
            with self._lent(self.param_groups):
                yield
            if rounds:
                assign(*self._as_written(params))
            for p in params if rounds else ():
                count_write(p)
                local_itself(p).written = False
        finally:
            for p in params:
                self._masters[p].grad = None
            self._free()
        self._show_state()

    def _check_exchanged(self) -> None:
        """Raise where something put other quantized parameters into the groups, which have no masters."""
        if any(_is_quantized(p) and p not in self._masters for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                "MasterWeights: quantized parameters of its groups are not those it was made of. Make it after "
                "fully_shard. accelerate's FSDP2 exchanges parameters in prepare: take "
                "fp8compile.integrations.accelerate.MasterWeights, or for a Trainer "
                "fp8compile.integrations.transformers.master_weights."
            )

    @contextmanager
    def _lent(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Let the groups hold masters in place of weights, while the inner optimizer runs."""
        weights = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [self._masters.get(p, p) for p in group["params"]]
        try:
            yield
        finally:
            for group, params in zip(groups, weights, strict=True):
                group["params"] = params

    def _share_groups(self, weights: list[list[Tensor]]) -> None:
        """Use the inner optimizer's groups, which it just made from masters, as the groups of weights."""
        for group, params in zip(self.inner.param_groups, weights, strict=True):
            group["params"] = params
        self.param_groups: list[dict[str, Any]] = self.inner.param_groups

    def _as_written(self, params: list[Tensor]) -> tuple[Any, ...]:
        """What `assign` takes: local weights, their masters, and how these are rounded."""
        weights = [local_itself(p) for p in params]
        # as a copy of the master in the weight's dtype would be; noise is for the digits that such a copy loses
        dtypes = [w.dtype if self._rounding == "nearest" else torch.float32 for w in weights]
        values = [local_itself(self._masters[p]).detach() for p in params]
        return weights, values, dtypes, self._rounding_of, [sharding_of(p) for p in params]

    def _take_over(self, params: list[Tensor]) -> None:
        """Restart the masters of weights that something else wrote to, from the weights' values.

        After a checkpoint is loaded, masters stay, whichever of model and optimizer was loaded first.
        """
        written = [p for p in params if self._keep and local_itself(p).written]
        for p, is_same in zip(written, stand_for(*self._as_written(written)), strict=True):
            local = local_itself(p)
            if not is_same:
                local_itself(self._masters[p]).copy_(local.dequantize(torch.float32))

    def _rounding_of(self, quantizer: Quantizer) -> Quantizer:
        if self._rounding == "nearest":
            return quantizer
        rounding: dict[str, Any] = {"rounding": "stochastic", "seed": (self._seed + 65537 * self._steps) & 0x7FFFFFFF}
        return replace(quantizer, **rounding)

    def _fill(self, params: list[Tensor]) -> None:
        """Fill masters that are not kept with the values of the codes."""
        for p in params if not self._keep else ():
            set_local_itself(self._masters[p], local_itself(p).dequantize(torch.float32))

    def _free(self) -> None:
        """Empty masters that are not kept; they are tensors without elements, because files take no freed memory."""
        for master in self._masters.values() if not self._keep else ():
            set_local_itself(master, torch.empty(0, device=master.device))

    # ------------------------------------------------------------------ what schedulers and checkpoints see

    def _show_state(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                master = self._masters.get(p, p)
                if master in self.inner.state:
                    kept = {MASTER: master.detach()} if p in self._masters and self._keep else {}
                    self.state[p] = {**self.inner.state[master], **kept}

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, each quantized weight's master beside its moments, and the number of steps."""
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
        """Load what ``state_dict`` returned. Weights are not changed: they are in the model's own state."""
        state = {index: dict(each) for index, each in state_dict["state"].items()}
        groups = [dict(group) for group in state_dict["param_groups"]]
        params = [p for group in self.param_groups for p in group["params"]]
        places = [index for group in groups for index in group["params"]]
        steps = [group.pop("master_steps", 0) for group in groups]
        for p, index in zip(params, places, strict=True):
            master = state.get(index, {}).pop(MASTER, None)
            if p in self._masters and self._keep:
                if master is None:
                    raise ValueError(
                        "MasterWeights: the state has no master for a quantized weight; it is of an optimizer without "
                        "masters. Start a new MasterWeights from the weights, or load into one with keep=False."
                    )
                local_itself(self._masters[p]).copy_(local_itself(master))
        weights = [group["params"] for group in self.param_groups]
        with self._lent(self.param_groups):
            self.inner.load_state_dict(
                {"state": {i: each for i, each in state.items() if each}, "param_groups": groups}
            )
        self._share_groups(weights)  # loading makes new ones
        self._steps = max(steps, default=0)
        self.state.clear()
        self._show_state()

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "_masters", "_keep", "_rounding", "_seed", "_steps", "_ready")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise, except during construction, because masters belong to the first groups."""
        if hasattr(self, "_ready"):
            raise NotImplementedError("MasterWeights: give all groups at once.")
        super().add_param_group(param_group)


def _is_quantized(p: Tensor) -> bool:
    return is_quantized_parameter(local_itself(p))


def _check_closure(optimizer: type[Optimizer]) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"MasterWeights: the step of {optimizer.__name__} needs a closure, which it calls between changes of the "
            "weights; codes would be those of before the step each time. Take an optimizer whose step does without, "
            "such as torch.optim.AdamW, or weights that are no codes (convert without quantized_parameters)."
        )

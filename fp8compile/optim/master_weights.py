"""MasterWeights: a torch.optim optimizer on float32 masters, which are rounded to codes once a step.

p.grad --to float32--> master.grad --torch.optim--> master float32 --(one amax message for all)--> codes, scale

MasterWeights and the inner optimizer share the dicts of their parameter groups, to which schedulers write. While the
inner optimizer runs, the groups hold masters instead of weights.
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

from fp8compile._compat import is_dtensor, load_hooks_apart, local_itself, set_local_itself, untraced
from fp8compile.nn.layer.redistribute_like import wrapped_like
from fp8compile.quantizers import CurrentScaling, Quantizer, TwoLevelScaling
from fp8compile.tensor import (
    SOURCE_DTYPES,
    assign,
    count_write,
    is_quantized_parameter,
    sharding_of,
    share_scale_of_part,
    shown,
    stand_for,
)

__all__ = ["MasterWeights"]

MASTER = "master"  # key of a master in an optimizer's state
STOCHASTIC = CurrentScaling, TwoLevelScaling  # quantizers that support stochastic rounding


class MasterWeights(Optimizer):
    """Optimizer that updates float32 master weights and quantizes them into FP8 parameters.

    Each FP8 parameter is quantized from its master with its own quantizer. Ranks that share scales reduce the amaxes
    of all weights in one collective. If a weight was written to in another way, such as by ``load_state_dict`` on the
    model alone, its master is reset to the dequantized weight. Other parameters are updated directly.

    Learning rate schedulers are supported; ``add_param_group`` is not. The state dict is that of the inner optimizer,
    with the master next to each weight's moments. The methods ``train`` and ``eval`` exist if the inner optimizer has
    them, as schedule-free optimizers do. A deep copy or a pickle contains copies of the weights. If you deep-copy
    ``(model, optimizer)`` together, the copied optimizer updates the copied model.

    Args:
        optimizer: An optimizer class such as ``torch.optim.AdamW``. Its ``step`` must not require a closure.
        params: Parameters, named parameters or parameter groups, as in ``torch.optim``.
        keep: Whether masters are kept between steps. If False, each step starts from the dequantized weights. Without
            stochastic rounding, updates smaller than half the FP8 spacing are then lost.
        rounding: Rounding mode for quantizing the masters, ``"nearest"`` or ``"stochastic"``. The noise differs from
            step to step, and a shard gets its part of the full weight's noise.
        seed: Seed of stochastic rounding.
        moments: Dtype in which an optimizer from ``fp8compile.optim`` stores its moments, such as
            ``torch.float8_e4m3fn``. None uses the optimizer's default. Options such as ``exp_avg_dtype`` take
            precedence.
        options: Keyword arguments passed to the optimizer.

    Raises:
        TypeError: ``optimizer`` is not an optimizer class, or its ``step`` requires a closure, as in LBFGS. Or
            ``moments`` is given, but the optimizer has no options for the dtypes of its moments.
        ValueError: ``rounding`` is neither of the two. Or it is stochastic, and a quantizer does not support
            stochastic rounding, FSDP2 shards a tensor parallel weight within blocks, or experts are spread over ranks.
    """

    def __init__(
        self,
        optimizer: type[Optimizer],
        params: Iterable[Any],
        *,
        keep: bool = True,
        rounding: str = "nearest",
        seed: int = 0,
        moments: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
            raise TypeError(
                f"MasterWeights: `optimizer` must be a class such as torch.optim.AdamW, got {shown(optimizer)}."
            )
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"MasterWeights: `rounding` is {rounding!r}; it must be 'nearest' or 'stochastic'.")
        _check_closure(optimizer)
        options = {**_of_moments(optimizer, moments), **options}
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
            raise ValueError(
                f"MasterWeights: {others[0]!r} does not support stochastic rounding; only {names} do. Use "
                "rounding='nearest', or another recipe."
            )
        if self._rounding == "stochastic" and p.ndim == 3 and is_dtensor(p):
            raise ValueError(
                "MasterWeights: stochastic rounding is not supported for experts sharded over ranks, because the "
                "noise would differ from the noise in a single process. Use rounding='nearest'."
            )
        if local.has_all_scales or is_dtensor(p):
            share_scale_of_part(p)  # tells the part its place; a resumed run steps before its first forward
        if local.has_all_scales and self._rounding == "stochastic" and len(sharding_of(p)) > 1:
            raise ValueError(
                "MasterWeights: stochastic rounding is not supported for a tensor parallel weight whose blocks are "
                f"divided by FSDP2. Use rounding='nearest', or shapes for which each FSDP2 rank has a multiple of "
                f"{local.sets()[-1].quantizer.block[0]} rows."
            )
        initial, local.initial = local.initial, None
        values = local.detach().dequantize(torch.float32) if initial is None else initial
        values = values.to(local.device, torch.float32)
        return wrapped_like(values, p).requires_grad_()

    # ------------------------------------------------------------------ what a step does

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one optimizer step, then quantize the masters of all FP8 parameters that have a gradient.

        ``closure``, if given, is called once before the step, and its result is returned.
        """
        self.make_masters()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._computing([p for p in self._masters if p.grad is not None], rounds=not self._stands_still()):
            self.inner.step()
            self._steps += 1
        return loss

    def make_masters(self) -> None:
        """Create masters that do not exist yet; each step calls this.

        Subclasses override this instead of `step`, because PyTorch would call the hooks of an overridden ``step``
        twice.
        """

    def _stands_still(self) -> bool:
        """Whether all learning rates are 0, as when `torch.distributed.checkpoint` initializes states.

        Masters are not rounded then, because codes that were just loaded would be made anew from dequantized values.
        """
        rates = [group.get("lr") for group in self.param_groups]
        return all(not (isinstance(rate, Tensor) and not rate.is_cpu) and rate == 0 for rate in rates)

    def __getattr__(self, name: str) -> Any:
        """Return the inner optimizer's ``train`` or ``eval``, wrapped so that it runs on the masters."""
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
        """Context in which the inner optimizer can run on the masters of ``params``, with their gradients.

        If ``rounds`` is True, the masters are rounded to codes when the context ends.
        """
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
        """Raise a RuntimeError if a quantized parameter in the groups has no master, as when FSDP replaced it."""
        if any(_is_quantized(p) and p not in self._masters for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                "MasterWeights: the quantized parameters were replaced after the optimizer was created. Create it "
                "after fully_shard. With accelerate and FSDP2, prepare replaces parameters: use "
                "fp8compile.integrations.accelerate.MasterWeights, or "
                "fp8compile.integrations.transformers.master_weights for a Trainer."
            )

    @contextmanager
    def _lent(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Context in which the parameter groups hold masters instead of weights, for the inner optimizer."""
        weights = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [self._masters.get(p, p) for p in group["params"]]
        try:
            yield
        finally:
            for group, params in zip(groups, weights, strict=True):
                group["params"] = params

    def _share_groups(self, weights: list[list[Tensor]]) -> None:
        """Share the inner optimizer's parameter groups, and put ``weights`` into them in place of masters."""
        for group, params in zip(self.inner.param_groups, weights, strict=True):
            group["params"] = params
        self.param_groups: list[dict[str, Any]] = self.inner.param_groups

    def _as_written(self, params: list[Tensor]) -> tuple[Any, ...]:
        """Return the arguments with which `assign` rounds the masters of ``params`` to codes."""
        weights = [local_itself(p) for p in params]
        # nearest: first round to the weight's dtype, as `copy_` of the master does. Stochastic: keep all its digits.
        dtypes = [w.dtype if self._rounding == "nearest" else torch.float32 for w in weights]
        values = [local_itself(self._masters[p]).detach() for p in params]
        return weights, values, dtypes, self._rounding_of, [sharding_of(p) for p in params]

    def _take_over(self, params: list[Tensor]) -> None:
        """Reset masters to the dequantized codes, for those of ``params`` whose codes other code has written.

        A master that rounds to the weight's codes stays, so model and optimizer may be loaded in either order.
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
        """Set the masters of ``params`` to the dequantized codes, unless masters are kept between steps."""
        for p in params if not self._keep else ():
            set_local_itself(self._masters[p], local_itself(p).dequantize(torch.float32))

    def _free(self) -> None:
        """Free the memory of the masters, unless masters are kept between steps."""
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
        """Return the optimizer's state, with the masters of FP8 parameters next to their moments.

        The number of steps is in each parameter group, as ``master_steps``.
        """
        self._show_state()
        if self._keep:  # before the first step too, so that a resumed run starts from the same masters
            for p, master in self._masters.items():
                self.state[p] = {**self.state.get(p, {}), MASTER: master.detach()}
        found = super().state_dict()
        for group in found["param_groups"]:
            group["master_steps"] = self._steps
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state and the masters from ``state_dict``; FP8 parameters don't change.

        Hooks run as in ``torch.optim``.
        """
        with load_hooks_apart(self, state_dict) as found, torch.no_grad():
            self._load(found)

    def _load(self, state_dict: dict[str, Any]) -> None:
        state = {index: dict(each) for index, each in state_dict["state"].items()}
        groups = [dict(group) for group in state_dict["param_groups"]]
        params = [p for group in self.param_groups for p in group["params"]]
        places = [index for group in groups for index in group["params"]]
        steps = [group.pop("master_steps", 0) for group in groups]
        masters: list[tuple[Tensor, Tensor]] = []  # copied last, so that an error leaves all of them unchanged
        for p, index in zip(params, places, strict=False):  # the inner optimizer compares the numbers of parameters
            master = state.get(index, {}).pop(MASTER, None)
            if p in self._masters and self._keep:
                masters.append((local_itself(self._masters[p]), _checked(master, self._masters[p])))
        weights = [group["params"] for group in self.param_groups]
        self._fill(list(self._masters))  # the inner optimizer may look at the shapes of its parameters
        with self._lent(self.param_groups):
            self.inner.load_state_dict(
                {"state": {i: each for i, each in state.items() if each}, "param_groups": groups}
            )
        for own, given in masters:
            own.copy_(given)
        self._free()
        self._share_groups(weights)  # loading has made new group dicts
        self._steps = max(steps, default=0)
        self.state.clear()
        self._show_state()

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "_masters", "_keep", "_rounding", "_seed", "_steps", "_ready")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise a NotImplementedError after construction, because only the constructor creates masters."""
        if hasattr(self, "_ready"):
            raise NotImplementedError(
                "MasterWeights: add_param_group is not supported. Pass all groups when creating it."
            )
        super().add_param_group(param_group)


def _is_quantized(p: Tensor) -> bool:
    return is_quantized_parameter(local_itself(p))


def _checked(given: Tensor | None, own: Tensor) -> Tensor:
    """Return this rank's part of a loaded master; raise a ValueError if it can't be that of the master ``own``."""
    if given is None:
        raise ValueError(
            "MasterWeights: the state has no master for a quantized weight, because it was saved by an optimizer "
            "without masters. Create a new MasterWeights from the weights, or load the state into one with keep=False."
        )
    local = local_itself(given)
    if given.shape != own.shape or local.shape != local_itself(own).shape or given.dtype not in SOURCE_DTYPES:
        raise ValueError(
            f"MasterWeights: a loaded master has shape {tuple(given.shape)}, {given.dtype}, but its weight has "
            f"shape {tuple(own.shape)}, and masters are float32 (bfloat16 and float16 can also be loaded). Load the "
            "state of an optimizer for this model, saved with the same number of ranks."
        )
    return local


def _check_closure(optimizer: type[Optimizer]) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"MasterWeights: the step of {optimizer.__name__} requires a closure, which would always see the FP8 "
            "weights from before the step. Use an optimizer that does not require a closure, such as "
            "torch.optim.AdamW, or convert with weight_lifetime='call'."
        )


def _of_moments(optimizer: type[Optimizer], moments: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the options that make an optimizer keep all moments in the dtype ``moments``; {} for None."""
    if moments is None:
        return {}
    names = [name for name in inspect.signature(optimizer).parameters if name.endswith("_dtype")]
    if not names:
        raise TypeError(
            f"MasterWeights: moments is {moments}, but {optimizer.__name__} has no option for the dtype of its "
            "moments. Use fp8compile.optim.AdamW or Muon, or omit moments."
        )
    return dict.fromkeys(names, moments)

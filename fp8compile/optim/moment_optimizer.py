"""MomentOptimizer: base class of optimizers with quantized moments, for their state, checkpoints and step.

param_groups, state --on the host--> a `Job` and a row of scalars per parameter --one graph--> parameters, state
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8compile._compat import (
    compiled_alone,
    is_dtensor,
    is_fake,
    load_hooks_apart,
    local_itself,
    plain_alias,
    untraced,
)
from fp8compile.optim.compiled_step import Job, Rule, advance
from fp8compile.optim.moments import CODES, STORED, MomentRows, StoredMoment
from fp8compile.quantizers.stochastic_rounding import check_rounding
from fp8compile.tensor import SOURCE_DTYPES, has_codes, shown

__all__ = ["AUTO", "MomentOptimizer"]

Backend = str | Callable[..., Any] | None
AUTO = "auto"  # the backend of a GPU's steps is Inductor; a CPU would compile for longer than most runs there take
OURS = ("rounding", "seed", "bf16_stochastic_round")  # options of how state is kept, which no checkpoint changes


class MomentOptimizer(Optimizer):
    """Base of optimizers with quantized moments; a subclass defines ``moments``, ``rule`` and `scalars`.

    Attributes:
        moments: For each moment, by name, whether the moment is never negative, and thus stored as its square root.
        rule: Update of one parameter: (parameter, gradient, moments, scalars) -> (what is written, new moments).
        refused: For each option that must be False or None, by name, the reason.
    """

    moments: ClassVar[dict[str, bool]]
    rule: ClassVar[Rule]
    refused: ClassVar[dict[str, str]]

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], backend: Backend) -> None:
        self._backend = backend
        self._compiled: dict[str, Callable[..., None]] = {}  # by type of device
        self._places: dict[Tensor, tuple[Tensor, ...]] = {}  # of parameters that ranks cut, which stay where they are
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_backend": self._backend, "_compiled": {}, "_places": {}}

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as ``torch.optim`` does; missing options take the optimizer's defaults.

        Raises:
            TypeError: A parameter is quantized, or not float32, bfloat16 or float16.
            ValueError: An option has a value that is not allowed, or a shard boundary divides a block.
        """
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise a ValueError or TypeError if an option or a parameter of a parameter group is not allowed."""
        owner = type(self).__name__
        self.check_refused(group)
        if "backend" in group:
            raise ValueError(
                f"{owner}: a group has backend={shown(group['backend'])}, but all groups are updated by one graph. "
                "Omit it from the group, and pass backend= to the optimizer."
            )
        self._check_options(group)
        for p in group["params"]:
            if has_codes(local_itself(p)):
                raise TypeError(
                    f"{owner}: a parameter is an FP8 parameter, which a step would round without a master weight. "
                    f"Wrap the optimizer: fp8compile.MasterWeights(fp8compile.optim.{owner}, params, lr=...)."
                )
            if p.dtype not in SOURCE_DTYPES:
                raise TypeError(f"{owner}: a parameter is {p.dtype}; it must be float32, bfloat16 or float16.")
            if any(each.dtype == CODES for each in self._stored(group)):
                MomentRows.of(p).check_blocks()

    def check_refused(self, options: dict[str, Any]) -> None:
        """Raise a ValueError if an option of `refused` is neither False nor None."""
        for name, reason in self.refused.items():
            if options.get(name):
                raise ValueError(f"{type(self).__name__}: `{name}` is not supported: {reason}. Omit it.")

    def _check_options(self, group: dict[str, Any]) -> None:
        owner = type(self).__name__
        for option in self._dtype_options():
            if group[option] not in STORED:
                allowed = ", ".join(map(str, STORED))
                raise ValueError(f"{owner}: `{option}` is {group[option]}; it must be one of {allowed}.")
        check_rounding(owner, group["rounding"], group["seed"])

    def _dtype_options(self) -> list[str]:
        return [f"{name}_dtype" for name in self.moments]

    def _stored(self, group: dict[str, Any]) -> list[StoredMoment]:
        return [StoredMoment.of_group(name, group, root=root) for name, root in self.moments.items()]

    # ------------------------------------------------------------------ a step

    def scalars(self, group: dict[str, Any], step: float) -> Sequence[float]:
        """Return the numbers that `rule` takes after the learning rate, for step number ``step`` (1 is the first)."""
        raise NotImplementedError

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step. If ``closure`` is given, first call it with gradients enabled, and return its result.

        A parameter without gradient does not change, nor does its state.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        for device in dict.fromkeys(p.device for p in params if p.grad is not None):
            self._advance(device)
        return loss

    def _advance(self, device: torch.device) -> None:
        """Run the step of the parameters on ``device``, of which at least one has a gradient."""
        jobs: list[Job] = []
        rows: list[tuple[float, ...]] = []
        rates: list[tuple[int, int, Tensor]] = []
        for group in self.param_groups:
            first, rate = len(jobs), group["lr"]
            for p in self._with_state(group, device):
                state, active = self.state[p], p.grad is not None
                state["step"] += active
                numbers = self.scalars(group, float(state["step"])) if active else ()
                jobs.append(self.job(p, group))
                known = 0.0 if isinstance(rate, Tensor) else float(rate)
                rows.append((float(active), float(state["step"]), known, *numbers))
            if isinstance(rate, Tensor):
                rates.append((first, len(jobs), rate))
        width = max(map(len, rows))
        scalars = torch.tensor([(*row, *(1.0,) * (width - len(row))) for row in rows]).to(device)
        for first, last, rate in rates:  # without a synchronization, if the rate is on the device
            scalars[first:last, 2] = rate
        self.advance(scalars, [each.arguments() for each in jobs])
        if self._backend_on(device) is not None:  # a graph that writes memory it has by two names counts no version
            torch.autograd.graph.increment_version([each.target for each in jobs])

    def _with_state(self, group: dict[str, Any], device: torch.device) -> Iterator[Tensor]:
        """Yield the group's parameters on ``device`` that have a gradient or a state; create missing states.

        A parameter without a gradient is part of the step's graph, but does not change.
        """
        for p in group["params"]:
            if p.device != device or (p.grad is None and not self.state.get(p)):
                continue
            if p.grad is not None and p.grad.is_sparse:
                raise TypeError(
                    f"{type(self).__name__}: a gradient is sparse; it must be dense. Create the embedding with "
                    "sparse=False, or pass its weight to another optimizer, such as torch.optim.SparseAdam."
                )
            if not self.state.get(p):
                self._check_options(group)  # they may have been changed since
                rows = MomentRows.of(p)
                self.state[p] = {"step": torch.tensor(0.0)}
                for each in self._stored(group):
                    self.state[p].update(each.zeros(p, rows))
            yield p

    def _store_anew(self, p: Tensor, group: dict[str, Any], rows: MomentRows) -> None:
        """Convert a parameter's stored moments to the dtypes in its group's options, which have changed."""
        self._check_options(group)
        stored, state = self._stored(group), self.state[p]
        if any(each.dtype == CODES for each in stored):
            rows.check_blocks()
        found = [each.loaded(state, p, rows) for each in stored]
        for each, parts in zip(stored, found, strict=True):
            for key in (each.name, *each.keys_of_codes()):
                state.pop(key, None)
            state.update(parts)

    def job(self, p: Tensor, group: dict[str, Any]) -> Job:
        """Return the tensors that a step reads and writes for parameter ``p`` of the parameter group ``group``."""
        rows, local, state = MomentRows.of(p), local_itself(p), self.state[p]
        if not is_fake(local):  # a graph of the step takes plain tensors, and FSDP2 may gather shards as codes
            local = plain_alias(local)
        stored = self._stored(group)
        if not all(each.is_in(state, rows) for each in stored):
            self._store_anew(p, group, rows)
        quantizers = tuple(each.quantizer_for(rows) for each in stored)
        is_local = all(each is None or each.is_local() for each in quantizers) and not group["bf16_stochastic_round"]
        if not is_local and p not in self._places:
            self._places[p] = rows.place(local.device)
        return Job(
            shape=rows.in_blocks()[0],
            parameter=local,
            grad=torch.zeros_like(local) if p.grad is None else local_itself(p.grad),
            target=local,
            moments=tuple(each.parts(state, rows) for each in stored),
            quantizers=quantizers,
            place=() if is_local else self._places[p],
            bf16_seed=group["seed"] if group["bf16_stochastic_round"] else None,
        )

    def _backend_on(self, device: torch.device) -> Backend:
        if self._backend != AUTO:
            return self._backend
        return None if device.type == "cpu" else "inductor"

    def advance(self, scalars: Tensor, jobs: Sequence[tuple[Any, ...]]) -> None:
        """Call `compiled_step.advance` for all jobs in one compiled graph, or eagerly, as ``backend`` says."""
        kind, rule = scalars.device.type, type(self).rule
        if kind not in self._compiled:
            backend = self._backend_on(scalars.device)
            own = partial(advance, rule) if backend is None else compiled_alone(advance, rule, backend)
            self._compiled[kind] = own
        self._compiled[kind](scalars, jobs)

    # ------------------------------------------------------------------ files

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this optimizer, or of its counterpart in ``torch.optim``.

        If this optimizer stores a moment as codes, saved codes are loaded unchanged, and saved values are quantized,
        such as those of ``torch.optim.AdamW``. If this optimizer stores a moment as values, saved codes are
        dequantized. Hooks run as in ``torch.optim``.

        Raises:
            KeyError: The saved state lacks a moment.
            ValueError: The saved groups have other numbers of parameters, or `adapted` refuses the state.
        """
        with load_hooks_apart(self, state_dict) as found, torch.no_grad():
            self._load(self.adapted(found))

    def adapted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict of the counterpart in ``torch.optim`` as one that this optimizer could have saved.

        Raises:
            ValueError: The state has what this optimizer does not keep.
        """
        return state_dict

    def _load(self, state_dict: dict[str, Any]) -> None:
        kept = [{name: group[name] for name in (*self._dtype_options(), *OURS)} for group in self.param_groups]
        before = [dict(group) for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": {}})
        self.state.clear()
        places = [index for group in state_dict["param_groups"] for index in group["params"]]
        for group, own, old in zip(self.param_groups, kept, before, strict=True):
            for name, value in old.items():
                group.setdefault(name, value)
            group.update(own)
        owners = [(p, group) for group in self.param_groups for p in group["params"]]
        for (p, group), index in zip(owners, places, strict=True):
            state = state_dict["state"].get(index)
            if not state:
                continue
            rows = MomentRows.of(p)
            self.state[p] = {"step": torch.as_tensor(float(state["step"]))}
            for each in self._stored(group):
                self.state[p].update(each.loaded(state, p, rows))


def check_number(owner: str, name: str, value: Any, *, below: float = math.inf) -> None:
    """Raise a ValueError unless ``value`` is a one-element tensor, or a number >= 0 and < ``below``.

    ``owner`` and ``name`` name the optimizer and the option in the error.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or is_dtensor(value):
            raise ValueError(
                f"{owner}: `{name}` is a {type(value).__name__} of shape {tuple(value.shape)}; if it is a tensor, it "
                "must have exactly one element and not be a DTensor."
            )
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < below:
        most = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{owner}: `{name}` is {shown(value)}; it must be a number of at least 0{most}.")

"""Compute the scales of weights that FSDP2 gathers as codes, from amaxes exchanged in one message."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8compile import _compat
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.nn.layer.delayed_state import RowOfWeight
from fp8compile.ops.collectives import all_reduce_amaxes
from fp8compile.ops.layer.quantize_over_ranks import outer_amax_of, scales_of, whole_amax
from fp8compile.ops.quantization_steps import Scales
from fp8compile.parallel.fsdp2.sharded_weight import ShardedWeight, WriteCounter, part_of_weight
from fp8compile.quantizers import DelayedScaling, Quantizer

__all__ = ["WeightScales"]


@dataclass(frozen=True)
class _Version:
    """A weight's version counters when its scales or codes were computed."""

    write_counter: WriteCounter  # the counter of writes that the weight had
    writes: tuple[int, ...]  # version counters of the weight

    @staticmethod
    def of(parameter: _compat.FsdpParameter) -> _Version:
        """Read the version counters that a weight has now."""
        return _Version(*_writes(parameter))

    def holds(self, parameter: _compat.FsdpParameter) -> bool:
        """Whether the weight still has these version counters, so that nothing was written to it."""
        counter, writes = _writes(parameter)
        return self.write_counter is counter and self.writes == writes


@dataclass(frozen=True)
class _Scales:
    """Scales of one weight by the recipe's field, and the weight's version when they were computed.

    For blocks that each lie on one rank, it holds the outer amax, from which each rank computes its own scales.
    """

    by_role: dict[str, Scales]  # multiplier, scale and outer scale, by the recipe's field, such as ``"weight"``
    # Outer amax by the recipe's field, if each block lies on one rank. That rank computes the scales of its blocks
    # itself.
    outer_amaxes: dict[str, Tensor]
    version: _Version


def _writes(parameter: _compat.FsdpParameter) -> tuple[WriteCounter, tuple[int, ...]]:
    """Return a weight's `WriteCounter`, and four numbers that change if something writes to the weight.

    They are the version counters of the parameter, of its local tensor and of the plain tensor inside, and the count
    in the `WriteCounter`, which includes writes through views.
    """
    local = _compat.local_itself(parameter.sharded)
    if not isinstance(local, ShardedWeight):
        raise RuntimeError(
            "fsdp_float8_all_gather: a parameter that was prepared for an FP8 all-gather was replaced by a "
            f"{type(local).__name__}. Change weights in place, or with load_state_dict."
        )
    return local.write_counter, (
        parameter.sharded._version,
        local._version,
        local.plain._version,
        local.write_counter.count,
    )


@_compat.untraced
def _end_of_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count a write to each weight after an optimizer's step, because some kernels raise no version counter."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.requires_grad and isinstance(local := _compat.local_itself(p), ShardedWeight):
            local.write_counter.count += 1


@cache
def _listen_to_optimizers() -> None:
    register_optimizer_step_post_hook(_end_of_step)


class WeightScales:
    """Scales of the weights that are gathered as codes, computed again after weights change.

    If a weight has changed, asking for its scale computes the scales of all changed weights, with one message for each
    group of ranks. If one rank changes a weight, all ranks must change it, as in training.
    """

    def __init__(self, weights: Iterable[tuple[nn.Module, str]]) -> None:
        _listen_to_optimizers()
        self._weights = list(weights)
        self._parameters: dict[tuple[nn.Module, str], _compat.FsdpParameter] = {}
        self._scales: dict[tuple[nn.Module, str], _Scales] = {}
        # what a rank sends of its shard while codes live for a step: codes and scales, by GEMM and how they are sent
        self._sent: dict[tuple[nn.Module, str], tuple[_Version, dict[Hashable, tuple[Tensor, ...]]]] = {}

    def _known(self, weight: tuple[nn.Module, str]) -> dict[tuple[nn.Module, str], _compat.FsdpParameter]:
        """Return FSDP2's records of weights, by (module, name); read them anew if ``weight`` is not among them."""
        if weight not in self._parameters:
            found = {(p.module, p.name): p for p in _compat.fsdp_parameters()}
            self._parameters = {each: found[each] for each in self._weights if each in found}
        return self._parameters

    def of(self, module: nn.Module, name: str, role: str) -> Scales:
        """Return the multiplier (1 / scale), the scales of blocks and the outer scale (or None) of a weight.

        The weight is the parameter ``name`` of ``module``; ``role`` names the recipe's field that holds the weight's
        quantizer. With delayed scaling, the last backward computed the multiplier.
        """
        found = self._of_now(module, name)
        return found.by_role[role] if role in found.by_role else _of_steps_before(module, role)

    def outer_amax(self, module: nn.Module, name: str, role: str) -> Tensor:
        """Return the outer amax of the parameter ``name`` of ``module``, whose blocks each lie on one rank.

        Ranks exchange only this amax, and each rank computes the scales of its own blocks. ``role`` is the recipe's
        field of the quantizer.
        """
        return self._of_now(module, name).outer_amaxes[role]

    def forget(self) -> None:
        """Drop all scales and codes, so that the next request computes them again."""
        self._scales.clear()
        self._sent.clear()

    def sent(
        self, module: nn.Module, name: str, which: Hashable, make: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Return ``make()``, codes and scales to send, cached until the weight changes.

        The weight is the parameter ``name`` of ``module``; ``which`` is the key in the weight's cache.
        """
        weight = module, name
        parameter = self._known(weight)[weight]
        version, found = self._sent.get(weight, (None, {}))
        if version is None or not version.holds(parameter):
            version, found = _Version.of(parameter), {}
            self._sent[weight] = version, found
        if which not in found:
            with torch.inference_mode(mode=False):
                found[which] = make()
        return found[which]

    def _of_now(self, module: nn.Module, name: str) -> _Scales:
        weight = module, name
        known, found = self._known(weight), self._scales.get(weight)
        if found is None or not found.version.holds(known[weight]):
            self._refresh(known)
            found = self._scales[weight]
        return found

    def _stale(self, known: dict[tuple[nn.Module, str], _compat.FsdpParameter]) -> set[tuple[nn.Module, str]]:
        """Return the weights that have changed, and weights that share a scale with a changed weight.

        ``known`` maps weights, as (module, name), to FSDP2's records.
        """
        changed = {
            weight
            for weight, parameter in known.items()
            if (found := self._scales.get(weight)) is None or not found.version.holds(parameter)
        }
        beside = {other for module, _ in changed for other in getattr(module, "scale_group", ())}
        return {weight for weight in known if weight in changed or weight[0] in beside}

    @torch.inference_mode(mode=False)  # training uses these scales too, until a weight changes
    @torch.no_grad()
    def _refresh(self, known: dict[tuple[nn.Module, str], _compat.FsdpParameter]) -> None:
        changed: list[tuple[tuple[nn.Module, str], str, Quantizer, bool]] = []
        amaxes: list[Tensor] = []
        groups: list[tuple[Any, ...]] = []
        stale = self._stale(known)
        for weight, parameter in known.items():
            if weight not in stale:
                continue
            self._scales[weight] = _Scales({}, {}, _Version.of(parameter))
            shard = _compat.local_itself(parameter.sharded)
            part = part_of_weight(shard, parameter.mesh, parameter.size, parameter.mp_policy)
            for role, quantizer in shard.quantizers_over_ranks(parameter.module, part).items():
                is_outer = shard.own_levels(part, quantizer)[0]
                alone = Plain(part.local, TensorLayout(batch=shard.batch))
                own = whole_amax(alone if is_outer else part, quantizer)
                own = outer_amax_of(own, quantizer, shard.batch) if is_outer else own
                changed.append((weight, role, quantizer, is_outer))
                amaxes.append(own.to(parameter.device))
                cuts: tuple[Any, ...] = part.cuts
                groups.append(tuple(cut.group for cut in cuts))
        reduced = all_reduce_amaxes(amaxes, groups)
        shared = _shared_amaxes(changed, reduced)
        for (weight, role, quantizer, is_outer), amax in zip(changed, reduced, strict=True):
            if isinstance(quantizer, DelayedScaling):
                row: Any = RowOfWeight(weight[0])()
                history, _ = row
                history[0].copy_(amax.view(()))  # for the next backward, which computes a multiplier from the amax
            elif is_outer:
                self._scales[weight].outer_amaxes[role] = amax.clone()  # a view would keep the whole message alive
            else:
                shard = _compat.local_itself(known[weight].sharded)
                outer_amax = shared.get((weight[0], role))
                if outer_amax is not None and not quantizer.has_outer_scale():
                    amax, outer_amax = outer_amax.view(amax.shape), None
                self._scales[weight].by_role[role] = scales_of(
                    amax, quantizer, outer_amax=outer_amax, batch=shard.batch
                )


def _shared_amaxes(
    entries: list[tuple[tuple[nn.Module, str], str, Quantizer, bool]],
    amaxes: list[Tensor],
) -> dict[tuple[nn.Module, str], Tensor]:
    """Return, by layer and recipe field, the amax of a scale that several layers share, (1,) float32.

    Raises:
        RuntimeError: FSDP2 gathers only some of these layers as codes.
    """
    own: dict[tuple[nn.Module, str], Tensor] = {}
    for (weight, role, quantizer, _), amax in zip(entries, amaxes, strict=True):
        if getattr(weight[0], "scale_group", ()):
            outer = outer_amax_of(amax, quantizer, 0) if quantizer.has_outer_scale() else amax.view(1)
            own[weight[0], role] = outer
    found = {}
    for module, role in own:
        group: Any = module.scale_group
        if any((each, role) not in own for each in group):
            raise RuntimeError(
                "fsdp_float8_all_gather: layers share a global scale, but fully_shard shards only some of their "
                "weights. Shard all of them or none."
            )
        found[module, role] = torch.cat([own[each, role] for each in group]).amax(0, keepdim=True)
    return found


def _of_steps_before(module: nn.Module, role: str) -> Scales:
    """Return (multiplier, scale, None) of a weight with delayed scaling; the last backward computed the multiplier."""
    row: Any = RowOfWeight(module)()
    _, multiplier = row
    multiplier = multiplier.clone().view(1, 1)
    return multiplier, getattr(module.recipe, role).scale_of(multiplier), None

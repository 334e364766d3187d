"""Private interfaces of FSDP2: its modules, and the parameters that it shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

__all__ = [
    "FsdpParameter",
    "fsdp_messages_told",
    "fsdp_modules",
    "fsdp_parameters",
    "is_fsdp",
    "is_fsdp_managed",
    "is_part_of_flat_parameter",
    "is_sharded_class",
]


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` was called on a module."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def fsdp_modules(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules that `fully_shard` was called on, "the model" for ``model`` itself."""
    return [name or "the model" for name, module in model.named_modules() if is_fsdp(module)]


def is_sharded_class(cls: type[Any]) -> bool:
    """Whether `fully_shard` or `replicate` made a class, told by the names of its bases, without importing FSDP2."""
    return any(base.__name__ in ("FSDPModule", "ReplicateModule") for base in cls.__mro__)


def is_fsdp_managed(module: torch.nn.Module) -> bool:
    """Whether FSDP manages a module's parameters, because FSDP was applied to the module or a parent."""
    return getattr(module, "_is_fsdp_managed_module", False)


def is_part_of_flat_parameter(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a view of a flat parameter of FSDP1 (``use_orig_params=True``)."""
    return getattr(parameter, "_fsdp_flattened", False)


class FsdpParameter:
    """A parameter that FSDP2 manages, and its module, name, mesh and dtypes."""

    def __init__(self, parameter: Any, group: Any) -> None:
        self._parameter = parameter
        self._group = group

    @property
    def module(self) -> torch.nn.Module:
        """The first module that holds the parameter."""
        return self._parameter._module_info.module

    @property
    def modules(self) -> list[torch.nn.Module]:
        """All modules that hold the parameter; more than one if it is shared."""
        return [self.module, *self._parameter._module_info.shared_modules]

    @property
    def name(self) -> str:
        """The parameter's attribute name in `module`."""
        return self._parameter._module_info.param_name

    @property
    def sharded(self) -> torch.Tensor:
        """The sharded parameter, a DTensor, which optimizers update; `load_state_dict` may replace it."""
        return self._parameter.sharded_param

    @property
    def mesh(self) -> Any:
        """The one-dimensional mesh of the ranks that have the shards."""
        return self._parameter.shard_mesh

    @property
    def size(self) -> torch.Size:
        """The size of the whole parameter, over all ranks of `mesh`."""
        return self._parameter._orig_size

    @property
    def mp_policy(self) -> Any:
        """FSDP2's ``MixedPrecisionPolicy`` for this parameter."""
        return self._parameter.mp_policy

    @property
    def stays_after_forward(self) -> bool:
        """Whether gathered data stays in memory from the forward to the backward.

        The data is the whole parameter, or with `reshard_after_forward=N` one of N larger shards.
        """
        return not self._group._reshard_after_forward or self._group._use_post_forward_mesh

    @property
    def is_in_backward(self) -> bool:
        """Whether the current gather, possibly a prefetch, is for the backward."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        state = self._group._training_state
        if state == TrainingState.IDLE:  # the user called unshard()
            return torch._C._current_graph_task_id() != -1
        return state in (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)

    @property
    def device(self) -> torch.device:
        """The device on which the parameter is gathered."""
        return self._parameter.device


def fsdp_parameters() -> Iterator[FsdpParameter]:
    """Yield all parameters that FSDP2 manages in this process."""
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        for group in _groups(reference()):
            for parameter in group.fsdp_params:
                yield FsdpParameter(parameter, group)


def _groups(state: Any) -> Sequence[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # 2.12
        groups = [group] if (group := getattr(state, "_fsdp_param_group", None)) is not None else []
    return groups


@contextmanager
def fsdp_messages_told(module: Any, begin: Callable[[], None], end: Callable[[], object]) -> Iterator[None]:
    """Context that calls ``begin`` before and ``end`` after FSDP2 gathers parameters or starts to reduce gradients.

    Parameter groups of other modules than ``module`` do not count. `is_fsdp` has to be True for ``module``.
    """

    def telling(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_tell(*args: Any, **kwargs: Any) -> Any:
            begin()
            try:
                return run(*args, **kwargs)
            finally:
                end()

        return run_and_tell

    with ExitStack() as stack:
        for group in _groups(module._get_fsdp_state()):
            for name in ("unshard", "wait_for_unshard", "post_backward"):
                stack.enter_context(mock.patch.object(group, name, telling(getattr(group, name))))
        yield

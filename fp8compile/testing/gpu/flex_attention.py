"""Makes FlexAttention traceable on the CPU as on a GPU: with gradients and log-sums of exponentials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

__all__ = ["pretend_flex_attention"]


def _any_device(*_: Any) -> None:  # not a mock, because Dynamo traces it
    """Accept tensors on any device; replaces PyTorch's ``_validate_device``."""


def _options_of_a_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def options(
        query: Any, key: Any, value: Any, return_lse: bool, given: Any, return_aux: Any = None
    ) -> dict[str, Any]:
        found = original(query, key, value, True, given)  # noqa: FBT003  # PyTorch's signature
        wants_sums = return_lse if return_aux is None else return_aux.lse
        found["OUTPUT_LOGSUMEXP"] = wants_sums or torch.is_grad_enabled()
        found["OUTPUT_MAX"] = return_aux is not None and return_aux.max_scores
        return found

    return options


@contextmanager
def pretend_flex_attention() -> Iterator[None]:
    """Context in which `flex_attention` accepts CPU tensors that require grad, as on a GPU.

    Source: ``_validate_device`` and ``_apply_kernel_options`` in torch/nn/attention/flex_attention.py (2.11 to 2.15).
    """
    from torch.nn.attention import flex_attention as module

    with (
        mock.patch.object(module, "_validate_device", _any_device),
        mock.patch.object(module, "_apply_kernel_options", _options_of_a_gpu(module._apply_kernel_options)),
    ):
        yield

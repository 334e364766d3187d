"""Chooses Inductor's template for each GEMM by its number, because no GPU is there to time templates on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

__all__ = ["Choices", "chosen_templates"]


@dataclass
class Choices:
    """Number of templates that Inductor would choose from.

    Attributes:
        most: The largest number of templates that Inductor would time for one GEMM.
    """

    most: int = 0


@contextmanager
def chosen_templates(number: int | None) -> Iterator[Choices]:
    """Context in which Inductor compiles each GEMM to one of its Triton templates, chosen by number.

    A GEMM without a template gets Inductor's first choice, a library call.

    Args:
        number: Which of the templates that Inductor would time; the last one if there are fewer. None leaves Inductor
            as it is: it calls a library for GEMMs, and FlexAttention uses its default template.

    Yields:
        The choices, whose ``most`` grows as GEMMs are compiled; it stays 0 if ``number`` is None.
    """
    from torch._inductor import config
    from torch._inductor.select_algorithm import AlgorithmSelectorCache, TritonTemplateCaller

    found, original = Choices(), AlgorithmSelectorCache.__call__

    def choose(cache: Any, name: str, choices: Any, *args: Any, **kwargs: Any) -> Any:
        templates = [each for each in choices if isinstance(each, TritonTemplateCaller)]
        found.most = max(found.most, len(templates))
        taken = templates[min(number or 0, len(templates) - 1)] if templates else choices[0]
        return original(cache, name, [taken], *args, **kwargs)

    if number is None:
        yield found
        return
    with (
        mock.patch.object(AlgorithmSelectorCache, "__call__", choose),
        config.patch({"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}),
    ):
        yield found

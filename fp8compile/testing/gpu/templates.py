"""Inductor's templates of products, chosen by number: autotuning without a GPU to time them on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

__all__ = ["Choices", "chosen_templates"]


@dataclass
class Choices:
    """What Inductor would choose from.

    Attributes:
        most: The largest number of templates that it would time for one product.
    """

    most: int = 0


@contextmanager
def chosen_templates(number: int | None) -> Iterator[Choices]:
    """While this runs, Inductor multiplies by its Triton templates, and takes one of them without timing any.

    Products that have no template are a library's.

    Args:
        number: Number of the template, among those that Inductor would time; the last one if there are fewer. With
            None nothing changes: a product is a library's, and FlexAttention has the one template of its defaults.
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

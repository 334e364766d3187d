"""Finds converted layers on a mesh whose FP8 GEMMs are missing from the graphs.

GEMMs are assigned to layers by their weights. So additional GEMMs of one layer, as by activation checkpointing, do
not hide that another layer's GEMMs are missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fp8compile.nn.convertible.convertible_layers import is_converted
from fp8compile.nn.experts.converted_class import ConvertedExperts
from fp8compile.nn.experts.known_modules import layout_of
from fp8compile.quantizers import GEMMS, Recipe
from fp8compile.testing.explain.attribution import Owners, Unknown
from fp8compile.testing.explain.capture import Recorded
from fp8compile.testing.explain.layers import layer_weights, weight_parameters
from fp8compile.testing.explain.module_stack import Names
from fp8compile.testing.explain.weight_flow import PRODUCTS
from fp8compile.testing.gpu.graphs import GpuGraph
from fp8compile.testing.graphs.recording import KeptGraph
from fp8compile.testing.graphs.report import place_text

__all__ = ["CODE_DTYPES", "layers_astray"]

CODE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS


@dataclass
class _Weight:
    """A weight of a converted layer, and its GEMMs in the graphs.

    Attributes:
        recipe: The layer's recipe.
        is_frozen: Whether the weight needs no gradient.
        dtypes: Maps each of the three GEMMs by name to its calls in the graphs, as tuples of the operands' dtypes.
        input_needs_grad: Whether the layer's input needs a gradient.
        unknown: Opaque operators that take the weight and a tensor computed from the inputs.
    """

    recipe: Recipe
    is_frozen: bool
    dtypes: defaultdict[str, list[tuple[torch.dtype, ...]]] = field(default_factory=lambda: defaultdict(list))
    input_needs_grad: bool = False
    unknown: list[Unknown] = field(default_factory=list)

    def problems(self) -> Iterator[str]:
        """Yield descriptions of how the weight's GEMMs differ from its recipe; nothing if all agree."""
        yield from (
            f"{each.op} at {place_text(each.file, each.line)} uses it in an unknown way" for each in self.unknown
        )
        in_codes = [gemm for gemm in GEMMS if self.recipe.quantizers(gemm) is not None]
        if in_codes and not self.dtypes[OUTPUT.name]:
            yield "it is not called"
            return
        for gemm in in_codes:
            found = self.dtypes[gemm.name]
            other = {dtype for dtypes in found if not set(dtypes) <= set(CODE_DTYPES) for dtype in dtypes}
            if other:
                names = " x ".join(sorted(str(dtype).removeprefix("torch.") for dtype in other))
                yield f"{gemm.name} fell back to {names}"
            elif not found and self._needs(gemm.name):
                yield f"{gemm.name} is missing in the graphs"

    def _needs(self, gemm: str) -> bool:
        if gemm == GRAD_INPUT.name:
            return self.input_needs_grad
        return gemm == OUTPUT.name or not self.is_frozen


def _converted(model: nn.Module) -> tuple[dict[str, _Weight], dict[int, list[str]]]:
    weights: dict[str, _Weight] = {}
    names = layer_weights(model)
    for fqn, layer in model.named_modules():
        if isinstance(layer, ConvertedExperts):
            for name, stack in layout_of(layer).weights.items():
                whole = f"{fqn}.{name}" if fqn else name
                weights[whole] = _Weight(layer.recipe, not stack.requires_grad)
                names[id(stack)] = [whole]
        elif is_converted(layer):
            frozen = not any(each.requires_grad for each in weight_parameters(layer))
            weights[fqn] = _Weight(layer.recipe, frozen)
    return weights, names


def _note_products(owners: Owners, weights: Mapping[str, _Weight]) -> None:
    for values, is_backward in ((owners.forward, False), (owners.backward, True)):
        for value in values:
            backward = is_backward and not owners.is_recomputed(value)
            if value.op not in PRODUCTS:
                for each in owners.unknown(value, backward=backward):
                    if each.layer in weights:
                        weights[each.layer].unknown.append(each)
                continue
            layers, gemm = owners.whose(value, backward=backward)
            operands = owners.operands(value)
            for weight in (weights[layer] for layer in layers if layer is not None and layer in weights):
                weight.dtypes[gemm].append(tuple(each.tensors[0].dtype for each in operands))
                if gemm == OUTPUT.name:
                    data = (each for each in operands if owners.forms[each].is_data)
                    weight.input_needs_grad |= any(each in owners.needs_grad for each in data)


def layers_astray(model: nn.Module, graphs: Sequence[GpuGraph]) -> tuple[str, ...]:
    """Describe each weight of a converted layer whose FP8 GEMMs are not all in the graphs.

    A frozen weight needs no grad_weight. If an input needs no gradient, its layer needs no grad_input.

    Args:
        model: The model.
        graphs: The model's graphs, as `gpu_graphs` returned them.

    Returns:
        A line for each such weight, with its name and its problems.
    """
    weights, names = _converted(model)
    forward, backward = graphs[0].graph, graphs[1].graph if len(graphs) > 1 else None
    kept = KeptGraph("", forward, forward, backward)
    buffers = set(map(id, model.buffers()))
    _note_products(Owners(Recorded(kept, graphs[0].called_with), names, buffers, Names.of(model)), weights)
    found = {name or "the model": ", ".join(dict.fromkeys(weight.problems())) for name, weight in weights.items()}
    return tuple(f"{name}: {problems}" for name, problems in found.items() if problems)

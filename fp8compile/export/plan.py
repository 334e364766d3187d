"""Plan of a checkpoint in a serving format, made from the model's names, shapes and recipes, without values.

    parameter of a converted layer --kind of its codes, shape, name--> Weight, with a scheme and its places
                                  +--the format can't hold it--> raises, or stays as values
    any other parameter or buffer ----------------------------> Weight without a scheme

Errors are therefore raised before anything is gathered or written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile._compat import fsdp_parameters, is_fsdp_managed
from fp8compile.export.checkpoint_names import Place, places, places_of_transposed, tied_names
from fp8compile.export.read_folder import grouped, listed
from fp8compile.export.scheme import Format, Scheme, kind_of
from fp8compile.nn.check_model import check_model
from fp8compile.nn.convertible.convertible_layers import is_converted, is_layer, layers, weight_names, weight_slots
from fp8compile.nn.experts.known_modules import is_transposed
from fp8compile.nn.experts.routers import routers
from fp8compile.nn.layer.forward_dtype import forward_dtypes
from fp8compile.nn.layer.linear import STATE, Linear
from fp8compile.quantizers import DelayedScaling

__all__ = ["Plan", "Weight", "plan_of"]

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")  # parts of names that wrappers add
UNFIT = ("raise", "values")
UNKNOWN_DTYPE = (
    "Weights are float32 and were quantized in float32, because no forward pass with gradients was seen. If they "
    "were trained under autocast, pass its dtype as forward_dtype."
)
HEAD = (
    "{name} is written in high precision, because not every server loads FP8 output embeddings. Training "
    "computes it in FP8; to train it as it is served, pass filter='!lm_head' to convert."
)


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter or buffer, and how the checkpoint stores it.

    Attributes:
        name: Name in the model.
        tensor: The parameter or buffer.
        layer: The converted layer whose weight it is; None for a tensor that is written as values.
        scheme: How the format stores the codes; None for values.
        places: Names and rows of a quantized weight's matrices in the checkpoint. Stacked biases of transposed experts
            have the places of the experts' weights. Other tensors have none.
        dtype: Dtype to which the forward casts the tensor; None without a cast.
    """

    name: str
    tensor: Tensor
    layer: nn.Module | None = None
    scheme: Scheme | None = None
    places: tuple[Place, ...] = ()
    dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that will be written to a checkpoint, in the order of the model's modules.

    Attributes:
        model: The model.
        format: The format.
        weights: All parameters and buffers that the checkpoint stores.
        groups: For each scheme, the checkpoint's names of the layers that it stores.
        ignored: The checkpoint's names of the layers that are not quantized, including routers.
        notes: Differences between serving and training, and their reasons.
    """

    model: nn.Module
    format: Format
    weights: list[Weight] = field(default_factory=list)
    groups: dict[Scheme, list[str]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _clean(name: str) -> str:
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield all parameters and persistent buffers: full name, module, name in the module, tensor."""
    for fqn, module in model.named_modules(remove_duplicate=False):
        buffers: dict[str, Any] = dict(module._buffers)
        own: dict[str, Any] = {**module._parameters, **buffers}
        for name, tensor in own.items():
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            if isinstance(module, Linear) and name in STATE:  # delayed scaling's; a server has no use for it
                continue
            yield _clean(f"{fqn}.{name}" if fqn else name), module, name, tensor


def _layers_of_weights(model: nn.Module) -> dict[tuple[nn.Module, str], nn.Module]:
    """Map (module, parameter name) of each converted layer's weight to the layer."""
    return {slot: layer for layer, _ in layers(model) if is_converted(layer) for slot in weight_slots(layer)}


def _holders(model: nn.Module) -> dict[Tensor, list[tuple[nn.Module, str]]]:
    """Map each parameter to all (module, name) pairs that hold it."""
    found: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((module, name))
    return found


def _dtypes_of_graph_fsdp(model: nn.Module) -> dict[Tensor, torch.dtype]:
    """Map each parameter that `fp8compile.parallel.graph_fsdp` shards to its dtype in the forward."""
    states = [(module, vars(module)["graph_fsdp"]) for module in model.modules() if "graph_fsdp" in vars(module)]
    own = ((module._parameters, state.shardings) for module, state in states)
    pairs = ((parameters[name], each.dtype) for parameters, every in own for name, each in every.items())
    return {parameter: dtype for parameter, dtype in pairs if parameter is not None}


def _dtypes_in_forward(model: nn.Module) -> dict[Tensor, torch.dtype]:
    """Map each parameter that FSDP2 or `graph_fsdp` casts in the forward to the cast's dtype."""
    if in_graph := _dtypes_of_graph_fsdp(model):
        return in_graph
    if not any(is_fsdp_managed(module) for module in model.modules()):
        return {}
    own = {module: module._parameters for module in model.modules()}
    found = [(each.mp_policy.param_dtype, module, each.name) for each in fsdp_parameters() for module in each.modules]
    cast = [(dtype, own[module].get(name)) for dtype, module, name in found if dtype is not None and module in own]
    return {parameter: dtype for dtype, parameter in cast if parameter is not None}


def _static_inputs_missing(layer: Any, scheme: Scheme) -> str | None:
    if scheme.input_scale is None:
        return None
    own = layer.recipe.input
    if isinstance(layer, Linear) and isinstance(own, DelayedScaling) and own.format == "e4m3":
        return None
    return f"has no e4m3 delayed scaling for its input, which {scheme.name} requires for its static input scale"


def _is_ragged(place: Place, scheme: Scheme) -> bool:
    """Whether N is no multiple of the block size, and the format can hold the matrix nevertheless.

    N / rows of scales then has to be a fraction, which readers can't mistake for the block size.
    """
    rows, block = place.rows, scheme.multiples[0]
    return scheme.has_ragged_rows and bool(rows % block) and bool(rows % -(-rows // block))


def _wrong_size(place: Place, columns: int, scheme: Scheme) -> str | None:
    rows, (of_rows, of_columns) = place.rows, scheme.multiples
    if place.step > 1 and of_rows > 1:
        return f"interleaves gate and up, so a block of {of_rows} x {of_columns} would contain both"
    fits = rows % of_rows == 0 or _is_ragged(place, scheme)
    if not fits or columns % of_columns or place.start % of_rows:
        return (
            f"is {rows} x {columns}, but sizes for {scheme.name} must be multiples of {of_rows} x {of_columns}, "
            "because readers compute the block size by division and would get a different one"
        )
    return None


def _scheme_of_transposed(experts: Any, name: str, weight: Tensor, scheme: Scheme) -> tuple[Scheme, list[Place]] | str:
    """Return the scheme and checkpoint matrices of weights (E, in_features, out_features), or why they don't fit.

    If one stack of a module is refused, all are: readers expect either linears or stacks for all weights of a module.
    """
    path, _, own = name.rpartition(".")
    found: list[Place] = []
    for other in weight_names(experts):
        count, columns, rows = getattr(experts, other).shape
        places = places_of_transposed(experts, f"{path}.{other}" if path else other, rows, count)
        reasons = (_wrong_size(place, columns, scheme) for place in places)
        if (reason := next((each for each in reasons if each is not None), None)) is not None:
            return reason if other == own else f"is in one module with {other}, which {reason}"
        found = places if other == own else found
    return scheme, found


def _scheme_or_reason(
    model: nn.Module, format: Format, layer: Any, name: str, weight: Tensor
) -> tuple[Scheme, list[Place]] | str:
    """Return the scheme and checkpoint matrices of a layer's weight, or why the format can't hold it."""
    turned = is_transposed(layer)
    if turned and weight.ndim == 2:
        return "is stored as (in_features, out_features), which no serving format supports"
    if weight.ndim not in (2, 3) or name.count("parametrizations."):
        return "is not a matrix or a stack of matrices of its own"
    kind = kind_of(layer.recipe.weight)
    if (scheme := format.scheme(kind)) is None:
        return f"is quantized by {layer.recipe.weight!r}; {format.refusal(kind)}"
    if (reason := _static_inputs_missing(layer, scheme)) is not None:
        return reason
    if turned:
        return _scheme_of_transposed(layer, name, weight, scheme)
    if isinstance(found := places(model, name, weight), str):
        return found
    reasons = (_wrong_size(place, weight.shape[-1], scheme) for place in found)
    return next((reason for reason in reasons if reason is not None), None) or (scheme, found)


def _check_mixed(plan: Plan) -> None:
    if len(plan.groups) > 1 and not plan.format.mixes:
        found = plan.groups.items()
        each = "; ".join(f"{scheme.name}: {len(names)} layers, such as {names[0]}" for scheme, names in found)
        raise ValueError(
            f"export: layers are quantized in several ways ({each}), but {plan.format.name!r} supports only one per "
            "model. Use 'compressed-tensors', or one recipe for all layers."
        )


def _raise_unfit(format: Format, unfit: list[str]) -> None:
    raise ValueError(
        f"export: {format.name!r} does not support {len(unfit)} weights:{listed(unfit)}\n"
        "unfit='values' writes them in high precision, so the server does not compute these layers exactly as in "
        "training."
    )


def _ignored_name(model: nn.Module, name: str, weight: Tensor) -> list[str]:
    found = places(model, name, weight) if name.endswith("weight") or weight.ndim == 3 else "it has a different name"
    if isinstance(found, str):
        return [name.removesuffix(".weight")]
    return [place.name for place in found]


def _output_embeddings(model: nn.Module) -> set[nn.Module]:
    """Return the modules that compute logits: that of a transformers model, and modules called ``lm_head``."""
    found = {module for name, module in model.named_modules() if name.rpartition(".")[2] == "lm_head"}
    own: Any = getattr(model, "get_output_embeddings", None)
    return found | ({own()} - {None} if own is not None else set())


class _Planner:
    """Fills a `Plan`, one parameter or buffer after another."""

    def __init__(self, plan: Plan, forward_dtype: torch.dtype | None, *, is_read: bool) -> None:
        self.plan, self.forward_dtype = plan, forward_dtype
        self.refused: list[str] = []
        model = plan.model
        self._of_slot, self._tied, self._holders = _layers_of_weights(model), tied_names(model), _holders(model)
        self._dtypes, self._routers = _dtypes_in_forward(model), routers(model)
        self._heads = set() if is_read else _output_embeddings(model)
        self._of_layer = {} if is_read else self._dtypes_of_layers()

    def _dtypes_of_layers(self) -> dict[nn.Module, torch.dtype]:
        """Return the dtype in which each FP8 layer's forward quantizes its weights, where it is known."""
        own: dict[nn.Module, torch.dtype] = {}
        for (module, name), layer in self._of_slot.items():
            if (weight := module._parameters.get(name)) is not None:
                own[layer] = self._dtypes.get(weight, weight.dtype)
        found = forward_dtypes("export", self.plan.model, own, self.forward_dtype)
        if any(own[layer] == torch.float32 and layer not in found for layer in own):
            self.note(UNKNOWN_DTYPE)
        return found

    def note(self, text: str) -> None:
        if text and text not in self.plan.notes:
            self.plan.notes.append(text)

    def _note_scheme(self, scheme: Scheme, layer: Any) -> None:
        if layer.recipe.input is not None:
            self.note(scheme.served)
        elif not scheme.served:
            self.note(
                f"The server also quantizes inputs in {scheme.name}, while training keeps them in high precision."
            )
        block = layer.recipe.weight.block
        if scheme.kind in ("mx", "nvfp4") and block[0] > 1:
            self.note(
                f"{scheme.name} has one scale per row, so each scale of a {block[0]} x {block[1]} block is written "
                f"{block[0]} times. The quantized data and the values are the same."
            )

    def _add_codes(self, name: str, tensor: Tensor, layer: Any, dtype: torch.dtype | None) -> bool:
        """Plan to write a converted layer's weight as codes; return False if the format can't hold it."""
        found = _scheme_or_reason(self.plan.model, self.plan.format, layer, name, tensor)
        if isinstance(found, str):
            self.refused.append(f"{name} {found.rstrip('.')}")
            return False
        scheme, where = found
        self.plan.groups.setdefault(scheme, []).extend(place.name for place in where)
        self._note_scheme(scheme, layer)
        if is_transposed(layer):
            self.note(
                f"Experts such as {name} are written as one linear layer for each expert and projection. Readers "
                "that expect a stack, such as that of transformers for gpt-oss, do not find them."
            )
        if any(_is_ragged(place, scheme) for place in where):
            self.note(
                f"Weights such as {name} have {tensor.shape[-2]} rows, which is not a multiple of "
                f"{scheme.multiples[0]}. vLLM and SGLang read them; transformers does not dequantize them."
            )
        own = Weight(name=name, tensor=tensor, layer=layer, scheme=scheme, places=tuple(where), dtype=dtype)
        self.plan.weights.append(own)
        return True

    def add(self, name: str, module: nn.Module, own: str, tensor: Tensor) -> None:
        """Add a parameter or buffer to the plan; ``name`` is its full name, ``own`` its name in ``module``."""
        layer = self._of_slot.get((module, own))
        dtype = self.forward_dtype or self._of_layer.get(layer or module) or self._dtypes.get(tensor)
        is_product = layer is not None or module in self._routers or is_layer(module)
        if name in self._tied:
            if is_product:
                self._ignore(name, tensor)
                self.note(f"{name} is tied to {self._tied[name]}, so it is also served in high precision.")
            return
        if places_of_bias := self._places_of_bias(name):
            self.plan.weights.append(Weight(name=name, tensor=tensor, dtype=dtype, places=places_of_bias))
            return
        has_other_holders = any(slot not in self._of_slot for slot in self._holders.get(tensor, ()))
        if layer is not None and module in self._heads:
            self.note(HEAD.format(name=name))
        elif layer is not None and not has_other_holders and self._add_codes(name, tensor, layer, dtype):
            return
        if tensor.ndim > 1 and is_product:
            self._ignore(name, tensor)
        self.plan.weights.append(Weight(name=name, tensor=tensor, dtype=dtype))

    def _places_of_bias(self, name: str) -> tuple[Place, ...]:
        """Return the checkpoint matrices of the transposed experts whose bias is ``name``; () for other tensors."""
        weights = (each for each in self.plan.weights if f"{each.name}_bias" == name and each.scheme is not None)
        found = next(weights, None)
        return () if found is None or not is_transposed(found.layer) else found.places  # type: ignore[arg-type]

    def _ignore(self, name: str, tensor: Tensor) -> None:
        self.plan.ignored.extend(_ignored_name(self.plan.model, name, tensor))


def _check_exportable(model: nn.Module, unfit: str) -> None:
    if unfit not in UNFIT:
        raise ValueError(f"export: `unfit` is {unfit!r}; it must be 'raise' or 'values'.")
    check_model("export", model)
    if not any(is_converted(module) for module in model.modules()):
        raise ValueError("export: the model has no FP8 layers. Call fp8compile.convert first.")


def plan_of(
    model: nn.Module,
    format: Format,
    *,
    unfit: str = "raise",
    forward_dtype: torch.dtype | None = None,
    is_read: bool = False,
) -> Plan:
    """Decide for each tensor of a model how the checkpoint stores it.

    Args:
        model: A converted model.
        format: The format.
        unfit: What to do with a converted layer's weight that the format can't hold: ``"raise"``, or
            ``"values"`` to write the weight in high precision.
        forward_dtype: Dtype to which the forward casts parameters before it quantizes them; None for the dtype that
            was seen in forwards with gradients, else FSDP's.
        is_read: Whether a checkpoint is read, whose output embeddings may be quantized, and not written.

    Raises:
        ValueError: Nothing is converted, a weight does not fit, or the format does not allow several kinds of codes.
    """
    model = getattr(model, "_orig_mod", model)
    _check_exportable(model, unfit)
    planner = _Planner(Plan(model=model, format=format), forward_dtype, is_read=is_read)
    plan, refused = planner.plan, planner.refused
    for each in _named_tensors(model):
        planner.add(*each)
    if refused and unfit == "raise":
        _raise_unfit(format, refused)
    for text in grouped(refused):
        planner.note(f"{text}. Such weights are served in high precision.")
    if not plan.groups:
        raise ValueError(f"export: {format.name!r} does not support any weight: {plan.notes[0]}")
    _check_mixed(plan)
    return plan

"""load_quantized: loads a serving checkpoint into a model; codes become quantized parameters.

    config.json --> format         plan of the model --> names and shapes, all of them checked
    tensors of one weight --StoredMatrix--> Quantized --> QuantizedParameter, which replaces the weight

A weight is dequantized only if the recipe has other codes of the weight for the backward. These codes are made from
the dequantized values, one weight at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile import ops
from fp8compile._compat import is_dtensor
from fp8compile.export.checkpoint_names import in_checkpoint, is_of_transformers, tied_names
from fp8compile.export.format_table import FORMATS
from fp8compile.export.plan import Plan, Weight, plan_of
from fp8compile.export.read_folder import StoredFiles, listed, read_json
from fp8compile.export.scheme import Format
from fp8compile.export.stored_matrix import FLOATS, StoredMatrix, unshared
from fp8compile.export.whole_matrix import empty_matrix
from fp8compile.layout.four_bit_packing import one_a_byte, packed_in_rows, two_a_byte
from fp8compile.layout.quantized import STACK, WHOLE, Quantized
from fp8compile.nn.convert.check_not_in_ddp import check_not_in_ddp
from fp8compile.nn.experts.known_modules import as_it_lies, is_transposed
from fp8compile.nn.weights.quantize_weights import as_parameter, put_codes, quantizers_of_sets
from fp8compile.quantizers import DelayedScaling, Quantizer
from fp8compile.tensor import QuantizedParameter, is_quantized_parameter

__all__ = ["LoadReport", "load_quantized"]

METHODS = {"fp8": "fine_grained_fp8", **{name: name for name in ("compressed-tensors", "modelopt")}}
# static scales of inputs and of caches, which training has no use for
STATIC = re.compile(r".*\.(input_scale|activation_scale|input_global_scale|[kvq]_scale|output_scale)")


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The result of `load_quantized`.

    Attributes:
        folder: The folder.
        format: Name of the format.
        codes: Names of the parameters that are now quantized.
        values: Names of the parameters and buffers that were loaded in high precision.
        notes: What was not loaded, and why.
    """

    folder: Path
    format: str
    codes: tuple[str, ...]
    values: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        first = f"{self.folder}: {self.format}, {len(self.codes)} quantized, {len(self.values)} other parameters"
        return "\n".join([first, *(f"    {note}" for note in self.notes)])


# ---------------------------------------------------------------------------------- what is in the folder


def _declared(folder: Path) -> tuple[Format, Mapping[str, Any]]:
    """Return the folder's format, and what its configuration says of the quantization."""
    own = read_json("load_quantized", folder / "config.json").get("quantization_config")
    if own is None and (folder / "hf_quant_config.json").exists():
        found = read_json("load_quantized", folder / "hf_quant_config.json").get("quantization")
        own = {**(found if isinstance(found, dict) else {}), "quant_method": "modelopt"}
    own = own if isinstance(own, dict) else {}
    method = own.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"load_quantized: {folder} has quant_method {method!r}; it must be one of "
            f"{', '.join(map(repr, METHODS))}. Load a checkpoint in high precision with the model's own library, "
            "and convert it with fp8compile.convert."
        )
    return FORMATS[METHODS[method]], own


def _undeclared(plan: Plan, config: Mapping[str, Any]) -> list[str]:
    """Return, in words, which fields of a folder's configuration say that its data is of another kind."""
    return [
        f"the configuration has {name} {found!r}; for this recipe it must be {' or '.join(map(repr, allowed))}"
        for name, found, allowed in plan.format.declares(config, tuple(plan.groups))
        if found not in allowed
    ]


# ---------------------------------------------------------------------------------- one parameter


def _device_of(tensor: Tensor, given: torch.device | str | None) -> torch.device | str:
    if given is not None:
        return given
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _first_set(weight: Weight, stored: Sequence[StoredMatrix], files: StoredFiles, device: Any) -> Quantized:
    """Assemble a weight's codes and scales for the forward, of a matrix or a stack, from the checkpoint's matrices."""
    rows, columns = _sizes(weight)
    quantizer = stored[0].quantizer
    whole = empty_matrix(quantizer, rows, columns, device)
    if weight.tensor.ndim == 3:
        count = weight.tensor.shape[0]
        whole = replace(whole.each(lambda each: each.new_empty((count, *each.shape))), layout=STACK)
    for each in stored:
        part, place = each.read(files), each.place
        own = whole if place.expert is None else whole.each(lambda t, index=place.expert: t[index])  # type: ignore[misc]
        step = quantizer.block[0]
        own.codes[place.start : place.stop : place.step].copy_(part.codes)
        of_grid = slice(None) if step == -1 else slice(place.start // step, -(-place.stop // step), place.step)
        own.scale[of_grid].copy_(part.scale)
        if own.outer_scale is not None and part.outer_scale is not None:
            own.outer_scale.copy_(part.outer_scale)
    if whole.outer_scale is not None and weight.tensor.ndim == 3:
        whole = replace(whole, outer_scale=whole.outer_scale.flatten())
    return whole


def _sizes(weight: Weight) -> tuple[int, int]:
    """Return N and K of a weight's matrices, which may be stored transposed."""
    first, second = weight.tensor.shape[-2:]
    return (second, first) if weight.layer is not None and is_transposed(weight.layer) else (first, second)


def _as_it_lies(codes: Quantized, weight: Weight) -> Quantized:
    """Convert codes (E, N, K) to the layer's layout, which may be (E, K, N): E experts, N outputs, K inputs."""
    if weight.layer is None or not is_transposed(weight.layer):
        return codes
    single, quantizer = one_a_byte(codes.codes, codes.quantizer)
    turned = replace(codes, codes=single, quantizer=quantizer).t()
    quantizer = packed_in_rows(as_it_lies(weight.layer, codes.quantizer), weight.tensor.shape)
    packed = two_a_byte(turned.codes.contiguous(), quantizer)
    return replace(turned, codes=packed, scale=turned.scale.contiguous(), quantizer=quantizer, layout=STACK)


def _has_rows(tensor: Tensor, index: Mapping[str, Tensor]) -> bool:
    """Whether ``index``, from `_index_of_rows`, numbers rows of ``tensor``; False if it numbers single elements."""
    return tensor.ndim > 1 and sum(each.numel() for each in index.values()) != tensor.numel()


def _values_of(codes: Quantized, dtype: torch.dtype) -> Tensor:
    if not codes.layout.batch:
        return ops.dequantize(codes.codes, codes.scale, codes.quantizer, dtype, *codes.scales[1:])
    outer = [()] * len(codes.codes) if codes.outer_scale is None else [(each,) for each in codes.outer_scale.split(1)]
    each = zip(codes.codes, codes.scale, outer, strict=True)
    return torch.stack([ops.dequantize(*two, codes.quantizer, dtype, *one) for *two, one in each])


def _parameter(weight: Weight, stored: Sequence[StoredMatrix], files: StoredFiles, device: Any) -> QuantizedParameter:
    first, dtype = _as_it_lies(_first_set(weight, stored, files, device), weight), weight.tensor.dtype
    _, *others = quantizers_of_sets(weight.layer)
    sets, batch = [replace(first, layout=WHOLE)], first.layout.batch
    for quantizer in others:  # forward and backward multiply different codes
        values = _values_of(first, dtype)
        sets.append(QuantizedParameter.of(values, quantizer, batch=batch).sets()[0])
    return QuantizedParameter.of_sets(sets, dtype, batch=batch)


def _index_of_rows(model: nn.Module, weight: Weight, names: set[str]) -> dict[str, Tensor]:
    """Map the name of each checkpoint tensor of a parameter to the indices of the parameter's rows that it holds.

    For vectors and biases of single experts, indices are of elements. ``names`` are all names in the checkpoint.
    """
    tensor = weight.tensor
    if weight.scheme is None and weight.places and f"{weight.places[0].name}.bias" in names:
        index = torch.arange(tensor.numel()).view(tensor.shape)
        return {f"{each.name}.bias": index[each.expert, each.start : each.stop : each.step] for each in weight.places}
    shape = (*tensor.shape[:-1], 1) if tensor.ndim > 1 else tensor.shape
    return in_checkpoint(model, weight.name, torch.arange(int(torch.Size(shape).numel())).view(shape))


# ---------------------------------------------------------------------------------- the model


class _Loader:
    """Checks all tensors of a folder against a model, and then loads them."""

    def __init__(self, plan: Plan, files: StoredFiles, device: torch.device | str | None) -> None:
        self.plan, self.files, self.device = plan, files, device
        self.problems: list[str] = list(files.problems)
        self.used: set[str] = set()
        self.codes: list[tuple[Weight, list[StoredMatrix]]] = []
        self.values: list[tuple[Weight, dict[str, Tensor]]] = []

    def look(self) -> None:
        """Find each parameter's tensors in the folder, and collect all problems in ``problems``."""
        if self.problems:
            return
        for weight in self.plan.weights:
            if is_dtensor(weight.tensor):
                self.problems.append(
                    f"{weight.name} is sharded over ranks. Load before parallelize_module or fully_shard."
                )
            elif (stored := self._stored(weight)) and any(each.is_quantized(self.files) for each in stored):
                self._look_at_codes(weight, stored)
            else:
                self._look_at_values(weight)
        self._look_at_others()
        if not self.problems:
            self._look_at_tied()

    def _stored(self, weight: Weight) -> list[StoredMatrix]:
        if weight.scheme is None:
            return []
        layer: Any = weight.layer
        return [StoredMatrix(place, weight.scheme, layer.recipe.weight, _sizes(weight)[1]) for place in weight.places]

    def _look_at_codes(self, weight: Weight, stored: list[StoredMatrix]) -> None:
        layer: Any = weight.layer
        if isinstance(layer.recipe.weight, DelayedScaling):
            self.problems.append(
                f"{weight.name} uses delayed scaling, whose scale comes from the layer and not from the checkpoint"
            )
            return
        if getattr(layer, "scale_group", ()) and weight.tensor.requires_grad:
            self.problems.append(
                f"{weight.name} shares a global scale with other layers, and loading it would change that scale. "
                "Freeze the weights, or convert without share_outer_scale."
            )
            return
        try:
            quantizers_of_sets(layer)
        except ValueError as error:
            self.problems.append(f"{weight.name}: the recipe {error}")
            return
        found = [problem for each in stored for problem in each.problems(self.files)]
        self.problems += found or unshared(stored, self.files)
        for each in stored:
            self.used.update(each.names())
        self.codes.append((weight, stored))

    def _look_at_values(self, weight: Weight) -> None:
        rows = _index_of_rows(self.plan.model, weight, self.files.names())
        columns = weight.tensor.shape[-1:] if _has_rows(weight.tensor, rows) else ()
        for name, index in rows.items():
            shape = (*index.shape[:-1], *columns) if columns else tuple(index.shape)
            if name not in self.files.names():
                self.problems.append(f"{name} is missing")
            elif self.files.shape(name) != shape:
                self.problems.append(f"{name} has shape {self.files.shape(name)}; the model has {shape}")
            elif (dtype := self.files.dtype(name)) not in FLOATS and weight.tensor.is_floating_point():
                self.problems.append(
                    f"{name} has dtype {dtype} and no scale; the model has {weight.tensor.dtype} values"
                )
        self.used.update(rows)
        self.values.append((weight, rows))

    def _look_at_others(self) -> None:
        model: Any = self.plan.model
        allowed = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        tied = {*tied_names(self.plan.model)}
        for name in sorted(self.files.names() - self.used):
            if STATIC.fullmatch(name) or name in tied or any(each.search(name) for each in allowed):
                continue
            self.problems.append(
                f"{name} is not in the model. Either there is no such parameter, or fp8compile.convert did not "
                "convert its layer."
            )

    def _look_at_tied(self) -> None:
        """Collect in ``problems`` the parameters with two names for which the folder has two different tensors."""
        found: list[tuple[Weight, tuple[Quantizer, ...], list[str]]] = []
        for weight, stored in self.codes:
            names = [name for each in stored for name in each.names()]
            found.append((weight, quantizers_of_sets(weight.layer), names))
        found += [(weight, (), list(rows)) for weight, rows in self.values]
        first: dict[Tensor, tuple[Weight, tuple[Quantizer, ...], list[str]]] = {}
        for each in found:
            weight, quantizers, names = each
            other, others_quantizers, others_names = first.setdefault(weight.tensor, each)
            if other is weight:
                continue
            what = f"{weight.name} is tied to {other.name} in the model, but"
            if quantizers != others_quantizers:
                self.problems.append(f"{what} their recipes quantize it differently. Use one recipe, or untie them.")
            elif len(names) != len(others_names) or not all(map(self._are_equal, names, others_names)):
                self.problems.append(f"{what} they differ in the folder. Untie them to load both.")

    def _are_equal(self, name: str, other: str) -> bool:
        one, two = self.files.get(name), self.files.get(other)
        if one is None or two is None:
            return one is two
        return one.dtype == two.dtype and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, two)))

    def load(self) -> None:
        """Replace the model's parameters by the folder's tensors; call `look` before."""
        made: dict[Tensor, Any] = {}  # a parameter with two names stays one
        for weight, stored in self.codes:
            own = weight.name.rpartition(".")[2]
            if weight.tensor not in made:
                found = _parameter(weight, stored, self.files, _device_of(weight.tensor, self.device))
                made[weight.tensor] = as_parameter(weight.tensor, own, found, function="fp8compile.load_quantized")
            put_codes(weight.layer, own, made[weight.tensor])
        for weight, rows in self.values:
            if weight.tensor not in made:
                made[weight.tensor] = self._with_values(weight, rows)
            if made[weight.tensor] is not weight.tensor:
                _replace(self.plan.model, weight.name, made[weight.tensor])
        if is_of_transformers(self.plan.model):
            model: Any = self.plan.model
            model.tie_weights()

    def _with_values(self, weight: Weight, rows: Mapping[str, Tensor]) -> Tensor:
        """Copy the folder's values to a parameter or buffer, and return it; if it is on meta, return a new one."""
        parameter = weight.tensor
        target = parameter
        if parameter.is_meta or is_quantized_parameter(parameter):
            target = torch.empty(parameter.shape, dtype=parameter.dtype, device=_device_of(parameter, self.device))
        has_rows = _has_rows(target, rows)
        flat = target.detach().view(-1, *(target.shape[-1:] if has_rows else ()))
        for name, index in rows.items():
            found: Any = self.files.get(name)
            found = found.view(-1, *(found.shape[-1:] if has_rows else ()))
            if index.ndim == 0:
                flat.copy_(found)
            else:
                flat[index.flatten().to(flat.device)] = found.to(flat)
        if is_quantized_parameter(parameter):
            parameter.copy_(target)
            return parameter
        if target is not parameter and isinstance(parameter, nn.Parameter):
            return nn.Parameter(target, requires_grad=parameter.requires_grad)
        return target


def _replace(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, own = name.rpartition(".")
    setattr(model.get_submodule(path), own, tensor)


def _check_real(model: nn.Module) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, each in named if each.is_meta]
    if not left:
        return []
    return [
        f"{', '.join(left[:3])}{' and more' if len(left) > 3 else ''} are still on the meta device, because no "
        "checkpoint contains them. Create such buffers on a real device, for example with "
        "accelerate.init_empty_weights(include_buffers=False)."
    ]


def load_quantized(
    model: nn.Module, folder: str | os.PathLike[str], *, device: torch.device | str | None = None
) -> LoadReport:
    """Load a checkpoint in a serving format; quantized weights become FP8 parameters.

    The forward then uses the quantized weights and scales of the checkpoint. Parameters keep their ``requires_grad``.
    Freeze them, or train them with `fp8compile.MasterWeights`. Weights stored in high precision are loaded in high
    precision. Tied parameters stay tied. Parameters are new objects, so create optimizers and shard the model
    afterwards.

    ``fp8compile.convert`` also works on a model on the meta device. Quantized weights are then never in memory in high
    precision. The exception is a recipe that quantizes weights differently for the backward (`rowwise`, `mxfp8`): each
    weight in turn is dequantized and quantized again for the backward.

    Args:
        model: A model converted by `fp8compile.convert`, with recipes that quantize weights in the same way as the
            checkpoint.
        folder: A folder in one of the formats of `save_pretrained`, written by this package or another tool.
        device: Device of the parameters; by default the current device of each parameter, or the CPU instead of the
            meta device.

    Returns:
        A report to print.

    Raises:
        ValueError: The format is unknown, a file can't be read, or the model is wrapped in DistributedDataParallel. Or
            the checkpoint does not match the model: a tensor is missing, is not in the model, or does not have the
            shape or dtype of the recipe; config.json describes a different quantization; a scale is negative, infinite
            or NaN, or differs within its block or matrix; the names of a tied parameter have different tensors, or
            recipes that quantize differently; the recipe has delayed scaling; or a weight is sharded. The message
            lists all problems. The model is then unchanged.
        FileNotFoundError: The folder has no config.json.
    """
    path = Path(folder)
    form, config = _declared(path)
    plan = plan_of(model, form, unfit="values", is_read=True)
    files = StoredFiles("load_quantized", path)
    loader = _Loader(plan, files, device)
    loader.look()
    loader.problems += _undeclared(plan, config)
    if not loader.codes and not loader.problems:
        loader.problems.append("it has no quantized weight for any converted layer")
    if loader.problems:
        raise ValueError(f"load_quantized: {path} does not match the model:{listed(loader.problems)}")
    check_not_in_ddp("load_quantized", [weight.tensor for weight, _ in loader.codes])
    with torch.no_grad():
        loader.load()
    skipped = sum(1 for name in files.names() - loader.used if STATIC.fullmatch(name))
    notes = [f"{skipped} static scales were not read; training computes the scale of each input."] if skipped else []
    return LoadReport(
        folder=path,
        format=form.name,
        codes=tuple(weight.name for weight, _ in loader.codes),
        values=tuple(weight.name for weight, _ in loader.values),
        notes=(*notes, *_check_real(plan.model)),
    )

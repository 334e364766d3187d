"""compressed-tensors: the layout of llm-compressor's checkpoints, which vLLM and transformers read.

Weights are (N, K), with N output and K input features:

    float-quantized       weight (N, K) e4m3; weight_scale float32 (1,), (N, 1) or (N / 128, K / 128)
    mxfp8-quantized       weight (N, K) e4m3; weight_scale (N, K / 32) uint8, E8M0
    nvfp4-pack-quantized  weight_packed (N, K / 2) uint8; weight_scale (N, K / 16) e4m3;
                          weight_global_scale (1,) float32, 1 / outer scale: values are divided by it

Source: compressed-tensors 0.20, ``compressors``; vLLM, ``compressed_tensors/schemes``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fp8compile.export.scheme import (
    CODES,
    Format,
    Scheme,
    eight_bits,
    four_bit_values,
    numbers_of,
    packed_codes,
    scales_of_rows,
    spread_scales,
)
from fp8compile.layout.quantized import Quantized

__all__ = ["COMPRESSED_TENSORS"]

WEIGHT_ONLY = (
    "The server loads FP4 weights and keeps inputs in high precision, because the format requires a static global "
    "scale for inputs, but training computes one for each input."
)


def _nvfp4(matrix: Quantized) -> dict[str, Tensor]:
    assert matrix.outer_scale is not None
    return {
        ".weight_packed": packed_codes(matrix),
        ".weight_scale": scales_of_rows(matrix).view(CODES),
        ".weight_global_scale": 1.0 / matrix.outer_scale.reshape(1),
    }


def _read(stored: Mapping[str, Tensor]) -> Tensor:
    codes, scale = stored[".weight"].float(), numbers_of(stored[".weight_scale"])
    return codes * (scale if scale.ndim == 1 else spread_scales(scale, codes.shape))


def _read_nvfp4(stored: Mapping[str, Tensor]) -> Tensor:
    codes = four_bit_values(stored[".weight_packed"])
    outer = 1.0 / stored[".weight_global_scale"]  # vLLM, process_weights_after_loading
    return codes * (spread_scales(stored[".weight_scale"].float(), codes.shape) * outer)


def _numbers(bits: int, strategy: str, *, dynamic: bool, group: int | None = None, **others: Any) -> dict[str, Any]:
    """Return compressed-tensors' ``QuantizationArgs`` as JSON; ``strategy`` names what shares a scale."""
    own = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic}
    return {**own, **({} if group is None else {"group_size": group}), **others}


def _group(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    return {"format": form, "weights": weights, "input_activations": inputs}


def _config(groups: Mapping[Scheme, Sequence[str]], ignored: Sequence[str]) -> dict[str, Any]:
    formats = {scheme.config["format"] for scheme in groups}
    found: dict[str, Any] = {}
    for index, (scheme, names) in enumerate(groups.items()):
        targets = ["Linear"] if len(groups) == 1 else list(names)
        found[f"group_{index}"] = {"targets": targets, "output_activations": None, **scheme.config}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": found,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _declares(config: Mapping[str, Any], schemes: Sequence[Scheme]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    bits = tuple({scheme.config["weights"]["num_bits"] for scheme in schemes})
    groups = config.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        own = group.get("weights") if isinstance(group, dict) else None
        for key, allowed in (("type", ("float",)), ("num_bits", bits), ("symmetric", (True,))):
            if isinstance(own, dict) and key in own:
                yield f"{key} of the weights of {name}", own[key], allowed


SUFFIXES = (".weight", ".weight_scale")
EIGHT: dict[str, Any] = {"suffixes": SUFFIXES, "read": _read}
ONE_SCALE = eight_bits(SUFFIXES, lambda matrix: matrix.scale.reshape(1))
GRID = eight_bits(SUFFIXES, lambda matrix: matrix.scale)
BLOCKS: dict[str, Any] = {
    "name": "float-quantized, block",
    "write": GRID,
    "multiples": (128, 128),
    "config": _group(
        "float-quantized",
        _numbers(8, "block", dynamic=False, block_structure=[128, 128]),
        _numbers(8, "group", dynamic=True, group=128),
    ),
    **EIGHT,
}
BYTES = "torch.uint8"
COMPRESSED_TENSORS = Format(
    name="compressed-tensors",
    schemes=(
        Scheme(
            kind="tensor",
            name="float-quantized, tensor",
            write=ONE_SCALE,
            config=_group(
                "float-quantized", _numbers(8, "tensor", dynamic=False), _numbers(8, "tensor", dynamic=True)
            ),
            **EIGHT,
        ),
        Scheme(
            kind="static_tensor",
            name="float-quantized, tensor, static inputs",
            write=ONE_SCALE,
            input_scale=".input_scale",
            config=_group(
                "float-quantized", _numbers(8, "tensor", dynamic=False), _numbers(8, "tensor", dynamic=False)
            ),
            **EIGHT,
        ),
        Scheme(
            kind="channel",
            name="float-quantized, channel",
            write=GRID,
            config=_group(
                "float-quantized", _numbers(8, "channel", dynamic=False), _numbers(8, "token", dynamic=True)
            ),
            **EIGHT,
        ),
        Scheme(kind="block", **BLOCKS),
        Scheme(kind="block_ue8m0", **BLOCKS),
        Scheme(
            kind="mx",
            name="mxfp8-quantized",
            write=eight_bits(SUFFIXES, scales_of_rows),
            multiples=(1, 32),
            config=_group(
                "mxfp8-quantized",
                _numbers(8, "group", dynamic=False, group=32, scale_dtype=BYTES),
                _numbers(8, "group", dynamic=True, group=32, scale_dtype=BYTES),
            ),
            **EIGHT,
        ),
        Scheme(
            kind="nvfp4",
            name="nvfp4-pack-quantized",
            suffixes=(".weight_packed", ".weight_scale", ".weight_global_scale"),
            write=_nvfp4,
            read=_read_nvfp4,
            multiples=(1, 16),
            served=WEIGHT_ONLY,
            stores_divisor=True,
            config=_group(
                "nvfp4-pack-quantized",
                _numbers(4, "tensor_group", dynamic=False, group=16, scale_dtype="torch.float8_e4m3fn"),
                None,
            ),
        ),
    ),
    config=_config,
    declares=_declares,
    mixes=True,
)

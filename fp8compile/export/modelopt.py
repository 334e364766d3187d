"""modelopt: the layout of NVIDIA's ModelOpt, which TensorRT-LLM, vLLM and SGLang read.

Weights are (N, K), with N output and K input features. Codes are multiplied by all scales of weights:

    FP8                        weight (N, K) e4m3; weight_scale, input_scale () float32
    FP8_PER_CHANNEL_PER_TOKEN  weight (N, K) e4m3; weight_scale (N,) float32
    MXFP8                      weight (N, K) e4m3; weight_scale (N, K / 32) uint8, E8M0
    W4A16_NVFP4                weight (N, K / 2) uint8; weight_scale (N, K / 16) e4m3; weight_scale_2 () float32

The file ``hf_quant_config.json`` repeats the configuration in config.json.

Source: nvidia-modelopt 0.47, ``torch/export/quant_utils.py``; vLLM, ``quantization/modelopt.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
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

__all__ = ["MODELOPT"]


def _nvfp4(matrix: Quantized) -> dict[str, Tensor]:
    assert matrix.outer_scale is not None
    return {
        ".weight": packed_codes(matrix),
        ".weight_scale": scales_of_rows(matrix).view(CODES),
        ".weight_scale_2": matrix.outer_scale.reshape(()),
    }


def _read(stored: Mapping[str, Tensor]) -> Tensor:
    codes, scale = stored[".weight"].float(), stored[".weight_scale"]
    if scale.dtype == torch.uint8:
        return codes * spread_scales(numbers_of(scale), codes.shape)
    return codes * (scale.view(-1, 1) if scale.ndim == 1 else scale)


def _read_nvfp4(stored: Mapping[str, Tensor]) -> Tensor:
    codes = four_bit_values(stored[".weight"])
    return codes * (spread_scales(stored[".weight_scale"].float(), codes.shape) * stored[".weight_scale_2"])


def _config(groups: Mapping[Scheme, Sequence[str]], ignored: Sequence[str]) -> dict[str, Any]:
    (scheme,) = groups
    return {"quant_method": "modelopt", "kv_cache_quant_algo": None, **scheme.config, "ignore": list(ignored)}


def _files(groups: Mapping[Scheme, Sequence[str]], ignored: Sequence[str]) -> dict[str, Any]:
    (scheme,) = groups
    quantization = {"kv_cache_quant_algo": None, **scheme.config, "exclude_modules": list(ignored)}
    return {"hf_quant_config.json": {"producer": {"name": "fp8compile"}, "quantization": quantization}}


def _declares(config: Mapping[str, Any], schemes: Sequence[Scheme]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    own = {scheme.config["quant_algo"]: None for scheme in schemes}
    others = ("NVFP4", "MIXED_PRECISION") if "W4A16_NVFP4" in own else ("MIXED_PRECISION",)
    if "quant_algo" in config:
        yield "quant_algo", config["quant_algo"], (*own, *others)


SUFFIXES = (".weight", ".weight_scale")
EIGHT: dict[str, Any] = {"suffixes": SUFFIXES, "read": _read}
MODELOPT = Format(
    name="modelopt",
    schemes=(
        Scheme(
            kind="static_tensor",
            name="FP8",
            write=eight_bits(SUFFIXES, lambda matrix: matrix.scale.reshape(())),
            input_scale=".input_scale",
            config={"quant_algo": "FP8"},
            **EIGHT,
        ),
        Scheme(
            kind="channel",
            name="FP8_PER_CHANNEL_PER_TOKEN",
            write=eight_bits(SUFFIXES, lambda matrix: matrix.scale.reshape(-1)),
            config={"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            **EIGHT,
        ),
        Scheme(
            kind="mx",
            name="MXFP8",
            write=eight_bits(SUFFIXES, scales_of_rows),
            multiples=(1, 32),
            config={"quant_algo": "MXFP8", "group_size": 32},
            **EIGHT,
        ),
        Scheme(
            kind="nvfp4",
            name="W4A16_NVFP4",
            suffixes=(".weight", ".weight_scale", ".weight_scale_2"),
            write=_nvfp4,
            read=_read_nvfp4,
            multiples=(1, 16),
            served=(
                "The server loads FP4 weights and keeps inputs in high precision (W4A16_NVFP4), because NVFP4 in "
                "this format requires a static global scale for inputs, but training computes one for each input."
            ),
            config={"quant_algo": "W4A16_NVFP4", "group_size": 16},
        ),
    ),
    config=_config,
    declares=_declares,
    files=_files,
    instead={
        "tensor": "This format requires a static input scale, as delayed() has; 'compressed-tensors' does not.",
        "block": "Take 'fine_grained_fp8'.",
        "block_ue8m0": "Take 'fine_grained_fp8'.",
    },
)

"""fine_grained_fp8: the layout of DeepSeek's checkpoints, which transformers, vLLM and SGLang read.

    weight            (N, K) e4m3: N output and K input features
    weight_scale_inv  (ceil(N / 128), K / 128) float32 or E8M0, or () for one scale; codes are multiplied by it
    activation_scale  () float32, if inputs have static scales

transformers computes the block size from the shapes: N / rows of scales, K / columns of scales. For N = 192, which has
blocks of 128 and 64 rows, it would assume two blocks of 96. So K has to be a multiple of 128. N too, unless the
division leaves a remainder, as 576 / 5 does for a weight of DeepSeek: transformers then refuses to dequantize the
weight, while vLLM and SGLang read it.

Source: transformers 5.24, ``integrations/finegrained_fp8.py``, Fp8Dequantize; vLLM, ``quantization/fp8.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.export.scheme import Format, Scheme, eight_bits
from fp8compile.formats import E8M0
from fp8compile.layout.quantized import Quantized

__all__ = ["FINE_GRAINED_FP8"]

BLOCK = 128


def _read(stored: Mapping[str, Tensor]) -> Tensor:
    codes, scale = stored[".weight"].float(), stored[".weight_scale_inv"].float()
    if scale.ndim == 0:
        return codes * scale
    rows, columns = (-(-size // BLOCK) for size in codes.shape)
    if scale.shape != (rows, columns):
        raise ValueError(
            f"weight_scale_inv of a weight of shape {tuple(codes.shape)} has shape {tuple(scale.shape)}; with blocks "
            f"of {BLOCK} x {BLOCK} it must be {(rows, columns)}. Only checkpoints with these blocks can be loaded."
        )
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes * spread[: codes.shape[0], : codes.shape[1]]


def _config(groups: Mapping[Scheme, Sequence[str]], ignored: Sequence[str]) -> dict[str, Any]:
    (scheme,) = groups
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": None,
        **scheme.config,
        "modules_to_not_convert": list(ignored),
    }


def _declares(config: Mapping[str, Any], schemes: Sequence[Scheme]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    yield "fmt", config.get("fmt") or "e4m3", ("e4m3",)
    blocks = tuple(scheme.config.get("weight_block_size") for scheme in schemes)
    yield "weight_block_size", config.get("weight_block_size"), blocks


def _scheme(kind: str, name: str, scale: Callable[[Quantized], Tensor], **others: Any) -> Scheme:
    suffixes = (".weight", ".weight_scale_inv")
    return Scheme(kind=kind, name=name, suffixes=suffixes, write=eight_bits(suffixes, scale), read=_read, **others)


def _one_scale(matrix: Quantized) -> Tensor:
    return matrix.scale.reshape(())


BLOCKS: dict[str, Any] = {"weight_block_size": [BLOCK, BLOCK]}
OF_BLOCKS: dict[str, Any] = {"multiples": (BLOCK, BLOCK), "has_ragged_rows": True}
FINE_GRAINED_FP8 = Format(
    name="fine_grained_fp8",
    schemes=(
        _scheme("block", "blocks of 128 x 128", lambda matrix: matrix.scale, config=BLOCKS, **OF_BLOCKS),
        _scheme(
            "block_ue8m0",
            "blocks of 128 x 128, ue8m0",
            lambda matrix: E8M0.encode(matrix.scale).view(torch.float8_e8m0fnu),
            config={**BLOCKS, "scale_fmt": "ue8m0"},
            **OF_BLOCKS,
        ),
        _scheme("tensor", "per tensor", _one_scale),
        _scheme(
            "static_tensor",
            "per tensor, static inputs",
            _one_scale,
            config={"activation_scheme": "static"},
            input_scale=".activation_scale",
        ),
    ),
    config=_config,
    declares=_declares,
    instead={"channel": "For rowwise scales use 'compressed-tensors'."},
)

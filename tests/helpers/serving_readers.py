"""What vLLM and SGLang compute from a checkpoint's tensors, in NumPy, by their own order of operations.

| here | there |
|---|---|
| `blocks` | SGLang, ``srt/layers/quantization/fp8_utils.py``, ``block_quant_dequant``; shapes: vLLM, ``fp8.py`` |
| `one_scale`, `channels` | vLLM, ``utils/w8a8_utils.py``, ``apply_fp8_linear``: ``x_scale * weight_scale.t()`` |
| `requantized` | vLLM, ``utils/w8a8_utils.py``, lines 26 to 31 and 57 to 83 at commit 0039d4bd |
| `microscaled` | vLLM, ``utils/mxfp8_utils.py``, lines 148 to 161 at commit 00134422 |
| `two_levels` | vLLM, ``utils/nvfp4_emulation_utils.py``, ``break_fp4_bytes``, ``dequantize_to_dtype``, 055e47c2 |
| `two_levels_in_kernel` | the same numbers as a GPU's product has them: codes and block scales, then ``alpha`` |
| `outer_of_divisor` | vLLM, ``schemes/compressed_tensors_w4a4_nvfp4.py``, lines 139 to 142 at commit 0094cb9b |
| `outer_of_multiplier` | vLLM and SGLang, ``modelopt.py``, ``modelopt_quant.py``: ``weight_scale_2.max()`` |

Files of vLLM lie in ``vllm/model_executor/layers/quantization``. Nothing here shares code with what writes.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["as_arrays", "e4m3", "read", "requantized", "two_levels", "two_levels_in_kernel"]

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)


def as_arrays(stored):
    """Tensors as arrays; those of one byte as bytes."""
    plain = {
        name: each.view(torch.uint8) if each.element_size() == 1 else each.float() for name, each in stored.items()
    }
    return {name: each.numpy() for name, each in plain.items()}


def e4m3(byte):
    """The values of e4m3 bytes, by the fields of OFP8 1.0."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, (byte & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent.astype(int) - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    return np.where(sign == 1, -value, value).astype(np.float32)


def e8m0(byte):
    """Powers of two: the byte is a float32's exponent."""
    return np.ldexp(np.float32(1), byte.astype(int) - 127).astype(np.float32)


def four_bits(packed):
    """Two values of a byte, the lower four bits first."""
    halves = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    return E2M1[halves & 7] * np.where(halves & 8, np.float32(-1), np.float32(1))


def blocks(codes, scale):
    """Codes times the scales of 128 x 128 values."""
    numbers = e8m0(scale) if scale.dtype == np.uint8 else scale
    spread = numbers.repeat(128, -2).repeat(128, -1)
    return e4m3(codes) * spread[: codes.shape[0], : codes.shape[1]]


def one_scale(codes, scale):
    """Codes times one scale."""
    return e4m3(codes) * scale.reshape(())


def channels(codes, scale):
    """Codes times a scale for each row."""
    return e4m3(codes) * scale.reshape(-1, 1)


def microscaled(codes, scale):
    """Codes times a power of two for each 32 values."""
    values = e4m3(codes).reshape(codes.shape[0], -1, 32)
    return (values * e8m0(scale)[..., None]).reshape(codes.shape)


def two_levels(packed, scale, outer):
    """The emulation: block scales times the outer scale first."""
    values = four_bits(packed).reshape(packed.shape[0], -1, 16)
    return (values * (e4m3(scale) * outer)[..., None]).reshape(packed.shape[0], -1)


def two_levels_in_kernel(packed, scale, outer):
    """A GPU's product: codes times block scales, exact in float32, then the outer scale."""
    values = four_bits(packed).reshape(packed.shape[0], -1, 16) * e4m3(scale)[..., None]
    return values.reshape(packed.shape[0], -1) * outer


def outer_of_divisor(stored):
    """The outer scale that a server computes from 1 / scale of several layers."""
    return np.float32(1) / np.max(stored).astype(np.float32)


def outer_of_multiplier(stored):
    """The outer scale that a server takes for several layers."""
    return np.max(stored).astype(np.float32)


def requantized(codes, scales):
    """Codes of layers that are multiplied as one, made anew by the largest of their scales; a dtype in between."""
    largest = max(float(scale.reshape(())) for scale in scales)
    found = []
    for own, scale in zip(codes, scales, strict=True):
        values = (e4m3(own).astype(np.float16) * np.float32(scale)).astype(np.float16)
        quotient = torch.from_numpy(values.astype(np.float32)) / largest
        found.append(quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    return found


EIGHT = {
    **dict.fromkeys(("block", "block_ue8m0"), blocks),
    **dict.fromkeys(("tensor", "static_tensor"), one_scale),
    "channel": channels,
    "mx": microscaled,
}
NAMES = {"fine_grained_fp8": (".weight", ".weight_scale_inv")}


def read(form, kind, stored, name, *, nvfp4=two_levels_in_kernel):
    """The values of a layer, float32, from the arrays of its checkpoint."""
    if kind != "nvfp4":
        return EIGHT[kind](*(stored[name + suffix] for suffix in NAMES.get(form, (".weight", ".weight_scale"))))
    if form == "modelopt":
        outer = outer_of_multiplier(stored[f"{name}.weight_scale_2"])
        return nvfp4(stored[f"{name}.weight"], stored[f"{name}.weight_scale"], outer)
    outer = outer_of_divisor(stored[f"{name}.weight_global_scale"])
    return nvfp4(stored[f"{name}.weight_packed"], stored[f"{name}.weight_scale"], outer)

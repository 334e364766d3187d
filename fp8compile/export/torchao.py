"""torchao: the layout of Float8Tensor in safetensors, which transformers reads (method "torchao").

    _weight_qdata   (N, K) e4m3: N output and K input features
    _weight_scale   float32: (1, 1), (N, 1) or (N / 128, K / 128); codes are multiplied by it

The header of a file says how to combine the two tensors. torchao calls this format a prototype; names may change.

Source: torchao 0.18, ``prototype/safetensors``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.export.scheme import Format, Scheme, eight_bits, spread_scales
from fp8compile.layout.quantized import Quantized

__all__ = ["TORCHAO"]

QDATA, SCALE = "._weight_qdata", "._weight_scale"


_write = eight_bits((QDATA, SCALE), lambda matrix: matrix.scale.reshape(matrix.quantizer.scale_shape(matrix.shape)))


def _read(stored: Mapping[str, Tensor]) -> Tensor:
    codes = stored[QDATA].float()
    return codes * spread_scales(stored[SCALE].float(), codes.shape)


def _metadata(name: str, matrix: Quantized | None) -> dict[str, str]:
    """Return the header entry for the tensor ``name``: its class and, for codes, the block size.

    ``matrix`` is None for a tensor in high precision.
    """
    if matrix is None:
        return {name: json.dumps({"_type": "Tensor"})}
    from torchao.prototype.safetensors.safetensors_utils import TensorSubclassAttributeJSONEncoder
    from torchao.quantization import Float8Tensor

    rows, columns = matrix.shape
    block = [size if step == -1 else step for size, step in zip((rows, columns), matrix.quantizer.block, strict=True)]
    stored = _write(matrix)
    tensor = Float8Tensor(stored[QDATA], stored[SCALE], block_size=block, dtype=torch.bfloat16)
    return {f"{name}.weight": json.dumps(tensor, cls=TensorSubclassAttributeJSONEncoder)}


def _config(groups: Mapping[Scheme, Sequence[str]], ignored: Sequence[str]) -> dict[str, Any]:
    (scheme,) = groups
    granularity = scheme.config["granularity"]
    product = {"emulate": False, "use_fast_accum": True, "pad_inner_dim": False}
    data = {
        "granularity": [{"_type": granularity, "_data": {}}] * 2,
        "mm_config": {"_type": "Float8MMConfig", "_data": product},
    }
    own = {"_type": "Float8DynamicActivationFloat8WeightConfig", "_data": data, "_version": 2}
    return {
        "quant_method": "torchao",
        "quant_type": {"default": own},
        "modules_to_not_convert": list(ignored),
        "include_input_output_embeddings": False,
    }


def _scheme(kind: str, name: str, granularity: str, **others: Any) -> Scheme:
    config = {"granularity": granularity}
    return Scheme(kind=kind, name=name, suffixes=(QDATA, SCALE), write=_write, read=_read, config=config, **others)


TORCHAO = Format(
    name="torchao",
    schemes=(_scheme("tensor", "PerTensor", "PerTensor"), _scheme("channel", "PerRow", "PerRow")),
    config=_config,
    metadata=_metadata,
    instead={"block": "Take 'fine_grained_fp8'.", "block_ue8m0": "Take 'fine_grained_fp8'."},
)

"""Tasks of somebody who sees only the paths of the package, and the file that each task begins in.

A review asks such tasks of a stranger, who names a file for each. A path that misleads is renamed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8compile

PACKAGE = Path(fp8compile.__file__).parent
TASKS = {
    "change the rounding of NVFP4's codes": "quantizers/two_level_scaling.py",
    "add a rule by which a scale comes from an amax": "quantizers/scale_rules.py",
    "add a ready recipe": "recipes.py",
    "add an element format of six bits": "formats.py",
    "say why a layer was not converted": "nn/why_not_converted.py",
    "add a column to the conversion report": "nn/conversion_report.py",
    "let convert take another kind of layer": "nn/convertible_layers.py",
    "give one layer another recipe by its name": "nn/assign_recipes.py",
    "convert experts of another library": "nn/experts/known_modules.py",
    "add a low-rank product to converted experts": "nn/experts/adapters.py",
    "mend the state of delayed scaling that a layer keeps": "nn/delayed_state.py",
    "change how the backward writes an amax history": "ops/layer/delayed_scaling_state.py",
    "renew a cached weight's codes at another time": "nn/cached_weights.py",
    "share NVFP4's outer scale among q, k and v": "nn/share_outer_scale.py",
    "write another entry into Monitor's JSON lines": "nn/monitor.py",
    "add a statistic of a cast": "ops/layer/statistics/definitions.py",
    "add up statistics over ranks": "nn/statistics_over_ranks.py",
    "add a placement of a layer's tensors": "ops/layer/placements.py",
    "mend the gather of a rowwise weight's scales in the graph": "ops/layer/gather_operands.py",
    "mend the gather of a layer norm's weight under FSDP in the graph": "ops/layer/fsdp_gather_high_precision.py",
    "mend what FSDP2 sends for a rowwise weight": "tensor/fsdp2_messages.py",
    "decide which codes FSDP2 gathers in the backward": "tensor/fsdp2_gather_policy.py",
    "exchange an amax before a rank quantizes its part": "ops/layer/quantize_over_ranks.py",
    "gather an operand or sum a product over ranks": "ops/layer/multiply_over_ranks.py",
    "save one tensor less between forward and backward": "ops/layer/placed_op.py",
    "send fewer bytes to the ranks of experts": "ops/exchange/message_format.py",
    "change the padding of experts' rows": "ops/groups/padding.py",
    "say that a GPU now runs a GEMM": "ops/gemms/gpu_support.py",
    "learn what a GEMM has to say of itself": "ops/gemms/interface.py",
    "let another package register a GEMM": "ops/gemms/registration.py",
    "pass another argument to torch._scaled_mm": "ops/gemms/torch_scaled_mm.py",
    "change which of two GEMMs is tried first": "ops/gemms/table.py",
    "write an operator's sharding rule": "ops/sharding_rules.py",
    "speed up the kernel that quantizes a weight": "kernels/quantize_weight.py",
    "count saturated elements in a kernel": "kernels/counts.py",
    "see which kernels count what a cast loses": "ops/counting_kernels.py",
    "decide whether Inductor fuses a cast with what is before it": "inductor/is_fusible.py",
    "make a call once in a graph": "inductor/once_a_graph.py",
    "change an error's text for an unsupported dtype of a weight": "nn/functional.py",
    "support another view of a quantized tensor": "tensor/view_ops.py",
    "write a quantized parameter in place": "tensor/write_ops.py",
    "quantize a parameter anew after an optimizer's step": "tensor/requantize.py",
    "read a checkpoint of modelopt": "export/modelopt.py",
    "add a kind of quantized weight to serving formats": "export/scheme.py",
    "list another format that servers read": "export/format_table.py",
    "cut a weight over ranks without DTensor": "parallel/tensor_parallel_linear.py",
    "clip gradients of experts": "parallel/clip_grad_norm.py",
    "add a flag to fp8compile doctor": "cli/doctor.py",
    "pretend another GPU": "testing/gpu/gpus.py",
    "mend the table of bytes that each layer sends": "testing/explain/bytes_sent_by_layer.py",
    "support a new version of PyTorch": "_compat/versions.py",
}


@pytest.mark.parametrize("path", TASKS.values(), ids=TASKS)
def test_the_file_of_a_task_is_there(path):
    assert (PACKAGE / path).is_file()

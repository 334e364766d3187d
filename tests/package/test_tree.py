"""Tasks of somebody who sees only the paths of the package, and the file and the name in it that each task changes.

A review asks such tasks of a stranger, who names a file for each. A path that misleads is renamed.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fp8compile

PACKAGE = Path(fp8compile.__file__).parent
TASKS = {
    "change the rounding of NVFP4's codes": "quantizers/two_level_scaling.py::TwoLevelScaling.cast",
    "add a rule by which a scale comes from an amax": "quantizers/scale_rules.py::SCALE_RULES",
    "add a ready recipe": "recipes.py::READY",
    "add an element format of six bits": "formats.py::Float4Format",
    "say why a layer was not converted": "nn/convert/why_not_converted.py::recipes_and_reasons",
    "add a column to the conversion report": "nn/report/conversion_report.py::ConversionReport",
    "let convert take another kind of layer": "nn/convertible/convertible_layers.py::put_in_float8",
    "give one layer another recipe by its name": "nn/convertible/assign_recipes.py::assigner",
    "convert experts of another library": "nn/experts/known_modules.py::SPECS",
    "add a low-rank product to converted experts": "nn/experts/adapters.py::add_to_product",
    "fix the state of delayed scaling that a layer keeps": "nn/layer/delayed_state.py::DelayedState",
    "change how the backward writes an amax history": "ops/layer/delayed_scaling_state.py::update_state",
    "renew a cached weight's codes at another time": "nn/layer/cached_weights.py::invalidate_weight_cache",
    "share NVFP4's outer scale among q, k and v": "nn/weights/share_outer_scale.py::share_scales",
    "write another entry into Monitor's JSON lines": "monitor/monitor.py::Monitor.write",
    "add a statistic of a cast": "monitor/definitions.py::STATISTICS",
    "add up statistics over ranks": "monitor/statistics_over_ranks.py::over_ranks",
    "shard a layer's tensors in another way": "ops/layer/layer_sharding.py::LayerSharding",
    "fix the gather of a rowwise weight's scales in the graph": "ops/layer/gather_operands.py::gather",
    "gather a norm's weight under FSDP in the graph": "ops/layer/fsdp_gather_high_precision.py::fsdp_gather",
    "fix what FSDP2 sends for a rowwise weight": "tensor/fsdp2_messages.py::codes_to_send",
    "decide which codes FSDP2 gathers in the backward": "tensor/fsdp2_gather_policy.py::GatherPolicy",
    "exchange an amax before a rank quantizes its part": "ops/layer/quantize_over_ranks.py::whole_amax",
    "gather an operand or sum a product over ranks": "ops/layer/sharded_gemm.py::redistribute",
    "save one tensor less between forward and backward": "ops/layer/layer_ops.py::keep_operands",
    "send fewer bytes to the ranks of experts": "ops/exchange/message_format.py::packed",
    "change the padding of experts' rows": "ops/groups/padding.py::padded_offsets",
    "say that a GPU now runs a GEMM": "ops/gemms/gpu_support.py::PRODUCTS",
    "learn what a GEMM has to say of itself": "ops/gemms/interface.py::GemmKernel",
    "observe a layer without statistics": "ops/layer/observer.py::Observer",
    "save fewer bytes between forward and backward": "saved_tensors/packing.py::Packing",
    "let compile accept another partitioner": "inductor/partitioners.py::PARTITIONERS",
    "change the memory of an optimizer's moments": "optim/moments.py::MomentRows",
    "let another package register a GEMM": "ops/gemms/registration/register_gemm.py::register_gemm",
    "pass another argument to torch._scaled_mm": "ops/gemms/torch_scaled_mm.py::scaled_mm",
    "change which of two GEMMs is tried first": "ops/gemms/table.py::NATIVE",
    "write an operator's sharding rule": "ops/sharding_rules.py::Split",
    "speed up the kernel that quantizes a weight": "kernels/quantize_weight.py",
    "decide whether Inductor fuses a cast with what is before it": "inductor/is_fusible.py::is_fusible",
    "make a call once in a graph": "_compat/once_a_graph.py::once_a_graph",
    "change an error's text for an unsupported dtype of a weight": "nn/layer/functional.py::check_tensor",
    "support another view of a quantized tensor": "tensor/view_ops.py::_view",
    "write a quantized parameter in place": "tensor/write_ops.py::written_arguments",
    "quantize a parameter anew after an optimizer's step": "tensor/requantize.py::assign",
    "read a checkpoint of modelopt": "export/modelopt.py::MODELOPT",
    "add a kind of quantized weight to serving formats": "export/scheme.py::Scheme",
    "list another format that servers read": "export/format_table.py::FORMATS",
    "cut a weight over ranks without DTensor": "parallel/tensor_parallel_linear.py::column_parallel_linear",
    "clip gradients of experts": "parallel/clip_grad_norm.py::clip_grad_norm_",
    "add a flag to fp8compile doctor": "cli/doctor.py::add_parser",
    "pretend another GPU": "testing/gpu/gpus.py::GPUS",
    "fix the table of bytes that each layer sends": "testing/explain/bytes_sent_by_layer.py::sends",
    "support a new version of PyTorch": "_compat/versions.py::KNOWN_VERSIONS",
    "raise the size below which convert leaves a linear alone": "nn/convertible/filters.py::SMALLEST_DIM",
    "round the number of layers of tail down": "nn/convertible/assign_recipes.py::with_tail",
    "recognize a router with one row more than experts": "nn/experts/routers.py::routers",
    "tell otherwise whether FSDP2 keeps a gathered weight": "tensor/fsdp2_gather_policy.py::GatherPolicy._kind_for",
    "list an operand of 15 % underflow as unusual": "cli/monitor/summary.py::UNDERFLOW",
    "keep other files of a folder that an export overwrites": "export/write_folder.py::_keep_others",
    "suggest the method that a misspelled one means": "quantizers/check_declaration.py::check_steps",
    "let bytes exceed a graph baseline by 1 %": "testing/graphs/baseline.py::_changes",
    "let explain find a function of another name": "cli/target.py::DEFAULT_NAMES",
    "let advise measure more rows": "testing/numerics/advise.py::SAMPLE",
    "gather Muon's updates in float32": "optim/muon.py::Muon",
    "warn of a checkpoint with another block size": "nn/layer/codes_in_state.py::_check_meanings",
    "merge adapters into high precision by default": "integrations/peft.py::register",
    "allow optimizers= beside F8Callback under FSDP2": "integrations/transformers.py::F8Callback",
}


def _defined(source: str) -> set[str]:
    """Names that a file defines, and methods of its classes as ``Class.method``."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("place", TASKS.values(), ids=TASKS)
def test_what_a_task_changes_is_in_its_file(place):
    path, _, name = place.partition("::")
    assert (PACKAGE / path).is_file()
    assert not name or name in _defined((PACKAGE / path).read_text())


def test_most_tasks_name_what_they_change():
    assert sum("::" in place for place in TASKS.values()) >= 16


def test_a_name_that_a_file_only_imports_is_not_in_it():
    assert _defined("from a import b\nC = 1\nd: int = 2\nclass E:\n    def f(self): ...") == {"C", "d", "E", "E.f"}


def test_each_test_file_has_a_name_of_its_own():
    """pytest imports a test file by its name alone, and fails at the second of one name, when it runs both."""
    root = Path(__file__).parents[2]
    names = [each.name for room in ("tests", "compile_tests", "examples") for each in (root / room).rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))

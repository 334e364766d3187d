"""What becomes of kernels and models that nobody here wrote, as GPU programs on a CPU: runs, differs, or why not.

Each case is compiled for an H200, and its whole program runs, forward and backward, as `run_gpu_program` runs it.
Triton kernels of a package are their own reference; what they compute is also compared with a formula in PyTorch, in
float64, and the largest error is shown as a part of the largest value.

    pip install --no-deps liger-kernel fla-core flash-linear-attention timm attn_gym einops transformers
    pip install --no-deps xformers unsloth unsloth_zoo
    pip install torchtitan
    python -m benchmarks.public_kernels [--only Liger] [--json]

A package that is not installed is a row that says so.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from benchmarks.table import Row, emit
from fp8compile.testing import run_gpu_program
from fp8compile.testing.gpu.gpus import GPUS, pretend_gpu
from fp8compile.testing.gpu.program.interpreter import Interpreter

__all__ = ["CASES", "Public"]

PACKAGES = {
    "Liger": "liger_kernel", "FLA": "fla", "timm": "timm", "attention-gym": "attn_gym",
    "transformers": "transformers", "torchtitan": "torchtitan", "xformers": "xformers", "Unsloth": "unsloth",
}  # fmt: skip
UNSLOTH = ("unsloth", "unsloth.kernels", "unsloth_zoo")  # their __init__ looks for a GPU and changes other packages
TORCHVISION = (  # timm imports it for images, which no block has
    "torchvision", "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms",
    "torchvision.transforms.functional", "torchvision.datasets", "torchvision.models",
    "torchvision.models.feature_extraction", "torchvision.utils",
)  # fmt: skip
Made = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Public:
    """A function that nobody here wrote.

    Attributes:
        name: Package and function.
        make: Returns the function and its arguments.
        formula: What the outputs are, in PyTorch; None for a model, whose graphs are formulas.
        options: For `run_gpu_program`.
    """

    name: str
    make: Callable[[], Made]
    formula: Callable[..., Any] | None = None
    options: tuple[tuple[str, Any], ...] = ()


def _normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size).to(dtype).requires_grad_()


def _imported(module: str) -> Any:
    """A module; one of Unsloth is imported under a pretended GPU, without the ``__init__`` of its packages."""
    if not module.startswith("unsloth.") or module in sys.modules:
        return importlib.import_module(module)
    for name in UNSLOTH:
        if name not in sys.modules:
            package, *inner = name.split(".")
            (folder,) = importlib.util.find_spec(package).submodule_search_locations
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(Path(folder, *inner))]
            sys.modules[name] = importlib.util.module_from_spec(spec)
            sys.modules[name].DEVICE_TYPE = "cuda"  # type: ignore[attr-defined]  # its __init__ would set it
    stream = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=0)
    elsewhere = mock.patch.dict(os.environ, {"UNSLOTH_COMPILE_LOCATION": tempfile.mkdtemp()})  # it copies files there
    with pretend_gpu(GPUS["h200"]), stream, elsewhere:
        return importlib.import_module(module)


def _kernel(
    module: str, kernel: str, out: str, *, programs: int, shape: tuple[int, ...],
    tensors: dict[str, Callable[[], Any]], **constants: Any,
) -> Callable[[], Made]:  # fmt: skip
    """A kernel that is launched in the function, with one result.

    Args:
        module: Its module.
        kernel: Its name.
        out: Name of the argument that it writes to.
        programs: Number of programs.
        shape: Shape of the result.
        tensors: Make its other tensors, by the names of its arguments.
        constants: Its other arguments.
    """

    def make() -> Made:
        found = getattr(_imported(module), kernel)

        def call(*given: Tensor) -> Tensor:
            result = torch.empty(shape)
            found[(programs,)](**dict(zip(tensors, given, strict=True)), **{out: result}, **constants)
            return result * 2

        return call, tuple(each().detach() for each in tensors.values())

    return make


def _operator(
    module: str, function: str, *args: Callable[[], Any], names: tuple[str, ...] = (),
    constants: tuple[Any, ...] = (), shape: tuple[int, ...] | None = None,
) -> Callable[[], Made]:  # fmt: skip
    """A forward whose own function Dynamo may not trace, as a custom operator with one result.

    Args:
        module: Its module.
        function: Its name.
        args: Make its tensors.
        names: Keywords of the last of them.
        constants: Other arguments, after those without keywords.
        shape: Shape of the result; None for that of the first tensor.
    """

    def make() -> Made:
        found = getattr(_imported(module), function)

        def first(*given: Any) -> Tensor:
            copies = [each.clone() for each in given]  # some kernels write gradients to their inputs
            positional = copies[: len(copies) - len(names)]
            with mock.patch("torch.cuda.device", nullcontext):  # which refuses tensors on a CPU
                result = found(*positional, *constants, **dict(zip(names, copies[len(positional) :], strict=True)))
            return result[0] if isinstance(result, tuple) else result

        given = tuple(each().detach() for each in args)
        schema = f"({', '.join(f'Tensor x{at}' for at in range(len(given)))}) -> Tensor"
        operator = torch.library.custom_op(f"public_kernels::{function}", first, mutates_args=(), schema=schema)
        operator.register_fake(lambda *given: given[0].new_empty(given[0].shape if shape is None else shape))
        return (lambda *given: operator(*given) * 2), given

    return make


# ------------------------------------------------------------------------------------------------ Liger


def _liger(function: str, *args: Callable[[], Any]) -> Callable[[], Made]:
    def make() -> Made:
        import liger_kernel.ops

        apply = getattr(liger_kernel.ops, function).apply
        return (lambda *given: apply(*given)), tuple(each() for each in args)

    return make


def _value(value: Any) -> Callable[[], Any]:
    return lambda: value


def _random(*size: int, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    return lambda: _normal(*size, dtype=dtype)


def _logits() -> Tensor:
    return _normal(12, 70).detach().log_softmax(-1).requires_grad_()


def _labels() -> Tensor:
    return torch.arange(12) * 5


def _rotary_inputs() -> Made:
    import liger_kernel.ops

    angles = torch.outer(torch.arange(12.0), 10000 ** -(torch.arange(0, 32, 2) / 32)).repeat(1, 2)[None]
    apply = liger_kernel.ops.LigerRopeFunction.apply
    return (lambda *given: apply(*given)), (_normal(1, 4, 12, 32), _normal(1, 2, 12, 32), angles.cos(), angles.sin())


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    def turn(x: Tensor) -> Tensor:
        return x * cos[:, None] + torch.cat([-x[..., 16:], x[..., :16]], -1) * sin[:, None]

    return turn(q), turn(k)


LIGER = (
    Public("Liger: RMSNorm", _liger("LigerRMSNormFunction", _random(33, 200), _random(200), _value(1e-6)),
           lambda x, weight, eps: functional.rms_norm(x, (200,), weight, eps)),
    Public("Liger: LayerNorm",
           _liger("LigerLayerNormFunction", _random(33, 200), _random(200), _random(200), _value(1e-6)),
           lambda x, weight, bias, eps: functional.layer_norm(x, (200,), weight, bias, eps)),
    Public("Liger: SwiGLU", _liger("LigerSiLUMulFunction", _random(33, 100), _random(33, 100)),
           lambda a, b: functional.silu(a) * b),
    Public("Liger: GEGLU", _liger("LigerGELUMulFunction", _random(33, 100), _random(33, 100)),
           lambda a, b: functional.gelu(a, approximate="tanh") * b),
    Public("Liger: rotary embedding", _rotary_inputs, _rotated),
    Public("Liger: softmax", _liger("LigerSoftmaxFunction", _random(12, 70)), lambda x: x.softmax(-1)),
    Public("Liger: cross entropy",
           _liger("LigerCrossEntropyFunction", _random(12, 70), _labels, _value(None), _value(-100), _value(0.0),
                  _value(0.1)),
           lambda x, y, *_: functional.cross_entropy(x, y, label_smoothing=0.1)),
    Public("Liger: fused linear cross entropy",
           _liger("LigerFusedLinearCrossEntropyFunction", _random(12, 32), _random(70, 32), _labels),
           lambda x, w, y: functional.cross_entropy(x @ w.t(), y)),
    Public("Liger: JSD", _liger("LigerJSDFunction", _logits, lambda: _logits().detach())),
    Public("Liger: KL divergence", _liger("LigerKLDivLossFunction", _logits, lambda: _logits().detach().exp())),
    Public("Liger: group norm",
           _liger("LigerGroupNormFunction", _random(2, 8, 30), _random(8), _random(8), _value(8), _value(2),
                  _value(1e-6))),
    Public("Liger: dynamic tanh", _liger("LigerDyTFunction", _random(33, 64), _random(1), _random(64), _random(64)),
           lambda x, alpha, gamma, beta: torch.tanh(alpha * x) * gamma + beta),
    Public("Liger: dynamic tanh, as an operator",
           _operator("liger_kernel.ops.dyt", "liger_dyt_fwd", _random(33, 64), _random(1), _random(64), _random(64)),
           lambda x, alpha, gamma, beta: 2 * (torch.tanh(alpha * x) * gamma + beta)),
    Public("Liger: KL divergence, as an operator",
           _operator("liger_kernel.ops.kl_div", "kldiv_forward_triton", _logits, lambda: _logits().exp(),
                     constants=(False, "batchmean", 1e-10), shape=()),
           lambda x, y: 2 * functional.kl_div(x, y, reduction="batchmean")),
    Public("Liger: cross entropy, as an operator",
           _operator("liger_kernel.ops.cross_entropy", "cross_entropy_forward", _random(12, 70), _labels,
                     constants=(None, -100, 0.0, 0.1, "mean", None, False), shape=()),
           lambda x, y: 2 * functional.cross_entropy(x, y, label_smoothing=0.1)),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ FLA


def _gates(*size: int) -> Callable[[], Tensor]:
    return lambda: functional.logsigmoid(torch.randn(*size)).requires_grad_()


def _heads() -> Callable[[], Tensor]:
    return _random(1, 64, 2, 32)


def _silu_times(a: Tensor, b: Tensor) -> Tensor:
    return 2 * functional.silu(a) * b


def _retained(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Linear attention with one gate a head and token, summed as a matrix."""
    total = g.cumsum(1).permute(0, 2, 1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    q, k, v = (each.permute(0, 2, 1, 3) for each in (q, k, v))
    return 2 * ((q @ k.mT * q.shape[-1] ** -0.5 * decay) @ v).permute(0, 2, 1, 3)


FLA = (
    Public("FLA: swiglu", _operator("fla.modules.activations", "swiglu_fwd", _random(20, 64), _random(20, 64)),
           _silu_times),
    Public("FLA: l2norm", _operator("fla.modules.l2norm", "l2norm_fwd", _random(20, 64)),
           lambda x: 2 * x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()),
    Public("FLA: token shift", _operator("fla.modules.token_shift", "token_shift_fwd", _random(2, 12, 64)),
           lambda x: 2 * (functional.pad(x, (0, 0, 1, 0))[:, :-1] - x)),
    Public("FLA: simple GLA in chunks",
           _operator("fla.ops.simple_gla", "chunk_simple_gla", _heads(), _heads(), _heads(), _gates(1, 64, 2)),
           _retained),
    Public("FLA: simple GLA, recurrent",
           _operator("fla.ops.simple_gla", "fused_recurrent_simple_gla", _heads(), _heads(), _heads(),
                     _gates(1, 64, 2)), _retained),
    Public("FLA: gated delta rule, recurrent",
           _operator("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule", _heads(), _heads(), _heads(),
                     _gates(1, 64, 2), lambda: torch.rand(1, 64, 2), names=("g", "beta"))),
    Public("FLA: gated delta rule in chunks",
           _operator("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", _heads(), _heads(), _heads(),
                     _gates(1, 64, 2), lambda: torch.rand(1, 64, 2), names=("g", "beta"))),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ xformers, Unsloth


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return 2 * functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _tiled() -> Made:
    from xformers.ops._triton import tiled_matmul_kernels as module

    def product(x: Tensor, y: Tensor) -> Tensor:
        result = x.new_empty(x.shape[0], y.shape[1])
        module._launch_triton_matmul([[x]], [[y]], [[result]], [x.shape[0]], [y.shape[1]], [x.shape[1]])
        return result

    operator = torch.library.custom_op(
        "public_kernels::tiled", product, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor"
    )
    operator.register_fake(lambda x, y: x.new_empty(x.shape[0], y.shape[1]))
    return (lambda x, y: operator(x, y) * 2), (_normal(64, 32).detach(), _normal(32, 48).detach())


def _rows(*size: int) -> Callable[[], Tensor]:
    return lambda: torch.empty(size)


XFORMERS = (
    Public("xformers: RMSNorm",
           _operator("xformers.ops._triton.rmsnorm_kernels", "_rms_norm_forward", _random(33, 200), _random(200),
                     constants=(1e-6,)), _normed),
    Public("xformers: RMSNorm of a sum",
           _operator("xformers.ops._triton.rmsnorm_kernels", "_rms_norm_add_forward", _random(33, 200),
                     _random(33, 200), _random(200), constants=(1e-6,)),
           lambda x, y, weight: _normed(x + y, weight)),
    Public("xformers: index select",
           _kernel("xformers.ops._triton.k_index_select_cat", "index_select_cat_fwd_kernel", "output_ptr", programs=12,
                   shape=(12, 200),
                   tensors={"source_ptr": _random(33, 200), "index_ptr": lambda: torch.randperm(33)[:12]},
                   num_indices=12, num_cols=200, stride0=200, stride1=1, BLOCK_SIZE_INDEX=1, BLOCK_SIZE_COL=512),
           lambda x, index: 2 * x[index]),
    Public("xformers: tiled product", _tiled, lambda x, y: 2 * x @ y),
)  # fmt: skip
UNSLOTHS = (
    Public("Unsloth: SwiGLU",
           _operator("unsloth.kernels.swiglu", "swiglu_fg_kernel", _random(2, 33, 100), _random(2, 33, 100)),
           _silu_times),
    Public("Unsloth: GEGLU",
           _operator("unsloth.kernels.geglu", "geglu_exact_forward_kernel", _random(2, 33, 100), _random(2, 33, 100)),
           lambda a, b: 2 * functional.gelu(a) * b),
    Public("Unsloth: GEGLU by tanh",
           _operator("unsloth.kernels.geglu", "geglu_approx_forward_kernel", _random(2, 33, 100), _random(2, 33, 100)),
           lambda a, b: 2 * functional.gelu(a, approximate="tanh") * b),
    Public("Unsloth: RMSNorm",
           _kernel("unsloth.kernels.rms_layernorm", "_rms_layernorm_forward", "Y", programs=33, shape=(33, 200),
                   tensors={"X": _random(33, 200), "W": _random(200), "r": _rows(33)}, Y_row_stride=200,
                   X_row_stride=200, W_row_stride=1, r_row_stride=1, n_cols=200, eps=1e-6, LONG_INDEXING=False,
                   BLOCK_SIZE=256),
           lambda x, weight, _: _normed(x, weight)),
    Public("Unsloth: LayerNorm",
           _kernel("unsloth.kernels.layernorm", "layernorm_forward", "Y", programs=33, shape=(33, 200),
                   tensors={"X": _random(33, 200), "W": _random(200), "b": _random(200), "r": _rows(33),
                            "mu": _rows(33)},
                   Y_row_stride=200, X_row_stride=200, n_cols=200, eps=1e-6, LONG_INDEXING=False, BLOCK_SIZE=256,
                   HAS_BIAS=True),
           lambda x, weight, bias, *_: 2 * functional.layer_norm(x, (200,), weight, bias, 1e-6)),
    Public("Unsloth: cross entropy",
           _kernel("unsloth.kernels.cross_entropy_loss", "_cross_entropy_forward", "loss_ptr", programs=12,
                   shape=(12,),
                   tensors={"logits_ptr": _random(12, 70), "labels_ptr": _labels, "logsumexp_ptr": _rows(12)},
                   logits_row_stride=70, VOCAB_SIZE=70, BLOCK_SIZE=128, DO_SOFTCAPPING=True, SOFTCAP=30.0,
                   DO_LOGIT_SCALING=False, LOGIT_SCALE=0.0),
           lambda x, y, _: 2 * functional.cross_entropy(30 * torch.tanh(x / 30), y, reduction="none")),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ models


def _modified(mods: tuple[str, ...], mask: str) -> Callable[[], Made]:
    """FlexAttention with functions of attention-gym."""

    def make() -> Made:
        from attn_gym import masks as all_masks
        from attn_gym import mods as all_mods
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        chosen = [
            all_mods.generate_alibi_bias(2) if name == "alibi" else all_mods.generate_tanh_softcap(20) for name in mods
        ]
        masks = {"causal": lambda: all_masks.causal_mask, "window": lambda: all_masks.generate_sliding_window(40),
                 "prefix": lambda: all_masks.generate_prefix_lm_mask(24)}  # fmt: skip
        block_mask = create_block_mask(masks[mask](), None, None, 128, 128, device="cpu")

        def score_mod(score: Tensor, *at: Tensor) -> Tensor:
            for each in chosen:
                score = each(score, *at)
            return score

        def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
            return flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)

        return call, tuple(_normal(1, 2, 128, 32, dtype=torch.bfloat16) for _ in range(3))

    return make


def _timm(module: str, block: str, *args: Any, size: tuple[int, ...], **kwargs: Any) -> Callable[[], Made]:
    def make() -> Made:
        stand_ins = {} if importlib.util.find_spec("torchvision") else {name: mock.MagicMock() for name in TORCHVISION}
        sys.modules.update(stand_ins)
        try:
            found = getattr(importlib.import_module(f"timm.models.{module}"), block)(*args, **kwargs)
        finally:
            for name in stand_ins:
                del sys.modules[name]
        for each in found.modules():
            if hasattr(each, "fused_attn"):
                each.fused_attn = False  # the fused one is a GPU library's
        return found, (_normal(*size),)

    return make


def _llama() -> Made:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=64, intermediate_size=100, num_attention_heads=4, num_key_value_heads=2,
                         attn_implementation="eager")  # fmt: skip
    layer, rotary = LlamaDecoderLayer(config, 0).bfloat16(), LlamaRotaryEmbedding(config)
    x, at = _normal(1, 20, 64, dtype=torch.bfloat16), torch.arange(20)[None]
    position = rotary(x, at)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return self.layer(x, position_embeddings=(cos, sin))

    return Layer(), (x, *position)


def _bert() -> Made:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(hidden_size=64, num_attention_heads=4, intermediate_size=96, attn_implementation="eager")
    return BertLayer(config).train(), (_normal(2, 20, 64),)


def _gpt2() -> Made:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=64, n_head=4, attn_implementation="eager")
    return GPT2Block(config, layer_idx=0).train(), (_normal(2, 20, 64),)


def _torchtitan() -> Made:
    """Norm and feed-forward of torchtitan's Llama 3; its attention is FlexAttention."""
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex").layers[0]

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.feed_forward = config.ffn_norm.build(), config.feed_forward.build()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.feed_forward(self.norm(x))

    half = Half()
    for parameter in half.parameters():
        nn.init.normal_(parameter, std=0.02)
    return half.bfloat16(), (_normal(2, 8, 256, dtype=torch.bfloat16),)


MODELS = (
    Public("attention-gym: ALiBi, causal", _modified(("alibi",), "causal")),
    Public("attention-gym: soft cap, sliding window", _modified(("soft",), "window")),
    Public("attention-gym: both, prefix LM", _modified(("alibi", "soft"), "prefix")),
    Public("timm: vision transformer block, dropout",
           _timm("vision_transformer", "Block", 64, 4, size=(2, 17, 64), proj_drop=0.1, attn_drop=0.1)),
    Public("timm: MLP-mixer block", _timm("mlp_mixer", "MixerBlock", 48, 16, size=(2, 16, 48))),
    Public("timm: ConvNeXt block", _timm("convnext", "ConvNeXtBlock", 32, size=(1, 32, 8, 8))),
    Public("transformers: Llama layer", _llama),
    Public("transformers: BERT layer, dropout", _bert),
    Public("transformers: GPT-2 block, dropout", _gpt2),
    Public("torchtitan: norm and feed-forward of Llama 3", _torchtitan),
)  # fmt: skip
CASES = (*LIGER, *FLA, *XFORMERS, *UNSLOTHS, *MODELS)


# ------------------------------------------------------------------------------------------------ the table


def _cause(error: BaseException) -> BaseException:
    """What the tool or the function raised, which PyTorch wraps while it compiles."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return error


def _formula(case: Public, args: tuple[Any, ...]) -> list[Tensor]:
    """What the outputs are, in float64."""
    if case.formula is None:
        return []
    exact = case.formula(*(each.detach().double() if _is_float(each) else each for each in args))
    return [each for each in pytree.tree_leaves(exact) if isinstance(each, Tensor)]


def _error(outputs: tuple[Tensor, ...], wanted: list[Tensor]) -> str:
    """The largest error of the outputs, as a part of the largest value."""
    errors = [
        float((got.double() - each.reshape(got.shape)).abs().max() / each.abs().max())
        for got, each in zip(outputs, wanted, strict=False)
    ]
    return f"{max(errors):.0e}" if errors else ""


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def measured(case: Public) -> Row:
    """The row of one case."""
    package = PACKAGES[case.name.partition(":")[0]]
    row: Row = {"what": case.name, "answer": "", "kernels": 0, "error": "", "seconds": 0.0, "why": ""}
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        return {**row, "answer": "not installed"}
    torch.manual_seed(0)
    began, plain, launched = time.perf_counter(), Interpreter.launch, 0

    def launch(interpreter: Interpreter, *args: Any) -> None:
        nonlocal launched
        launched += interpreter.elements > 1  # with 1 it is a kernel's reference
        plain(interpreter, *args)

    try:
        fn, args = case.make()
        wanted = _formula(case, args)  # before Liger's backwards write to saved inputs
        with mock.patch.object(Interpreter, "launch", launch):
            run = run_gpu_program(fn, *args, **dict(case.options))
    except Exception as error:  # the row names it
        cause = _cause(error)
        said = " ".join(f"{type(cause).__name__}: {cause}".split())
        return {**row, "answer": "refused", "seconds": time.perf_counter() - began, "why": said[:160]}
    first = str(run.differences[0]) if run.differences else ""
    return {
        **row, "answer": "differs" if run.differences else "runs", "kernels": launched,
        "error": _error(run.outputs, wanted), "seconds": time.perf_counter() - began,
        "why": first,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels and models that nobody here wrote, as GPU programs.")
    parser.add_argument("--only", default="", help="words that a case's name has")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = []
    for case in CASES:
        if parsed.only in case.name:
            rows.append(measured(case))
            print(rows[-1]["what"], rows[-1]["answer"], file=sys.stderr)
    emit("public kernels and models, run as GPU programs", rows, as_json=parsed.json, digits=1)


if __name__ == "__main__":
    main()

"""Functions that nobody here wrote, in plain bfloat16: `run_gpu_program` is for any model.

They need packages that the tests' environment need not have: ``pip install --no-deps liger-kernel timm attn_gym``, and
transformers.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from unittest import mock

import torch
from gpu_program_cases import Case
from torch import nn

__all__ = ["FOREIGN", "has_package"]

TORCHVISION = (
    "torchvision", "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms",
    "torchvision.transforms.functional", "torchvision.datasets", "torchvision.models",
    "torchvision.models.feature_extraction", "torchvision.utils",
)  # fmt: skip
PACKAGE_OF = {"Liger": "liger_kernel", "transformers": "transformers", "timm": "timm", "attention-gym": "attn_gym"}


def has_package(case: Case) -> bool:
    """Whether the package of a case is installed."""
    return importlib.util.find_spec(PACKAGE_OF[case.name.partition(":")[0]]) is not None


def _normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.bfloat16).requires_grad_()


def rms_norm(_: str) -> tuple[Callable, tuple]:
    """What Liger compares its RMSNorm kernels with."""
    from liger_kernel.testing import pytorch_reference_rms_norm

    return lambda x, weight: pytorch_reference_rms_norm(x, weight, 1e-6), (_normal(33, 200), _normal(200))


def llama_mlp(_: str) -> tuple[nn.Module, tuple]:
    """The module that Liger's SwiGLU kernel replaces."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    return LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=100, num_attention_heads=4)).bfloat16(), (
        _normal(33, 64),
    )


def timm_block(_: str) -> tuple[nn.Module, tuple]:
    """A block of a vision transformer. timm imports torchvision for images, which no block has."""
    stand_ins = {} if importlib.util.find_spec("torchvision") else {name: mock.MagicMock() for name in TORCHVISION}
    sys.modules.update(stand_ins)
    try:
        from timm.models.vision_transformer import Block
    finally:
        for name in stand_ins:
            del sys.modules[name]
    block = Block(64, num_heads=4, qkv_bias=True, qk_norm=True, init_values=0.1).bfloat16()
    for module in block.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # written out: the fused one is a GPU library's, which does not run here
    return block, (_normal(2, 17, 64),)


def modified_scores(_: str) -> tuple[Callable, tuple]:
    """attention-gym's functions of scores, called on all of them at once."""
    from attn_gym.masks import generate_sliding_window
    from attn_gym.mods import generate_alibi_bias, generate_tanh_softcap

    alibi, softcap, window = generate_alibi_bias(2), generate_tanh_softcap(20), generate_sliding_window(12)

    def call(q, k, v):
        _, heads, tokens, _ = q.shape
        at = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
        batch, head = torch.zeros((), dtype=torch.int64), torch.arange(heads)[:, None, None]
        scores = softcap(alibi((q @ k.mT).float() / 4, batch, head, *at), batch, head, *at)
        return scores.where(window(batch, head, *at), -torch.inf).softmax(-1).to(v.dtype) @ v

    return call, tuple(_normal(1, 2, 40, 16) for _ in range(3))


def _foreign(name: str, make: Callable[[str], tuple], *, rounded_once: tuple[str, ...] = ()) -> Case:
    return Case(name=name, recipe="bf16", make=make, is_quick=True, rounded_once=rounded_once)


FOREIGN = (
    _foreign("Liger: pytorch_reference_rms_norm", rms_norm),
    _foreign("transformers: LlamaMLP", llama_mlp, rounded_once=("args[0]",)),  # gradients of two layers are added
    _foreign("timm: vision_transformer.Block", timm_block),
    _foreign("attention-gym: ALiBi, soft cap, sliding window", modified_scores),
)

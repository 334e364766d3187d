"""How many bytes does a compiled block keep for its backward, beside its input and its parameters?

Method: hooks on autograd's saved tensors see everything the compiled forward saves; storages are counted once, and
those of the input and of parameters not at all. The compiler is the backend ``aot_eager_decomp_partition``, which has
Inductor's decompositions and Inductor's choice of what to recompute, and runs on fake tensors, so full sizes cost
nothing. compile_tests/test_saved_bytes.py checks it against Inductor itself on small real tensors.

    python -m benchmarks.memory [--json] [--m 8192 --d 4096 --h 14336]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.mlp import contenders, mlp
from benchmarks.table import Row, emit

__all__ = ["saved_bytes", "saved_row"]


def saved_bytes(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that ``call(x)`` saves for backward, without those of ``x`` and the model."""
    given = {t.untyped_storage()._cdata for t in (x, *model.parameters())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in given:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(x)
    return sum(storage.nbytes() for storage in kept.values())


def saved_row(contender: str, m: int, d: int, h: int) -> Row:
    """Bytes saved by one contender, and how many a token that is."""
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = mlp(contender, m, d, h)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
        saved = saved_bytes(compiled, model, x)
    return {"block": contender, "saved MB": saved / 1e6, "bytes a token": saved // m}


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes that one compiled MLP block saves for backward.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--m", type=int, default=8192, help="tokens")
    parser.add_argument("--d", type=int, default=4096, help="width of the residual stream")
    parser.add_argument("--h", type=int, default=14336, help="hidden width")
    args = parser.parse_args()
    rows = [saved_row(name, args.m, args.d, args.h) for name in contenders()]
    emit(f"saved for backward: M={args.m} d={args.d} h={args.h}", rows, as_json=args.json)


if __name__ == "__main__":
    main()

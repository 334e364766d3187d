"""How many bytes does a weight take, in memory and in the messages of each pass of stock FSDP2?

Two linears of 1024 x 1024 without bias, or two modules of four experts of 512 x 512, a group of `fully_shard` each, on
two gloo ranks, trained two steps by SGD; `--width` takes another size. Counted in the second step, for an element of
the rank's shards:

    memory      bytes of all tensors that live after it
    forward     bytes that a rank gives to FSDP2's all-gathers in the forward
    backward    likewise in the backward
    amaxes      bytes of the message of amaxes of weights

`values` are gathered as ever; `gathered` are bfloat16 weights that are gathered as codes; `kept`, likewise, with
`reshard_after_forward=False`, under which the gathered weights live until the backward; `parameters` are codes.

    python -m benchmarks.weight_bytes [--json] [--recipes rowwise ...] [--layers experts] [--width 1008]
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fp8compile as f8
from benchmarks.living import bytes_since, living
from benchmarks.table import Row, emit
from fp8compile.ops import collectives

__all__ = ["LAYERS", "RECIPES", "WAYS", "weight_bytes"]

OTHER_BLOCKS = {
    "mxfp8 32x32": f8.recipes.mxfp8(weight_block=(32, 32)),  # both passes multiply the same codes
    "nvfp4 1x16": f8.recipes.nvfp4(weight_block=(1, 16)),  # each pass multiplies codes of its own
}
RECIPES = (
    *("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8", "mxfp8 32x32", "delayed"),
    *("nvfp4", "nvfp4 1x16"),
)
WAYS = ("gathered", "kept", "parameters")
WIDTH, EXPERTS, RANKS = 1024, 4, 2


class _Sent:
    """FSDP2's all-gather, and the bytes that a rank gives to it."""

    def __init__(self) -> None:
        self.bytes = 0

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        self.bytes += input_tensor.nbytes
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@contextmanager
def _amaxes() -> Iterator[list[int]]:
    """Bytes of each message of amaxes of weights that is sent inside."""
    found, reduce = [], collectives.all_reduce_amax

    def counted(amax: Tensor, group: object) -> Tensor:
        found.append(amax.nbytes)
        return reduce(amax, group)

    with patch.object(collectives, "all_reduce_amax", counted):
        yield found


class _Experts(nn.Module):
    """As many elements as a linear has; each expert multiplies as many rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, width // 2, width // 2) / 32)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(A, B_t, offs=offs)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, self.weight.shape[-1])
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (len(rows) // EXPERTS)
        y = self._grouped_mm(A=rows, B_t=self.weight.mT, offs=ends)
        return y.view(x.shape).clone()  # FSDP2 warns of views


LAYERS = {"linear": lambda width: nn.Linear(width, width, bias=False), "experts": _Experts}


def _recipe(name: str) -> f8.Recipe:
    return OTHER_BLOCKS.get(name) or f8.recipes.by_name(name)


def _model(recipe: str | None, way: str, mesh: DeviceMesh, layer: str, width: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(LAYERS[layer](width) for _ in range(2))).bfloat16()
    if recipe is not None:
        delayed = {"amax_group": mesh.get_group()} if recipe == "delayed" else {}
        f8.convert(model, _recipe(recipe), weight_lifetime="parameter" if way == "parameters" else None, **delayed)
        if way in ("gathered", "kept"):
            f8.parallel.fsdp_float8_all_gather(model)
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=way != "kept")
    return model


def weight_bytes(recipe: str | None, way: str, mesh: DeviceMesh, layer: str = "linear", *, width: int = WIDTH) -> Row:
    """A row of the table; all ranks of the mesh call this.

    Args:
        recipe: One of ``RECIPES``; None for a model without FP8.
        way: One of ``WAYS``, or ``"values"``.
        mesh: Of FSDP2, one dim.
        layer: One of ``LAYERS``.
        width: Inputs and outputs of a linear; experts have half of both.
    """
    before = living()
    model, sent = _model(recipe, way, mesh, layer, width), _Sent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for block in model:
        block.set_custom_all_gather(sent)
    with _amaxes() as messages:
        for _ in range(2):
            sent.bytes = 0
            messages.clear()
            loss = model(torch.ones(16, width, dtype=torch.bfloat16)).float().square().mean()
            forward = sent.bytes
            loss.backward()
            backward = sent.bytes - forward
            optimizer.step()
            optimizer.zero_grad()
            del loss
    memory = bytes_since(before)
    elements = 2 * width * width // mesh.size()
    counted = {"memory": memory, "forward": forward, "backward": backward, "amaxes": sum(messages)}
    found = {name: value / elements for name, value in counted.items()}
    return {"layer": layer, "recipe": recipe or "bf16", "way": way, **found}


def _rank(rank: int, port: int, chosen: list[str], layers: list[str], width: int, results: SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    rows = []
    for layer in layers:
        takes = [recipe for recipe in chosen if layer == "linear" or recipe != "delayed"]
        rows.append(weight_bytes(None, "values", mesh, layer, width=width))
        rows += [weight_bytes(recipe, way, mesh, layer, width=width) for recipe in takes for way in WAYS]
    if rank == 0:
        results.put(rows)
    dist.destroy_process_group()


def _rows(chosen: list[str], layers: list[str], width: int) -> list[Row]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_rank, (port, chosen, layers, width, results), nprocs=RANKS)
    return results.get()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    args = parser.parse_args()
    emit("Bytes for an element of a rank's shards", _rows(args.recipes, args.layers, args.width), as_json=args.json)

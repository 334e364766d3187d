"""The plan by which tensor parallel ranks share the model, from PyTorch's styles and ours.

    tokens --embed--> x --norm--> query, key, value --> attention of a rank's own heads --> output --> + x
                      x --norm--> gate, up          --> a rank's own hidden features    --> down   --> + x
                      x --norm--> router            --> experts, spread over all ranks             --> + x
                      x --norm--> head --> logits --> loss, the same on every rank

Between the layers, x is a DTensor: whole on each rank, or with ``sp`` a rank's part of the sequence. With ``sp``, FP8
layers have styles of `fp8compile.parallel`, which gather codes. Other layers, and all layers without ``sp``, have
PyTorch's styles. Every parameter becomes a DTensor, so that AdamW sees one kind of tensor.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, parallel

import fp8compile as f8
from examples.train.experts import MixtureOfExperts
from fp8compile.parallel import ColwiseParallel, RowwiseParallel

HEADS_DIM = 1  # the heads' dim in the inputs of query_norm and key_norm: (batch, heads, sequence, width)


def _of_mixture(between: Placement) -> parallel.ParallelStyle:
    """The style of a mixture of experts, whose forward gets all tokens and returns all tokens on each rank."""
    return parallel.PrepareModuleInputOutput(
        input_layouts=between,
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=between,
        use_local_output=False,
    )


def _style_of(name: str, module: nn.Module, *, sp: bool) -> parallel.ParallelStyle | None:
    """The style of a module of the model; None if the module needs none."""
    between = Shard(1) if sp else Replicate()
    # our styles are needed to gather a sequence as codes, and to cut a weight that is quantized
    codes = isinstance(module, f8.Linear) and (sp or isinstance(module.weight, f8.QuantizedTensor))
    last = name.rpartition(".")[2]
    if last == "embed":
        return parallel.PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=between,
            use_local_output=False,
        )
    if last == "head":
        return parallel.ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    if last == "router":
        ways = ("input", "desired_input", "output", "desired_output")  # every rank scores all tokens
        return parallel.PrepareModuleInputOutput(**{f"{way}_layouts": Replicate() for way in ways})
    if isinstance(module, MixtureOfExperts):
        return _of_mixture(between)
    if last in ("query_norm", "key_norm"):
        return parallel.SequenceParallel(sequence_dim=HEADS_DIM, use_local_output=True)
    if last in ("output", "down"):
        kind = RowwiseParallel if codes else parallel.RowwiseParallel
        return kind(output_layouts=between, use_local_output=False)
    if isinstance(module, nn.Linear):
        return (ColwiseParallel if codes else parallel.ColwiseParallel)(input_layouts=between)
    return None


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sp: bool) -> None:
    """Cut a model over ranks, with the first rank's weights. With ``sp`` the sequence is cut too, between products."""
    styles = {name: _style_of(name, module, sp=sp) for name, module in model.named_modules()}
    parallel.parallelize_module(model, mesh, {name: chosen for name, chosen in styles.items() if chosen is not None})
    for module in model.modules():
        if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            distribute_module(module, mesh)  # weights of the embedding and of x's norms are replicated


def place_gradients(model: nn.Module) -> None:
    """Redistribute each gradient to its parameter's placements; partial gradients of replicated weights are summed."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

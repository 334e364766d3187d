"""Writes the checkpoints of this folder, and expected.json, which has the digests of all that is in them.

Ran once, before the classes of quantized tensors were rebuilt. To run it again would prove nothing: delete no file
here, and add new ones beside them. From the repository:

    PYTHONPATH=.:tests/helpers python tests/checkpoints_before/write.py
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_cases import (
    FOLDER,
    OTHER_RECIPES,
    RECIPES,
    SHARDED,
    attributes_of,
    digests,
    digests_of_model,
    digests_of_parameter,
    flat,
    masters_of,
    model_of,
    quantizers,
)
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import fp8compile as f8


def step(model):
    """A forward and a backward of its linear layer, by which delayed scaling sees amaxes."""
    width = model.linear.in_features
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(7)).bfloat16()
    model.linear(x).float().square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None


def write_states():
    """Write a state dict of each recipe by safetensors, some by torch.save and DCP too, and one of values."""
    expected = {}
    for name in RECIPES:
        model = model_of(name, seed=1)
        if name == "delayed":
            step(model)
            step(model)
        state = model.state_dict()
        if name != "rowwise_bf16_wgrad":  # whose weights are those of rowwise
            save_file(state, FOLDER / f"{name}.safetensors")
        if name in ("delayed", "mxfp8", "nvfp4", "nvfp4_1x16"):
            torch.save(state, FOLDER / f"{name}.pt")
        if name in ("delayed", "nvfp4"):
            dcp.save(state, checkpoint_id=FOLDER / f"{name}.dcp", no_dist=True)
        expected[name] = digests_of_model(model)
    plain = model_of("delayed", seed=1, quantized_parameters=False)
    step(plain)
    torch.save(plain.state_dict(), FOLDER / "delayed_values.pt")
    expected["delayed_values"] = digests(plain.state_dict())
    return expected


def write_values():
    """Weights in bfloat16, and what each recipe makes of them."""
    expected = {}
    values = model_of("tensorwise", seed=2, quantized_parameters=False).state_dict()
    save_file(values, FOLDER / "values.safetensors")
    for name in RECIPES:
        if name in ("blockwise", "delayed"):
            continue  # of other sizes, and without experts
        model = model_of(name, seed=3)
        model.load_state_dict(values)
        expected[name] = digests_of_model(model)
    return expected


def write_masters():
    """A model and its optimizer with master weights, after a step."""
    model = model_of("mxfp8", seed=4, experts=False, keep_initial=True)
    optimizer = masters_of(model)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, FOLDER / "masters.pt")
    return digests_of_model(model) | digests(flat(states["optimizer"], "optimizer"))


def write_tensors():
    """Quantized tensors and parameters themselves, by torch.save and by pickle."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(16, 48, generator=generator).bfloat16()
    tensors = {name: f8.quantize(x, each) for name, each in quantizers().items()}
    tensors["a view"] = tensors["rowwise.input"][4:12]
    tensors["transposed"] = tensors["mxfp8.input"].t()
    tensors["float32"] = f8.quantize(x.float(), f8.CurrentScaling())
    torch.save(tensors, FOLDER / "tensors.pt")
    pickled = {name: tensors[name] for name in ("tensorwise.input", "mxfp8.weight_for_grad_input", "nvfp4.weight")}
    (FOLDER / "tensors.pickle").write_bytes(pickle.dumps(pickled))

    parameters = {}
    for name in ("tensorwise", "rowwise", "mxfp8", "nvfp4", "nvfp4_1x16", "delayed"):
        model = model_of(name, seed=6, experts=name != "rowwise", keep_initial=name == "rowwise")
        parameters |= {f"{name}.{key}": each for key, each in model.named_parameters() if hasattr(each, "sets")}
        if name in SHARDED:
            parameters[f"{name}, frozen"] = model.linear.weight.detach()
    parameters["a slice"] = parameters["tensorwise.linear.weight"].detach()[8:24]
    torch.save(parameters, FOLDER / "parameters.pt")
    torch.save({"recipes": RECIPES | OTHER_RECIPES, "quantizers": quantizers()}, FOLDER / "recipes.pt")

    return {
        "tensors": {name: digests_of_parameter(each) for name, each in tensors.items()},
        "parameters": {name: digests_of_parameter(each) for name, each in parameters.items()},
        "attributes": {name: attributes_of(each) for name, each in (tensors | parameters).items()},
    }


def write_sharded(rank, folder):
    """Write the state that two ranks of FSDP2 have, for some recipes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name in SHARDED:
        model = model_of(name, seed=8, experts=SHARDED[name])
        expected = digests_of_model(model)
        fully_shard(model)
        f8.parallel.share_scales(model)
        dcp.save(model.state_dict(), checkpoint_id=FOLDER / f"{name}_two_ranks.dcp")
        if rank == 0:
            Path(folder, f"{name}.json").write_text(json.dumps(expected))
    dist.destroy_process_group()


def main():
    """Write everything."""
    expected = {"states": write_states(), "values": write_values(), "masters": write_masters(), **write_tensors()}
    with tempfile.TemporaryDirectory() as folder:
        spawn(write_sharded, (folder,), nprocs=2)
        expected["two ranks"] = {name: json.loads(Path(folder, f"{name}.json").read_text()) for name in SHARDED}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    expected["written by"] = {
        "commit": commit,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "date": datetime.now(UTC).date().isoformat(),
    }
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

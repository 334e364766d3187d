"""Shards that two ranks wrote before the classes of quantized tensors were rebuilt load on two ranks, and on three."""

from __future__ import annotations

import json

import pytest
import torch.distributed.checkpoint as dcp
from checkpoint_cases import FOLDER, SHARDED, digests, model_of
from gloo_ranks import GROUPS, shared_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fp8compile import _compat, parallel

pytestmark = pytest.mark.skipif(
    _compat.TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12"
)


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def loaded(name, group):
    """Digests of the whole state that ranks loaded shards of, and went through a module with."""
    mesh = DeviceMesh.from_group(GROUPS[group], "cpu")
    model = fully_shard(model_of(name, seed=11, experts=SHARDED[name]), mesh=mesh)
    parallel.share_scales(model)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=FOLDER / f"{name}_two_ranks.dcp", process_group=GROUPS[group])
    model.load_state_dict(state)
    state = model.state_dict()
    return digests({key: each.full_tensor() if hasattr(each, "full_tensor") else each for key, each in state.items()})


CASES = [(name, group) for name in SHARDED for group in ("pair", "three")]


@pytest.mark.parametrize(("name", "group"), CASES)
def test_shards_of_two_ranks_load(ranks, name, group):
    expected = json.loads((FOLDER / "expected.json").read_text())["two ranks"][name]
    expected = {key: value for key, value in expected.items() if ":" not in key}
    answers = ranks.run(loaded, name, group, within=group)
    assert answers == [expected] * (2 if group == "pair" else 3)

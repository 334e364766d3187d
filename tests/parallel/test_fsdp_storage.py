"""A weight that FSDP2 gathers as codes is to all else the tensor that it was: memory, bytes, attributes."""

from __future__ import annotations

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import fsdp_models as models
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, shared_ranks
from safetensors.torch import load, save
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch_files import through_a_file

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.parallel import fsdp_float8_all_gather, graph_fsdp
from fp8compile.testing.bits import bits

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def gathered(dtype=torch.bfloat16):
    """A model of one layer whose weight is to be gathered as codes."""
    torch.manual_seed(0)
    model = f8.convert(nn.Sequential(nn.Linear(48, 32, dtype=dtype)), f8.recipes.tensorwise(), filter=lambda *_: True)
    return fsdp_float8_all_gather(model)


def same(found, weight):
    """Whether a tensor has the bytes of a weight, and no class of ours."""
    return type(found) is torch.Tensor and torch.equal(bits(found), bits(weight.plain))


AS_ANY_TENSOR = {
    "data_ptr": lambda w: w.data_ptr() == w.plain.data_ptr() == w.untyped_storage().data_ptr() != 0,
    "bytes of the storage": lambda w: bytes(w.untyped_storage()) == bytes(w.plain.untyped_storage()),
    "numpy": lambda w: np.array_equal(w.float().numpy(), w.plain.float().numpy()),
    "numpy, its own": lambda w: w.view(torch.int16).numpy().ctypes.data == w.data_ptr(),
    "np.asarray": lambda w: np.array_equal(np.asarray(w.view(torch.int16)), w.plain.view(torch.int16).numpy()),
    "tolist": lambda w: w.tolist() == w.plain.tolist(),
    "dlpack": lambda w: torch.from_dlpack(w).data_ptr() == w.data_ptr(),
    "safetensors": lambda w: same(load(save({"w": w}))["w"], w),
    "torch.save": lambda w: same(through_a_file(w), w),
    "pickle": lambda w: same(pickle.loads(pickle.dumps(w)), w),
    "sent to a process": lambda w: same(pickle.loads(bytes(ForkingPickler.dumps(w))), w),
    "share_memory_": lambda w: w.share_memory_() is w and w.is_shared() and w.plain.is_shared(),
    "deepcopy": lambda w: _is_copy(copy.deepcopy(w), w),
    "view": lambda w: w.view(-1).data_ptr() == w.data_ptr() and w.view(-1)._base is not None,
    "resized memory": lambda w: w.untyped_storage().resize_(0) is not None and w.plain.untyped_storage().nbytes() == 0,
    "set_": lambda w: w.set_(torch.zeros(2, 2, dtype=w.dtype)) is w and w.plain.tolist() == [[0, 0], [0, 0]],
}


def _is_copy(found, weight):
    return type(found) is type(weight) and found.data_ptr() != weight.data_ptr() and same(found.plain, weight)


@pytest.mark.parametrize("name", AS_ANY_TENSOR)
def test_it_has_its_memory(name):
    weight = gathered()[0].weight
    assert AS_ANY_TENSOR[name](weight.detach()), name
    if name not in ("dlpack", "numpy, its own", "np.asarray", "set_"):  # what any parameter takes, too
        weight = gathered()[0].weight.requires_grad_(requires_grad=name not in ("numpy", "safetensors"))
        through_pickle = name in ("torch.save", "pickle", "sent to a process")
        assert through_pickle or AS_ANY_TENSOR[name](weight), name


def test_numpy_of_a_parameter_asks_for_detach_as_ever():
    with pytest.raises(RuntimeError, match="detach"):
        gathered(torch.float32)[0].weight.numpy()
    assert gathered(torch.float32)[0].weight.numpy(force=True).shape == (32, 48)


def test_a_pickled_parameter_is_a_parameter():
    weight = gathered()[0].weight.requires_grad_(requires_grad=False)
    weight.is_expert = True
    found = pickle.loads(pickle.dumps(weight))
    assert type(found) is nn.Parameter
    assert (found.requires_grad, found.is_expert) == (False, True)


def test_modules_move_it_as_any_parameter():
    model = gathered(torch.float32)
    before = model[0].weight
    before.is_expert = True
    model.share_memory()
    assert model[0].weight is before
    assert before.is_shared()
    model.to(torch.bfloat16)
    assert model[0].weight is before
    assert (before.dtype, before.plain.dtype, before.is_expert) == (torch.bfloat16, torch.bfloat16, True)
    model.to_empty(device="meta")  # PyTorch puts a new parameter there, of whatever kind
    assert type(model[0].weight) is type(before)


def as_in_a_plain_model(use):
    """Whether something gives the same for a model before `fully_shard`, whose weight has the class or not."""
    found = []
    for on in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).bfloat16()
        f8.convert(model, f8.recipes.tensorwise(), filter=lambda *_: True)
        use_of = use(fsdp_float8_all_gather(model) if on else model)
        found.append([each.detach().float().tolist() for each in use_of])
    return found[0] == found[1]


X = torch.linspace(-1, 1, 128, dtype=torch.bfloat16).view(4, 32)


def values_assigned(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())  # by `.data =`
    return [model(X)]


def functional(model):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).float().square().sum())
    return gradients(parameters).values()


def averaged(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    nn.init.ones_(model[0].weight)
    average.update_parameters(model)
    average.update_parameters(model)
    return [average(X), model(X)]


def exported(model):
    return [torch.export.export(model, (X,)).module()(X)]


@pytest.mark.parametrize("use", [values_assigned, functional, averaged, exported])
def test_uses_of_a_model_that_is_not_sharded_yet(use):
    assert as_in_a_plain_model(use)


def stepped_by_a_compiled_optimizer(backend):
    """Losses, with the codes gathered and without."""
    found = []
    for on in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16))
        f8.convert(model, f8.recipes.tensorwise(), filter=lambda *_: True)
        model = fully_shard(fsdp_float8_all_gather(model) if on else model, mesh=models.mesh_1d("pair"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step, sums = torch.compile(optimizer.step, backend=backend), []
        for _ in range(3):
            y = model(X).float()
            y.square().sum().backward()
            step()
            optimizer.zero_grad()
            sums.append(y.sum().item())
        found.append(sums)
    return found[0] == found[1] and len(set(found[0])) == 3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_optimizer_writes_to_it(ranks, backend):
    assert ranks.run(stepped_by_a_compiled_optimizer, backend, within="pair") == [True] * 2


# ---------------------------------------------------------------------------------- attributes


def tagged(model):
    """The model with attributes of another library on each parameter."""
    for name, parameter in model.named_parameters():
        parameter.mesh_type = name
        if TORCH_VERSION >= (2, 15):
            parameter.grad_dtype = torch.float32
    return model


def tags(model):
    every = dict(model.named_parameters())
    if TORCH_VERSION >= (2, 15):
        assert {p.grad_dtype for p in every.values()} == {torch.float32}
    return {name: getattr(p, "mesh_type", None) == name for name, p in every.items()}


def plain_model():
    torch.manual_seed(0)
    return tagged(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16())


def test_conversion_keeps_what_others_hang_on_parameters():
    everywhere = dict.fromkeys(dict(plain_model().named_parameters()), True)
    for quantized in (False, True):
        model = f8.convert(
            plain_model(),
            f8.recipes.tensorwise(),
            filter=lambda *_: True,
            weight_lifetime="parameter" if quantized else None,
        )
        assert tags(model) == everywhere
        if quantized:
            assert all(p.mesh_type == name for name, p in model.to("meta").named_parameters() if "weight" in name)
    model = f8.convert(plain_model(), f8.recipes.tensorwise(), filter=lambda *_: True)
    assert tags(fsdp_float8_all_gather(model)) == everywhere


def attributes_on_ranks():
    """Which ways of spreading a model over ranks lose attributes."""
    mesh, lost = models.mesh_1d("pair"), []
    model = graph_fsdp(f8.convert(plain_model(), f8.recipes.rowwise(), filter=lambda *_: True), mesh)
    lost += [f"graph_fsdp {name}" for name, kept in tags(model).items() if not kept]
    model = plain_model()
    for layer in model:
        placed = distribute_tensor(layer.weight.detach(), mesh, [Shard(0)])
        layer.weight = nn.Parameter(placed)
    model = fsdp_float8_all_gather(f8.convert(tagged(model), f8.recipes.tensorwise(), filter=lambda *_: True))
    lost += [f"a DTensor {name}" for name, kept in tags(model).items() if not kept]
    return lost


def test_spreading_over_ranks_keeps_them(ranks):
    assert ranks.run(attributes_on_ranks) == [[]] * 4


# ---------------------------------------------------------------------------------- checkpoints


def saved_while_training(folder, kind):
    """What a checkpoint has of weights that the next step changes while it is written."""
    mesh = models.mesh_1d("all")

    def make():
        model = models.model_of("uneven", models.recipe_of("tensorwise" if kind == "plain" else kind))
        if kind != "plain":
            fsdp_float8_all_gather(model)
        return fully_shard(model, mesh=mesh, mp_policy=models.BF16)

    model = make()
    model(models.batch(0, dist.get_rank())).backward()  # weights now know FSDP2's groups, which no copy takes
    expected = models.weights_of(model)
    future = dcp.async_save(model.state_dict(), checkpoint_id=folder, process_group=GROUPS["all"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    future.result()
    dist.barrier()
    loaded = make()
    loaded.load_state_dict({name: value.zero_() for name, value in loaded.state_dict().items()})
    state_dict = loaded.state_dict()
    dcp.load(state_dict, checkpoint_id=folder, process_group=GROUPS["all"])
    found = models.weights_of(loaded)
    return [name for name in expected if not torch.equal(bits(expected[name]), bits(found[name]))]


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", models.FOUR_BITS, "plain"])
def test_async_save_has_the_weights_at_the_call(ranks, tmp_path, kind):
    assert ranks.run(saved_while_training, str(tmp_path), kind) == [[]] * 4


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_a_deep_copy_before_fully_shard_has_gathers_of_its_own_and_keeps_ties(name):
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    model = f8.convert(nn.Sequential(first, second), f8.recipes.by_name(name))
    fsdp_float8_all_gather(model, checkpointed=True)
    copied = copy.deepcopy(model)
    assert copied[0].weight is copied[1].weight
    if name == "rowwise":
        assert copied[0].weight.gathers is not model[0].weight.gathers
        assert copied[0].weight.gathers.checkpointed


def state_dict_in_files():
    """Local tensors of a sharded model's state dict in the formats that need memory."""
    model = models.model_of("uneven", f8.recipes.tensorwise())
    fsdp_float8_all_gather(model)
    fully_shard(model, mesh=models.mesh_1d("pair"), mp_policy=models.BF16)
    local = {name: value.to_local() for name, value in model.state_dict().items()}
    stock = fully_shard(
        models.model_of("uneven", f8.recipes.tensorwise()), mesh=models.mesh_1d("pair"), mp_policy=models.BF16
    )
    expected = {name: value.to_local() for name, value in stock.state_dict().items()}
    assert all(value.data_ptr() != 0 for value in local.values())
    return save(local) == save(expected)


def test_state_dict_of_shards_in_safetensors(ranks):
    assert ranks.run(state_dict_in_files, within="pair") == [True] * 2


# ---------------------------------------------------------------------------------- inference mode


def inferred(kind):
    """Outputs under no_grad and, of a model that has not run before, inference_mode; and whether it trains after."""
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        quantized = kind == "quantized"
        model = models.model_of("even", f8.recipes.tensorwise(), weight_lifetime="parameter" if quantized else None)
        mesh = models.mesh_1d("pair")
        if kind == "graph":
            model = graph_fsdp(model, mesh, mp_policy=models.BF16)
        else:
            model = models.shard(fsdp_float8_all_gather(model) if kind == "gathered" else model, mesh, models.BF16)
        with context():
            found.append([model(models.batch(step, dist.get_rank())).item() for step in (0, 0, 1)])
    return found[0] == found[1]


@pytest.mark.parametrize("kind", ["gathered", "quantized", "graph", "plain"])
def test_first_forward_in_inference_mode(ranks, kind):
    assert ranks.run(inferred, kind, within="pair") == [True] * 2


def trained_around_inference(kind):
    """Losses of steps with an inference between them, and of steps with an evaluation under no_grad."""
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        model, mesh = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16)), models.mesh_1d("pair")
        recipe = f8.recipes.tensorwise()
        f8.convert(model, recipe, filter=lambda *_: True, weight_lifetime="parameter" if kind == "quantized" else None)
        if kind == "gathered":
            fsdp_float8_all_gather(model)
        model[0] = fully_shard(torch.compile(model[0], fullgraph=True, backend="aot_eager"), mesh=mesh)
        model = fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x, sums = torch.linspace(-1, 1, 128, dtype=torch.bfloat16).view(4, 32), []
        x.requires_grad_()  # so that the weight is kept for the backward
        for _ in range(3):
            y = model(x).float()
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with context():
                sums += [y.sum().item(), model(x).float().sum().item()]
        found.append(sums)
    return found[0] == found[1]


@pytest.mark.parametrize("kind", ["gathered", "quantized"])
def test_inference_mode_between_compiled_steps(ranks, kind):
    assert ranks.run(trained_around_inference, kind, within="pair") == [True] * 2

"""FSDP beside what users put together with it: each way trains as stock `fully_shard` of values, to the bit.

way       "codes": fully_shard with fsdp_float8_all_gather; "graph": graph_fsdp
mesh      "1-D": two ranks; "three": three, sizes uneven; "HSDP": two replicas of two shards; "all": four ranks
feature   what the user does beside, of FEATURES
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import expert_models
import fsdp_models as models
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS
from recipes_of_pairs import recipe_of
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile.testing.bits import bits

__all__ = ["FEATURES", "MESHES", "MIXED", "RESHARD", "check_experts", "gathers_differ", "trained_alike"]

STEPS = 3
MESHES = {"1-D": "pair", "three": "three", "HSDP": "all", "all": "all"}
# dim, hidden: rows of 201 and 33 are cut unevenly; one row leaves one of two ranks without any, four one of three
SIZES = {"uneven": (33, 201), "uneven pairs": (34, 202), "even": (32, 256), "thin": (32, 1), "thin for three": (32, 4)}


class Model(models.Model):
    """Symbols to the loss of the next ones, as a sum, which an empty batch has too."""

    def forward(self, symbols):
        x = self.embed(symbols[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, symbols[:, 1:].flatten(), reduction="sum") / 32


# ---------------------------------------------------------------------------------- how it is trained


def batch(step):
    return models.batch(step, dist.get_rank())


def steps(run, optimizer, first=0, count=STEPS, *, of=batch):
    """Losses of some steps."""
    losses = []
    for step in range(first, first + count):
        loss = run(of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(job):
    return steps(job.run, job.optimizer)


def without_tokens(job):
    """The second rank of all has an empty batch."""
    return steps(job.run, job.optimizer, of=lambda step: batch(step)[: 0 if dist.get_rank() == 1 else None])


def accumulated(job):
    """Two backwards to a step, each of which sends its gradients."""
    losses = []
    for step in range(2 * STEPS):
        loss = job.run(batch(step))
        loss.backward()
        losses.append(loss.item())
        if step % 2:
            job.optimizer.step()
            job.optimizer.zero_grad()
    return losses


def clipped(job):
    losses = []
    for step in range(STEPS):
        loss = job.run(batch(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
        losses += [loss.item(), norm.full_tensor().item()]
        job.optimizer.step()
        job.optimizer.zero_grad()
    return losses


def resumed(job):
    """Saved after two steps and loaded by another model: as if it went on, which the losses say too."""
    group = GROUPS[MESHES[job.mesh]]
    losses = steps(job.run, job.optimizer, count=2)
    state = dict(zip(("model", "optimizer"), get_state_dict(job.model, job.optimizer), strict=True))
    dcp.save(state, checkpoint_id=job.folder, process_group=group)
    on = steps(job.run, job.optimizer, first=2)
    other = job.another()
    found, own = get_state_dict(other.model, other.optimizer)
    dcp.load({"model": found, "optimizer": own}, checkpoint_id=job.folder, process_group=group)
    set_state_dict(other.model, other.optimizer, model_state_dict=found, optim_state_dict=own)
    again = steps(other.run, other.optimizer, first=2)
    return [*losses, *on, again == on, not differing(job.weights(), other.weights())]


# ---------------------------------------------------------------------------------- features


def model_of(recipe, sizes, seed):
    torch.manual_seed(seed)
    return f8.convert(Model(*SIZES[sizes]), recipe, filter=lambda _, fqn: fqn != "head")


def with_experts(kind, recipe, sizes, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a recipe that experts don't take: raised here
        model = expert_models.mixture_of(kind, 3 if "uneven" in sizes else 4, recipe, seed=seed)
    check_experts(model)
    return model


def check_experts(model):
    """Raise what the report says of experts that stayed in high precision."""
    left = [row.reason for row in f8.conversion_report(model).rows if row.experts and not row.converted]
    if left:
        raise ValueError(left[0])


def with_tied_head(recipe, sizes, seed, *, converted):
    torch.manual_seed(seed)
    model = Model(*SIZES[sizes])
    model.head.weight = model.embed.weight
    return f8.convert(model, recipe, filter=lambda _, fqn: converted or fqn != "head")


def with_frozen(recipe, sizes, seed):
    model = model_of(recipe, sizes, seed)
    model.blocks[0].requires_grad_(requires_grad=False)
    return model


def repeated(model):
    """Blocks that the backward runs again."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@dataclass(frozen=True)
class Feature:
    """What a user does beside FSDP.

    Attributes:
        make: The converted model, of recipe, sizes and seed.
        use: How it is trained.
        checkpointed: Whether blocks are run again in the backward.
        wrapped: Whether they are, by PyTorch's wrapper of modules.
        sizes: What it takes of SIZES; None for whatever the mesh has.
        options: Of `fully_shard`.
    """

    make: Any = model_of
    use: Any = trained
    checkpointed: bool = False
    wrapped: bool = False
    sizes: str | None = None
    options: dict = field(default_factory=dict)


FEATURES = {
    "nothing else": Feature(),
    "experts": Feature(make=partial(with_experts, "torchtitan")),
    "experts, transposed": Feature(make=partial(with_experts, "gpt-oss")),
    "experts, checkpointed": Feature(make=partial(with_experts, "torchtitan"), checkpointed=True),
    "activation checkpointing": Feature(checkpointed=True),
    "activation checkpointing, wrapped": Feature(wrapped=True),
    "gradient accumulation": Feature(use=accumulated),
    "a tied head": Feature(make=partial(with_tied_head, converted=False)),
    "a tied FP8 head": Feature(make=partial(with_tied_head, converted=True)),
    "frozen weights": Feature(make=with_frozen),
    "clipping": Feature(use=clipped),
    "resume": Feature(use=resumed),
    "a rank without rows": Feature(sizes="thin"),
    "a rank without tokens": Feature(use=without_tokens),
}


# ---------------------------------------------------------------------------------- a model on ranks


def mesh_of(name):
    return models.mesh_2d("replicate", "shard") if name == "HSDP" else models.mesh_1d(MESHES[name])


@dataclass
class Job:
    """A model on ranks, with what its training needs."""

    way: str
    mesh: str
    recipe: f8.Recipe
    policy: MixedPrecisionPolicy
    feature: Feature
    folder: str
    backend: str | None = None
    seed: int = 0

    def __post_init__(self):
        sizes = self.feature.sizes or ("uneven" if self.mesh == "three" else "even")
        if sizes == "thin" and self.mesh == "three":
            sizes = "thin for three"
        if sizes == "uneven" and self.recipe.input.codes_shape((2, 2)) != (2, 2):
            sizes = "uneven pairs"  # packed by another library, which has no rule for odd numbers
        self.model = self.feature.make(self.recipe, sizes, self.seed)
        if self.feature.wrapped:
            apply_activation_checkpointing(self.model, check_fn=lambda module: module in self.model.blocks)
        if self.feature.checkpointed and self.way != "graph":
            repeated(self.model)
        mesh, options = mesh_of(self.mesh), self.feature.options
        if self.way == "graph":
            f8.parallel.graph_fsdp(self.model, mesh, mp_policy=self.policy)
            if self.feature.checkpointed:
                repeated(self.model)
        else:
            if self.way == "codes":
                f8.parallel.fsdp_float8_all_gather(
                    self.model, checkpointed=self.feature.checkpointed or self.feature.wrapped
                )
            inner = replace(self.policy, output_dtype=None)  # blocks hand on what the next one takes
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=inner, **options)
            fully_shard(self.model, mesh=mesh, mp_policy=self.policy, **options)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=3e-3)
        self.run = torch.compile(self.model, fullgraph=True, backend=self.backend) if self.backend else self.model

    def another(self):
        """One of another seed."""
        return Job(self.way, self.mesh, self.recipe, self.policy, self.feature, self.folder, self.backend, seed=5)

    def weights(self):
        return models.weights_of(self.model)


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(bits(one[name]), bits(other[name]))]


def trained_alike(way, mesh, recipe, policy, feature, folder, backend=None):
    """What differs between a way of FSDP and stock `fully_shard` of values, in words."""
    if GROUPS.get(MESHES[mesh]) is None:
        return []
    found = {}
    for each in ("stock", way):
        job = Job(
            each,
            mesh,
            recipe_of(recipe),
            models.POLICIES[policy],
            FEATURES[feature],
            str(Path(folder) / each),
            backend if each == "graph" else None,
        )
        found[each] = job.feature.use(job), job.weights()
    (losses, weights), (own, others) = found["stock"], found[way]
    problems = differing(weights, others)
    return problems if losses == own else [*problems, f"losses {losses}, {own}"]


# ---------------------------------------------------------------------------------- gathers of codes

RESHARD = {"reshard": True, "kept": False, "reshard to 2": 2}
MIXED = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16, output fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32),
}


def gathers_differ(recipe, reshard, mixed, checkpointed, offloaded, experts=False, way="codes", sizes="even"):
    """What differs on four ranks between gathers of codes and stock gathers of values, freed after the forward."""
    found = []
    for each in ("stock", way):
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offloaded and each != "stock" else {}
        options["reshard_after_forward"] = RESHARD[reshard] if each != "stock" else True
        make = partial(with_experts, "torchtitan") if experts else model_of
        feature = Feature(make=make, checkpointed=checkpointed, options=options, sizes=sizes)
        job = Job(each, "all", recipe_of(recipe), MIXED[mixed], feature, "")
        found.append((trained(job), job.weights()))
    (losses, weights), (own, others) = found
    problems = differing(weights, others)
    return problems if losses == own else [*problems, f"losses {losses}, {own}"]

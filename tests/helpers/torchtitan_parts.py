"""Components of torchtitan's own kinds, for trainings without files: see torchtitan_on_cpu, which imports this.

It is imported after torchtitan was, by `torchtitan_on_cpu.import_torchtitan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer

__all__ = ["Losses", "NoTokenizer", "Walks"]


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **kwargs):
        super().__init__()

    def encode(self, *args, **kwargs):
        raise NotImplementedError

    decode = encode

    def get_vocab_size(self):
        raise NotImplementedError


class Walks(BaseDataLoader):
    """Walks through tokens: the next follows from the last by a rule, one time in eight by chance.

    A step's global batch is the same whatever the number of ranks that share it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **kwargs):
        self.rows, self.rank, self.length = local_batch_size, dp_rank, seq_len
        self.total, self.step = local_batch_size * dp_world_size, 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.step)
            tokens = torch.randint(0, 256, (self.total, self.length + 1), generator=generator)
            by_chance = torch.rand(tokens.shape, generator=generator) < 1 / 8
            for place in range(1, self.length + 1):
                ruled = (tokens[:, place - 1] * 5 + 17) % 256
                tokens[:, place] = torch.where(by_chance[:, place], tokens[:, place], ruled)
            self.step += 1
            own = tokens[self.rank * self.rows : (self.rank + 1) * self.rows]
            positions = torch.arange(self.length).expand(self.rows, -1).contiguous()
            yield {"input": own[:, :-1].contiguous(), "positions": positions}, own[:, 1:].contiguous()

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state_dict):
        self.step = state_dict["step"]


class Losses(MetricsProcessor):
    """Keeps the loss of each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.losses = []

    def log(self, step, global_avg_loss, *args, **kwargs):
        self.losses.append(global_avg_loss)
        super().log(step, global_avg_loss, *args, **kwargs)

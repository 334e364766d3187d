"""A text to train on, and a process that is as it was after each run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} squared is {number**2}\n" for number in range(700)))
    return path


@pytest.fixture(autouse=True)
def restored():
    """A run sets threads and determinism for its whole process."""
    threads, fills = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=False)
    torch.utils.deterministic.fill_uninitialized_memory = fills

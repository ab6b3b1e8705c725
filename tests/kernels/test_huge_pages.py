"""Memory that the system is asked to put into huge pages."""

from __future__ import annotations

import mmap

import pytest
import torch

from pageframe.kernels.huge_pages import huge_page_memory


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, (5 << 20) + 3])
def test_memory_is_zeros_that_can_be_written(num_bytes: int) -> None:
    memory = huge_page_memory(num_bytes)
    assert memory.shape == (num_bytes,)
    assert not memory.any()
    memory.fill_(7)
    assert int(memory.sum()) == 7 * num_bytes


def test_more_than_there_is_is_refused_in_torch_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(RuntimeError, match="4,096 bytes: cannot allocate memory"):
        huge_page_memory(4096)


def test_each_piece_is_memory_of_its_own() -> None:
    first, second = huge_page_memory(4096), huge_page_memory(4096)
    first.fill_(1)
    assert torch.equal(second, torch.zeros(4096, dtype=torch.uint8))

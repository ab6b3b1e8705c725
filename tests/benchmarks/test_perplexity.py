"""Perplexity against float32: by hand and by transformers, on a tiny model, and the command on the default one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pageframe.benchmarks.experiments import perplexity

from .tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def one_thread_and_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setenv("COLUMNS", "160")
    yield
    torch.set_num_threads(threads)


def random_ids(count: int) -> list[int]:
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def test_float32_is_what_transformers_computes(tiny_model: str) -> None:
    """Contexts longer than a chunk, the last chunk a single token, and no multiple of the block size."""
    import transformers

    contexts = perplexity.cut(random_ids(300), 300, perplexity.CHUNK + 2)
    assert [len(context) for context in contexts] == [130, 130]
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).double()
    with torch.no_grad():
        losses = [model(torch.tensor([ids]), labels=torch.tensor([ids])).loss for ids in map(list, contexts)]
    result = perplexity.measure(tiny_model, contexts, "float32")
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / 2), rel=1e-5)


def test_the_first_arithmetic_is_the_measure(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's weights stay float32 or become bf16; a tolerance of nothing is exceeded by the second alone."""
    both = {name: perplexity.ARITHMETICS[name] for name in ("float32", "weights bf16")}
    monkeypatch.setattr(perplexity, "ARITHMETICS", both)
    contexts = perplexity.cut(random_ids(128), 128, 64)
    seen: list[tuple[str, float, bool]] = []
    report = lambda result, ratio, holds: seen.append((result.name, ratio, holds))  # noqa: E731
    assert perplexity.run(tiny_model, contexts, report)
    monkeypatch.setattr(perplexity, "TOLERANCE", 0.0)
    assert not perplexity.run(tiny_model, contexts, report)
    assert [holds for _, _, holds in seen] == [True, True, True, False]
    assert seen[0][1] == 1.0
    assert seen[1][1] == pytest.approx(1.0, abs=0.01)


def test_a_text_is_cut_into_whole_contexts() -> None:
    assert perplexity.cut(range(100), 70, 30) == [range(30), range(30, 60)]
    assert perplexity.cut(range(10), 70, 5) == [range(5), range(5, 10)]


def test_the_packages_own_text_is_long_enough_for_the_usual_size() -> None:
    text = perplexity.package_text()
    assert "one forward pass" in text
    assert len(text) > 4096 * 5, "tokens are about four characters long"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--context", "5000"), "context is 5000; it must be from 2 to the text's tokens, 4096 here"),
        (("--context", "1"), "context is 1; it must be from 2 to the text's tokens, 4096 here"),
        (("--text", "/nowhere/text"), "text is /nowhere/text; it cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert perplexity.main(flags) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.usefixtures("compiled_kernels")
def test_the_command_measures_the_default_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    assert perplexity.main(["--text", str(text), "--quick"]) == 0
    out = capsys.readouterr().out
    assert "2 contexts of 64 tokens" in out
    for name in perplexity.ARITHMETICS:
        assert name in out

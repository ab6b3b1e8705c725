"""The trainer of the small GPT, on tiny models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pageframe.benchmarks.experiments import char_gpt_data, char_gpt_training, train_char_gpt
from pageframe.benchmarks.experiments.char_gpt_model import CharGpt, Shape
from pageframe.runtime.llm import LLM
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.tokenizer import load_tokenizer

from .char_gpts import CONTEXT, TEXT, TINY, hf_logits, train


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some steps."""
    folder = tmp_path_factory.mktemp("small-gpt")
    assert train(folder, "--steps", "30", "--validate-every", "10", "--learning-rate", "0.01") == 0
    return folder / "model"


def test_it_learns_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "--steps", "60", "--validate-every", "20", "--learning-rate", "0.01") == 0
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split("validation loss ")[1].split()[0]) for line in lines if line.startswith("step")]
    assert len(losses) == 3
    assert min(losses) < 0.8 * math.log(len(set(TEXT)))
    assert f"validation loss {min(losses):.3f}" in lines[-1]


def test_every_character_comes_back_in_both_libraries(model: Path) -> None:
    import transformers

    ours = load_tokenizer(resolve_source(str(model)))
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    characters = "".join(sorted(set(TEXT)))
    for text in (TEXT[:300], characters, "\n", "  ", ""):
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == [characters.index(character) for character in text]
        assert ours.decode(ids) == text
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text


def test_both_libraries_run_it_and_nothing_ends_early(model: Path) -> None:
    import transformers

    llm = LLM(str(model), dtype="float32", num_blocks=8, threads=1, show_progress=False)
    assert llm.resolved.model.eos_token_ids == ()
    params = SamplingParams(temperature=0, max_tokens=CONTEXT - 6, logprobs=0)
    result = llm.generate(["ROMEO:"], params)[0]
    output = result.outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", CONTEXT - 6)
    expected = hf_logits(model, result.prompt_token_ids + output.token_ids)[5:-1].log_softmax(dim=1)
    assert output.logprobs is not None
    logprobs = torch.tensor([one.logprob for one in output.logprobs])
    torch.testing.assert_close(logprobs, expected.max(dim=1).values, rtol=0, atol=1e-3)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(model)
    written = loaded.generate(torch.tensor([result.prompt_token_ids]), max_new_tokens=CONTEXT - 6, do_sample=False)
    assert written.shape == (1, CONTEXT)


def test_saved_in_bf16(tmp_path: Path) -> None:
    assert train(tmp_path, "--steps", "2", "--dtype", "bf16") == 0
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert hf_logits(tmp_path / "model", [0, 1]).shape == (2, len(set(TEXT)))


def test_the_seed_decides(tmp_path: Path) -> None:
    stored = []
    for seed in ("1", "1", "2"):
        assert train(tmp_path, "--steps", "3", "--seed", seed, "--dropout", "0.1") == 0
        stored.append((tmp_path / "model" / "model.safetensors").read_bytes())
    assert stored[0] == stored[1] != stored[2]


def test_minutes_end_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "--steps", "1000000", "--minutes", "0.0001") == 0
    assert "has the weights of step" in capsys.readouterr().out


def test_without_minutes_the_clock_ends_it_all_the_same() -> None:
    texts = ["text.txt", "--out", "model"]
    assert train_char_gpt.parse(texts).minutes == 9
    assert train_char_gpt.parse([*texts, "--quick"]).minutes == 0.5
    assert train_char_gpt.parse([*texts, "--quick", "--minutes", "inf"]).minutes == math.inf


def test_weights_are_counted_before_there_is_a_model() -> None:
    shape = Shape(vocab_size=11, layers=3, heads=2, width=8, context=5)
    assert shape.num_weights == sum(parameter.numel() for parameter in CharGpt(shape).parameters())


def test_the_best_checkpoint_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [2.0, 1.0, 3.0]
    seen: list[torch.Tensor] = []

    def validation_loss(model: CharGpt, windows: torch.Tensor) -> float:
        seen.append(model.wte.weight.detach().clone())
        return losses[len(seen) - 1]

    monkeypatch.setattr(char_gpt_training, "validation_loss", validation_loss)
    assert train(tmp_path, "--steps", "6", "--validate-every", "2") == 0
    stored = load_file(tmp_path / "model" / "model.safetensors")["transformer.wte.weight"]
    assert [torch.equal(stored, weights) for weights in seen] == [False, True, False]


def test_a_training_that_diverges_claims_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(char_gpt_training, "validation_loss", lambda model, windows: math.nan)
    assert train(tmp_path, "--steps", "4", "--validate-every", "2") == 1
    captured = capsys.readouterr()
    (line,) = captured.err.strip().splitlines()  # the bar leaves an empty one
    assert line.startswith("train_char_gpt: the training diverged: no validation loss was finite")
    assert "has the weights" not in captured.out
    assert list((tmp_path / "model").iterdir()) == []


def test_a_model_that_cannot_be_saved_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model" / "model.safetensors").mkdir(parents=True)
    assert train(tmp_path, "--steps", "2") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()  # the bar leaves an empty one
    assert line.startswith(f"train_char_gpt: out is {tmp_path / 'model'}; it can't be written: ")


@pytest.mark.parametrize(
    ("validate_every", "kept"), [("100", "the weights as they are, not validated"), ("2", "the weights of step 2, ")]
)
def test_ctrl_c_saves_what_there_is(
    validate_every: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = []

    def draw(self: char_gpt_data.Text, *args: Any) -> torch.Tensor:
        drawn.append(1)
        if len(drawn) == 4:
            raise KeyboardInterrupt
        return original(self, *args)

    original = char_gpt_data.Text.draw
    monkeypatch.setattr(char_gpt_data.Text, "draw", draw)
    assert train(tmp_path, "--steps", "50", "--validate-every", validate_every) == 130
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"stopped after step 3; {tmp_path / 'model'} has {kept}")
    assert hf_logits(tmp_path / "model", [0, 1]).isfinite().all()


def test_ctrl_c_before_the_first_step_says_that_nothing_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_char_gpt, "Text", stop)
    assert train(tmp_path, "--steps", "2") == 130
    assert capsys.readouterr().out == "stopped before the first step; nothing was written\n"
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("text", "flags", "complaint"),
    [
        (None, (), "text.txt; it can't be read: No such file"),
        (b"\xff\xfe", (), "text.txt; it must be UTF-8"),
        (b"short", (), "text.txt of 5 characters; with a context of 24 it must have at least 250"),
        (TEXT.encode(), ("--width", "30", "--heads", "4"), "width is 30; it must be a multiple of 8"),
        (TEXT.encode(), ("--steps", "0"), "steps is 0; it must be at least 1"),
        (TEXT.encode(), ("--dropout", "1"), "dropout is 1.0; it must be at least 0 and below 1"),
        (TEXT.encode(), ("--learning-rate", "nan"), "learning_rate is nan; it must be above 0 and finite"),
        (TEXT.encode(), ("--learning-rate", "inf"), "learning_rate is inf; it must be above 0 and finite"),
        (TEXT.encode(), ("--out", "/dev/null"), "out is /dev/null; it can't be written"),
        (TEXT.encode(), ("--minutes", "nan"), "minutes is nan; it must be above 0"),
        (TEXT.encode(), ("--seed", str(2**63)), f"seed is {2**63}; it must be a signed number of 64 bits"),
        (TEXT.encode(), ("--layers", str(10**30)), f"layers is {10**30}; it must be at most 1000"),
        (TEXT.encode(), ("--context", str(10**400)), "it must be at most 1048576"),
        (TEXT.encode(), ("--width", "65536", "--layers", "1000"), "GiB to train; this machine has"),
        (TEXT.encode(), ("--width", "8192", "--batch", "1000000"), "GiB to train; this machine has"),
    ],
)
def test_bad_input_is_one_line(
    text: bytes | None, flags: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    if text is not None:
        path.write_bytes(text)
    assert train_char_gpt.main([str(path), "--out", str(tmp_path / "model"), *TINY, *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1

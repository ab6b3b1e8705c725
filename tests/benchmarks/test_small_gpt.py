"""The trainer of the small GPT and its experiment, on tiny models."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pageframe.benchmarks.experiments import small_gpt, train_char_gpt
from pageframe.benchmarks.experiments.small_gpt import Results, Run
from pageframe.runtime.llm import LLM
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.philox import choice_seed, gumbel, token_words
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.tokenizer import load_tokenizer

CONTEXT = 24
#: With both kinds of line end, a tab, spaces at ends, and characters of two and four bytes.
TEXT = "ROMEO:\r\n\tWhat light,  is it? \n\nJULIET:\nÀ demain; adieu 🙂 \n" * 40
TINY = ["--layers", "2", "--heads", "2", "--width", "32", "--context", str(CONTEXT), "--batch", "4", "--warmup", "2"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_text(folder: Path, text: str = TEXT) -> Path:
    path = folder / "text.txt"
    path.write_bytes(text.encode())
    return path


def train(folder: Path, *flags: str) -> int:
    """Train on TEXT into folder/model."""
    return train_char_gpt.main([str(write_text(folder)), "--out", str(folder / "model"), *TINY, *flags])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some steps."""
    folder = tmp_path_factory.mktemp("small-gpt")
    assert train(folder, "--steps", "30", "--validate-every", "10", "--learning-rate", "0.01") == 0
    return folder / "model"


def hf_logits(model: Path, token_ids: Sequence[int]) -> torch.Tensor:
    import transformers

    loaded = transformers.GPT2LMHeadModel.from_pretrained(model, attn_implementation="eager").double().eval()
    with torch.no_grad():
        return loaded(torch.tensor([list(token_ids)])).logits[0].float()


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


def test_the_best_checkpoint_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [2.0, 1.0, 3.0]
    seen: list[torch.Tensor] = []

    def validation_loss(model: train_char_gpt.CharGpt, windows: torch.Tensor) -> float:
        seen.append(model.wte.weight.detach().clone())
        return losses[len(seen) - 1]

    monkeypatch.setattr(train_char_gpt, "validation_loss", validation_loss)
    assert train(tmp_path, "--steps", "6", "--validate-every", "2") == 0
    stored = load_file(tmp_path / "model" / "model.safetensors")["transformer.wte.weight"]
    assert [torch.equal(stored, weights) for weights in seen] == [False, True, False]


def test_a_training_that_diverges_claims_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_char_gpt, "validation_loss", lambda model, windows: math.nan)
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

    def draw(self: train_char_gpt.Text, *args: Any) -> torch.Tensor:
        drawn.append(1)
        if len(drawn) == 4:
            raise KeyboardInterrupt
        return original(self, *args)

    original = train_char_gpt.Text.draw
    monkeypatch.setattr(train_char_gpt.Text, "draw", draw)
    assert train(tmp_path, "--steps", "50", "--validate-every", validate_every) == 130
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"stopped after step 3; {tmp_path / 'model'} has {kept}")
    assert hf_logits(tmp_path / "model", [0, 1]).isfinite().all()


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


@pytest.mark.parametrize("module", [train_char_gpt, small_gpt])
def test_help(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    assert "--seed" in capsys.readouterr().out


def test_the_experiment_writes_one_text_in_both_ways(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into the context and past it; each token is the one that transformers' logits and the seed's noise give."""
    plot, raw = tmp_path / "plot.png", tmp_path / "raw.json"
    status = small_gpt.main([str(model), "--quick", "--seed", "5", "--plot", str(plot), "--json", str(raw)])
    printed = capsys.readouterr().out
    assert status == 0
    results = json.loads(raw.read_text())
    (cached,), (recomputed,) = (results["runs"][way] for way in ("cached", "recomputed"))
    count = CONTEXT - len("ROMEO:") + small_gpt.PAST_CONTEXT
    assert len(cached["token_ids"]) == len(cached["seconds"]) == count
    assert cached["token_ids"] == recomputed["token_ids"]
    tokenizer = load_tokenizer(resolve_source(str(model)))
    assert tokenizer.decode(cached["token_ids"]) == results["text"]
    token_ids = tokenizer.encode("ROMEO:", add_special_tokens=True) + cached["token_ids"]
    for index in (0, 1, CONTEXT - 7, CONTEXT - 6, CONTEXT - 5, count - 1):
        end = len("ROMEO:") + index
        logits = hf_logits(model, token_ids[max(0, end - CONTEXT) : end])[-1].numpy().astype(np.float64)
        words = token_words(np.array([choice_seed(5, 0)]), np.array([index]), [np.arange(len(logits))])
        scores = logits / small_gpt.TEMPERATURE + gumbel(words)
        assert scores.max() - scores[token_ids[end]] < 1e-3
    assert plot.stat().st_size > 10_000
    words_printed = " ".join(printed.split())
    ratio = results["ratios"][f"1-{CONTEXT}"]
    assert f"{ratio:.1f} times as fast as without it, and the text is the same" in words_printed
    assert f"plot: {plot}" in words_printed


def test_different_texts_are_noticed(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tokens(self: small_gpt.Recomputed, *args: Any) -> Iterator[int]:
        for index, token_id in enumerate(original(self, *args)):
            yield token_id if index < 9 else (token_id + 1) % 10

    original = small_gpt.Recomputed.tokens
    monkeypatch.setattr(small_gpt.Recomputed, "tokens", tokens)
    assert small_gpt.main([str(model), "--quick", "--no-plot", "--tokens", "12"]) == 1
    captured = capsys.readouterr()
    assert "the texts differ from output token 9 on" in captured.err
    assert "the text is the same" not in " ".join(captured.out.split())


def test_ctrl_c_keeps_what_was_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tokens(self: small_gpt.Recomputed, prompt: Sequence[int], count: int, seed: int) -> Iterator[int]:
        yield from original(self, prompt, min(count, 5), seed)
        if count > 5:
            raise KeyboardInterrupt

    original = small_gpt.Recomputed.tokens
    monkeypatch.setattr(small_gpt.Recomputed, "tokens", tokens)
    assert small_gpt.main([str(model), "--quick", "--no-plot"]) == 130
    printed = capsys.readouterr().out
    assert "partial" in printed
    assert small_gpt.NOT_MEASURED.split()[0] in printed


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--tokens", "0"), "tokens is 0; it must be at least 1"),
        (("--prompt", "ROMEO:" * 4), f"prompt has 24 tokens; it must have from 1 to 23, for a context of {CONTEXT}"),
        (("--prompt", ""), "prompt has 0 tokens"),
        (("--prompt", "ROMEO%"), "the text holds '%' (U+0025), for which this model has no token"),
    ],
)
def test_the_experiments_bad_input_is_one_line(
    flags: tuple[str, ...], complaint: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small_gpt.main([str(model), "--no-plot", *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert small_gpt.main([str(tmp_path), "--no-plot"]) == 2
    assert "holds no config.json" in capsys.readouterr().err


def results_of(**seconds: list[list[float]]) -> Results:
    runs = {way: [Run([1] * len(run), run) for run in taken] for way, taken in seconds.items()}
    return Results(context=4, num_prompt_tokens=1, count=6, seed=0, runs=runs)


def test_medians_and_ratios_by_hand() -> None:
    results = results_of(cached=[[1.0] * 6, [2.0] * 6, [9.0] * 6], recomputed=[[8.0] * 6, [6.0] * 3])
    names = [stretch.name for stretch in results.stretches()]
    assert names == ["1-3, filling up", "1-4", "4-6, sliding"]
    filling, whole, sliding = results.stretches()
    assert results.seconds("cached", filling) == 6.0
    assert results.seconds("recomputed", filling) == 21.0  # the median of 24 and 18
    assert results.ratio(filling) == 3.5
    assert results.ratio(whole) == results.ratio(sliding) == 4.0  # the run that was cut short is not counted
    assert results.first_difference() is None


def test_the_words_say_whether_the_texts_are_the_same() -> None:
    results = results_of(cached=[[1.0] * 6, [1.0] * 6], recomputed=[[4.0] * 6])
    assert "4.0 times as fast as without it, and the text is the same;" in small_gpt.in_words(results)[0]
    results.runs["recomputed"][0].token_ids[5] = 2
    results.runs["cached"][1].token_ids[3] = 7
    assert results.first_difference() == 3
    words = small_gpt.in_words(results)[0]
    assert "4.0 times as fast as without it, but the texts differ from output token 3 on;" in words
    assert "the same" not in words


def test_what_was_not_reached_is_not_measured() -> None:
    results = results_of(cached=[[1.0] * 6], recomputed=[[1.0] * 3])
    assert [results.ratio(stretch) for stretch in results.stretches()] == [1.0, None, None]
    assert small_gpt.in_words(results) == []


def test_a_way_stops_when_its_time_is_over() -> None:
    class Endless:
        name = "cached"

        def tokens(self, prompt: Sequence[int], count: int, seed: int) -> Iterator[int]:
            yield from range(count)

    results = results_of(cached=[])
    small_gpt.measure([Endless()], [0], results, repeats=3, budget_seconds=0.0, advance=lambda: None)
    assert results.runs == {"cached": []}
    small_gpt.measure([Endless()], [0], results, repeats=3, budget_seconds=60.0, advance=lambda: None)
    assert [run.token_ids for run in results.runs["cached"]] == [list(range(6))] * 3

"""`pageframe plan`: the memory formula against numbers worked out by hand."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from pageframe.api.plan_command import add_arguments, draw_plan, make_plan, measure, num_parameters, run
from pageframe.runtime import pool_measure
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.errors import MemoryPlanError
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.source import resolve_source

GIB = 1024**3

LLAMA_7B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
#: 64 bytes of K/V a token in bf16: 2 * 1 * 1 * 16 * 2.
TINY = LLAMA_7B | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 100,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def write_model(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "tiny-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def plan(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(argv))


def draw(config: EngineConfig, width: int, **colour: Any) -> list[str]:
    console = Console(width=width, highlight=False, **colour)
    with console.capture() as capture:
        console.print(draw_plan(make_plan(config, free_bytes=16 * GIB)))
    return [line.rstrip() for line in capture.get().replace("\N{MULTIPLICATION SIGN}", "x").splitlines()]


def test_4096_tokens_of_a_7b_model_take_2_gib(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", write_model(tmp_path, LLAMA_7B), "--num-blocks", "256", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes"] == {"per_token": 512 * 1024, "per_block": 8 * 1024**2, "pool": 2 * GIB}
    assert answer["pool_tokens"] == answer["max_model_len"] == 4096


def test_parameters_are_those_of_llama_2_7b(tmp_path: Path) -> None:
    model = load_model_config(resolve_source(write_model(tmp_path, LLAMA_7B)))
    assert num_parameters(model) == 6_738_415_616  # as published


@pytest.mark.parametrize("width", [80, 200])
def test_drawing_puts_the_numbers_into_the_formula(tmp_path: Path, width: int) -> None:
    lines = draw(EngineConfig(model=write_model(tmp_path, LLAMA_7B), num_blocks=2000, max_num_requests=200), width)
    assert lines[0] == "tiny-model"
    assert lines[-16:] == [
        "formula       2 (K and V) x layers x KV heads x head_dim x bytes",
        "one token     2 x 32 x 32 x 128 x 2 (bf16) = 524,288 bytes          512.0 KiB",
        "one block     x 16 tokens = 8,388,608 bytes                           8.0 MiB",
        "one request   at most 4,096 tokens (max_model_len)                   2.00 GiB",
        "this machine  free, of which the weights will take about 12.55 GiB  16.00 GiB",
        "the pool      2,000 blocks = 32,000 tokens (as asked for)           15.62 GiB",
        "",
        "Requests at once: paged (blocks as needed), or 4,096 tokens reserved for each",
        "tokens each    blocks each    fit paged    fit reserved      gain",
        "        128              8          250               7    x 35.7",
        "        512             32           62               7    x 8.86",
        "      2,048            128           15               7    x 2.14",
        "      4,096            256            7               7       x 1",
        "",
        "At most 200 run at once (max_num_requests).",
        "The pool is for a larger machine: 16.00 GiB are free here, weights included.",
    ]


def test_colour_changes_no_character(tmp_path: Path) -> None:
    config = EngineConfig(model=write_model(tmp_path, LLAMA_7B))
    plain = draw(config, 80, color_system=None)
    coloured = draw(config, 80, color_system="standard", force_terminal=True)
    assert coloured != plain
    assert [Text.from_ansi(line).plain.rstrip() for line in coloured] == plain


def test_only_lengths_that_the_model_allows_are_counted(tmp_path: Path) -> None:
    model = write_model(tmp_path, TINY | {"max_position_embeddings": 1000})
    fits = make_plan(EngineConfig(model=model, num_blocks=125, block_size=16)).fits
    assert [(fit.tokens, fit.blocks, fit.paged, fit.reserved) for fit in fits] == [
        (128, 8, 15, 2),
        (512, 32, 3, 2),
        (1000, 63, 1, 2),
    ]


def test_the_pool_is_sized_by_memory_cap_or_need(tmp_path: Path) -> None:
    tiny = write_model(tmp_path, TINY)
    weights = 15_712 * 2
    by_memory = make_plan(EngineConfig(model=tiny), free_bytes=weights + 100 * 1024)
    assert (by_memory.num_blocks, by_memory.max_model_len) == (50, 800)
    assert by_memory.pool_rule == "50% of what the weights leave"
    by_need = make_plan(EngineConfig(model=tiny, max_num_requests=3), free_bytes=100 * GIB)
    assert (by_need.num_blocks, by_need.max_model_len) == (3 * 256, 4096)
    assert by_need.pool_rule == "all that 3 requests can use"
    (tmp_path / "large").mkdir()
    by_cap = make_plan(EngineConfig(model=write_model(tmp_path / "large", LLAMA_7B)), free_bytes=100 * GIB)
    assert by_cap.pool_bytes == 4 * GIB
    assert by_cap.pool_rule == "the cap on a CPU"
    with pytest.raises(MemoryPlanError, match=r"one block takes 1\.0 KiB"):
        make_plan(EngineConfig(model=tiny), free_bytes=weights + 1024)


def test_a_pool_for_another_machine_is_planned_and_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--model", write_model(tmp_path, LLAMA_7B), "--kv-memory", "1000000GiB") == 0
    assert "larger machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "no/such/model"], "model 'no/such/model' is not 'default'"),
        (["--kv-memory", "3 apples"], "'3 apples' is not a size"),
        (["--kv-memory", "100"], "kv_memory is 100 B; one block of the KV cache takes 1.0 KiB"),
        (["--block-size", "12"], "block_size is 12; it must be a power of two from 1 to 256"),
        (["--max-model-len", "5000"], "max_model_len is 5000; this model's positions end at 4096"),
        (["--num-blocks", "2", "--max-model-len", "40"], "the pool of 2 blocks of 16 holds 32 tokens"),
        (["--num-blocks", "1", "--block-size", "1"], "the pool of 1 blocks of 1 holds 1 tokens"),
        (["--max-num-requests", "0"], "max_num_requests is 0; it must be from 1 to 65536"),
        (["--lengths", "512,4097"], "lengths has 4097; a request has at most 4096 tokens here (max_model_len)"),
        (["--lengths", "512,long"], "lengths is '512,long'; it must be whole numbers from 1"),
        (["--lengths", "0"], "lengths is '0'; it must be whole numbers from 1"),
        (["--model", "default", "--shape", "1,2,3"], "it must be four numbers: layers, heads, KV heads, head_dim"),
        (["--model", "default", "--shape", "1,4,3,8"], "shape has 3 KV heads; they must divide its 4 heads"),
        (["--model", "default", "--shape", "1000000,8,8,64"], "shape has 1000000 layers; they must be from 1 to 1000"),
        (
            ["--model", "default", "--shape", "1,8,8,1000000"],
            "shape has 1000000 head_dim; they must be from 1 to 65536",
        ),
        (["--model", "default", "--shape", "9" * 5000], "it must be whole numbers from 1 to 2147483647 with commas"),
        (["--shape", "1,1,1,8"], "only one of them can be planned for"),
        (["--model", "default", "--example", "--dtype", "float32"], "dtype is float32; --example has its own"),
        (["--model", "default", "--example", "--kv-dtype", "int8"], "kv_dtype is int8; --example has its own"),
        (["--dtype", "float32", "--kv-dtype", "int8"], "kv_dtype is 'int8', but dtype is 'float32'; it must be 'bf16'"),
        (["--plot", "no/such/folder/plan.png"], "plot is no/such/folder/plan.png; it can't be written"),
        (["--plot", "plan.table"], "plot is plan.table; it can't be written"),
    ],
)
def test_bad_input_is_one_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    model = [] if "--model" in flags else ["--model", write_model(tmp_path, TINY)]
    assert plan(*model, *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_the_worked_example_takes_2_gib(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--example", "--no-measure") == 0
    text = capsys.readouterr().out.replace("\N{MULTIPLICATION SIGN}", "x")
    assert "2 x 32 x 32 x 128 x 4,096 x 2 = 2,147,483,648 bytes = 2.00 GiB" in text
    assert "not measured" in text


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_codes_for_keys_and_values_have_their_scales_in_every_figure(
    capsys: pytest.CaptureFixture[str], kv_dtype: str
) -> None:
    flags = ("--shape", "32,32,8,128", "--max-model-len", "4096", "--kv-dtype", kv_dtype)
    assert plan(*flags, "--no-measure") == 0
    text = capsys.readouterr().out.replace("\N{MULTIPLICATION SIGN}", "x")
    assert re.search(r"\nformula +2 \(K and V\) x layers x KV heads x \(head_dim \+ scale\) *\n", text)
    assert f"2 x 32 x 8 x (128 + 4) ({kv_dtype}) = 67,584 bytes" in text
    assert "2 x 32 x 8 x (128 + 4) x 4,096 = 276,824,064 bytes = 264.0 MiB" in text
    assert re.search(rf"\n{kv_dtype} with its scales +67,584 +4,096\n", text)
    assert re.search(r"\nbf16 +131,072 +2,112\n", text)
    assert plan(*flags, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["dtype"], answer["kv_dtype"]) == ("bf16", kv_dtype)
    assert answer["bytes"] == {"per_token": 67_584, "per_block": 16 * 67_584, "pool": 4096 * 67_584}
    assert answer["measured"]["allocated"] == answer["measured"]["num_blocks"] * 16 * 67_584
    assert answer["kv_heads"][0]["bytes_per_token"] == 4 * 67_584


@pytest.mark.parametrize("flags", [["--dtype", "float32"], ["--block-size", "64"], ["--num-blocks", "3"]])
def test_a_real_pool_takes_what_the_formula_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    model = write_model(tmp_path, TINY | {"num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 24})
    assert plan("--model", model, "--num-blocks", "7", *flags, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    measured, per_block = answer["measured"], answer["bytes"]["per_block"]
    assert measured["num_blocks"] == 64 * 2**20 // per_block, "enough to be seen, whatever is planned"
    assert measured["allocated"] == measured["num_blocks"] * per_block
    # Memory is taken in pages, and the process may take or give back some for other things meanwhile.
    assert measured["resident"] == pytest.approx(measured["allocated"], rel=0.05)


def test_resident_memory_is_not_said_where_the_system_does_not_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_measure, "MEMORY_MAP", tmp_path / "nothing")
    model = write_model(tmp_path, TINY)
    assert plan("--model", model) == 0
    text = capsys.readouterr().out
    assert "bytes allocated" in text
    assert "RAM" not in text


def test_only_a_small_pool_is_measured_and_its_size_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path, LLAMA_7B | {"num_hidden_layers": 1})
    assert plan("--model", model, "--num-blocks", "1000") == 0
    text = capsys.readouterr().out
    assert "a real pool of 256 blocks (4,096 tokens): 67,108,864 bytes allocated" in text
    assert "the formula says 67,108,864 bytes: the same" in text
    assert re.search(r"written whole, it took 6\d,\d{3},\d{3} bytes of this process's RAM: [+-]", text)
    too_large = make_plan(EngineConfig(model=model, num_blocks=1), free_bytes=GIB)
    assert measure(dataclasses.replace(too_large, bytes_per_block=2 * GIB)) is None


def test_requests_are_counted_at_the_lengths_asked_for(tmp_path: Path) -> None:
    fits = make_plan(EngineConfig(model=write_model(tmp_path, TINY), num_blocks=256), lengths=[2048, 100, 4096]).fits
    assert [(fit.tokens, fit.blocks, fit.paged, fit.reserved) for fit in fits] == [
        (100, 7, 36, 1),
        (2048, 128, 2, 1),
        (4096, 256, 1, 1),
    ]


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    assert plan("--model", write_model(tmp_path, TINY), "--no-measure", "--plot", str(file)) == 0
    header = file.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[16:20], "big") >= 1200

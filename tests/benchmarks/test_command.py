"""Bad input: one clear line on stderr, exit code 2; and what the client may import."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pageframe.benchmarks.client.command import add_arguments, run
from pageframe.benchmarks.client.errors import InputError
from pageframe.benchmarks.client.measures import Objectives
from pageframe.benchmarks.client.prompt_file import Prompt, read_prompts
from pageframe.benchmarks.client.settings import LoadSettings, parse_objectives, settings_from

if TYPE_CHECKING:
    from conftest import FakeOpenAI


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


def settings(*flags: str, environment: dict[str, str] | None = None) -> LoadSettings:
    return settings_from(parse("--url", "http://127.0.0.1:8000", *flags), environment or {})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rate", "4", "--concurrency", "2"], "--rate and --concurrency"),
        (["--burstiness", "0.5"], "--burstiness needs --rate"),
        (["--input-len", "8", "--prompts", "x"], "--input-len and --prompts"),
        (["--requests", "0"], "--requests is 0"),
        (["--concurrency", "0"], "--concurrency is 0"),
        (["--rate", "nan"], "--rate is nan"),
        (["--rate", "0"], "--rate is 0"),
        (["--rate", "1", "--burstiness", "0"], "--burstiness is 0"),
        (["--timeout", "inf"], "--timeout is inf"),
        (["--output-len", "0"], "--output-len is 0"),
        (["--warmup", "-1"], "--warmup is -1"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--cancel-rate", "1.5"], "--cancel-rate is 1.5"),
        (["--slo", "ttft"], "--slo has 'ttft'"),
        (["--slo", "speed=3"], "--slo has 'speed=3'"),
        (["--slo", "ttft=1,ttft=2"], "ttft twice"),
        (["--slo", "ttft=fast"], "ttft is 'fast'"),
        (["--slo", "e2e=-1"], "e2e is -1"),
        (["--api-key", "two words"], "--api-key"),
        (["--prompts", "/nowhere/at/all"], "/nowhere/at/all cannot be read"),
        (["--json", "/nowhere/at/all"], "/nowhere/at/all cannot be written"),
    ],
)
def test_bad_flags_end_with_one_line_and_exit_code_2(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parse("--url", "http://127.0.0.1:8000", *flags)) == 2
    seen = capsys.readouterr()
    assert named in seen.err
    assert seen.err.count("\n") == 1
    assert seen.out == ""


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://user:secret@host", "http://host?x=1", ""],
)
def test_a_bad_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(parse("--url", url)) == 2
    seen = capsys.readouterr().err
    assert "--url" in seen
    assert "secret" not in seen


def test_an_unreachable_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound but not listening: nobody else can be behind it
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert run(parse("--url", url, "--requests", "1")) == 2
    seen = capsys.readouterr().err
    assert f"{url} cannot be reached" in seen
    assert "Traceback" not in seen


def test_a_refused_key_or_request_is_told_before_any_load(
    server: FakeOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    server.api_key = "right"
    assert run(parse("--url", server.base_url, "--api-key", "wrong-key")) == 2
    assert "answered 401" in capsys.readouterr().err
    server.api_key = None
    server.refused_fields = {"temperature"}
    assert run(parse("--url", server.base_url)) == 2
    seen = capsys.readouterr().err
    assert "answered 400: unknown field temperature" in seen
    assert "wrong-key" not in seen
    assert server.calls == []


def test_defaults_follow_from_the_kind_of_load() -> None:
    plain = settings()
    assert (plain.num_requests, plain.concurrency, plain.rate) == (100, 8, None)
    assert (plain.input_len, plain.output_len, plain.ignore_eos) == (128, 128, True)
    open_loop = settings("--rate", "4")
    assert (open_loop.concurrency, open_loop.rate, open_loop.burstiness) == (None, 4.0, 1.0)
    from_file = settings("--prompts", "x")
    assert (from_file.num_requests, from_file.input_len, from_file.ignore_eos) == (None, None, False)
    assert settings("--prompts", "x", "--ignore-eos").ignore_eos


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_url_may_have_v1_or_not(url: str) -> None:
    assert settings_from(parse("--url", url), {}).base_url == "http://h:1"


def test_the_key_comes_from_the_flag_or_the_environment_and_is_not_in_the_repr() -> None:
    environment = {"OPENAI_API_KEY": "from-environment"}
    assert settings(environment=environment).api_key == "from-environment"
    assert settings("--api-key", "from-flag", environment=environment).api_key == "from-flag"
    assert "from-environment" not in repr(settings(environment=environment))


def test_objectives_are_milliseconds() -> None:
    assert parse_objectives("ttft=200, itl=50") == Objectives(ttft_s=0.2, itl_s=0.05)


@pytest.mark.parametrize(
    ("lines", "prompts"),
    [
        (["one", "", "  two  "], ["one", "two"]),
        (["{curly but plain"], ["{curly but plain"]),
        ([json.dumps({"prompt": "a"}), json.dumps({"question": "b", "answer": "c"})], ["a", "b"]),
        ([json.dumps({"question_id": 81, "turns": ["first", "second"]})], ["first"]),
    ],
)
def test_prompt_files(tmp_path: Path, lines: list[str], prompts: list[str]) -> None:
    file = tmp_path / "prompts"
    file.write_text("\n".join(lines), encoding="utf-8")
    assert read_prompts(file, chat=False) == [Prompt(text=text) for text in prompts]


def test_conversations_are_for_chat_only(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    file.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    assert read_prompts(file, chat=True) == [Prompt(messages=messages)]
    with pytest.raises(InputError, match='line 1 has "messages", which only --endpoint chat'):
        read_prompts(file, chat=False)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "holds no prompt"),
        (b"\n\n", "holds no prompt"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"prompt": "a"}\nplain', "line 2 is not JSON"),
        (b'{"prompt": "a"}\n[1]', "line 2 is not a JSON object"),
        (b'{"input": "a"}', "line 1 has no text"),
        (b'{"prompt": ""}', "line 1 has no text"),
        (b'{"messages": []}', "line 1"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path: Path, content: bytes, named: str) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(InputError, match=named):
        read_prompts(file, chat=True)


def test_the_client_imports_nothing_of_the_server() -> None:
    code = (
        "import sys, pageframe.benchmarks.client.__main__\n"
        "own = {name.split('.')[1] for name in sys.modules if name.startswith('pageframe.')}\n"
        "print(sorted(own), sorted({'torch', 'fastapi', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['benchmarks'] []"

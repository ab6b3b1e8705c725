"""One server of the default model for all clients. Its template also shows tools, which the model's own does not;
without tools both say the same.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pageframe.benchmarks.experiments.server_process import RunningServer, running_server
from pageframe.runtime.models.source import resolve_source

MODEL = "default-with-tools"
TOOLS_SHOWN = """{% if tools %}<|im_start|>system
Functions: {{ tools | tojson }}
A call: <tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>
{% endif %}"""


def write_model(path: Path) -> None:
    """The default model's file with the longer template."""
    source = resolve_source("default")
    template = TOOLS_SHOWN + source.gguf.metadata["tokenizer.chat_template"]
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force", "--chat-template", template]
    subprocess.run([*command, str(source.path), str(path)], check=True, capture_output=True)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_model(path)
    with running_server("--model", str(path), "--served-model-name", MODEL, "--kv-memory", "512MiB") as running:
        yield running
    path.unlink()

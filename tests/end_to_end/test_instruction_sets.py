"""The default model on each instruction set that this processor has, and without compiled kernels: it serves, and says
what it computes with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pageframe.kernels.cpu.isa import INSTRUCTION_SETS, WISH, BuildError, processor_flags

SCRIPT = """
import json
from pageframe.runtime import LLM, SamplingParams
llm = LLM(num_blocks=8, max_model_len=128, show_progress=False)
(result,) = llm.chat([[{"role": "user", "content": "What is the capital of France?"}]],
                     SamplingParams(temperature=0, max_tokens=8))
resolved = llm.resolved
names = ("weights", "instruction_set", "batch_invariant", "notes")
print(json.dumps({name: getattr(resolved, name) for name in names} | {"text": result.outputs[0].text}))
"""
ANSWER = "The capital of France is Paris."


def instruction_sets() -> list[str]:
    """The names of those that this processor has."""
    try:
        flags = processor_flags()
    except BuildError:
        return []
    return [isa.name for isa in INSTRUCTION_SETS if flags.issuperset(isa.needs)]


def serve(cache: Path | None = None, **environment: str) -> dict[str, Any]:
    """What a process of its own answers, and how.

    Args:
        cache: in place of the user's folder of compiled libraries.
    """
    unset = {WISH, "PAGEFRAME_NO_COMPILE", "CXX"}
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    own = {} if cache is None else {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=inherited | own | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", instruction_sets())
def test_each_instruction_set_serves_the_files_own_weights(name: str) -> None:
    assert serve(**{WISH: name}) == {
        "text": ANSWER,
        "weights": "file",
        "instruction_set": name,
        "batch_invariant": True,
        "notes": [],
    }


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({WISH: "none"}, "PAGEFRAME_CPU_ISA is none"),
        ({"PAGEFRAME_NO_COMPILE": "1"}, "PAGEFRAME_NO_COMPILE is set"),
        ({"CXX": "/nowhere/g++"}, "no C++ compiler: CXX is '/nowhere/g++', which is no program"),
    ],
    ids=["none wished for", "no compiling", "no compiler"],
)
@pytest.mark.skipif(not instruction_sets(), reason="another reason comes first here")
def test_without_compiled_kernels_torch_serves_and_a_note_says_why(
    environment: dict[str, str], reason: str, tmp_path: Path
) -> None:
    answer = serve(tmp_path, **environment)
    (note,) = answer.pop("notes")
    assert answer == {"text": ANSWER, "weights": "bf16", "instruction_set": "", "batch_invariant": False}
    assert note.startswith(f"The compiled CPU kernels do not compute here ({reason}): ")
    assert not (tmp_path / "pageframe").exists(), "something was compiled"

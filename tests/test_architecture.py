"""Dependencies point one way (api -> runtime -> kernels), and light imports stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH_USERS = {
    "runtime/model_runner.py",
    "runtime/cuda_graphs.py",
    "runtime/sampler.py",
    "runtime/arithmetic.py",
    "runtime/device_logits.py",
    "runtime/engine_builder.py",
    "runtime/pool_measure.py",
    *(
        f"runtime/models/{name}.py"
        for name in ("blocks", "compiled", "decoder", "layers", "loader", "triton_layers", "weights")
    ),
}
ENGINE_MAY_IMPORT = {"torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2"}
# Modules of the two processes' conversation; an engine used in-process never imports them.
BETWEEN_PROCESSES = {
    f"runtime/{name}.py"
    for name in ("messages", "engine_process", "engine_client", "engine_launch", "journal_recorder")
}


def imports(path: Path, *, module_level: bool = False) -> Iterator[str]:
    """Dotted names that a file imports; `module_level` leaves out those inside functions and TYPE_CHECKING blocks."""
    tree = ast.parse(path.read_text())
    nodes = list(_top_statements(tree)) if module_level else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def _top_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no files in {folder}"
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_from(path: Path, *packages: str) -> list[str]:
    return [name for name in imports(path) if any(name == p or name.startswith(p + ".") for p in packages)]


def test_kernels_import_arithmetic_only() -> None:
    for path in files("kernels"):
        for name in imports(path):
            root = name.split(".")[0]
            allowed = root in {"torch", "triton", "numpy"} or root in sys.stdlib_module_names
            assert allowed or name.startswith("pageframe.kernels"), f"{relative(path)} imports {name}"


def test_runtime_knows_no_http() -> None:
    for path in files("runtime"):
        wrong = imports_from(
            path, "fastapi", "pydantic", "starlette", "uvicorn", "pageframe.api", "pageframe.benchmarks"
        )
        assert not wrong, f"{relative(path)} imports {wrong}"


def test_only_the_model_side_of_runtime_touches_torch() -> None:
    for path in files("runtime"):
        if relative(path) not in TORCH_USERS:
            assert not imports_from(path, "torch"), f"{relative(path)} imports torch"


def test_the_engine_imports_nothing_else_at_module_level() -> None:
    for path in files("runtime"):
        if relative(path) in BETWEEN_PROCESSES:
            continue
        for name in imports(path, module_level=True):
            root = name.split(".")[0]
            allowed = root in ENGINE_MAY_IMPORT or root in sys.stdlib_module_names or root == "pageframe"
            assert allowed, f"{relative(path)} imports {name} at module level"


def test_api_imports_no_model_side_and_only_the_cli_knows_benchmarks() -> None:
    for path in files("api"):
        assert not imports_from(path, "torch", "pageframe.kernels"), f"{relative(path)} touches the model side"
        if relative(path) != "api/cli.py":
            assert not imports_from(path, "pageframe.benchmarks"), f"{relative(path)} imports benchmarks"


def test_the_load_client_imports_none_of_the_others() -> None:
    for path in files("benchmarks/client"):
        wrong = imports_from(path, "pageframe.runtime", "pageframe.kernels", "pageframe.api", "torch")
        assert not wrong, f"{relative(path)} imports {wrong}"


def test_no_test_imports_a_folder_by_its_short_name() -> None:
    """`kernels.attention` and `pageframe.kernels.attention` would be two modules with two states."""
    for path in files("tests"):
        wrong = imports_from(path, "kernels", "runtime", "api", "benchmarks")
        assert not wrong, f"{relative(path)} imports {wrong}"


@pytest.mark.parametrize(
    "module",
    [
        "pageframe.runtime",
        "pageframe.api.cli",
        "pageframe.api.launch",
        "pageframe.api.server",
        "pageframe.runtime.engine_client",
        "pageframe.runtime.tokenizer",
        "pageframe.runtime.chat_template",
        "pageframe.benchmarks.client.command",
    ],
)
def test_light_modules_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

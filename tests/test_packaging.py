"""What is installed is everything: an unlisted subpackage imports from a checkout but is missing from the wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("runtime", "kernels", "api", "benchmarks")
SOURCES = {".py", ".cpp", ".h", ".json"}


def test_the_wheel_holds_every_source_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in names:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    subprocess.run([*command, str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {f"pageframe/{name}" for name in names if name.split("/")[0] in FOLDERS and Path(name).suffix in SOURCES}
    assert expected - shipped == set(), "missing from the wheel"
    assert {name for name in shipped if Path(name).suffix in SOURCES} - expected == set(), (
        "in the wheel but not in the tree"
    )


def test_kernels_stays_a_namespace_folder() -> None:
    """A regular top-level package `kernels` on the path would shadow another project's and break transformers."""
    assert not (ROOT / "kernels" / "__init__.py").exists()

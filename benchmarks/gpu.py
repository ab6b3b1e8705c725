"""Everything that a GPU must show, in one script: `python benchmarks/gpu.py` on a machine with one, nothing installed.

    python benchmarks/gpu.py [--rehearse] [--part NAME …] [--json gpu.json] [--plot gpu.png]

It needs torch, triton, numpy, safetensors, tokenizers and jinja2, and no network; under eight minutes on an H200. It
measures the machine's own limits, checks every kernel against float32, times attention beside them and beside other
implementations, and the draws of a step, and runs the engine with random weights in the shapes of three models, with
graphs and without. Each part is a process with a time limit of its own: one that fails or hangs keeps no other from
running. The table comes last; the raw figures are in the JSON file. Ctrl-C ends it early, with what was measured until
then. `--part tune` finds launch settings instead (tune_triton.py).

--rehearse runs the same code in Triton's interpreter on a CPU, at toy sizes and without the packages that a GPU machine
may lack: whether the script runs at all is then known before it is on a GPU. Its figures mean nothing.

Exits with 1 if a check failed or a part did not end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pageframe.benchmarks.gpu_parts.results import Row

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("runtime", "kernels", "api", "benchmarks")


@dataclass(frozen=True, slots=True)
class Part:
    """A process of the script, and the seconds it may take. Some run only when they are asked for."""

    name: str
    seconds: float
    unasked: bool = True


PARTS = (
    Part("machine", 25),
    Part("checks", 100),
    Part("attention", 70),
    Part("others", 50),
    Part("sampling", 20),
    Part("Qwen3-0.6B", 60),
    Part("Llama-3.1-8B", 75),
    Part("Qwen3-14B", 75),
    Part("tune", 560, unasked=False),
)


def main(argv: Sequence[str] | None = None) -> int:
    args = read_arguments(argv)
    parts = [part for part in PARTS if (part.name in args.part if args.part else part.unasked)]
    with tempfile.TemporaryDirectory() as folder:
        links = make_links(Path(folder))
        sys.path.insert(0, str(links))
        from pageframe.benchmarks.gpu_parts.results import FAILED, Row, format_table, read_rows

        rows: list[Row] = []
        for part in parts:
            print(f"{part.name} …", file=sys.stderr, flush=True)
            try:
                rows += run_part(part.name, part.seconds, links, Path(folder), rehearse=args.rehearse)
            except KeyboardInterrupt:
                rows += read_rows(Path(folder) / f"{part.name}.json")
                rows.append(Row(part.name, "rest", verdict=FAILED, note="stopped by Ctrl-C, and all that follows"))
                break
        rows += save(rows, args)
    print(format_table(rows))
    return 1 if any(row.verdict == FAILED for row in rows) else 0


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description="Check and time everything that runs on a GPU; the table comes last.")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes in the interpreter, on a CPU")
    names = [part.name for part in PARTS]
    parser.add_argument("--part", choices=names, action="append", help="only this one; may be given again")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), metavar="FILE", help="raw figures (%(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("gpu.png"), metavar="FILE", help="plot (%(default)s)")
    return parser.parse_args(argv)


def make_links(folder: Path) -> Path:
    """A folder from which `pageframe` is imported: the packages of this checkout under their full names."""
    package = folder / "links" / "pageframe"
    package.mkdir(parents=True)
    for name in FOLDERS:
        (package / name).symlink_to(ROOT / name)
    return package.parent


def run_part(name: str, limit: float, links: Path, folder: Path, *, rehearse: bool) -> list[Row]:
    """A part in a process of its own: the rows that it left, and one more if it did not end well. None outlives this.

    Args:
        limit: seconds after which it is ended.
    """
    from pageframe.benchmarks.gpu_parts.results import FAILED, Row, read_rows

    out = folder / f"{name}.json"
    environment = os.environ | {"PYTHONPATH": str(links)}
    environment.pop("TRITON_INTERPRET", None)
    if rehearse:
        environment["TRITON_INTERPRET"] = "1"
    # -P: the folder that the script is called from holds no modules of ours.
    command = [sys.executable, "-P", "-m", "pageframe.benchmarks.gpu_parts", name, str(out)]
    command += ["--rehearse"] * rehearse
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, complaint = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return [*read_rows(out), Row(name, "rest", verdict=FAILED, note=f"not done after {limit:.0f} s")]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its compilers too
            process.communicate()
    if process.returncode:
        sys.stderr.write(complaint)
        last = complaint.strip().splitlines()[-1:] or ["it left no word"]
        note = f"exit status {process.returncode}: {last[0][:200]}"
        return [*read_rows(out), Row(name, "rest", verdict=FAILED, note=note)]
    return read_rows(out)


def save(rows: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    """Write the figures and draw them; rows that say where, or why not."""
    from pageframe.benchmarks.gpu_parts.results import FAILED, NOT_MEASURED, Row

    saved = []
    try:
        content = {"rehearsal": args.rehearse, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
        saved.append(Row("output", "figures", note=str(args.json)))
    except OSError as error:
        saved.append(Row("output", "figures", verdict=FAILED, note=f"{args.json}: {error.strerror}"))
    try:
        from pageframe.benchmarks.gpu_parts.plot import save_plot

        save_plot(rows, args.plot, rehearsal=args.rehearse)
        saved.append(Row("output", "plot", note=str(args.plot)))
    except ImportError:
        saved.append(Row("output", "plot", verdict=NOT_MEASURED, note="not drawn: matplotlib is not installed here"))
    except (OSError, ValueError) as error:
        saved.append(Row("output", "plot", verdict=FAILED, note=f"{args.plot}: {error}"))
    return saved


if __name__ == "__main__":
    sys.exit(main())

"""`python -m pageframe.benchmarks.client`: the load client without the rest of the command line."""

from __future__ import annotations

import argparse
import sys

from pageframe.benchmarks.client.command import add_arguments, run


def main() -> int:
    """Parse the command line and run; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pageframe.benchmarks.client",
        description="Load a server that speaks OpenAI's API and measure it.",
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())

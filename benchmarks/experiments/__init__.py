"""In-process comparisons, each a command: `python -m pageframe.benchmarks.experiments.NAME`."""

import pageframe.runtime  # noqa: F401 - it sets how OpenMP waits, which must come before torch is imported

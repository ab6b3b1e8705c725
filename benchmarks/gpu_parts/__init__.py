"""The parts of benchmarks/gpu.py, each a process of its own. They need torch, triton, numpy and this package alone."""

import pageframe.runtime  # noqa: F401 - it sets how OpenMP waits, which must come before torch is imported

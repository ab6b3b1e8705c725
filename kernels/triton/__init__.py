"""GPU kernels in Triton. Importing this package does not import Triton; `backend` does."""

from collections import Counter

#: How often each kernel was launched in this process, by name: shows that a path really ran on these kernels.
launches: Counter[str] = Counter()

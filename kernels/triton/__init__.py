"""GPU kernels in Triton. Importing this package does not import Triton; `backend` does."""

from collections import Counter

#: How often each kernel was launched in this process, by name: shows that a path really ran on these kernels.
launches: Counter[str] = Counter()

#: An option of launches: no product is fused with a sum unless the kernel says tl.fma. Promises need it: codes of K and
#: V are those of the CPU's kernels, which round every product on its own; a row's bits do not depend on the size of the
#: batch, though a kernel's variants for other sizes are compiled each by itself; the tokens drawn are the host's. The
#: prefill kernel has every such sum as a tl.fma, and goes without the option, which would cost it registers.
UNFUSED = {"enable_fp_fusion": False}

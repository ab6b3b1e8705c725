"""What counts as a token's mass in top_p: one rule for numpy and for the kernels, and it needs no Triton.

A token's distance is (the row's largest logit - its logit) / temperature, in float32. Its mass is exp(-distance) as a
whole number of 2**-34 of the likeliest token's. So sums of masses are whole numbers as well: however they are taken,
in whatever order and on whatever device, they are the same, and where top_p ends is not a matter of rounding.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

#: The likeliest token's mass is 2**MASS_BITS. 2**19 of those, more than any vocabulary has, still add up to no more
#: than 2**53, below which float64 holds every whole number.
MASS_BITS = 34
MASS_EXPONENT = MASS_BITS * math.log(2)


def token_masses(distances: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Whole numbers, float64, of the shape of `distances`, which are from 0 to infinity.

    exp is the one step that may differ in its last bit between libraries; a mass has 19 bits fewer than a float64.
    """
    masses = distances.astype(np.float64)
    np.subtract(MASS_EXPONENT, masses, out=masses)
    np.exp(masses, out=masses)
    rounded: npt.NDArray[np.float64] = np.rint(masses, out=masses)
    return rounded

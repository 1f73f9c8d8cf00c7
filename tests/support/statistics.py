"""Whether a sample fits a distribution."""

import numpy as np


def implausible(counts, expected):
    """Whether these counts are further from the expected ones than in 1 of 10**6 samples (Wilson and Hilferty)."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    free = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    normal = ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / (2 / (9 * free)) ** 0.5
    return normal > 4.75

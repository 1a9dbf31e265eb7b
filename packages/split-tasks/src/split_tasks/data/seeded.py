"""Random numbers that are a pure function of (seed, split, item, draw).

A generator object per item would cost more than the image it draws, and one per worker would make an item
depend on its neighbours. A counter hashed with SplitMix64 (Steele et al., 2014) does neither, works on a whole
batch at once and gives the same bits on every platform and numpy version.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every bit depends on every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(*, seed: int, stream: str, items: Sequence[int], draws: int) -> NDArray[np.float64]:
    """(len(items), draws) numbers in [0, 1).

    Args:
        seed: any integer.
        stream: names what the numbers are for, so that splits or purposes with one seed are unrelated.
        items: row i depends on items[i] alone.
        draws: numbers per item; asking for more leaves the first ones unchanged.
    """
    start = np.array([seed & (2**64 - 1)], dtype=np.uint64)
    key = mix(mix(start + GOLDEN) + np.uint64(zlib.crc32(stream.encode())))
    rows = mix(key + (np.asarray(items, dtype=np.uint64) + np.uint64(1)) * GOLDEN)
    steps = (np.arange(draws, dtype=np.uint64) + np.uint64(1)) * GOLDEN
    return (mix(rows[:, None] + steps[None, :]) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def integer(u: NDArray[np.float64], low: int, high: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Uniform integers from `low` to `high`, both included, from uniforms."""
    return low + np.floor(u * (np.asarray(high) - low + 1)).astype(np.int64)

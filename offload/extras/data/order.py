"""Row order: each epoch is a permutation computed per position, without memory or history."""

from __future__ import annotations

import numpy as np

_NUM_ROUNDS = 8  # Feistel rounds


def shuffled(positions: np.ndarray, num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the row at each position [n] (0 <= position < num_rows) in this epoch, int64 [n].

    A Feistel network permutes the next even power of two. Repeating it while the result lies outside [0, num_rows)
    gives a permutation of the rows (cycle walking) [Black and Rogaway 2002, "Ciphers with arbitrary finite domains"].
    """
    half_bits = np.uint64(max((int(num_rows - 1).bit_length() + 1) // 2, 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    keys = _keys(seed, epoch)
    value = np.asarray(positions, np.uint64)
    # The domain has at most four times as many numbers as rows (from four rows on), so few repetitions are needed.
    outside = np.ones(value.shape, bool)
    while outside.any():
        left, right = value >> half_bits, value & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        value = np.where(outside, left << half_bits | right, value)
        outside = value >= num_rows
    return value.astype(np.int64)


def rows_at(positions: np.ndarray, num_rows: int, seed: int, group: int = 1) -> np.ndarray:
    """Return the rows at `positions` [n] in the endless epoch sequence, int64 [n].

    `group` neighbouring rows stay together.
    """
    if group > 1:
        return rows_at(positions // group, num_rows // group, seed) * group + positions % group
    epochs = positions // num_rows
    rows = np.empty(len(positions), np.int64)
    # A batch may cross the end of an epoch, and each epoch has keys of its own.
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        rows[in_epoch] = shuffled(positions[in_epoch] % num_rows, num_rows, seed, int(epoch))
    return rows


def _keys(seed: int, epoch: int) -> np.ndarray:
    # Mixed before the epoch is added: neighbouring seeds would otherwise share epochs.
    base = _mix(np.asarray([seed % 2**64], np.uint64)) + np.uint64(epoch)
    return _mix(_mix(base) + np.arange(1, _NUM_ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(value: np.ndarray) -> np.ndarray:
    """Finalizer from splitmix64 [Steele, Lea and Flood 2014]; uint64 arithmetic wraps."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(value ^ (value >> np.uint64(31)))

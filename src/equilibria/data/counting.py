"""splitmix64: numbers that look random, from a seed and a counter, the same on every machine.

Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014), figure 16. Splits of a
data set rest on it instead of a library's generator, whose stream may change with a version.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["host_seed", "mix", "shuffled"]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(*numbers: int) -> int:
    """One integer of 63 bits for a sequence of integers; every one of them matters, in order."""
    state = 0
    for number in numbers:
        state = _finish((state ^ (number & _WORD)) + _GOLDEN)
    return state >> 1


def shuffled(count: int, seed: int) -> Tensor:
    """The numbers 0 … count − 1 in an order that depends on (count, seed) alone, long [count]."""
    start = _signed(_finish((seed & _WORD) + _GOLDEN))
    keys = _signed(_GOLDEN) * torch.arange(1, count + 1, dtype=torch.int64) + start
    keys = (keys ^ _shift(keys, 30)) * _signed(_FIRST)
    keys = (keys ^ _shift(keys, 27)) * _signed(_SECOND)
    return torch.argsort(keys ^ _shift(keys, 31), stable=True)


def host_seed(generator: torch.Generator | None) -> int:
    """A seed drawn from ``generator`` without waiting for its device.

    A number drawn on a GPU can be read only after the GPU has come that far. Its generator is a
    counter whose seed and offset the host knows; both make the seed here, and the offset moves on.
    """
    if generator is None or generator.device.type == "cpu":
        return int(torch.randint(0, 2**63 - 1, (), generator=generator))
    if generator.device.type != "cuda":
        device = generator.device
        return int(torch.randint(0, 2**31 - 1, (), generator=generator, device=device))
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # offsets of CUDA generators are multiples of four
    return mix(generator.initial_seed(), offset)


def _finish(z: int) -> int:
    z &= _WORD
    z = ((z ^ (z >> 30)) * _FIRST) & _WORD
    z = ((z ^ (z >> 27)) * _SECOND) & _WORD
    return z ^ (z >> 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign, which torch's >> keeps."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)

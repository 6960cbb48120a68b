"""Checks of the options of DeepOptEq: what was given, what is allowed, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from equilibria.problems import Regularizer

__all__ = ["block_sizes", "check_regularizer", "odd_kernel", "size", "start_alphas"]


def size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"DeepOptEq({name}={value!r}): expected an integer of at least 1.")
    return value


def block_sizes(mids: object) -> tuple[int, ...]:
    if isinstance(mids, (str, bytes)) or not isinstance(mids, Sequence) or not mids:
        raise ValueError(
            f"DeepOptEq(mids={mids!r}): expected the channels of each block, such as (16, 32, 64)."
        )
    return tuple(size(f"mids[{i}]", mid) for i, mid in enumerate(mids))


def odd_kernel(value: int | None, separable: bool) -> int | None:
    if value is None:
        if separable:
            raise ValueError(
                "DeepOptEq(separable=True) is for convolutions: give kernel_size as well."
            )
        return None
    if size("kernel_size", value) % 2 == 0:
        raise ValueError(
            f"DeepOptEq(kernel_size={value}): 'same' padding needs an odd kernel size."
        )
    return value


def start_alphas(alpha: float | Sequence[float], count: int, *, learned: bool) -> tuple[float, ...]:
    values = tuple(alpha) if isinstance(alpha, Sequence) else (alpha,) * count
    if len(values) != count:
        raise ValueError(
            f"DeepOptEq(alpha={alpha!r}) gives {len(values)} numbers for the {count} blocks of "
            "mids: expected one for all, or one a block."
        )
    allowed = "(0, 1), which a sigmoid can reach," if learned else "(0, 1]"
    for value in values:
        given: object = value
        number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not number or not 0.0 < value <= 1.0 or (learned and value == 1.0):
            raise ValueError(f"DeepOptEq(alpha={alpha!r}): expected numbers in {allowed} (Eq 6).")
    return tuple(float(value) for value in values)


def check_regularizer(regularizer: object, regularize: object) -> None:
    if regularize not in ("gradient", "prox"):
        raise ValueError(f"DeepOptEq(regularize={regularize!r}): expected 'gradient' or 'prox'.")
    if regularizer is None:
        return
    if not isinstance(regularizer, Regularizer):
        raise TypeError(
            f"DeepOptEq(regularizer={regularizer!r}): expected a regularizer such as "
            "SquaredNorm(0.1) or None."
        )
    name = type(regularizer).__name__
    if regularize == "prox" and not regularizer.has_prox:
        raise ValueError(
            f"DeepOptEq(regularize='prox') needs a regularizer with a closed prox (SquaredNorm, "
            f"L1), got {name}; use regularize='gradient'."
        )
    if regularize == "gradient" and not regularizer.smooth:
        raise ValueError(
            f"DeepOptEq(regularize='gradient') takes a smooth regularizer, and {name} has a kink: "
            "z − ∂R(z) jumps there. Use regularize='prox'."
        )

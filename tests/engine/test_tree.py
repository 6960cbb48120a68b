"""Trees of tensors: checks, norms and products over leaves against numpy, memory order."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria.engine.tree import (
    History,
    Layout,
    flatten_state,
    sample_dot,
    sample_norm,
    scale_samples,
    select_samples,
    take_samples,
    where_sample,
)
from tests.contracts.problems import randn

law = settings(max_examples=30, deadline=None, derandomize=True)
shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)


def leaves_of(batch: int, kinds: list[tuple[int, ...]], seed: int) -> list[Tensor]:
    return [randn(batch, *shape, seed=seed + i) for i, shape in enumerate(kinds)]


def rows(leaves: list[Tensor]) -> np.ndarray:
    return np.concatenate([x.detach().double().reshape(len(x), -1).numpy() for x in leaves], 1)


@law
@given(batch=st.integers(1, 4), kinds=st.lists(shapes, min_size=1, max_size=3), seed=st.integers(0))
def test_norms_and_products_over_leaves(
    batch: int, kinds: list[tuple[int, ...]], seed: int
) -> None:
    a, b = leaves_of(batch, kinds, seed % 999), leaves_of(batch, kinds, seed % 999 + 50)
    np.testing.assert_allclose(sample_norm(a), np.linalg.norm(rows(a), axis=1), rtol=1e-14)
    expected = (rows(a) * rows(b)).sum(1)
    np.testing.assert_allclose(sample_dot(a, b), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_run_in_float32(dtype: torch.dtype) -> None:
    """10⁴ numbers of size 0.1: in half precision the sum would stall; in float16 1e5² overflows."""
    x = torch.full((2, 10_000), 0.1, dtype=dtype)
    exact = np.linalg.norm(rows([x]), axis=1)
    assert sample_norm([x]).dtype == sample_dot([x], [x]).dtype == torch.float32
    np.testing.assert_allclose(sample_norm([x]), exact, rtol=1e-5)
    np.testing.assert_allclose(sample_dot([x], [x]), exact**2, rtol=1e-5)
    large = torch.full((1, 4), 6e4, dtype=dtype)
    np.testing.assert_allclose(sample_norm([large]), np.linalg.norm(rows([large])), rtol=1e-5)


def test_scaling_and_choosing_by_sample() -> None:
    leaves = leaves_of(3, [(2, 2), (), (4,)], 0)
    scale = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
    scaled = scale_samples(scale, leaves)
    np.testing.assert_allclose(rows(scaled), rows(leaves) * scale.numpy()[:, None])
    mask = torch.tensor([True, False, True])
    chosen = where_sample(mask, leaves, scaled)
    np.testing.assert_array_equal(
        rows(chosen), np.where(mask.numpy()[:, None], rows(leaves), rows(scaled))
    )
    half = scale_samples(torch.tensor([1e-6]), [torch.full((1, 2), 6e4, dtype=torch.float16)])
    assert half[0].dtype == torch.float16
    assert float(half[0][0, 0]) == pytest.approx(0.06, rel=2e-3)  # 1e-6 alone underflows in half


MEMORY_ORDERS: dict[str, Any] = {
    "contiguous": lambda: randn(3, 2, 4, 5, seed=0),
    "channels_last": lambda: randn(3, 2, 4, 5, seed=0).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: randn(3, 2, 4, 5, 2, seed=0).to(
        memory_format=torch.channels_last_3d
    ),
    "transposed": lambda: randn(3, 5, 4, seed=0).transpose(1, 2),
    "sliced": lambda: randn(3, 8, seed=0)[:, ::2],
    "expanded": lambda: randn(1, 4, 2, seed=0).expand(3, 4, 2),
    "one number": lambda: randn(3, seed=0),
}


@pytest.mark.parametrize("kind", MEMORY_ORDERS)
def test_layout_is_a_view_in_the_leafs_own_order(kind: str) -> None:
    leaf = MEMORY_ORDERS[kind]()
    layout = Layout.of(leaf)
    flat = layout.flat(leaf)
    assert flat.shape == (3, leaf[0].numel())
    assert torch.equal(layout.leaf(flat), leaf)
    if kind not in ("sliced", "expanded"):
        assert flat.data_ptr() == leaf.data_ptr()
        assert layout.leaf(torch.zeros_like(flat)).stride() == leaf.stride()


@pytest.mark.parametrize("kind", MEMORY_ORDERS)
def test_selected_samples_keep_values_and_format(kind: str) -> None:
    leaf = MEMORY_ORDERS[kind]()
    (part,) = select_samples([leaf], torch.tensor([2, 0]))
    assert torch.equal(part, leaf[[2, 0]])
    if kind.startswith("channels_last"):
        fmt = torch.channels_last if kind == "channels_last" else torch.channels_last_3d
        assert part.is_contiguous(memory_format=fmt)


BAD_STATES = [
    ((), ValueError, "holds no tensor"),
    ({}, ValueError, "holds no tensor"),
    (1.5, TypeError, "is a float; every leaf must be a torch.Tensor"),
    ((torch.zeros(2, 2), None), TypeError, "leaf 1 of z0 is a NoneType"),
    (np.zeros((2, 3)), TypeError, "is a ndarray"),
    (torch.zeros(2, 3, dtype=torch.long), TypeError, r"torch.int64.*floating.*\.float\(\)"),
    (torch.zeros(2, 3, dtype=torch.bool), TypeError, "torch.bool"),
    ({"a": torch.zeros(2), "b": torch.zeros(2).int()}, TypeError, "leaf 1 of z0 has dtype"),
    (torch.tensor(1.0), ValueError, r"is a scalar.*\[1\]"),
    (torch.zeros(0, 3), ValueError, "batch size zero"),
    ((torch.zeros(2, 3), torch.zeros(3, 3)), ValueError, r"differ in batch size .*\[2, 3\]"),
]


@pytest.mark.parametrize(("tree", "kind", "message"), BAD_STATES)
def test_bad_states_are_refused_with_reasons(tree: Any, kind: type, message: str) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("the map must not be called")

    with pytest.raises(kind, match=message):
        flatten_state(tree)
    with pytest.raises(kind, match=message):
        eq.fixed_point(never, tree)
    with pytest.raises(kind, match=message.replace("z0", "b")):
        eq.linear_solve(never, tree)


# Histories ---------------------------------------------------------------------------------------


def leaves_like(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A leaf [B, n], a channels_last one, and one with a number a sample."""
    image = randn(3, 2, 4, 5, seed=seed).contiguous(memory_format=torch.channels_last)
    return [t.to(dtype) for t in (randn(3, 7, seed=seed + 100), image, randn(3, seed=seed + 200))]


MODES: dict[str, Any] = {"in place": torch.no_grad, "recorded": contextlib.nullcontext}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writes", [1, 3, 4, 7])
def test_products_and_combinations(mode: str, writes: int) -> None:
    memory = 4
    with MODES[mode]():
        ring = History(leaves_like(0), memory)
        assert ring.functional == (mode == "recorded")
        held: dict[int, list[Tensor]] = {}
        for k in range(writes):
            held[k % memory] = leaves_like(k)
            ring.write(k % memory, held[k % memory])
        used = len(held)
        assert ring.used == used
        x = leaves_like(50)
        expected = np.stack([(rows(held[i]) * rows(x)).sum(1) for i in range(used)], 1)
        np.testing.assert_allclose(ring.dot(x).squeeze(1), expected, rtol=1e-12, atol=1e-13)
        weights = randn(3, used, seed=9)
        combined = ring.combine(weights)
        mixed = sum(weights.numpy()[:, [i]] * rows(held[i]) for i in range(used))
        np.testing.assert_allclose(rows(combined), mixed, rtol=1e-12, atol=1e-13)
        assert [c.shape for c in combined] == [v.shape for v in x]
        assert combined[1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_products_are_summed_and_given_in_float32(
    mode: str, dtype: torch.dtype
) -> None:
    with MODES[mode]():
        x = [randn(3, 5000, seed=1).to(dtype)]
        ring = History(x, 1)
        ring.write(0, x)
        found = ring.dot(x).squeeze(1)
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found[:, 0], (rows(x) ** 2).sum(1), rtol=1e-5)
        assert ring.combine(torch.ones(3, 1))[0].dtype == dtype


@dataclass(frozen=True)
class Momentum:
    """What a user's solver may keep: also a field that ``__init__`` does not take."""

    last: list[Tensor]
    inner: Any
    norm: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", sample_norm(self.last))


def test_samples_are_taken_from_any_state_of_a_solver() -> None:
    z, index = randn(5, 3, seed=1), torch.tensor([3, 0])
    history = History([z], 2)
    history.write(0, [z])
    solvers = (eq.Anderson(), eq.BestIterate(eq.PeacemanRachford()))
    state = {"of": Momentum([z], (history, None, 7)), "by": solvers}
    found = take_samples(state, index)
    assert torch.equal(found["of"].last[0], z[index])
    assert torch.equal(found["of"].norm, state["of"].norm[index])
    taken, *rest = found["of"].inner
    assert torch.equal(taken.dot([z[index]])[:, 0, 0], sample_dot([z[index]], [z[index]]))
    assert rest == [None, 7]
    assert found["by"] == solvers  # whose method ``take`` is not one of a state
    assert torch.equal(state["of"].last[0], z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("empty", [(0,), (2, 0, 3)])
def test_leaves_without_entries_are_solved_with_the_others(empty: Any, dtype: Any) -> None:
    weight, x = torch.full((1,), 0.5, dtype=torch.float64, requires_grad=True), randn(2, 3, seed=0)
    start = {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.zeros(2, *empty, dtype=dtype)}

    def fn(z: Any) -> Any:
        return {"a": weight * z["a"] + x, "b": z["b"]}

    solvers = eq.Anderson(), eq.Broyden(), eq.Anderson(rtol=0.0, max_steps=60), eq.Picard()
    for solver in solvers:
        found = eq.fixed_point(fn, start, solver=solver).value
        torch.testing.assert_close(found["a"], 2 * x, rtol=1e-7, atol=1e-7)
        assert found["b"].shape == start["b"].shape
        (slope,) = torch.autograd.grad(found["a"].sum(), weight)
        torch.testing.assert_close(slope, 4 * x.sum().view(1), rtol=1e-6, atol=1e-6)

    def gap(z: Any) -> Any:
        return {"a": fn(z)["a"] - z["a"], "b": z["b"]}

    torch.testing.assert_close(eq.root(gap, start).value["a"], 2 * x)
    b = {"a": x, "b": start["b"]}
    half = eq.linear_solve(lambda v: {"a": 0.5 * v["a"], "b": v["b"]}, b)
    torch.testing.assert_close(half.value["a"], 2 * x)

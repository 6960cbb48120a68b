"""The map of a solve: what it may return, what is said of the rest, how it is cut by sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import equilibria as eq
from equilibria.engine.maps import Map
from tests.contracts import problems

Z = torch.zeros(3, 2)


def wrap(fn: Any, state: Any, args: tuple[Any, ...] = ()) -> Map:
    leaves, spec = pytree.tree_flatten(state)
    return Map(fn, args, spec, leaves)


BAD_OUTPUTS = [
    (lambda z: z[:, :1], ValueError, r"returned shape \(3, 1\) for a state of shape \(3, 2\)"),
    (lambda z: z[:1], ValueError, r"shape \(1, 2\)"),
    (lambda z: z.flatten(), ValueError, r"shape \(6,\)"),
    (lambda z: None, TypeError, "returned a NoneType; it must return a tensor"),
    (lambda z: (z, z), TypeError, "returned a tuple"),
    (lambda z: 0.0, TypeError, "returned a float"),
    (lambda z: z.long(), TypeError, "returned dtype torch.int64 for a state of torch.float32"),
    (lambda z: z.to("meta"), ValueError, "returned device meta for a state on cpu"),
    (lambda z: torch.cos(z.mul_(1.0)), RuntimeError, "changes its argument z in place"),
]


@pytest.mark.parametrize(("fn", "kind", "message"), BAD_OUTPUTS)
def test_wrong_answers_say_what_differs(fn: Any, kind: type, message: str) -> None:
    for adjoint in (eq.Implicit(), eq.Unrolled(), eq.OneStep()):
        with pytest.raises(kind, match=message):
            eq.fixed_point(fn, Z, adjoint=adjoint)
    with pytest.raises(kind, match=message):
        eq.linear_solve(fn, Z + 1)
    with torch.inference_mode(), pytest.raises(kind, match=message):
        eq.fixed_point(fn, Z + 1)


def test_wrong_trees_say_what_differs() -> None:
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(2)}
    with pytest.raises(ValueError, match="must return the structure of z0"):
        eq.fixed_point(lambda z: (z["a"], z["b"]), state)
    with pytest.raises(ValueError, match="must return the structure of z0"):
        eq.fixed_point(lambda z: {"a": z["a"]}, state)
    with pytest.raises(ValueError, match=r"leaf 1 of the map's output returned shape \(2, 1\)"):
        eq.fixed_point(lambda z: {"a": z["a"], "b": z["b"][:, None]}, state)
    with pytest.raises(ValueError, match="must return the structure of z0"):
        eq.fixed_point(lambda z: z["a"], state)


def test_dict_in_another_order_is_right_or_refused() -> None:
    """Keys name leaves, whatever their order; leaves of one shape must never change places."""
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}
    try:
        solution = eq.fixed_point(
            lambda z: {"b": 0.5 * z["b"] + 2, "a": 0.5 * z["a"] + 1}, state, solver=eq.Picard()
        )
    except ValueError as error:
        said = str(error)
    else:
        said = "structure"
        torch.testing.assert_close(solution.value["a"], torch.full((2, 3), 2.0), rtol=1e-3, atol=0)
        torch.testing.assert_close(solution.value["b"], torch.full((2, 3), 4.0), rtol=1e-3, atol=0)
    assert "structure" in said


def test_args_may_be_one_thing_or_a_tree() -> None:
    seen: list[Any] = []

    def fn(z: Tensor, *args: Any) -> Tensor:
        seen.append(args)
        return 0.5 * z + 1

    for given, expected in (
        (3.0, (3.0,)),
        (None, (None,)),
        ((), ()),
        ((1, "two"), (1, "two")),
        ([1, 2], ([1, 2],)),
        ({"k": 1}, ({"k": 1},)),
    ):
        with torch.no_grad():
            eq.fixed_point(fn, Z, given, solver=eq.Picard())
        assert seen[-1] == expected


def test_part_of_a_map_indexes_every_tensor_in_args() -> None:
    problem = problems.mixed()
    matrix, offset = problem.args
    fn = wrap(
        lambda z, p: problem.fn(z, p["m"], p["o"][0]) * p["k"],
        problem.z0,
        ({"m": matrix, "o": (offset,), "k": 2.0},),
    )
    index = torch.tensor([4, 1])
    z = problems.randn(6, 8, seed=3)
    part = fn.take(index)
    torch.testing.assert_close(part([z[index]])[0], fn([z])[0][index], rtol=1e-14, atol=0)
    fn.check_take(index, [z], fn([z]), part)
    again = part.take(torch.tensor([1]))
    torch.testing.assert_close(again([z[[1]]])[0], fn([z])[0][[1]], rtol=1e-14, atol=0)


@pytest.mark.parametrize("leak", [1.0, 1e-6])
def test_samples_that_mix_are_caught(leak: float) -> None:
    """In float64 even a small dependence on the batch shows (the check allows 1e-10)."""
    z = problems.randn(4, 3, seed=0)
    fn = wrap(lambda z: z + leak * z.mean(0), z)
    index = torch.tensor([0, 3])
    with pytest.raises(ValueError, match="no batch statistics"):
        fn.check_take(index, [z], fn([z]), fn.take(index))


def test_samples_that_mix_are_caught_beside_large_ones() -> None:
    """Each sample is compared by its own size: a small one is not hidden by a large one."""
    z = problems.randn(4, 3, seed=0) * torch.tensor([[1e12], [1e12], [1.0], [1.0]])
    fn = wrap(lambda z: 0.5 * z + (torch.arange(3.0) if len(z) == 4 else 0.0), z)
    index = torch.tensor([0, 3])
    with pytest.raises(ValueError, match="compact=True"):
        fn.check_take(index, [z], fn([z]), fn.take(index))


def test_nan_rows_do_not_hide_a_mixture_nor_raise_one() -> None:
    z = problems.randn(4, 3, seed=0)
    z[3] = float("nan")
    good = wrap(lambda z: 0.5 * z, z)
    index = torch.tensor([0, 3])
    good.check_take(index, [z], good([z]), good.take(index))
    bad = wrap(lambda z: z + torch.arange(3.0) * len(z), z)
    with pytest.raises(ValueError, match="compact=True"):
        bad.check_take(index, [z], bad([z]), bad.take(index))

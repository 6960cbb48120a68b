"""The map at an answer: what it depends on, and how failed samples are kept out of its graph."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.adjoints.graph import clean, cut_off, evaluate, isolate, lend, survey
from equilibria.engine.maps import Map
from equilibria.engine.result import Iterated
from equilibria.engine.tree import flatten_state
from tests.contracts.adjoint_contract import (
    FORWARD,
    TANH,
    assert_close,
    dense_of,
    draw,
    exact_propagator,
    loss_of,
)


def as_map(fn: Any, z: Any, args: Any = ()) -> tuple[Map, list[Tensor]]:
    leaves, spec = flatten_state(z)
    return Map(fn, args, spec, leaves), leaves


def sources(fn: Any, args: Any = (), z: Tensor | None = None) -> list[Tensor]:
    z = torch.zeros(2, 3) if z is None else z
    map_, leaves = as_map(fn, z, args)
    return evaluate(map_, leaves).sources


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return sorted(map(id, found)) == sorted(map(id, wanted))


def test_dependencies_that_are_not_used_are_not_found() -> None:
    used, unused = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True) * 1.0
    found = sources(lambda z, a: z * used + (lambda: 0.0 if a is None else 1.0)(), (unused,))
    assert same(found, [used])


def test_the_graph_ends_at_stand_ins() -> None:
    """The gradient of the evaluation to a feature's own ancestors is not taken here."""
    root = torch.ones(3, requires_grad=True)
    feature = root * 2.0
    map_, leaves = as_map(lambda z: z * feature * root, torch.ones(2, 3))
    graph = evaluate(map_, leaves)
    assert same(graph.sources, [feature, root])
    pulled = torch.autograd.grad(graph.outputs[0].sum(), graph.stand_ins)
    by_id = {id(s): g for s, g in zip(graph.sources, pulled, strict=True)}
    # ∂/∂root with the feature held: z·feature = 2 a sample, not 4; ∂/∂feature: z·root = 1.
    assert torch.equal(by_id[id(root)], torch.full((3,), 4.0))
    assert torch.equal(by_id[id(feature)], torch.full((3,), 2.0))


def test_a_non_leaf_that_retains_its_gradient() -> None:
    weight, x = TANH.leaves()
    feature = 1.0 * x
    feature.retain_grad()
    value = eq.fixed_point(lambda z: TANH.fn(z, weight, feature), TANH.start, solver=FORWARD).value
    loss_of(value).backward()
    wanted = dense_of("tanh").gradients(exact_propagator)
    assert_close([weight.grad, x.grad, feature.grad], [*wanted, wanted[1]])


@pytest.mark.parametrize("captured", [False, True])
def test_hooks_on_parameters_are_called_once_with_the_whole_gradient(captured: bool) -> None:
    weight, x = TANH.leaves()
    seen: list[Tensor] = []

    def double(g: Tensor) -> Tensor:
        seen.append(g.clone())
        return 2.0 * g

    weight.register_hook(double)
    fn = (lambda z, x: TANH.fn(z, weight, x)) if captured else TANH.fn
    args = (x,) if captured else (weight, x)
    value = eq.fixed_point(fn, TANH.start, args, solver=FORWARD).value
    loss_of(value).backward(retain_graph=True)
    wanted = dense_of("tanh").gradients(exact_propagator)[0]
    assert len(seen) == 1
    assert weight.grad is not None
    assert_close([seen[0], weight.grad], [wanted, 2.0 * wanted])
    loss_of(value).backward()  # the hook is still there
    assert_close([weight.grad], [4.0 * wanted])


class Slotted:
    """No __dict__ to look into: found by watching the evaluation."""

    __slots__ = ("held",)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __call__(self, z: Tensor) -> Tensor:
        return 0.5 * z * self.held


def test_slots_thread_local_storage_and_closures_that_hold_themselves() -> None:
    made = torch.ones(3, requires_grad=True) * 1.0
    local, box = threading.local(), dict[str, Any](x=made)
    local.feature, box["self"] = made, box
    for fn in (Slotted(made), lambda z: 0.5 * z + local.feature, lambda z: z * box["self"]["x"]):
        assert same(sources(fn), [made])


def test_a_tensor_out_of_sight_of_torch_functions_is_refused_with_advice() -> None:
    """A view made from an older graph: an error."""
    pieces = (torch.ones(3, requires_grad=True) * 2.0).unbind(0)

    def fn(z: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return 0.5 * z + pieces[0]

    with pytest.raises(RuntimeError, match="args"):
        sources(fn)


def test_the_map_may_raise_and_nothing_is_left_behind() -> None:
    """An error of the user's own goes through, and later solves are not disturbed."""
    held = torch.ones(3, requires_grad=True) * 1.0

    def fn(z: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise KeyError("mine")
        return 0.5 * z + held

    with pytest.raises(KeyError, match="mine"):
        eq.fixed_point(fn, torch.zeros(2, 3))
    assert torch.equal(held + 0.0, torch.ones(3))
    x = draw(110, 2, 3).requires_grad_()
    value = eq.fixed_point(lambda z: 0.5 * z + x, torch.zeros(2, 3).double(), solver=FORWARD).value
    assert_close(torch.autograd.grad(value.sum(), x), [torch.full((2, 3), 2.0).double()])


def test_a_large_closure_is_not_searched_and_its_tensors_are_found_all_the_same() -> None:
    """A list longer than a map's own is passed over; watching finds what the map uses of it."""
    weight, x = TANH.leaves()
    feature = 1.0 * x
    crowd = [torch.zeros(1) for _ in range(5000)]
    crowd[4321] = feature
    fn = lambda z: TANH.fn(z, weight, crowd[4321])
    assert not any(t is feature for t in survey(fn).tensors)
    adjoint = eq.Implicit(solver=eq.GMRES(rtol=1e-12))
    value = eq.fixed_point(fn, TANH.start, solver=FORWARD, adjoint=adjoint).value
    found = torch.autograd.grad(loss_of(value), (weight, x))
    assert_close(found, dense_of("tanh").gradients(exact_propagator))


# Failed samples ----------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
FAILED = torch.tensor([True, False, False])


def test_tensors_without_a_row_a_sample_are_left_alone() -> None:
    for t in (torch.full((2, 3), NAN), torch.tensor(NAN)):
        assert clean(t, FAILED) is t
        assert lend(t, FAILED) is t
    t = torch.full((3, 2), NAN)
    assert clean(t, None) is t
    assert lend(t, None) is t


def test_without_a_healthy_sample_nothing_is_infinite() -> None:
    t = torch.tensor([[NAN, 1.0], [INF, 2.0]])
    assert torch.isfinite(lend(t, torch.tensor([True, True]))).all()


def test_entries_that_are_equal_keep_their_gradient() -> None:
    """A bias of zeros with as many rows as the batch has samples is nobody's row."""
    t = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]], requires_grad=True)
    (found,) = torch.autograd.grad((lend(t, FAILED) * torch.ones(3, 2)).sum(), t)
    assert found.tolist() == [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


def isolated(fn: Any, args: tuple[Tensor, ...], z: Tensor) -> Any:
    map_, leaves = as_map(fn, z, args)
    code = torch.where(FAILED, int(eq.Result.nonfinite), int(eq.Result.converged)).to(torch.int8)
    norms = torch.zeros(3)
    counts = {eq.Result.nonfinite: 1, eq.Result.converged: 2}
    return isolate(map_, Iterated(leaves, code, norms, norms, norms, 1, 1, counts))


def test_arguments_and_captured_tensors_are_exchanged_alike() -> None:
    x = torch.tensor([[NAN, 1.0], [2.0, 3.0], [4.0, 5.0]])
    held = x.clone().requires_grad_()
    made = 1.0 * held
    for fn, args in (
        (lambda z, x: z + x, (x,)),
        (lambda z: z + x, ()),
        (lambda z: z + held, ()),
        (lambda z: z + made, ()),
    ):
        part = isolated(fn, args, torch.zeros(3, 2))
        (out,) = part.fn(part.z)
        assert out.tolist() == [[2.0, 3.0], [2.0, 3.0], [4.0, 5.0]]
        if out.requires_grad:
            (found,) = torch.autograd.grad(out.sum(), held)
            assert found.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("way", ["argument", "captured"])
@pytest.mark.parametrize("at", [0.0, 1.0])
def test_a_weight_with_as_many_rows_as_samples_is_left_alone(way: str, at: float) -> None:
    """Also at z = 0, where its product is zero whatever its rows are."""
    weight = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x = torch.tensor([[NAN, 1.0, 0.0], [2.0, 3.0, 1.0], [4.0, 5.0, 2.0]])
    z = torch.full((3, 3), at)
    if way == "argument":
        part = isolated(lambda z, w, x: z @ w.T + x, (weight, x), z)
    else:
        part = isolated(lambda z: z @ weight.T + x, (), z)
    (out,) = part.fn([torch.ones(3, 3)])
    by_hand = torch.ones(3, 3) @ weight.T + x
    assert torch.equal(out[1:], by_hand[1:])
    assert torch.equal(out[0], out[1])
    (found,) = torch.autograd.grad(out[1:].sum(), weight)
    assert torch.equal(found, torch.full((3, 3), 2.0))


def test_where_samples_are_coupled_nan_becomes_zero_and_no_more() -> None:
    """With another sample in place of the failed one the others would answer differently."""
    x = torch.tensor([[NAN, 1.0], [2.0, 3.0], [4.0, 5.0]])
    z = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    part = isolated(lambda z, x: z.mean(0, keepdim=True) + x, (x,), z)
    assert not part.apart
    assert part.fn(part.z)[0].tolist() == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


def test_cut_off_takes_the_constant_for_failed_samples() -> None:
    value = torch.full((3, 2), 2.0, requires_grad=True)
    constant = torch.zeros(3, 2)
    (out,) = cut_off(FAILED, [value * 1.0], [constant])
    assert out.tolist() == [[0.0, 0.0], [2.0, 2.0], [2.0, 2.0]]
    (found,) = torch.autograd.grad(out.sum(), value)
    assert found.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    assert cut_off(None, [value], [constant])[0] is value


ADJOINTS = [eq.Implicit(), eq.Phantom(), eq.Phantom(form="neumann"), eq.OneStep()]


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
@pytest.mark.parametrize(
    ("steps", "start", "first", "weight"), [(1, 0, 0.1, 0.5), (2, 0.4, 0.3, 0.7)]
)
def test_an_answer_outside_the_domain_of_the_map_harms_no_weight(
    adjoint: Any, steps: int, start: float, first: float, weight: float
) -> None:
    """After ``steps`` of √(x − wz) the next evaluation at the first sample is NaN."""
    solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=steps)

    def solve(x: Tensor, z0: Tensor) -> tuple[Tensor, Tensor]:
        w = torch.tensor(weight, requires_grad=True)
        fn = lambda z, x: torch.sqrt(x - w * z)
        sol = eq.fixed_point(fn, z0, (x,), solver=solver, adjoint=adjoint)
        (found,) = torch.autograd.grad(sol.value.sum(), w)
        return sol.value.detach(), found

    x, z0 = torch.tensor([[first], [4.0]]), torch.tensor([[start], [0.0]])
    value, found = solve(x, z0)
    alone, wanted = solve(x[1:], z0[1:])
    assert torch.isfinite(value).all()
    assert torch.equal(value[1:], alone)
    assert torch.isfinite(found)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("adjoint", [*ADJOINTS, eq.Unrolled()], ids=repr)
@pytest.mark.parametrize("fixed", [False, True])
def test_where_all_samples_failed_gradients_are_zero(adjoint: Any, fixed: bool) -> None:
    """Not None, and not an error: a training step of one bad sample does nothing."""
    weight = torch.full((4, 4), 0.1, requires_grad=True)
    x = torch.full((1, 4), -5.0, requires_grad=True)
    solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=5) if fixed else eq.Picard()
    fn = lambda z, x: torch.sqrt(z @ weight.T + x)
    with contextlib.nullcontext() if fixed else pytest.warns(eq.ConvergenceWarning):
        sol = eq.fixed_point(fn, torch.ones(1, 4), (x,), solver=solver, adjoint=adjoint)
    assert sol.result.tolist() == [int(eq.Result.nonfinite)]
    for g in torch.autograd.grad(sol.value.sum(), (weight, x)):
        assert float(g.abs().max()) == 0.0

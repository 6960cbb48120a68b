"""What a map depends on: stand-ins, the walk over the graph, and what cannot be traced."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.adjoints.graph import Substitute, evaluate, survey, watch
from equilibria.engine.maps import Map
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


def test_each_dependency_is_found_once() -> None:
    leaf = torch.ones(3, requires_grad=True)
    made = torch.ones(3, requires_grad=True) * 2.0
    argument = torch.ones(3, requires_grad=True)
    constant = torch.ones(3)
    found = sources(lambda z, a: z * leaf + made * leaf + a * made + constant + a, (argument,))
    assert same(found, [leaf, made, argument])


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


def test_views_of_parameters_made_before_the_map() -> None:
    weight = torch.eye(3).requires_grad_()
    turned = weight.T
    assert same(sources(lambda z: z @ turned), [turned])


def test_a_non_leaf_that_retains_its_gradient() -> None:
    weight, x = TANH.leaves()
    feature = 1.0 * x
    feature.retain_grad()
    value = eq.fixed_point(lambda z: TANH.fn(z, weight, feature), TANH.start, solver=FORWARD).value
    loss_of(value).backward()
    wanted = dense_of("tanh").gradients(exact_propagator)
    assert_close([weight.grad, x.grad, feature.grad], [*wanted, wanted[1]])


def test_hooks_on_parameters_are_called_once_with_the_whole_gradient() -> None:
    weight, x = TANH.leaves()
    seen: list[Tensor] = []
    weight.register_hook(lambda g: seen.append(g.clone()))
    value = eq.fixed_point(TANH.fn, TANH.start, (weight, x), solver=FORWARD).value
    loss_of(value).backward()
    assert len(seen) == 1
    assert_close(seen, dense_of("tanh").gradients(exact_propagator)[:1])


def test_module_with_buffers_and_nested_modules() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
            self.register_buffer("shift", torch.ones(3))

        def forward(self, z: Tensor) -> Tensor:
            return 0.1 * self.stack(z) + self.shift

    block = Block()
    assert same(sources(block), list(block.parameters()))


def test_an_object_with_slots_and_a_callable() -> None:
    """No __dict__ to look into: found by watching the evaluation."""

    class Slotted:
        __slots__ = ("held",)

        def __init__(self, held: Tensor) -> None:
            self.held = held

        def __call__(self, z: Tensor) -> Tensor:
            return 0.5 * z * self.held

    made = torch.ones(3, requires_grad=True) * 1.0
    assert same(sources(Slotted(made)), [made])


def test_an_intermediate_in_thread_local_storage() -> None:
    local = threading.local()
    local.feature = torch.ones(3, requires_grad=True) * 1.0
    assert same(sources(lambda z: 0.5 * z + local.feature), [local.feature])


def test_a_self_referential_closure_ends() -> None:
    made = torch.ones(3, requires_grad=True) * 1.0
    box: dict[str, Any] = {"x": made}
    box["self"] = box
    assert same(sources(lambda z: 0.5 * z * box["self"]["x"]), [made])


def test_a_tensor_out_of_sight_of_torch_functions_is_refused_with_advice() -> None:
    """A view made from an older graph: an error."""
    pieces = (torch.ones(3, requires_grad=True) * 2.0).unbind(0)

    def fn(z: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return 0.5 * z + pieces[0]

    with pytest.raises(RuntimeError, match="args"):
        sources(fn)


def test_watch_sees_what_comes_from_outside_and_nothing_made_inside() -> None:
    held, argument = torch.ones(3), torch.ones(3)
    z = torch.zeros(2, 3)
    map_, leaves = as_map(
        lambda z, a: torch.relu(z * held + a) + torch.ones(3) * 2.0, z, (argument,)
    )
    given_ = watch(map_, leaves)
    assert {id(held), id(argument)} <= {id(t) for t in given_}
    assert id(z) not in {id(t) for t in given_}
    assert not any(t.requires_grad for t in given_)


def test_substitute_feeds_other_tensors_everywhere() -> None:
    old, new = torch.ones(2), torch.full((2,), 5.0)
    with Substitute([old], [new]):
        assert torch.equal(old + 1.0, torch.full((2,), 6.0))
        assert torch.equal(torch.stack([old, old])[1], new)
        assert torch.equal(torch.add(input=old, other=old), torch.full((2,), 10.0))
        assert torch.equal(old.clone(), new)
        assert torch.equal(1.0 - old, torch.full((2,), -4.0))
    assert torch.equal(old + 1.0, torch.full((2,), 2.0))


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


def test_random_maps_of_many_captured_tensors_against_plain_autograd() -> None:
    """Graphs of mixed leaves and intermediates: one evaluation's gradient by both roads."""
    for seed in range(5):
        leaves = [draw(120 + 10 * seed + i, 3, 3, scale=0.2).requires_grad_() for i in range(4)]
        mixed = [leaves[0], leaves[1] @ leaves[0], torch.sin(leaves[2]), leaves[3]]

        def fn(z: Tensor, mixed: list[Tensor] = mixed) -> Tensor:
            out = z
            for m in mixed:
                out = torch.tanh(out @ m)
            return out + mixed[1].sum()

        start = torch.zeros(2, 3, dtype=torch.float64)
        value = eq.fixed_point(
            fn, start, solver=FORWARD, adjoint=eq.Implicit(solver=eq.GMRES(rtol=1e-13))
        ).value
        found = torch.autograd.grad(loss_of(value), leaves, retain_graph=True)
        z = start
        for _ in range(80):
            z = fn(z)
        assert_close(found, torch.autograd.grad(loss_of(z), leaves))


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

"""The battery that every adjoint inherits.

A subclass names its adjoint, the solver it goes with, and its *propagator*: the matrix M(J) that
the adjoint puts in place of (I − J)⁻¹, so that the gradient to a parameter θ is

    (∂T/∂θ)ᵀ M(J)ᵀ g,    J = ∂T/∂z at z*,  g = ∂L/∂z*.

The oracle solves for z* with scipy, forms J and ∂T/∂θ densely in float64 over the whole batch and
applies this formula; it shares nothing with the library but the map.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree

import equilibria as eq
from tests.contracts.problems import as_on_a_gpu, quietly

# Both solves run to 1e-12 and I − J has a condition number below 10 in every problem here, so that
# the gradient is right to about 1e-10; one order is left for sums over the batch.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}

FORWARD = eq.Anderson(rtol=1e-13, max_steps=400)
LAW = settings(
    deadline=None,
    derandomize=True,
    # The laws are inherited: one test function, several classes.
    suppress_health_check=[HealthCheck.differing_executors],
)
LAPS = eq.Picard(rtol=0.0, atol=0.0, max_steps=70)  # maps here halve the error: 2⁻⁷⁰ < eps


# Problems: a map, a start, and the tensors it depends on. --------------------------------------


@dataclass(frozen=True)
class Problem:
    """z = fn(z, *parameters), ‖J‖ ≤ about 1/2."""

    name: str
    fn: Callable[..., Any]
    start: Any
    parameters: tuple[Tensor, ...]

    def leaves(self) -> tuple[Tensor, ...]:
        """Fresh copies of the parameters, wanting gradients."""
        return tuple(p.clone().requires_grad_() for p in self.parameters)


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def contraction(seed: int, rows: int, columns: int, norm: float = 0.5) -> Tensor:
    weight = draw(seed, rows, columns)
    return norm * weight / torch.linalg.matrix_norm(weight, 2)


def tanh_map(z: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ weight.T + x)


def deep_map(
    z: Tensor, outer: Tensor, inner: Tensor, bias: Tensor, scale: Tensor, x: Tensor
) -> Tensor:
    return scale * torch.tanh(torch.sin(z @ inner.T + bias) @ outer.T + x)


def tree_map(
    state: dict[str, Tensor], across: Tensor, back: Tensor, x: Tensor
) -> dict[str, Tensor]:
    a, b = state["a"], state["b"]
    return {
        "a": torch.tanh(b.flatten(1) @ across.T + x),
        "b": 0.5 * torch.sin(a @ back.T).view_as(b) + 0.1 * b,
    }


def conv_map(z: Tensor, kernel: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(nn.functional.conv2d(z, kernel, padding=1) + x)


def symmetric_map(z: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """A gradient step, x − ∇E(z): J = −WᵀDW is symmetric and I − J positive definite."""
    return x - torch.tanh(z @ weight.T) @ weight


def symmetric_conv_map(z: Tensor, kernel: Tensor, x: Tensor) -> Tensor:
    inner = torch.tanh(nn.functional.conv2d(z, kernel, padding=1))
    return x - nn.functional.conv_transpose2d(inner, kernel, padding=1)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


TANH = Problem("tanh", tanh_map, zeros(3, 4), (contraction(1, 4, 4), draw(2, 3, 4)))
_DEEP = (contraction(3, 4, 5, 0.7), contraction(4, 5, 4, 0.7), draw(5, 5))
_SCALE = torch.tensor(0.9, dtype=torch.float64)
DEEP = Problem("several", deep_map, zeros(2, 4), (*_DEEP, _SCALE, draw(6, 2, 4)))
TREE = Problem(
    "tree",
    tree_map,
    {"a": zeros(2, 3), "b": zeros(2, 2, 2)},
    (contraction(7, 3, 4), contraction(8, 4, 3), draw(9, 2, 3)),
)
_KERNELS = draw(10, 2, 2, 3, 3, scale=0.09), draw(14, 2, 2, 3, 3, scale=0.12)
CONV = Problem("conv", conv_map, zeros(2, 2, 3, 2), (_KERNELS[0], draw(11, 2, 2, 3, 2)))
SYMMETRIC = Problem(
    "symmetric", symmetric_map, zeros(3, 4), (contraction(12, 5, 4, 0.7), draw(13, 3, 4))
)
SYMMETRIC_CONV = Problem(
    "symmetric_conv", symmetric_conv_map, zeros(2, 2, 3, 2), (_KERNELS[1], draw(15, 2, 2, 3, 2))
)
GENERAL = (TANH, DEEP, TREE, CONV, SYMMETRIC)
ONLY_SYMMETRIC = (SYMMETRIC, SYMMETRIC_CONV)


# Maps in which one sample may have no finite answer, or no finite derivative. ------------------
Mix = Callable[[Tensor, Tensor], Tensor]
"""(z, weight) ↦ what is fed back, with a small Lipschitz constant."""


@dataclass(frozen=True)
class Hostile:
    """z = fn(mix, z, weight, x): ``healthy`` bounds x of ordinary samples, ``bad`` is x of another.

    Entry 0 of a healthy sample has x = ``edge`` where one is given: infinite and ordinary.
    """

    fn: Callable[[Mix, Tensor, Tensor, Tensor], Tensor]
    healthy: tuple[float, float]
    bad: float
    edge: float | None = None


NAN, INF = float("nan"), float("inf")
HOSTILE = {
    "sqrt": Hostile(lambda mix, z, w, x: torch.sqrt(mix(z, w) + x), (1.0, 2.0), -5.0),
    "log": Hostile(lambda mix, z, w, x: torch.log(mix(z, w) + x), (2.0, 3.0), -5.0),
    "division": Hostile(lambda mix, z, w, x: 1.0 / (x * (1.0 + mix(z, w))), (2.0, 3.0), 0.0),
    "overflow": Hostile(lambda mix, z, w, x: torch.exp(x + mix(z, w).sin()), (-1.0, 0.0), 1e4),
    "nan": Hostile(lambda mix, z, w, x: torch.tanh(mix(z, w) + x), (-1.0, 1.0), NAN),
    "mask": Hostile(
        lambda mix, z, w, x: torch.softmax(mix(z, w) + x, 1) + 0.1, (-1.0, 1.0), -INF, -INF
    ),
    "clamp": Hostile(
        lambda mix, z, w, x: torch.maximum(mix(z, w) + 0.3, x), (-9.0, 0.0), NAN, -INF
    ),
}


# Oracle: scipy for z*, dense algebra for gradients. --------------------------------------------


def flat(tree: Any) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in pytree.tree_leaves(tree)])


def unflat(vector: Tensor, like: Any) -> Any:
    leaves, spec = pytree.tree_flatten(like)
    parts = torch.split(vector, [leaf.numel() for leaf in leaves])
    shaped = [p.view(x.shape) for p, x in zip(parts, leaves, strict=True)]
    return pytree.tree_unflatten(shaped, spec)


def weights_of_loss(z: Tensor) -> Tensor:
    """Coefficients of the loss Σ cᵢzᵢ + ½Σ zᵢ², on the flat state."""
    return torch.linspace(-1.0, 2.0, z.numel(), dtype=torch.float64).to(z)


def loss_of(value: Any) -> Tensor:
    z = flat(value)
    return (weights_of_loss(z) * z).sum() + 0.5 * (z * z).sum()


def solve_dense(fn: Callable[..., Any], start: Any, parameters: Sequence[Tensor]) -> Tensor:
    """z* as a flat vector, by scipy."""

    def gap(v: np.ndarray) -> np.ndarray:
        z = torch.from_numpy(v)
        return (flat(fn(unflat(z, start), *parameters)) - z).numpy()

    with torch.no_grad():
        found = scipy.optimize.root(gap, flat(start).numpy(), tol=1e-14)
        assert np.abs(gap(found.x)).max() < 1e-12
    return torch.from_numpy(found.x)


@dataclass(frozen=True)
class Dense:
    """z*, J = ∂T/∂z and ∂T/∂θ of the whole batch as one vector."""

    z: Tensor
    jacobian: Tensor
    partials: tuple[Tensor, ...]

    def gradients(self, propagator: Callable[[Tensor], Tensor]) -> list[Tensor]:
        g = weights_of_loss(self.z) + self.z
        u = propagator(self.jacobian).T @ g
        return [torch.tensordot(u, p, 1) for p in self.partials]

    def sensitivities(self) -> list[Tensor]:
        """∂z*/∂θ, [N, *θ.shape]."""
        inverse = torch.linalg.inv(torch.eye(len(self.z), dtype=torch.float64) - self.jacobian)
        return [torch.tensordot(inverse, p, 1) for p in self.partials]


def dense(fn: Callable[..., Any], start: Any, parameters: Sequence[Tensor]) -> Dense:
    fixed = [p.detach() for p in parameters]
    z = solve_dense(fn, start, fixed)
    jacobian = torch.autograd.functional.jacobian(lambda v: flat(fn(unflat(v, start), *fixed)), z)
    partials = torch.autograd.functional.jacobian(
        lambda *p: flat(fn(unflat(z, start), *p)), tuple(fixed)
    )
    return Dense(z, jacobian, tuple(partials))


@functools.cache
def dense_of(name: str) -> Dense:
    problem = {p.name: p for p in (*GENERAL, *ONLY_SYMMETRIC)}[name]
    return dense(problem.fn, problem.start, problem.parameters)


def exact_propagator(jacobian: Tensor) -> Tensor:
    """(I − J)⁻¹: the implicit function theorem."""
    return torch.linalg.inv(torch.eye(len(jacobian), dtype=jacobian.dtype) - jacobian)


def series_propagator(steps: int, damping: float) -> Callable[[Tensor], Tensor]:
    """β Σ_{k<steps} (βJ + (1 − β)I)ᵏ: phantom gradients."""

    def propagator(jacobian: Tensor) -> Tensor:
        eye = torch.eye(len(jacobian), dtype=jacobian.dtype)
        one = damping * jacobian + (1.0 - damping) * eye
        return damping * sum(torch.linalg.matrix_power(one, k) for k in range(steps))

    return propagator


def assert_close(
    found: Sequence[Tensor | None], wanted: Sequence[Tensor], **tolerance: Any
) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or CLOSE))


def quiet(call: Callable[[], Any]) -> Any:
    """Run something whose ConvergenceWarning is expected and tested elsewhere."""
    with quietly():
        return call()


def saved_tensors(adjoint: Any, solver: Any = FORWARD) -> int:
    """How many tensors the graph of one solve keeps."""
    parameters = TANH.leaves()
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        eq.fixed_point(TANH.fn, TANH.start, parameters, solver=solver, adjoint=adjoint)
    return len(kept)


def attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """(answer, "") or (None, message of the RuntimeError or ValueError)."""
    try:
        return call(), ""
    except (RuntimeError, ValueError) as error:
        return None, str(error)


# A name that a map can find in no closure.
GLOBAL_FEATURE: Tensor | None = None


def map_with_a_global(z: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(z @ weight.T + GLOBAL_FEATURE)


class Holder:
    """Anything with a method and an attribute."""

    def __init__(self, feature: Tensor, fn: Callable[..., Tensor]) -> None:
        self.feature = feature
        self.fn = fn

    def map(self, z: Tensor, weight: Tensor) -> Tensor:
        return self.fn(z, weight, self.feature)


class HoldingModule(nn.Module):
    """A feature of this forward pass kept on a module: a plain attribute, not a parameter."""

    def __init__(self, weight: Tensor, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.fn = fn
        self.inner = nn.Module()

    def forward(self, z: Tensor) -> Tensor:
        return self.fn(z, self.weight, self.inner.feature)


def ways_to_capture(fn: Callable[..., Tensor]) -> dict[str, Callable[[Tensor, Tensor], Any]]:
    """(weight, feature) ↦ (map, args): every way by which a map may come to its feature."""

    def nested_lambda(w: Tensor, h: Tensor) -> Any:
        def outer() -> Callable[[Tensor], Tensor]:
            return lambda z: (lambda y: fn(y, w, h))(z)

        return lambda z: outer()(z), ()

    def inside_a_list(w: Tensor, h: Tensor) -> Any:
        box = [{"deep": (h,)}]
        return lambda z: fn(z, w, box[0]["deep"][0]), ()

    return {
        "as_argument": lambda w, h: (fn, (w, h)),
        "nested_arguments": lambda w, h: (
            lambda z, box: fn(z, box["w"][0], box["x"]),
            ({"w": [w], "x": h},),
        ),
        "closure": lambda w, h: (lambda z: fn(z, w, h), ()),
        "nested_lambda": nested_lambda,
        "partial": lambda w, h: (functools.partial(lambda z, w, x: fn(z, w, x), x=h), (w,)),
        "default_argument": lambda w, h: (lambda z, w=w, x=h: fn(z, w, x), ()),
        "keyword_default": lambda w, h: (lambda z, *, w=w, x=h: fn(z, w, x), ()),
        "bound_method": lambda w, h: (Holder(h, fn).map, (w,)),
        "inside_a_list": inside_a_list,
        "object_argument": lambda w, h: (lambda z, w, held: held.map(z, w), (w, Holder(h, fn))),
    }


WAYS = tuple(ways_to_capture(tanh_map))


# The battery -----------------------------------------------------------------------------------


class AdjointContract:
    """Inherit, write ``make_adjoint`` and, where it is not the implicit one, ``propagator``."""

    solver: eq.Anderson | eq.Picard = FORWARD
    tolerant: eq.Anderson | eq.Picard = FORWARD
    """A solver that stops by its residual."""
    symmetric = False
    """The adjoint asks for a symmetric J."""
    under_transforms = True
    """torch.func and forward mode work."""
    twice = True
    """A second backward pass through the gradient works (it may be a clear error)."""
    reaches_start = False
    """The start gets a gradient."""
    compiles = True
    """A solve of fixed steps and its gradient are one graph to torch.compile."""

    def make_adjoint(self) -> Any:
        raise NotImplementedError

    def loose_adjoint(self, rtol: float | None) -> Any:
        """The same adjoint with another tolerance (None: the dtype's), where it has one."""
        return self.make_adjoint()

    def propagator(self, jacobian: Tensor) -> Tensor:
        return exact_propagator(jacobian)

    # helpers

    @property
    def problems(self) -> tuple[Problem, ...]:
        return ONLY_SYMMETRIC if self.symmetric else GENERAL

    @property
    def base(self) -> Problem:
        return self.problems[0]

    def solve(self, fn: Any, start: Any, args: Any = (), **options: Any) -> Any:
        options = {"solver": self.solver, "adjoint": self.make_adjoint(), **options}
        return eq.fixed_point(fn, start, args, **options)

    def wanted(self, problem: Problem) -> list[Tensor]:
        return dense_of(problem.name).gradients(self.propagator)

    def check(self, fn: Any, args: Any, leaves: Any, wanted: Any = None, start: Any = None) -> None:
        """The gradients of the loss to the leaves are those of the base problem, or as wanted."""
        value = self.solve(fn, self.base.start if start is None else start, args).value
        found = torch.autograd.grad(loss_of(value), leaves)
        assert_close(found, self.wanted(self.base) if wanted is None else wanted)

    # values and gradients

    def test_value_and_gradients_equal_the_dense_formula(self) -> None:
        for problem in self.problems:
            parameters = problem.leaves()
            value = self.solve(problem.fn, problem.start, parameters).value
            torch.testing.assert_close(flat(value), dense_of(problem.name).z, **CLOSE)
            found = torch.autograd.grad(loss_of(value), parameters)
            assert_close(found, self.wanted(problem))

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "intermediate"])
    def test_gradients_reach_what_is_captured(self, way: str, leaf: bool) -> None:
        """Leaves, and tensors made by an earlier computation, however the map holds them."""
        weight, x = self.base.leaves()
        held = (weight, x) if leaf else (1.0 * weight, x.clone())
        self.check(*ways_to_capture(self.base.fn)[way](*held), (weight, x))

    def test_gradients_reach_an_intermediate_held_in_a_global(self) -> None:
        weight, x = TANH.leaves()
        if self.symmetric:
            pytest.skip("the map with a global is not symmetric")
        global GLOBAL_FEATURE
        GLOBAL_FEATURE = x.clone()
        try:
            self.check(map_with_a_global, (weight,), (weight, x))
        finally:
            GLOBAL_FEATURE = None

    def test_gradients_reach_an_intermediate_held_by_a_submodule(self) -> None:
        weight, x = self.base.leaves()
        module = HoldingModule(weight, self.base.fn)
        module.inner.feature = 1.0 * x
        self.check(module, (), (module.weight, x))

    @pytest.mark.parametrize("way", ["as_argument", "closure", "bound_method"])
    def test_weight_used_upstream_and_inside_is_counted_once_each(self, way: str) -> None:
        """T uses W and h(x; W): the total derivative is ∂/∂W + (∂h/∂W)ᵀ∂/∂h, no more, no less."""
        weight, x = self.base.leaves()
        feature = x + 0.3 * (weight * weight).sum()
        reference = dense(self.base.fn, self.base.start, (weight, feature))
        to_weight, to_feature = reference.gradients(self.propagator)
        wanted = [to_weight + 0.6 * weight.detach() * to_feature.sum(), to_feature]
        fn, args = ways_to_capture(self.base.fn)[way](weight, feature)
        self.check(fn, args, (weight, x), wanted)

    @pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "intermediate"])
    def test_a_tensor_given_twice_gets_the_sum_of_both(self, leaf: bool) -> None:
        _, x = self.base.leaves()
        weight = self.base.parameters[0]
        given_ = x if leaf else 1.0 * x

        def fn(z: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return self.base.fn(z, weight, 0.5 * a + 0.25 * b + 0.25 * given_)

        self.check(fn, (given_, given_), x, self.wanted(self.base)[1:])

    def test_arguments_that_cannot_be_differentiated_pass_through(self) -> None:
        weight, x = self.base.leaves()

        def fn(z: Tensor, w: Tensor, order: Tensor, name: str, none: None, x: Tensor) -> Tensor:
            assert name == "name"
            assert none is None
            return self.base.fn(z, w, x[order])

        args = (weight, torch.arange(len(x)), "name", None, x.detach())
        self.check(fn, args, weight, self.wanted(self.base)[:1])

    def test_nothing_to_differentiate_gives_a_value_without_a_graph(self) -> None:
        value = self.solve(self.base.fn, self.base.start, self.base.parameters).value
        assert not value.requires_grad

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_without_grad_mode_the_value_is_the_same_and_has_no_graph(self, context: Any) -> None:
        parameters = self.base.leaves()
        with context():
            value = self.solve(self.base.fn, self.base.start, parameters).value
        assert not value.requires_grad
        torch.testing.assert_close(flat(value), dense_of(self.base.name).z, **CLOSE)

    @pytest.mark.parametrize("constant", [False, True])
    def test_a_leaf_of_the_state_may_be_an_argument_itself(self, constant: bool) -> None:
        """A tree that carries its input along: T((z, h), x) = (…, x); or a constant."""
        if self.symmetric:
            pytest.skip("the Jacobian of such a tree is not symmetric")
        weight, x = self.base.leaves()
        fixed, args = x.detach(), (weight,) if constant else (weight, x)

        def fn(state: tuple[Tensor, Tensor], w: Tensor, x: Tensor = fixed) -> Any:
            return self.base.fn(state[0], w, state[1]), x

        start = (self.base.start, torch.zeros_like(x))
        self.check(fn, args, args, dense(fn, start, args).gradients(self.propagator), start)

    def test_the_start_gets_no_gradient(self) -> None:
        start = self.base.start.clone().requires_grad_()
        value = self.solve(self.base.fn, start, self.base.leaves()).value
        (found,) = torch.autograd.grad(value.sum(), start, allow_unused=True)
        assert (found is not None) == self.reaches_start

    def check_compiled(self, solver: Any) -> None:
        """One graph, with the value and the gradients of the same code run eagerly."""
        parameters, adjoint = self.base.leaves(), self.make_adjoint()

        def run(*given_: Tensor) -> Tensor:
            options = {"solver": solver, "adjoint": adjoint}
            return eq.fixed_point(self.base.fn, self.base.start, given_, **options).value

        value = torch.compile(run, fullgraph=True, backend="aot_eager")(*parameters)
        plain = run(*parameters)
        torch.testing.assert_close(value, plain, **CLOSE)
        found = torch.autograd.grad(loss_of(value), parameters)
        assert_close(found, torch.autograd.grad(loss_of(plain), parameters))

    def test_fixed_steps_compile_to_one_graph(self) -> None:
        if not self.compiles:
            pytest.skip("reads the autograd graph, which breaks that of the compiler")
        self.check_compiled(eq.Picard(rtol=0.0, atol=0.0, max_steps=4))

    def test_one_number_a_sample(self) -> None:
        """States [B] without further dimensions: z = a·tanh(z) + x, dz/dx by M(J)."""
        x = draw(20, 5).requires_grad_()
        sol = self.solve(lambda z, x: 0.5 * torch.tanh(z) + x, torch.zeros(5).double(), (x,))
        (found,) = torch.autograd.grad(sol.value.sum(), x)
        slope = 0.5 / torch.cosh(sol.value.detach()) ** 2
        assert_close([found], [self.propagator(torch.diag(slope)).diagonal()])

    def test_channels_last_state_gets_the_same_gradient(self) -> None:
        problem = SYMMETRIC_CONV if self.symmetric else CONV
        parameters = problem.leaves()
        start = problem.start.contiguous(memory_format=torch.channels_last)
        self.check(problem.fn, parameters, parameters, self.wanted(problem), start)

    def test_the_start_may_be_the_input_itself(self) -> None:
        """z0 = x, one tensor in two roles: the gradient of x is that of its role in the map."""
        parameters = self.base.leaves()
        self.check(self.base.fn, parameters, parameters, start=parameters[1])

    def test_parametrized_modules(self) -> None:
        """Weights computed inside the map: weight_norm and spectral_norm, module as the map."""
        torch.manual_seed(0)
        for wrap in (parametrizations.weight_norm, parametrizations.spectral_norm):
            linear = wrap(nn.Linear(4, 4, bias=False)).double().eval()
            parameters = tuple(linear.parameters())
            x = self.base.parameters[1]

            def fn(z: Tensor, linear: nn.Module = linear, x: Tensor = x) -> Tensor:
                if self.symmetric:
                    return symmetric_map(z, 0.4 * linear.weight, x)
                return torch.tanh(0.4 * linear(z) + x)

            def functional(
                z: Tensor, *given_: Tensor, linear: nn.Module = linear, x: Tensor = x
            ) -> Tensor:
                names = [name for name, _ in linear.named_parameters()]
                replaced = dict(zip(names, given_, strict=True))
                eye = torch.eye(4, dtype=torch.float64)
                weight = 0.4 * torch.func.functional_call(linear, replaced, (eye,)).T
                return symmetric_map(z, weight, x) if self.symmetric else tanh_map(z, weight, x)

            wanted = dense(functional, self.base.start, parameters).gradients(self.propagator)
            # spectral_norm divides by an estimate of the norm: the same in both evaluations.
            self.check(fn, (), parameters, wanted)

    # laws

    @settings(parent=LAW, max_examples=6)
    @given(scale=st.sampled_from([1e-5, 1.0, 1e5, 1e-12, 3.0]), seed=st.integers(0, 99))
    def test_gradient_is_linear_in_the_scale_of_the_loss(self, scale: float, seed: int) -> None:
        weight, x = self.base.leaves()
        value = self.solve(self.base.fn, self.base.start, (weight, x)).value
        c = draw(seed, *value.shape)
        one = torch.autograd.grad((c * value).sum(), (weight, x), retain_graph=True)
        scaled = torch.autograd.grad((scale * c * value).sum(), (weight, x))
        # Relative: only the last digits may differ, by the rounding of scale·c.
        assert_close([s / scale for s in scaled], one, rtol=1e-9, atol=1e-12)

    @settings(parent=LAW, max_examples=5)
    @given(seed=st.integers(0, 99), order=st.permutations(range(3)))
    def test_gradient_of_a_sample_does_not_depend_on_its_mates(
        self, seed: int, order: list[int]
    ) -> None:
        weight = self.base.parameters[0]
        x = draw(seed, 3, *self.base.start.shape[1:]).requires_grad_()
        start = torch.zeros_like(x)
        value = self.solve(lambda z, x: self.base.fn(z, weight, x), start, (x,)).value
        (together,) = torch.autograd.grad(value.sin().sum(), x)
        for i in order:
            alone = x[i : i + 1].detach().requires_grad_()
            fn = lambda z, x: self.base.fn(z, weight, x)
            one = self.solve(fn, start[i : i + 1], (alone,)).value
            (found,) = torch.autograd.grad(one.sin().sum(), alone)
            torch.testing.assert_close(found[0], together[i], **CLOSE)

    # bad samples

    def check_bad_batch(self, way: str, solver: Any, create_graph: bool = False) -> Any:
        """Samples 0 and 3 are healthy; 1 has a NaN in its input; 2 has no fixed point (z < 5eᶻ)."""
        healthy = [0, 3]
        weight = self.base.parameters[0].clone().requires_grad_()
        x = draw(30, 4, 4)
        x[1, 2] = float("nan")
        x.requires_grad_()
        bend = torch.tensor([0.0, 0.0, 5.0, 0.0], dtype=torch.float64).view(4, 1)
        start = torch.zeros(4, 4, dtype=torch.float64)

        def fn(z: Tensor, weight: Tensor, x: Tensor, bend: Tensor) -> Tensor:
            return self.base.fn(z, weight, x) + torch.where(bend > 0, bend * torch.exp(z), 0.0)

        def run(x: Tensor, bend: Tensor, start: Tensor) -> Any:
            if way == "args":
                return self.solve(fn, start, (weight, x, bend), solver=solver)
            h = 1.0 * x if way == "intermediate" else x
            return self.solve(lambda z: fn(z, weight, h, bend), start, solver=solver)

        sol = quiet(lambda: run(x, bend, start))
        assert not any(sol.converged.tolist()[i] for i in range(4) if i not in healthy)
        loss = (sol.value[healthy] ** 2).sum()
        found = quiet(lambda: torch.autograd.grad(loss, (weight, x), create_graph=create_graph))
        alone = x.detach()[healthy].requires_grad_()
        fine = run(alone, bend[healthy], start[healthy])
        wanted = torch.autograd.grad((fine.value**2).sum(), (weight, alone))
        torch.testing.assert_close(sol.value[healthy], fine.value, **CLOSE)
        assert_close([found[0], found[1][healthy]], wanted)
        assert torch.isfinite(found[1]).all()
        return sol

    @pytest.mark.parametrize("way", ["args", "closure", "intermediate"])
    def test_bad_samples_do_not_harm_the_gradients_of_others(self, way: str) -> None:
        """A NaN input and a divergent sample: the rest's gradients are those of the rest alone."""
        self.check_bad_batch(way, self.tolerant)

    @pytest.mark.parametrize("way", ["args", "closure"])
    def test_bad_samples_do_no_harm_after_a_fixed_number_of_steps(self, way: str) -> None:
        self.check_bad_batch(way, LAPS)

    def spoilt(
        self, device: str = "cpu"
    ) -> tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """A weight; the loss of the healthy samples beside a NaN input; that of them alone."""
        weight, x = (p.to(device) for p in self.base.parameters)
        x = x.repeat(2, *([1] * (x.dim() - 1)))[:4]
        x[1].view(-1)[2] = NAN
        rest = [0, 2, 3]

        def of(w: Tensor, x: Tensor) -> Tensor:
            sol = self.solve(lambda z: self.base.fn(z, w, x), torch.zeros_like(x), solver=LAPS)
            return sol.value

        return weight, lambda w: loss_of(of(w, x)[rest]), lambda w: loss_of(of(w, x[rest]))

    def test_a_nan_input_does_no_harm_where_the_host_does_not_look(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fixed steps on a GPU: which samples failed is not read."""
        weight, beside, alone = self.spoilt()
        w = weight.clone().requires_grad_()
        wanted = torch.autograd.grad(alone(w), w)
        as_on_a_gpu(monkeypatch)
        assert_close(torch.autograd.grad(beside(w), w), wanted)

    @pytest.mark.gpu
    def test_gradients_on_the_gpu(self) -> None:
        """By the dense formula, and beside a NaN input after fixed steps."""
        for problem in self.problems:
            given = (problem.start, problem.leaves())
            start, parameters = pytree.tree_map(torch.Tensor.cuda, given)
            value = self.solve(problem.fn, start, parameters).value
            found = torch.autograd.grad(loss_of(value), parameters)
            assert_close([g.cpu() for g in found], self.wanted(problem))
        weight, beside, alone = self.spoilt("cuda")
        w = weight.clone().requires_grad_()
        assert_close(torch.autograd.grad(beside(w), w), torch.autograd.grad(alone(w), w))

    def test_a_nan_input_does_no_harm_under_torch_func(self) -> None:
        if not self.under_transforms:
            pytest.skip("refused, see the test of torch.func.grad")
        weight, beside, alone = self.spoilt()
        assert_close([torch.func.grad(beside)(weight)], [torch.func.grad(alone)(weight)])

    @settings(parent=LAW, max_examples=8)
    @given(
        kind=st.sampled_from(sorted(HOSTILE)),
        sick_start=st.booleans(),
        solver=st.integers(0, 3),
        way=st.sampled_from(["args", "closure", "intermediate"]),
        batch=st.integers(2, 4),
        where=st.integers(0, 3),
        seed=st.integers(0, 99),
    )
    def test_a_sample_without_a_finite_derivative_harms_no_weight(
        self, kind: str, sick_start: bool, solver: int, way: str, batch: int, where: int, seed: int
    ) -> None:
        """Square roots, logarithms, masks: gradients are those of the rest, by dense algebra.

        With three samples the weight has as many rows as the batch, and must not be taken for one.
        """
        map_, where = HOSTILE[kind], where % batch
        rest = [i for i in range(batch) if i != where]
        low, high = map_.healthy
        weight = (0.1 * draw(seed, 3, 3).abs() + 0.01).requires_grad_()
        x = low + (high - low) * draw(seed + 1, batch, 3).sigmoid()
        if map_.edge is not None:
            x[:, 0] = map_.edge
        start = torch.ones(batch, 3, dtype=torch.float64)
        if sick_start:
            start[where, 1] = NAN
        else:
            x[where] = map_.bad
        x.requires_grad_()

        def mix(z: Tensor, w: Tensor) -> Tensor:
            return w.mean() * z if self.symmetric else z @ w.T

        def fn(z: Tensor, w: Tensor, x: Tensor) -> Tensor:
            return map_.fn(mix, z, w, x)

        # Derivatives of unrolled Anderson and Broyden steps come close, not to the last digits.
        others = (FORWARD, eq.Broyden(rtol=1e-13)) if self.solver is FORWARD else ()
        solvers = (LAPS, self.tolerant, *others)
        chosen = solvers[solver % len(solvers)]
        if way == "args":
            sol = quiet(lambda: self.solve(fn, start, (weight, x), solver=chosen))
        else:
            h = 1.0 * x if way == "intermediate" else x
            sol = quiet(lambda: self.solve(lambda z: fn(z, weight, h), start, solver=chosen))
        assert sol.result[where] == eq.Result.nonfinite
        assert not any(int(sol.result[i]) == eq.Result.nonfinite for i in rest)
        found = torch.autograd.grad(loss_of(sol.value[rest]), (weight, x))
        oracle = dense(fn, start[rest], (weight, x[rest]))
        torch.testing.assert_close(flat(sol.value[rest]), oracle.z, **CLOSE)
        assert_close([found[0], found[1][rest]], oracle.gradients(self.propagator))
        assert torch.equal(found[1][where], torch.zeros(3, dtype=torch.float64))

    # what is returned is what was judged

    @pytest.mark.parametrize("fixed", [False, True])
    def test_gradients_do_not_change_the_value(self, fixed: bool) -> None:
        """Rough solves, whose answer a further step would move."""
        parameters = self.base.leaves()
        solver = eq.Picard(rtol=0.0, max_steps=2) if fixed else eq.Picard(rtol=1e-1)
        found = self.solve(self.base.fn, self.base.start, parameters, solver=solver)
        with torch.no_grad():
            wanted = self.solve(self.base.fn, self.base.start, parameters, solver=solver)
        assert torch.equal(found.value, wanted.value)
        assert torch.equal(found.stats.residual, wanted.stats.residual)

    def test_the_residual_stated_is_that_of_the_value(self) -> None:
        """T = 1000z + 1e-8 passes atol = 1e-4 at once; five steps on, z is in the thousands."""
        w = torch.tensor(1e3, dtype=torch.float64, requires_grad=True)
        start = torch.zeros(2, 3, dtype=torch.float64)
        sol = self.solve(lambda z: w * z + 1e-8, start, solver=eq.Picard(atol=1e-4))
        assert sol.converged.all()
        residual = (1e3 * sol.value + 1e-8 - sol.value).detach().norm(dim=1)
        torch.testing.assert_close(sol.stats.residual, residual, rtol=1e-9, atol=0.0)

    # graphs

    def test_backward_passes_agree_and_one_more_raises_or_is_right(self) -> None:
        """Two with retain_graph; a further one without the graph."""
        weight, x = self.base.leaves()
        loss = loss_of(self.solve(self.base.fn, self.base.start, (weight, x)).value)
        first = torch.autograd.grad(loss, (weight, x), retain_graph=True)
        assert_close(torch.autograd.grad(loss, (weight, x)), first, rtol=0, atol=0)
        third, error = attempt(lambda: torch.autograd.grad(loss, (weight, x)))
        if third is None:
            assert "second time" in error
        else:
            assert_close(third, first)

    @pytest.mark.parametrize("create_graph", [False, True])
    @pytest.mark.parametrize("which", [0, 1], ids=["weight", "input"])
    def test_parameter_modified_in_place_before_backward_raises_or_is_right(
        self, which: int, create_graph: bool
    ) -> None:
        """The gradient at the old parameters, or an error; never one at a mixture of both.

        (x enters by a sum, which saves nothing, so that its old value is not needed.)
        """
        if create_graph and not self.twice:
            pytest.skip("first order only")
        parameters = self.base.leaves()
        loss = loss_of(self.solve(self.base.fn, self.base.start, parameters).value)
        with torch.no_grad():
            parameters[which].mul_(1.5)
        pull = lambda: torch.autograd.grad(loss, parameters, create_graph=create_graph)
        found, error = attempt(pull)
        if found is None:
            assert "modified" in error
        else:
            assert_close([f.detach() for f in found], self.wanted(self.base))

    def test_a_value_may_be_modified_in_place(self) -> None:
        """As nn.ReLU(inplace=True) after a layer does."""
        weight, x = self.base.leaves()
        value = self.solve(self.base.fn, self.base.start, (weight, x)).value
        weights = torch.linspace(-1.0, 2.0, value.numel(), dtype=value.dtype).view_as(value)
        wanted = torch.autograd.grad((weights * (2.0 * value - 1.0)).sum(), (weight, x))
        value = self.solve(self.base.fn, self.base.start, (weight, x)).value
        loss = (weights * value.mul_(2.0).sub_(1.0)).sum()
        assert_close(torch.autograd.grad(loss, (weight, x)), wanted)
        lost = quiet(lambda: self.solve(self.base.fn, self.base.start, (weight, NAN * x)).value)
        (none,) = torch.autograd.grad(lost.mul_(2.0).sum(), weight)
        assert torch.equal(none, torch.zeros_like(weight))

    def test_a_batch_of_gradients_is_right_or_an_error_that_says_what_to_do(self) -> None:
        """is_grads_batched, and vmap of the pullback of a recorded solve."""
        weight, x = self.base.leaves()
        value = self.solve(self.base.fn, self.base.start, (weight, x)).value
        torch.manual_seed(3)
        many = torch.randn(3, *value.shape, dtype=value.dtype)

        def pull(v: Tensor, **options: Any) -> Any:
            return torch.autograd.grad(value, (weight, x), v, retain_graph=True, **options)

        wanted = [torch.stack(g) for g in zip(*map(pull, many), strict=True)]
        for together in (functools.partial(pull, is_grads_batched=True), torch.vmap(pull)):
            found, error = attempt(lambda run=together: run(many))
            if found is None:
                assert "call torch.autograd.grad for each" in error
            else:
                assert_close(found, wanted)

    def test_start_is_never_written_to(self) -> None:
        start = torch.ones_like(self.base.start)
        weight, x = self.base.leaves()
        loss_of(self.solve(self.base.fn, start, (weight, x)).value).backward()
        assert torch.equal(start, torch.ones_like(start))

    def test_nothing_outlives_the_solution(self) -> None:
        """No reference cycle: tensors die with their last name, without the collector's help."""
        weight, x = self.base.leaves()

        def use_and_forget() -> weakref.ref[Tensor]:
            feature = 1.0 * x
            sol = self.solve(lambda z: self.base.fn(z, weight, feature), self.base.start)
            torch.autograd.grad(loss_of(sol.value), (weight, x))
            return weakref.ref(feature)

        gc.collect()
        gc.disable()
        try:
            assert use_and_forget()() is None
        finally:
            gc.enable()

    # precision

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_low_precision_gradient_is_near_the_float64_one(self, dtype: torch.dtype) -> None:
        weight, x = (p.detach().to(dtype).requires_grad_() for p in self.base.leaves())
        start = self.base.start.to(dtype)
        solver = eq.Anderson() if self.solver is FORWARD else self.solver
        adjoint = self.loose_adjoint(None)
        sol = self.solve(self.base.fn, start, (weight, x), solver=solver, adjoint=adjoint)
        assert sol.value.dtype == dtype
        found = torch.autograd.grad(loss_of(sol.value), (weight, x))
        exact = [p.detach().double() for p in (weight, x)]
        wanted = dense(self.base.fn, self.base.start, exact).gradients(self.propagator)
        # The solves stop at this relative residual by default. ‖(I − J)⁻¹‖ ≤ 2 turns it into an
        # error at most twice as large; it enters by z* and by u. Rounding adds eps likewise.
        stop = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
        bound = 4.0 * (stop + torch.finfo(dtype).eps)
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == dtype
            assert (a.double() - b).norm() <= bound * b.norm()

    def test_autocast_keeps_the_state_and_gives_near_gradients(self) -> None:
        """bf16 autocast inside, float32 state and gradients outside."""
        weight, x = (p.detach().float().requires_grad_() for p in self.base.leaves())
        start = self.base.start.float()
        solver = eq.Anderson(rtol=2e-2) if self.solver is FORWARD else self.solver
        options = {"solver": solver, "adjoint": self.loose_adjoint(2e-2)}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = self.solve(self.base.fn, start, (weight, x), **options).value
        assert value.dtype == torch.float32
        found = torch.autograd.grad(loss_of(value), (weight, x))
        # As for bf16 states: rounding of eps(bf16) = 2⁻⁷ and the tolerance above, doubled twice.
        bound = 4.0 * (2e-2 + torch.finfo(torch.bfloat16).eps)
        for a, b in zip(found, self.wanted(self.base), strict=True):
            assert a.dtype == torch.float32
            assert (a.double() - b).norm() <= bound * b.norm()

    # transforms

    def functional_gradient(self) -> Any:
        """Gradients by torch.func.grad."""
        fn, start = self.base.fn, self.base.start
        loss = lambda w, x: loss_of(self.solve(fn, start, (w, x)).value)
        return torch.func.grad(loss, argnums=(0, 1))(*self.base.parameters)

    def test_torch_func_grad_is_right_or_a_clear_error(self) -> None:
        if self.under_transforms:
            assert_close(self.functional_gradient(), self.wanted(self.base))
        else:
            with pytest.raises(RuntimeError, match=r"torch\.func"):
                self.functional_gradient()

    def test_gradients_a_sample_by_vmap_of_grad(self) -> None:
        if not self.under_transforms:
            pytest.skip("refused, see the test of torch.func.grad")
        weight, x = self.base.parameters

        def loss(w: Tensor, x: Tensor) -> Tensor:
            start = torch.zeros_like(x).unsqueeze(0)
            value = self.solve(self.base.fn, start, (w, x.unsqueeze(0))).value
            return value.sin().sum()

        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
        for i in range(len(x)):
            w = weight.clone().requires_grad_()
            value = self.solve(self.base.fn, self.base.start[i : i + 1], (w, x[i : i + 1])).value
            assert_close([found[i]], torch.autograd.grad(value.sin().sum(), w))

    # objects

    def test_options_copy_pickle_and_compare(self) -> None:
        adjoint = self.make_adjoint()
        for other in (copy.deepcopy(adjoint), pickle.loads(pickle.dumps(adjoint))):
            assert other == adjoint
            assert hash(other) == hash(adjoint)
        with pytest.raises(AttributeError):
            adjoint.steps = 3

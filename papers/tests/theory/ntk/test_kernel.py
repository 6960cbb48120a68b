"""The empirical tangent kernel against closed forms, differences and its own other routes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import equilibria as eq
from equilibria_papers.theory import Projection, empirical_ntk
from equilibria_papers.theory.ntk.kernel import make_plan, standard_error

TIGHT: dict[str, Any] = {"solver": eq.Anderson(rtol=1e-12, max_steps=400)}


def mlp(inputs: int = 4, hidden: int = 6, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(),
        nn.Linear(hidden, outputs),
    ).double()  # fmt: skip


def dense_jacobian(model: nn.Module, x: Tensor, step: float = 1e-6) -> Tensor:
    """∂f/∂θ by central differences, one parameter's entry after the other, [N·K, P]."""
    columns = []
    with torch.no_grad():
        for p in model.parameters():
            flat = p.view(-1)
            for i in range(flat.numel()):
                old = float(flat[i])
                flat[i] = old + step
                above = model(x).flatten()
                flat[i] = old - step
                below = model(x).flatten()
                flat[i] = old
                columns.append((above - below) / (2 * step))
    return torch.stack(columns, dim=1)


def by_jacrev(model: nn.Module, x: Tensor) -> Tensor:
    """J Jᵀ from torch's own Jacobian of the whole batch, [N·K, N·K]."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    parts = jacrev(lambda p: functional_call(model, p, (x,)).flatten())(parameters)
    rows = torch.cat([part.flatten(1) for part in parts.values()], dim=1)
    return rows @ rows.mT


def test_a_deep_linear_model() -> None:
    """f = BAx: K(x, x′) = (x·x′)BBᵀ + (Ax·Ax′)I, its parts those of A and of B."""
    a, b = nn.Linear(5, 4, bias=False).double(), nn.Linear(4, 3, bias=False).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    left = torch.einsum("ij,ab->ijab", x @ x.mT, b.weight @ b.weight.mT)
    h = x @ a.weight.mT
    right = torch.einsum("ij,ab->ijab", h @ h.mT, torch.eye(3, dtype=x.dtype))
    found = empirical_ntk(nn.Sequential(a, b), x, layers=True)
    torch.testing.assert_close(found.kernel, (left + right).detach())
    torch.testing.assert_close(found.parts["0"], left.permute(0, 2, 1, 3).reshape(18, 18).detach())


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    return {
        "opteq": eq.nn.OptEq(4, 6, in_channels=3, **TIGHT),
        "geq": eq.nn.GEQ(4, 6, in_channels=3, hidden=4, gamma=0.3, **TIGHT),
        "monotone": eq.nn.MonotoneDEQ(4, in_channels=3),
        "deep": eq.nn.DeepOptEq(4, (5, 3), in_channels=3, **TIGHT),
    }


@pytest.mark.parametrize("name", ["opteq", "geq", "monotone", "deep"])
def test_equilibrium_layers_against_central_differences(name: str) -> None:
    layer: Any = layers()[name]
    model = nn.Sequential(layer, nn.Linear(4, 2)).double().eval()
    if name == "monotone":
        layer.solver = eq.PeacemanRachford(rtol=1e-12, max_steps=2000)
    layer.adjoint = eq.Implicit(solver=eq.GMRES(rtol=1e-12))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)  # off the bounds of the norms, which are kinks
    x = torch.randn(3, 3, dtype=torch.float64)
    jacobian = dense_jacobian(model, x, 1e-5)
    expected = jacobian @ jacobian.mT
    for method in ("auto", "autograd"):
        found = empirical_ntk(model, x, method=method)  # type: ignore[arg-type]
        torch.testing.assert_close(found.matrix, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["opteq_digits", "geq_digits", "explicit_digits"])
def test_named_networks_by_both_routes(name: str) -> None:
    torch.manual_seed(0)
    model = eq.models.create(name)
    x = torch.randn(3, 1, 8, 8)
    quick = empirical_ntk(model, x, outputs=[0, 7])
    assert quick.method == "vmap"
    plain = empirical_ntk(model, x, outputs=[0, 7], method="autograd")
    torch.testing.assert_close(quick.matrix, plain.matrix, rtol=1e-3, atol=1e-5)


def test_choices_of_outputs_are_parts_of_the_full_kernel() -> None:
    model, x = mlp(), torch.randn(4, 4, dtype=torch.float64)
    full = empirical_ntk(model, x).kernel
    traced = full.diagonal(0, 2, 3).mean(-1)
    torch.testing.assert_close(empirical_ntk(model, x, outputs="trace").matrix, traced)
    torch.testing.assert_close(empirical_ntk(model, x).traced, traced)
    torch.testing.assert_close(empirical_ntk(model, x, outputs="sum").matrix, full.sum((2, 3)) / 3)
    torch.testing.assert_close(empirical_ntk(model, x, outputs=-1).matrix, full[:, :, 2, 2])
    two = empirical_ntk(model, x, outputs=[2, 0]).kernel
    torch.testing.assert_close(two, full[:, :, [2, 0]][..., [2, 0]])


def test_the_kernel_of_two_sets_is_a_block_of_the_kernel_of_their_union() -> None:
    model, x = mlp(), torch.randn(7, 4, dtype=torch.float64)
    whole = empirical_ntk(model, x).kernel
    cross = empirical_ntk(model, x[:3], x[3:], batch_size=2).kernel
    torch.testing.assert_close(cross, whole[:3, 3:])


def test_layers_sum_to_the_kernel_and_their_shares_to_one() -> None:
    model, x = mlp(), torch.randn(4, 4, dtype=torch.float64)
    found = empirical_ntk(model, x, layers=True)
    assert list(found.parts) == ["0", "2", "4"]
    assert dict(found.sizes) == {"0": 30, "2": 42, "4": 21}
    torch.testing.assert_close(sum(found.parts.values()), found.matrix)
    assert sum(found.shares().values()) == pytest.approx(1.0)
    alone = empirical_ntk(model, x, parameters="2.*")
    assert alone.parameters == 42
    torch.testing.assert_close(found.parts["2"], alone.matrix)


def test_parametrized_weights_belong_to_their_layer() -> None:
    found = empirical_ntk(eq.models.create("opteq_digits"), torch.randn(2, 1, 8, 8), layers=True)
    assert "stages.0.layer.W" in found.parts
    assert not any("parametrizations" in name for name in found.parts)


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(1, 9),
    chunk=st.one_of(st.none(), st.integers(1, 5)),
    spare=st.integers(0, 40_000),
    choice=st.sampled_from(["all", "trace", "sum", 1, (0, 2)]),
)
def test_any_budget_gives_the_same_kernel(
    samples: int, chunk: int | None, spare: int, choice: Any
) -> None:
    """From rows that all fit to one parameter tensor at a time."""
    model = mlp()
    x = torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dense = empirical_ntk(model, x, outputs=choice)
    # The kernel, and four times the rows of one sample in the largest tensor (36 entries).
    least = dense.matrix.numel() * 8 + 4 * 3 * 36 * 8
    tight = empirical_ntk(model, x, outputs=choice, memory=least + spare, batch_size=chunk)
    torch.testing.assert_close(tight.matrix, dense.matrix)
    assert torch.equal(tight.matrix, tight.matrix.mT)
    if choice == "all":
        torch.testing.assert_close(dense.matrix, by_jacrev(model, x))


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model[1].eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    random = torch.get_rng_state()
    first = empirical_ntk(model, x := torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(random, torch.get_rng_state())
    assert [m.training for m in model] == [True, False, True, True]
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(first.matrix, empirical_ntk(model.eval(), x).matrix)


def test_half_precision_is_contracted_in_float32() -> None:
    model = mlp().to(torch.bfloat16)
    found = empirical_ntk(model, torch.randn(3, 4).bfloat16())
    assert found.matrix.dtype == torch.float32


def test_parameters_without_a_part_and_shared_ones() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3, bias=False).double()
            self.two = nn.Linear(3, 3, bias=False).double()
            self.two.weight = self.one.weight
            self.unused = nn.Parameter(torch.zeros(7, dtype=torch.float64))
            self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.two(torch.tanh(self.one(x))) * self.frozen
            return out

    model, x = Odd(), torch.randn(2, 3, dtype=torch.float64)
    # Central differences visit the shared weight once, like the kernel, and the frozen one too.
    assert [n for n, _ in model.named_parameters()] == ["unused", "frozen", "one.weight"]
    jacobian = dense_jacobian(model, x)
    jacobian[:, 7:10] = 0
    for method in ("vmap", "autograd"):
        found = empirical_ntk(model, x, method=method)  # type: ignore[arg-type]
        assert found.parameters == 16
        torch.testing.assert_close(found.matrix, jacobian @ jacobian.mT, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"outputs": "mean"}, "'all', 'trace', 'sum'"),
        ({"outputs": 3}, "3 outputs, 0 to 2"),
        ({"outputs": []}, "an index or several"),
        ({"outputs": [0.5]}, "an index or several"),
        ({"parameters": "tail.*"}, "fits none of 6 parameters"),
        ({"parameters": [3]}, "a pattern"),
        ({"layers": "head"}, "True or False"),
        ({"method": "fast"}, "'auto', 'vmap' or 'autograd'"),
        ({"memory": 0}, "positive integer"),
        ({"batch_size": 0}, "positive integer"),
        ({"projection": "half"}, "Projection"),
        ({"x2": torch.zeros(2, 5)}, "x and x2 differ"),
    ],
)
def test_bad_options_say_what_is_allowed(given_: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        empirical_ntk(mlp(), torch.zeros(2, 4, dtype=torch.float64), **given_)


def test_bad_models_and_inputs_say_what_is_wrong() -> None:
    x = torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got function"):
        empirical_ntk(lambda x: x, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x must be a tensor"):
        empirical_ntk(mlp(), [1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="N ≥ 1"):
        empirical_ntk(mlp(), x[:0])
    with pytest.raises(ValueError, match="no parameter that needs a gradient"):
        empirical_ntk(mlp().requires_grad_(False), x)
    with pytest.raises(TypeError, match="one tensor"):
        empirical_ntk(nn.LSTM(4, 3).double(), x)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        empirical_ntk(mlp(), torch.zeros(2, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match="layers=True"):
        empirical_ntk(mlp(), x).shares()


def test_a_budget_that_is_too_small_names_what_it_needs() -> None:
    x = torch.zeros(9, 4, dtype=torch.float64)
    with pytest.raises(MemoryError, match=r"take 5\.695 KiB, more than memory=1000 bytes"):
        empirical_ntk(mlp(), x, memory=1000)
    with pytest.raises(MemoryError, match=r"'2\.weight'"):
        empirical_ntk(mlp(), x, memory=27 * 27 * 8 + 100)


# Budgets are kept: by the plan's own arithmetic, and by the tensors that are alive.


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.dictionaries(st.text(min_size=1), st.integers(1, 5000), min_size=1, max_size=8),
    samples=st.integers(1, 300),
    outputs=st.integers(1, 12),
    spare=st.integers(0, 10**8),
    batch=st.one_of(st.none(), st.integers(1, 64)),
)
def test_a_plan_covers_every_parameter_once_and_fits(
    sizes: dict[str, int], samples: int, outputs: int, spare: int, batch: int | None
) -> None:
    memory = 1000 + 4 * outputs * 4 * max(sizes.values()) + spare
    held = {"itemsize": 4, "memory": memory, "held": 1000}
    plan = make_plan(sizes, samples=samples, outputs=outputs, batch_size=batch, **held)
    assert [n for names in plan.passes for n in names] == list(sizes)
    assert 1 <= plan.chunk <= min(samples, batch or samples)
    largest = max(sum(sizes[n] for n in names) for names in plan.passes)
    rows = plan.chunk * outputs * largest * 4
    # Kept chunks, and the new one three times: as gradients, inside autograd, as a matrix.
    kept = min(plan.resident, -(-samples // plan.chunk))
    assert 1000 + (kept + 3) * rows <= memory


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[Any, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        self.sizes = {ref: n for ref, n in self.sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out


def test_live_tensors_stay_within_the_budget() -> None:
    """Rows of all samples would take four times the budget; the model itself is small."""
    model = nn.Sequential(nn.Linear(8, 400), nn.ReLU(), nn.Linear(400, 4))
    x = torch.randn(60, 8)
    whole = 60 * 4 * sum(p.numel() for p in model.parameters()) * 4
    budget = 1_250_000
    assert whole > 3 * budget
    with Live() as seen:
        found = empirical_ntk(model, x, memory=budget, batch_size=2, method="vmap")
    assert found.matrix.numel() * 4 < seen.peak < 1.05 * budget


# Projected kernels: unbiased, with the stated spread, of both kinds.


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    return model, torch.randn(4, 6, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["sparse", "gaussian"])
@pytest.mark.parametrize("outputs", ["all", "trace"])
def test_the_mean_is_the_kernel_and_the_spread_is_bounded(kind: Any, outputs: str) -> None:
    model, x = small()
    exact = empirical_ntk(model, x, outputs=outputs).matrix
    size, trials = 16, 150
    found = torch.stack(
        [
            empirical_ntk(
                model, x, outputs=outputs, method="vmap",
                projection=Projection(size=size, kind=kind, seed=seed),
            ).matrix
            for seed in range(trials)
        ]
    )  # fmt: skip
    diagonal = exact.diagonal()
    bound = standard_error(exact, diagonal, diagonal, size, sums=outputs == "trace")
    # Five standard errors of the mean, in 4 to 64 entries.
    assert bool(((found.mean(0) - exact).abs() < 5 * bound / trials**0.5).all())
    spread = found.std(0)
    assert bool((spread < 1.25 * bound).all())
    if kind == "gaussian" and outputs == "all":  # there the bound is an equality
        torch.testing.assert_close(spread, bound, rtol=0.35, atol=0.0)
    relative = (found - exact).square().sum((1, 2)).mean().sqrt() / exact.norm()
    told = empirical_ntk(
        model, x, outputs=outputs, projection=Projection(size=256, kind=kind)
    ).relative_error
    # Told from one projection of 256; the truth at 16 is four times that, at most.
    assert told is not None
    assert float(relative) < 1.5 * 4 * told
    assert float(relative) > 0.3 * 4 * told


@pytest.mark.parametrize("kind", ["sparse", "gaussian"])
def test_parts_of_a_projection_fit_together(kind: Any) -> None:
    model, x = small()
    projection = Projection(size=40, kind=kind, seed=3)
    whole = empirical_ntk(model, x, projection=projection)
    cross = empirical_ntk(model, x[:1], x[1:], projection=projection)
    torch.testing.assert_close(cross.matrix, whole.matrix[:2, 2:])
    again = empirical_ntk(model, x, projection=projection, batch_size=1)
    torch.testing.assert_close(again.matrix, whole.matrix)
    parts = empirical_ntk(model, x, projection=projection, layers=True)
    torch.testing.assert_close(sum(parts.parts.values()), parts.matrix)
    other = empirical_ntk(model, x, projection=Projection(size=40, kind=kind, seed=4))
    assert not torch.allclose(other.matrix, whole.matrix)


def test_equilibrium_networks_project_both_ways() -> None:
    torch.manual_seed(0)
    model = eq.models.create("opteq_digits")
    x = torch.randn(3, 1, 8, 8)
    exact = empirical_ntk(model, x, outputs="trace").matrix
    for kind in ("sparse", "gaussian"):
        found = empirical_ntk(
            model, x, outputs="trace", projection=Projection(size=64, kind=kind)  # type: ignore[arg-type]
        )  # fmt: skip
        assert found.relative_error is not None
        off = float((found.matrix - exact).norm() / exact.norm())
        assert off < 2.5 * found.relative_error < 1.0


def test_a_model_without_forward_mode_is_told_of_the_other_kind() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * ctx.saved_tensors[0] * grad

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Square.apply(super().forward(x))
            return out

    model, x = Model(3, 2), torch.randn(2, 3)
    with pytest.raises(RuntimeError, match="kind='sparse'"):
        empirical_ntk(model, x, projection=Projection(kind="gaussian", size=4))
    found = empirical_ntk(model, x, projection=Projection(size=4000))
    assert found.method == "autograd"
    exact = empirical_ntk(model, x)
    torch.testing.assert_close(found.matrix, exact.matrix, rtol=0.2, atol=0.2)


def test_options_of_projections_are_checked() -> None:
    with pytest.raises(ValueError, match="out of range"):
        Projection(size=0)
    with pytest.raises(ValueError, match="'sparse' or 'gaussian'"):
        Projection(kind="hadamard")  # type: ignore[arg-type]
    model, x = small()
    with pytest.raises(MemoryError, match="more than memory"):
        empirical_ntk(model, x, projection=10**6, memory=10**6)

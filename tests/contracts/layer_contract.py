"""What every layer owes its users. Inherit, name the layer and an input, and get every test.

Hooks: ``layer(**options)`` makes a small layer (float32, options go to its constructor),
``shape`` is that of one input (or ``inputs(batch)`` draws them).
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree

import equilibria as eq
from equilibria.engine.solver import Solver
from equilibria.nn import EquilibriumLayer, WeightNormalized
from equilibria.solvers import ProximalGradient
from tests.contracts.problems import as_on_a_gpu, quietly

TIGHT = eq.Anderson(rtol=1e-13, max_steps=600)
LAPS = eq.Picard(rtol=0.0, atol=0.0, max_steps=3)
EXACT = eq.Implicit(solver=eq.GMRES(rtol=1e-13, max_steps=400))
# Adjoints that are part of a compiled graph; β < 1 keeps the first off the fused path.
NEUMANN = eq.Phantom(steps=2, damping=0.7, form="neumann")
BLIND = eq.Implicit(solver=eq.GMRES(rtol=0.0, atol=0.0, restart=12, max_steps=12))


def check_gradients(
    layer: nn.Module,
    x: Tensor,
    *,
    second: bool = False,
    atol: float = 1e-5,
    rtol: float = 1e-4,
    fast: bool = True,
) -> None:
    """To x and every parameter, against finite differences; fast: random projections of them."""
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Any:
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    inputs = [t.detach().clone().requires_grad_() for t in (x, *values)]
    check = torch.autograd.gradgradcheck if second else torch.autograd.gradcheck
    assert check(run, inputs, eps=1e-6, atol=atol, rtol=rtol, fast_mode=fast)


def leaves(z: Any) -> list[Tensor]:
    """The tensors of a state, which may be a tree."""
    return pytree.tree_leaves(z)


def squares(z: Any) -> Any:
    return sum(t.float().square().sum() for t in leaves(z))


def check_copies(made: Callable[..., nn.Module], x: Tensor) -> None:
    """Deep copies, pickles and a fresh layer with the state dict answer alike, independently.

    Also of a layer that has trained: no graph of the last step is left on it.
    """
    layer, fresh = made().train(), made(seed=4).eval()
    squares(layer(x)).backward()
    layer.zero_grad()
    assert pickle.loads(pickle.dumps(layer)).training
    expected = leaves(layer.eval()(x))
    assert not torch.equal(leaves(fresh(x))[0], expected[0])
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    pickled = pickle.loads(pickle.dumps(layer))
    again = pickle.loads(pickle.dumps(pickled))  # from the rebuilt one
    for twin in (copy.deepcopy(layer), pickled, again, fresh):
        assert list(twin.state_dict()) == list(layer.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(leaves(twin(x)), expected, strict=True))
        squares(twin(x)).backward()
        with torch.no_grad():
            for p in twin.parameters():
                assert p.grad is not None
                p.mul_(0.9)
        assert not torch.equal(leaves(twin(x))[0], expected[0])
    assert all(p.grad is None for p in layer.parameters())
    assert torch.equal(leaves(layer(x))[0], expected[0])


def check_autocast(layer: nn.Module, x: Tensor) -> None:
    """Near the answer in float32, and every gradient finite and in float32."""
    expected = leaves(copy.deepcopy(layer)(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = leaves(layer(x))
    for z, known in zip(found, expected, strict=True):
        scale = float(known.detach().abs().max())
        torch.testing.assert_close(z.float(), known, rtol=0, atol=0.2 * scale)
    squares(found).backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.dtype == torch.float32, name
        assert torch.isfinite(p.grad).all(), name


def check_compiles(layer: nn.Module, x: Tensor) -> None:
    """As one graph with the same answer, and with the same gradients. Solves of fixed steps."""
    torch._dynamo.reset()
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the second run finds the moved buffers
        found, expected = compiled(x), layer(x)
        for a, b in zip(leaves(found), leaves(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if torch.is_grad_enabled():
        squares(found).backward()
        squares(expected).backward()
        for a, b in zip(twin.parameters(), layer.parameters(), strict=True):
            scale = float(b.grad.abs().max())
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4 * scale)


_SETTLED: dict[tuple[str, bytes], list[Tensor]] = {}


@torch.no_grad()
def settle(layer: nn.Module) -> None:
    """Run the power iterations on: the parameters moved, and σ must follow.

    The iteration draws nothing, so that equal layers come to equal buffers, bit for bit; most tests
    of a class begin with the same layer, and it is iterated for the first of them only.
    """
    moving = [m for m in layer.modules() if isinstance(m, ParametrizationList)]
    tensors = [*layer.parameters(), *layer.buffers()]
    key = repr(layer), b"".join(t.detach().numpy().tobytes() for t in tensors)
    if key not in _SETTLED:
        for module in moving:
            for _ in range(200):
                module()
        _SETTLED[key] = [b.clone() for b in layer.buffers()]
    for buffer, settled in zip(layer.buffers(), _SETTLED[key], strict=True):
        buffer.copy_(settled)


class LayerContract:
    """Inherited by the tests of each layer."""

    tight: ClassVar[Solver] = TIGHT
    laps: ClassVar[Solver] = LAPS
    shape: ClassVar[tuple[int, ...]]
    infinite_inputs_fail: ClassVar[bool] = True
    wrong_options: ClassVar[list[tuple[str, Any, type[Exception], str]]] = [
        ("prior", "relu", TypeError, "expected a prior"),
        ("constraint", 0.95, TypeError, "NormBounded"),
    ]

    @property
    def convolutional(self) -> bool:
        return len(self.shape) > 1

    def layer(self, **options: Any) -> EquilibriumLayer:
        raise NotImplementedError("name the layer under test")

    def inputs(self, batch: int = 3) -> Tensor:
        return torch.randn(batch, *self.shape)

    # ------------------------------------------------------------------ helpers

    def made(self, seed: int = 0, **options: Any) -> EquilibriumLayer:
        """A layer away from the kinks of its constraints (W_h starts on its bound)."""
        torch.manual_seed(seed)
        layer = self.layer(**options)
        with torch.no_grad():
            for p in layer.parameters():
                p.add_(0.1 * torch.randn(p.shape))
        settle(layer)
        return layer

    def precise(self, **options: Any) -> EquilibriumLayer:
        return self.made(**{"solver": self.tight, "adjoint": EXACT, **options}).double().eval()

    def drawn(self, batch: int = 3, seed: int = 1) -> Tensor:
        torch.manual_seed(seed)
        return self.inputs(batch)

    # ------------------------------------------------------------------ answers

    @pytest.mark.parametrize("training", [True, False])
    def test_forward_and_backward(self, training: bool) -> None:
        layer = self.made().train(training)
        x = self.drawn().requires_grad_()
        solution = layer.solve(x)
        assert bool(solution.converged.all())
        assert torch.isfinite(solution.value).all()
        solution.value.square().sum().backward()
        for name, tensor in [("x", x), *layer.named_parameters()]:
            assert tensor.grad is not None, name
            assert torch.isfinite(tensor.grad).all(), name
            assert tensor.grad.abs().max() > 0, name

    def test_the_answer_is_a_stationary_point_of_the_problem(self) -> None:
        layer, x = self.precise(), self.drawn().double()
        with torch.no_grad():
            z, problem = layer(x), layer.problem(x)
        assert float((problem.step(z) - z).abs().max()) < 1e-10
        # The least subgradient is −(v − T(z)) and jumps where z sits on a kink of the prior by
        # rounding alone, so it is taken one step on, where T has put z exactly.
        stationarity = problem.stationarity(problem.step(z))
        assert float(stationarity.max()) < 1e-9

    def test_the_objective_is_finite_and_no_lower_anywhere_near(self) -> None:
        """With the default solver in float32, which may extrapolate out of the prior's domain."""
        layer, x = self.made().eval(), self.drawn()
        with torch.no_grad():
            z, problem = layer(x), layer.problem(x)
            least = problem.objective(z)
            assert torch.isfinite(least).all()
            torch.manual_seed(3)
            for _ in range(20):
                near = problem.step(z + 0.1 * torch.randn_like(z))  # back in the domain
                assert (problem.objective(near) >= least - 1e-3 * (1 + least.abs())).all()

    def test_gradients_to_the_input_and_every_parameter(self) -> None:
        # Solves at 1e-13 and a difference step of 1e-6: the quotient is right to about 1e-7.
        check_gradients(self.precise(), self.drawn(2).double())

    def test_a_warm_start_gives_the_same_answer_in_fewer_steps(self) -> None:
        layer, x = self.precise(), self.drawn().double()
        cold = layer.solve(x)
        warm = layer.solve(x, cold.value.detach())
        torch.testing.assert_close(warm.value, cold.value, rtol=1e-9, atol=1e-10)
        assert int(warm.stats.steps.max()) < int(cold.stats.steps.max())

    # ------------------------------------------------------------------ batches

    def test_an_answer_does_not_depend_on_batch_mates(self) -> None:
        layer, x = self.precise(), self.drawn(4).double()
        x[1] *= 30.0
        together = layer(x)
        for i in range(4):
            torch.testing.assert_close(layer(x[i : i + 1])[0], together[i], rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize(
        ("adjoint", "value", "fixed", "blind"),
        [
            (None, math.nan, False, False),
            (None, math.inf, False, False),
            (eq.Unrolled(), math.nan, False, False),
            (eq.Unrolled(), math.nan, True, True),
            (eq.Phantom(steps=2), math.inf, True, True),
            (eq.Phantom(steps=2, damping=1.0, form="neumann"), math.nan, True, False),
        ],
    )
    def test_one_bad_sample_harms_no_other(
        self,
        adjoint: Any,
        value: float,
        fixed: bool,
        blind: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Values, and the gradient to every weight, are those of the batch without the bad sample.

        ``blind``: as on a GPU, where the host does not wait to learn which samples failed.
        """
        if math.isinf(value) and not self.infinite_inputs_fail:
            pytest.skip("the map may answer an infinite input with a finite state")
        if blind:
            as_on_a_gpu(monkeypatch)
        options: dict[str, Any] = {} if adjoint is None else {"adjoint": adjoint}
        if fixed:
            options["solver"] = self.laps
        layer, x = self.precise(**options), self.drawn(3).double()
        bad = x.clone()
        bad[1].view(-1)[0] = value
        found, wanted = [], []
        for given, rows, grads in ((bad, [0, 2], found), (x[[0, 2]], [0, 1], wanted)):
            given.requires_grad_()
            with quietly():
                solution = layer.solve(given)
                loss = solution.value[rows].square().sum()
                tensors = [given, *layer.parameters()]
                grads += torch.autograd.grad(loss, tensors, allow_unused=True)
                grads.append(solution.value[rows].detach())
            if given is bad:
                assert solution.result[1] == eq.Result.nonfinite
                assert torch.isfinite(solution.value).all()
        assert torch.equal(found[0][1], torch.zeros_like(found[0][1]))
        found[0] = found[0][[0, 2]]
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)

    def test_two_forwards_in_one_graph(self) -> None:
        layer = self.made().train()
        a, b = self.drawn(2, seed=1), self.drawn(2, seed=2)
        (layer(a).square().sum() + layer(b).square().sum()).backward()
        together = [p.grad for p in layer.parameters()]
        layer.zero_grad()
        layer(a).square().sum().backward()
        layer(b).square().sum().backward()
        for one, two in zip(together, (p.grad for p in layer.parameters()), strict=True):
            # In training each forward moves the power iteration a little.
            torch.testing.assert_close(one, two, rtol=2e-3, atol=2e-3 * float(two.abs().max()))

    def test_zero_input_gives_no_nan(self) -> None:
        layer = self.made()
        x = torch.zeros_like(self.drawn()).requires_grad_()
        z = layer(x)
        z.sum().backward()
        assert torch.isfinite(z).all()
        assert torch.isfinite(x.grad).all()
        for p in layer.parameters():
            assert p.grad is None or torch.isfinite(p.grad).all()

    # ------------------------------------------------------------------ copies

    def test_eval_is_deterministic_and_leaves_the_state_alone(self) -> None:
        layer, x = self.made().eval(), self.drawn()
        before = {k: v.clone() for k, v in layer.state_dict().items()}
        first, second = layer(x), layer(x)
        assert torch.equal(first, second)
        for name, value in layer.state_dict().items():
            assert torch.equal(value, before[name]), name

    def test_copies_are_equal_and_independent(self) -> None:
        check_copies(self.made, self.drawn())

    # ------------------------------------------------------------------ precisions

    def test_dtypes(self) -> None:
        layer, x = self.made().eval(), self.drawn()
        single = layer(x)
        assert single.dtype == torch.float32
        double = copy.deepcopy(layer).double()(x.double())
        assert double.dtype == torch.float64
        scale = float(double.detach().abs().max())
        torch.testing.assert_close(single.double(), double, rtol=0, atol=5e-3 * scale)
        half = copy.deepcopy(layer).to(torch.bfloat16)(x.to(torch.bfloat16))
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.double(), double, rtol=0, atol=0.2 * scale)

    @pytest.mark.parametrize("training", [True, False])
    def test_autocast(self, training: bool) -> None:
        check_autocast(self.made().train(training), self.drawn())

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # TF32 keeps ten bits, and solves are looser with it: compare float32 with float32.
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        layer, x = self.made().eval(), self.drawn()
        expected = layer(x)
        moved = copy.deepcopy(layer).cuda()
        z = moved(x.cuda())
        assert z.is_cuda
        torch.testing.assert_close(z.cpu(), expected, rtol=1e-2, atol=1e-2)
        z.square().sum().backward()
        assert all(p.grad is not None and p.grad.is_cuda for p in moved.parameters())

    # ------------------------------------------------------------------ compile, memory format

    @pytest.mark.parametrize(
        ("adjoint", "training"),
        [
            pytest.param(eq.Phantom(steps=2), True, id="phantom-train"),
            pytest.param(eq.Unrolled(), False, id="unrolled-eval", marks=pytest.mark.slow),
            pytest.param(NEUMANN, True, id="neumann-train", marks=pytest.mark.slow),
            pytest.param(BLIND, True, id="implicit-train", marks=pytest.mark.slow),
        ],
    )
    @pytest.mark.filterwarnings("ignore:the backward solve missed its tolerance")
    def test_a_fixed_step_layer_compiles_whole(self, adjoint: Any, training: bool) -> None:
        check_compiles(self.made(solver=self.laps, adjoint=adjoint).train(training), self.drawn(2))

    def test_memory_format_passes_through(self) -> None:
        if not self.convolutional:
            pytest.skip("vectors have no memory format")
        layer, x = self.made().eval(), self.drawn()
        plain = layer(x)
        assert plain.is_contiguous()
        last = layer(x.to(memory_format=torch.channels_last))
        assert last.is_contiguous(memory_format=torch.channels_last)
        assert not last.is_contiguous()
        torch.testing.assert_close(last, plain, rtol=1e-3, atol=1e-4)

    # ------------------------------------------------------------------ bad input

    def test_wrong_number_of_channels(self) -> None:
        layer, x = self.made(), self.drawn()
        with pytest.raises(ValueError, match=rf"takes x \[B, {x.shape[1]}.*got shape"):
            layer(torch.cat([x, x], 1))
        with pytest.raises(ValueError, match=r"takes x .* got shape"):
            layer(x[0])

    def test_wrong_dtype_says_what_to_do(self) -> None:
        layer, x = self.made(), self.drawn()
        with pytest.raises(TypeError, match=r"weights of torch.float32 and got x of torch.float64"):
            layer(x.double())
        with pytest.raises(TypeError, match="floating-point"):
            layer(x.long())
        with pytest.raises(TypeError, match="takes a tensor"):
            layer(None)  # type: ignore[arg-type]

    def test_wrong_start(self) -> None:
        layer, x = self.made(), self.drawn()
        z = layer(x).detach()
        with pytest.raises(ValueError, match=r"state|W takes"):
            layer(x, torch.cat([z, z], 1))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_a_warm_start_of_another_dtype_says_what_to_do(self, dtype: torch.dtype) -> None:
        layer, x = self.made(), self.drawn()
        z = layer(x).detach()
        with pytest.raises(TypeError, match=rf"state of {dtype}: use z.to\({x.dtype}\)"):
            layer(x, z.to(dtype))

    def test_wrong_options(self) -> None:
        shared = {"solver": "solver must be a solver object", "adjoint": "adjoint must be an obj"}
        for name, message in shared.items():
            with pytest.raises(TypeError, match=message):
                self.layer(**{name: "anderson"})
        for name, value, error, message in self.wrong_options:
            with pytest.raises(error, match=message):
                self.layer(**{name: value})


class BoundedLayerContract(LayerContract):
    """For layers whose solver is chosen from the constraint's bound."""

    def test_the_solver_needs_no_norm_of_the_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from equilibria.problems import ConvOperator, DenseOperator

        def dear(self: Any) -> float:
            raise AssertionError("a proven norm in a training step costs too much")

        monkeypatch.setattr(DenseOperator, "norm_upper", dear)
        monkeypatch.setattr(ConvOperator, "norm_upper", dear)
        solution = self.made().solve(self.drawn())
        assert solution.choice != ""

    @pytest.mark.parametrize("options", [{}, {"constraint": WeightNormalized()}])
    def test_gradients_a_sample_by_torch_func(self, options: dict[str, Any]) -> None:
        """By the solver that the layer chooses, from its constraint or from the proven norms."""
        layer, x = self.made(**options).double().eval(), self.drawn().double()
        layer(x).square().sum().backward()

        def loss(weights: dict[str, Tensor], one: Tensor) -> Tensor:
            return functional_call(layer, weights, (one[None],)).square().sum()

        weights = {name: p.detach() for name, p in layer.named_parameters()}
        each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        for name, p in layer.named_parameters():
            scale = float(p.grad.abs().max())
            torch.testing.assert_close(each[name].sum(0), p.grad, rtol=0, atol=1e-6 * scale)

    def test_proximal_gradient_finds_the_same_answer(self) -> None:
        x = self.drawn().double()
        plain = self.precise()(x)
        other = self.precise(solver=ProximalGradient(rtol=1e-12, max_steps=5000))(x)
        torch.testing.assert_close(other, plain, rtol=1e-7, atol=1e-8)

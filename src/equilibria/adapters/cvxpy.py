"""cvxpy's problems as ours, its parameters as tensors; and ours as cvxpy's, for checking.

A part of a cvxpy problem is a known atom of an affine expression Kz + k. Torch computes K and k
from the tree of the expression, so gradients reach the values of parameters.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from equilibria import problems as p
from equilibria.engine.optional import needs
from equilibria.problems.joint_priors import Translated
from equilibria.problems.kernels import parts_of
from equilibria.problems.priors import aligned


def _swapped(t: Tensor) -> Tensor:
    return t.permute([*range(t.ndim - 1, -1, -1)])


def _indexed(e: Any, t: Tensor) -> Tensor:
    import numpy as np

    key = getattr(e, "_orig_key", e.key)  # index.key holds slices in a form of cvxpy's own
    places = np.arange(t.numel()).reshape(t.shape)[key].reshape(-1).tolist()
    return t.reshape(-1)[places].reshape(e.shape)


_AFFINE: dict[str, Callable[..., Tensor]] = {
    "AddExpression": lambda e, *ts: reduce(operator.add, ts),
    "NegExpression": lambda e, t: -t,
    "MulExpression": lambda e, a, b: a @ b,
    "multiply": lambda e, a, b: a * b,
    "DivExpression": lambda e, a, b: a / b,
    "Promote": lambda e, t: t.expand(e.shape),
    "Sum": lambda e, t: t.sum() if e.axis is None else t.sum(e.axis, keepdim=e.keepdims),
    "index": _indexed,
    "special_index": _indexed,
    "transpose": lambda e, t: _swapped(t) if e.axes is None else t.permute(e.axes),
    "reshape": lambda e, t: (
        t.reshape(e.shape) if e.order == "C" else _swapped(_swapped(t).reshape(e.shape[::-1]))
    ),
    "Hstack": lambda e, *ts: torch.hstack(ts),
    "Vstack": lambda e, *ts: torch.vstack(ts),
}
_KNOWN = (
    "sum_squares, quad_form, norm1, norm2 (also along an axis), tv of a vector, sums of abs and of "
    f"squares, linear terms and constraints; of expressions with {', '.join(sorted(_AFFINE))}. "
    "Write it down with eq.Problem or eq.Composite."
)


def _kind(e: Any) -> str:
    return type(e).__name__.removesuffix("Approx")


def _unknown(e: Any) -> ValueError:
    return ValueError(f"from_cvxpy does not know {_kind(e)}, in {str(e)[:80]}. Known are {_KNOWN}")


def _per_sample(what: str, e: Any) -> ValueError:
    given = f"a parameter that {what}, in {str(e)[:80]}, is given per sample [B, ...]"
    return ValueError(f"from_cvxpy: {given}; give one value for all samples.")


class _Reader:
    """Collects the parts of a problem in ``variable``; ``held`` and ``rows``: parameters by id."""

    def __init__(self, variable: Any, like: Tensor, held: Any, rows: Any) -> None:
        self.variable, self.n, self.held, self.rows = variable, variable.size, held, rows
        self.batch = next((len(t) for t in rows.values()), 1)
        self.options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self.smooth: list[p.Coupling] = []
        self.terms: list[tuple[p.Prior, Tensor | None]] = []
        self.totals: list[tuple[Tensor, Tensor]] = []  # sums of all entries that are fixed
        self.units = torch.eye(self.n, **self.options)
        self.zero = 0.0 * self.units[:1]
        self.lower, self.upper = self.zero - math.inf, self.zero + math.inf

    def evaluated(self, e: Any, z: Tensor, held: Mapping[int, Tensor]) -> Tensor:
        """An affine expression of one sample, in cvxpy's shape."""
        if e is self.variable or _kind(e) == "Parameter":
            return z.reshape(e.shape) if e is self.variable else held[e.id]
        if not e.variables() and not e.parameters():
            value = e.value.toarray() if hasattr(e.value, "toarray") else e.value
            return torch.as_tensor(value, **self.options)
        if _kind(e) not in _AFFINE:
            raise _unknown(e)
        return _AFFINE[_kind(e)](e, *(self.evaluated(a, z, held) for a in e.args))

    def at(self, e: Any, ways: Tensor, change: Any = torch.clone) -> tuple[Tensor, Tensor]:
        """e at z = 0, [1 or B, m], and slopes along ways, [1 or B, s, m]; rows by ``change``."""
        own = {q.id: change(self.rows[q.id]) for q in e.parameters() if q.id in self.rows}

        def both(row: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
            def value(z: Tensor) -> Tensor:
                return self.evaluated(e, z, {**self.held, **row}).reshape(-1)

            slopes = torch.vmap(lambda way: torch.func.jvp(value, (self.zero[0],), (way,))[1])
            return value(self.zero[0]), slopes(ways)

        return torch.vmap(both)(own or {0: self.zero[:, 0]})

    def affine(self, e: Any) -> tuple[Tensor, Tensor]:
        """K [m, n] and k [1 or B, m] of e = Kz + k."""
        probe = torch.linspace(1.0, 2.0, self.n, **self.options)[None]
        shake = torch.vmap(lambda t, i: (1.0 + i) * t.detach() + 0.731 * i)  # equal by chance
        slopes = self.at(e, probe, lambda t: shake(t, torch.arange(len(t), **self.options)))[1]
        if not bool((slopes == slopes[:1]).all()):
            raise _per_sample("multiplies the variable", e)
        return self.at(e, self.units, lambda t: t[:1])[1][0].mT, self.at(e, probe)[0]

    def number(self, e: Any) -> Tensor:
        """An expression without the variable: [] or [B]."""
        k = self.at(e, self.units[:1])[0][:, 0]
        return k[0] if len(k) == 1 else k

    def rowwise(self, t: Tensor) -> Tensor:
        return t.expand(self.batch, -1).contiguous()

    def add(self, e: Any, w: Tensor) -> None:
        """Collect w·e, a part of the objective."""
        kind, args = _kind(e), e.args
        fixed = [not a.variables() for a in args]
        if not e.variables() or not (w.requires_grad or w.any()):
            return  # a constant, or a part of weight 0, moves no minimizer
        if kind == "multiply" and any(fixed):
            self.add(args[fixed.index(False)], w * self.number(args[fixed.index(True)]))
        elif e.is_affine():
            slope = self.at(e, self.units)[1][..., 0]
            self.smooth.append(p.Linear(self.zero, self.rowwise(-w.reshape(-1, 1) * slope)))
        elif kind in ("AddExpression", "NegExpression"):
            for a in args:
                self.add(a, -w if kind == "NegExpression" else w)
        elif kind == "DivExpression" and fixed[1]:
            self.add(args[0], w / self.number(args[1]))
        else:
            self.atom(args[0] if kind == "Sum" and e.axis is None else e, w)

    def atom(self, e: Any, w: Tensor) -> None:
        """Collect w times the sum of the entries of e."""
        kind, arg = _kind(e), e.args[0]
        euclidean = [_kind(t) == "Pnorm" and t.p == 2 for t in (e, arg)]
        whole = getattr(e, "axis", None) is None
        if euclidean[0] or (kind == "norm1" and whole and euclidean[1]):
            self.norms(e if euclidean[0] else arg, w)  # norm1 of norms is their sum
        elif kind in ("norm1", "abs") and whole:
            self.absolute(arg, w)
        elif kind in ("Power", "power") and float(getattr(e.p, "value", e.p)) == 2.0:
            self.square(arg.args[0] if euclidean[1] else arg, w)
        elif kind == "quad_over_lin" and whole and not e.args[1].variables():
            self.square(arg, w / self.number(e.args[1]))
        elif kind == "QuadForm":
            self.square(arg, w, self.affine(e.args[1])[1])
        else:
            raise _unknown(e)

    def square(self, e: Any, w: Tensor, P: Tensor | None = None) -> None:
        """``w|e|^2``, or ``w e'Pe``."""
        if w.ndim or (P is not None and len(P) > 1):
            raise _per_sample("is the weight of squares", e)
        K, k = self.affine(e)
        if P is not None:
            root = _root(P.reshape(e.size, e.size))
            K, k = root @ K, k @ root.mT
        plain = torch.equal(K, self.units) and not K.requires_grad
        self.smooth.append(p.LeastSquares(None if plain else K, self.rowwise(-k), 2.0 * w))

    def term(self, h: p.Prior, K: Tensor | None, k: Tensor) -> None:
        """Collect h(Kz + k)."""
        self.terms.append((Translated(h, k) if k.requires_grad or k.any() else h, K))

    def absolute(self, e: Any, w: Tensor) -> None:
        K, k = self.affine(e)
        fixed, steps = not K.requires_grad, self.units.diff(dim=0)  # zeros that no gradient changes
        if fixed and len(K) == self.n and torch.equal(K, K.diagonal().diag()):
            size, weight = K.diagonal(), w.reshape(-1, 1) * K.diagonal().abs()
            self.term(p.SoftThreshold(weight), None, k / torch.where(size == 0, 1.0, size))
        elif fixed and torch.equal(K, K[:1, 1:2] * steps) and not (k.requires_grad or k.any()):
            self.terms.append((p.TotalVariation(w * K[0, 1].abs()), None))
        else:
            self.term(p.SoftThreshold(w), K, k)

    def norms(self, e: Any, w: Tensor) -> None:
        K, k = self.affine(e.args[0])
        places = torch.arange(len(K)).reshape(e.args[0].shape)
        last = places.reshape(1, -1) if e.axis is None else places.movedim(e.axis, -1)
        for group in last.flatten(0, -2):
            self.term(p.GroupSoftThreshold(w), K[group], k[:, group])

    def constrain(self, e: Any, *, equal: bool) -> None:
        """e <= 0, or e = 0."""
        K, k = self.affine(e)
        place = K.detach().abs().argmax(1)
        single = bool(((K != 0).sum(1) == 1).all()) and len(place.unique()) == len(place)
        if single and not K.requires_grad:
            factor = K.gather(1, place[:, None])[:, 0]
            none = torch.full((len(k), self.n), math.inf, **self.options)
            low = torch.where((factor < 0) | equal, -k / factor, -math.inf)
            high = torch.where((factor > 0) | equal, -k / factor, math.inf)
            self.lower = torch.maximum(self.lower, (-none).index_copy(1, place, low))
            self.upper = torch.minimum(self.upper, none.index_copy(1, place, high))
        elif equal and K.shape == (1, self.n) and torch.equal(K, K[:, :1].expand_as(K)):
            self.totals.append((K, k))
        else:
            self.terms.append((p.Box(-k if equal else -math.inf, -k), K))

    def result(self) -> p.Problem | p.Composite:
        prior: p.Prior = p.Free()
        live = self.lower.requires_grad or self.upper.requires_grad
        positive = not live and not self.lower.any() and bool((self.upper == math.inf).all())
        simplex = False
        if positive and len(self.totals) == 1 and not self.totals[0][0].requires_grad:
            K, k = self.totals[0]
            total = (-k / K[0, 0])[:, 0]
            simplex = bool((total > 0).all())
        if simplex:
            prior = p.Simplex(total if len(total) > 1 else total[0])
        elif positive:
            prior = p.NonNegative()
        elif live or bool(self.lower.isfinite().any() | self.upper.isfinite().any()):
            prior = p.Box(self.lower, self.upper)
        terms = self.terms + [(p.Box(-k, -k), K) for K, k in self.totals if not simplex]
        alone = next((i for i, (_, K) in enumerate(terms) if K is None), None)
        if isinstance(prior, p.Free) and alone is not None:
            prior = terms.pop(alone)[0]
        none = p.LeastSquares(self.zero, self.rowwise(self.zero[:, :1]))
        g = reduce(operator.add, self.smooth or [none])
        if terms or all(isinstance(q, p.Linear) for q in self.smooth):
            return p.Composite(prior, terms, g)
        return p.Problem(prior, smooth=g)


def _root(P: Tensor) -> Tensor:
    """F with FᵀF = P for a positive semidefinite P."""
    P = 0.5 * (P + P.mT)
    found: tuple[Tensor, Tensor] = torch.linalg.cholesky_ex(P)
    if not found[1]:
        return found[0].mT
    sizes, vectors = torch.linalg.eigh(P.detach())
    if P.requires_grad or sizes[0] < -1e-6 * sizes.abs().max():
        takes = "positive semidefinite P, for gradients a positive definite one"
        raise ValueError(f"from_cvxpy: P has the eigenvalue {sizes[0]:.3g}, takes a {takes}.")
    return torch.mul(sizes.clamp_min(0.0).sqrt()[:, None], vectors.mT)


def from_cvxpy(problem: Any, values: Mapping[Any, Tensor] | None = None) -> p.Problem | p.Composite:
    """A ``cvxpy.Problem`` as a ``Problem``, or a ``Composite`` where it has no single prox.

    The state is [B, n], the variable with its rows one after another. The objective is that of
    cvxpy up to a constant, to be minimized.

    Args:
        problem: convex by cvxpy's rules, of one variable and known atoms (an error lists them).
        values: ``cvxpy.Parameter`` → tensor of its shape, or [B, *shape] with one per sample;
            gradients reach these tensors, and the problem has their dtype. Per sample are constant
            parts, bounds and weights of norms. A parameter that is not here has its ``value``.
    """
    variables, given = problem.variables(), {q.id: t for q, t in (values or {}).items()}
    if len(variables) != 1 or not problem.is_dcp():
        got = f"{len(variables)}, problem.is_dcp() {problem.is_dcp()}"
        raise ValueError(f"from_cvxpy takes a convex problem of one variable, got {got}.")
    like = next(iter(given.values()), torch.empty(0))
    kept: list[dict[int, Tensor]] = [{}, {}]  # of all samples, and one per sample
    for q in problem.parameters():
        value = given.pop(q.id, q.value)
        if value is None:
            raise ValueError(f"from_cvxpy: parameter {q.name()} has no value; give it in values.")
        t = torch.as_tensor(value).to(like)
        if q.shape not in (tuple(t.shape), tuple(t.shape[1:])):
            takes = f"{list(q.shape)}, or one of these per sample"
            raise ValueError(f"from_cvxpy: {q.name()} got shape {list(t.shape)}, takes {takes}.")
        kept[tuple(t.shape) != q.shape][q.id] = t
    if given or len({len(t) for t in kept[1].values()}) > 1:
        what = "keys that are not its parameters" if given else "different numbers of samples"
        raise ValueError(f"from_cvxpy: values has {what}.")
    x, reader = variables[0], _Reader(variables[0], like, *kept)
    one = torch.ones((), **reader.options)
    reader.add(problem.objective.args[0], -one if problem.objective.NAME == "maximize" else one)
    for name, made in x.attributes.items():
        if name != "nonneg" and made is not None and made is not False:
            raise ValueError(f"from_cvxpy: the variable has {name}={made!r}; write a constraint.")
    for c in [*problem.constraints, *([x >= 0] if x.attributes["nonneg"] else [])]:
        if _kind(c) not in ("Inequality", "Equality", "NonNeg", "Zero"):
            raise _unknown(c)
        e = -c.expr if _kind(c) == "NonNeg" else c.expr
        reader.constrain(e, equal=_kind(c) in ("Equality", "Zero"))
    return reader.result()


def to_cvxpy(problem: p.HiddenProblem, sample: int = 0) -> Any:
    """The ``cvxpy.Problem`` of one sample, in float64, to check a solution by another solver.

    Its one variable, ``variables()[0]``, is the state with its rows one after another. Known are
    quadratic couplings (``LeastSquares``, ``Linear``, their sums), the regularizers ``L1`` and
    ``SquaredNorm``, and the priors that cvxpy can write; a ``TypeError`` names others.
    """
    with needs("cvxpy", "to_cvxpy", extra="cvxpy"):
        import cvxpy
    cp: Any = cvxpy  # exports names that type checkers do not see
    rows = [t[[sample]] for t in problem.inputs()]
    shape = tuple(problem.default_start().shape[1:])
    held: Any = problem.with_inputs(*rows).in_double()
    z = cp.Variable(math.prod(shape), name="z")
    same = torch.eye(z.size, dtype=torch.float64).numpy()
    if isinstance(problem, p.Composite):
        prior, terms, smooth, quadratic = held.prior, held.terms, held.smooth, 0.0 * same
    elif isinstance(problem, p.Problem):
        prior, terms, smooth, added = held.effective_prior, [], held.coupling, held.regularizer
        known = held.regularize == "gradient" and isinstance(added, p.L1 | p.SquaredNorm)
        if added is not None and not known:
            raise _not_written(added)
        bend = added.weight if isinstance(added, p.SquaredNorm) else 0.0
        quadratic = (held.ridge + bend) * same
    else:
        raise _not_written(problem)
    total, rules = _written(cp, prior, z, shape)
    for h, K in terms:
        matrix, out = _matrix(K, shape)
        value, more = _written(cp, h, matrix @ z, out)
        total, rules = total + value, rules + more
    for q, K in [] if smooth is None else parts_of(smooth):
        matrix, inner = _matrix(K, shape)
        if isinstance(q, p.LeastSquares):
            fit = (_matrix(q.operator, inner)[0] @ matrix) @ z - q.c.flatten().numpy()
            total = total + 0.5 * float(q.weight) * cp.sum_squares(fit)
        elif isinstance(q, p.Linear):
            W = _matrix(q.operator, inner)[0] @ matrix
            total, quadratic = total - (q.c.flatten().numpy() @ matrix) @ z, quadratic - W.T @ W
        else:
            raise _not_written(q)
    if quadratic.any():
        total = total + 0.5 * cp.quad_form(z, quadratic)
    made = cp.Problem(cp.Minimize(total), rules)
    if not made.is_dcp():
        raise ValueError("to_cvxpy: the problem is not convex.")
    return made


def _not_written(part: Any) -> TypeError:
    return TypeError(f"to_cvxpy does not know {type(part).__name__}; its docstring has the list.")


def _matrix(K: p.LinearOperator, shape: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
    n = math.prod(shape)
    images = K(torch.eye(n, dtype=torch.float64).reshape(n, *shape))
    return images.reshape(n, -1).mT.numpy(), tuple(images.shape[1:])


def _written(cp: Any, f: p.Prior, y: Any, shape: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """f of y, the entries of a state [*shape] one after another: an expression, constraints."""
    like = torch.empty(1, *shape, dtype=torch.float64)

    def each(name: str) -> Any:
        return torch.as_tensor(aligned(f, name, like)).expand_as(like).flatten().numpy()

    def groups() -> list[Any]:
        dim: Any = getattr(f, "dim", None)
        dims = (dim,) if isinstance(dim, int) else dim or tuple(range(1, like.ndim))
        places = torch.arange(like.numel()).reshape(like.shape)
        places = places.movedim(dims, tuple(range(-len(dims), 0)))
        return [y[g.numpy()] for g in places.reshape(-1, places.shape[-len(dims) :].numel())]

    def jumps() -> list[Any]:
        return [cp.diff(g) for g in groups() if g.size > 1]

    def one(name: str) -> float:  # the parameter of a prior that is not elementwise
        held = torch.as_tensor(getattr(f, name))
        if held.numel() > 1:
            raise TypeError(f"to_cvxpy: {name} of {type(f).__name__} must be one number a sample.")
        return float(held)

    def ends() -> list[Any]:
        pairs = [(-1.0, each("lower")), (1.0, each("upper"))]
        return [s * y[w] <= s * end[w] for s, end in pairs if (w := abs(end) < math.inf).any()]

    if isinstance(f, Translated):
        return _written(cp, f.prior, y + each("by"), shape)
    if isinstance(f, p.WithL1 | p.ShiftedNonNegative):
        plain, size = (f.prior, cp.abs(y)) if isinstance(f, p.WithL1) else (p.NonNegative(), y)
        value, rules = _written(cp, plain, y, shape)
        return value + each("weight") @ size, rules
    table: dict[type[p.Prior], Callable[[], Any]] = {
        p.Free: list,
        p.NonNegative: lambda: [y >= 0],
        p.Box: ends,
        p.SoftThreshold: lambda: each("weight") @ cp.abs(y),
        p.HalfSpace: lambda: [each("normal") @ y <= one("offset")],
        p.Simplex: lambda: [y >= 0, *(cp.sum(g) == one("total") for g in groups())],
        p.TotalVariation: lambda: one("weight") * sum(map(cp.norm1, jumps())),
        p.Isotonic: lambda: [jump >= 0 for jump in jumps()],
        p.Ball: lambda: [cp.norm(g, 2) <= one("radius") for g in groups()],
        p.GroupSoftThreshold: lambda: one("weight") * sum(cp.norm(g, 2) for g in groups()),
    }
    if type(f) not in table:
        raise _not_written(f)
    found = table[type(f)]()
    return (0.0, found) if isinstance(found, list) else (found, [])

"""Lipschitz constants of torch's functions, and what rounding adds to their values.

One rule a function; ``tracked`` asks for it by the function's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.engine.tree import sample_norm
from equilibria.problems.norms import SAFETY, UNIT, dense_norm, sum_error
from equilibria.problems.operators import ConvOperator, DenseOperator

UP = 1.0 + 1e-13
Bound = tuple[float, Tensor | float]
Rule = Callable[[Tensor, Any, Any, Tensor], "Bound | None"]
"""(u, args, kwargs, f(u)) → a Lipschitz constant of f, and what the computed f(u) may be off by
beside a few units in its last place; None where nothing is known. f(u) has as many samples as u."""
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return enter


def named(
    args: Any, kwargs: Any, names: str = "input weight bias stride padding dilation groups"
) -> dict[str, Any]:
    return {**dict(zip(names.split(), args, strict=False)), **kwargs}


def _same_entries(constant: float) -> Rule:
    """A function of each entry, or a rearrangement, with this constant."""

    def rule(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
        # No copies, by broadcasting; not the bits read as another type.
        return (constant, 0.0) if (out.numel(), out.dtype) == (u.numel(), u.dtype) else None

    return rule


_rule(
    "relu", "tanh", "clamp", "clamp_min", "clamp_max", "abs", "neg", "hardtanh",
    "relu6", "softshrink", "flatten", "reshape", "view", "contiguous", "unsqueeze", "detach",
    "clone", "double", "to", "squeeze", "pixel_unshuffle", "pixel_shuffle", "unflatten",
)(_same_entries(1.0))  # fmt: skip
_rule("sigmoid")(_same_entries(0.25))
_rule("silu")(_same_entries(1.1))  # the largest slope is 1.0998


@_rule("gelu")
def _gelu(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """The largest slope is 1.1290. In u·(1 + erf) the sum cancels where u is negative."""
    return 1.13, SAFETY * 8 * UNIT * sample_norm([u])


@_rule("softplus")
def _softplus(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """Above its threshold torch takes u, which is log(1 + e^{−threshold})/β off at most."""
    given = named(args, kwargs, "input beta threshold")
    beta, threshold = given.get("beta", 1.0), given.get("threshold", 20.0)
    off = math.log1p(math.exp(-threshold)) / abs(beta)
    above = (beta * u > threshold).to(u.dtype)
    rounding = SAFETY * 4 * UNIT * sample_norm([u])  # of βu
    return (1.0, off * sample_norm([above]) * UP + rounding) if threshold >= 20.0 else None


@_rule("leaky_relu")
def _leaky(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    slope = named(args, kwargs, "input negative_slope").get("negative_slope", 0.01)
    return max(1.0, abs(float(slope))), 0.0


@_rule("permute")
def _permuted(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """A permutation of dimensions that leaves the batch in its place."""
    dims = pytree.tree_leaves((args[1:], kwargs))
    return (1.0, 0.0) if int(dims[0]) % out.ndim == 0 else None


@_rule("transpose")
def _transposed(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    dims = [int(d) % out.ndim for d in pytree.tree_leaves((args[1:], kwargs))]
    return (1.0, 0.0) if 0 not in dims else None


@_rule("dropout", "dropout1d", "dropout2d", "feature_dropout")
def _dropout(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    training = named(args, kwargs, "input p training").get("training", True)
    return None if training else (1.0, 0.0)


PRODUCTS = {"mul", "__mul__", "__rmul__"}
QUOTIENTS = {"div", "__truediv__", "true_divide"}


@_rule(*PRODUCTS)
def _scaled(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """By a number, or by a tensor that leaves the shape as it is."""
    by = [value for value in args if value is not u]
    if len(by) != 1 or kwargs or out.shape != u.shape:
        return None
    return float(torch.as_tensor(by[0], dtype=u.dtype).abs().amax()), 0.0


@_rule(*QUOTIENTS)
def _quotient(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    if kwargs.get("rounding_mode") is not None or len(args) != 2:
        return None
    return _scaled(u, (u, UP / torch.as_tensor(args[1], dtype=u.dtype)), {}, out)


def _reduced(power: float) -> Rule:
    """Over n entries of a sample each: a mean, a sum or a maximum has the constant n^power."""

    def rule(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
        dims = [d for d in pytree.tree_leaves((args[1:], kwargs.get("dim"))) if type(d) is int]
        if not dims or 0 in (d % u.ndim for d in dims):
            return None
        count = u.numel() // max(out.numel(), 1)
        return _averaged(u, count**power, count)

    return rule


_rule("mean")(_reduced(-0.5))
_rule("sum")(_reduced(0.5))
_rule("amax", "amin")(_reduced(0.0))


def _averaged(u: Tensor, constant: float, terms: int) -> Bound:
    """A linear map of norm ``constant`` and of the norm of its magnitude, sums of ``terms``."""
    own = SAFETY * sum_error(terms) * max(1.0, constant) * sample_norm([u])
    return constant * UP, own


def _magnitude(weight: Tensor) -> float:
    """‖|W|‖₂ ≤ √(‖W‖₁‖W‖∞) of a matrix or a convolution, any stride, padding and dilation."""
    rows = weight.abs().flatten(1).sum(1).max()
    columns = weight.abs().transpose(0, 1).flatten(1).sum(1).max()
    return float(rows.sqrt() * columns.sqrt()) * (1.0 + 1e-12)


def _linear_map(u: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, norm: float) -> Bound:
    terms = weight[0].numel() + 1
    size = _magnitude(weight) * sample_norm([u])
    if bias is not None:
        size = size + bias.abs().max() * math.sqrt(out[0].numel())
    return norm, SAFETY * sum_error(terms) * size


@_rule("linear")
def _dense(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    given = named(args, kwargs)
    if u.ndim != 2:
        return None
    norm = DenseOperator(given["weight"]).norm_upper()
    return _linear_map(u, given["weight"], given.get("bias"), out, norm)


@_rule("conv2d")
def _convolution(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    given = named(args, kwargs)
    weight = given["weight"]
    if u.ndim != 4:
        return None
    norm, padding = _magnitude(weight), given.get("padding", 0)
    uneven = padding == "same" and not all(side % 2 for side in weight.shape[2:])
    if given.get("dilation", 1) in (1, (1, 1)) and not uneven:
        padding = 0 if padding == "valid" else padding
        operator = ConvOperator(weight, given.get("stride", 1), padding, given.get("groups", 1))
        norm = min(norm, operator.norm_upper_on(out.shape[1:]))
    return _linear_map(u, weight, given.get("bias"), out, norm)


@_rule("batch_norm")
def _batch_norm(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """Of torch.nn.functional; torch.batch_norm has its arguments in another order."""
    weight, bias = (kwargs.get(name) for name in ("weight", "bias"))
    if len(args) != 3 or "running_mean" in kwargs:
        return None
    if kwargs.get("training", True) or args[2] is None:
        return None
    factor = (args[2] + kwargs["eps"]).rsqrt()
    if weight is not None:
        factor = factor * weight.abs()
    shift = args[1].abs() * factor
    if bias is not None:
        shift = shift + bias.abs()
    own = SAFETY * 8 * UNIT * shift.max() * math.sqrt(out[0].numel())
    return float(factor.max()) * UP, own


def _pair(value: Any) -> tuple[Any, ...]:
    pair = (value,) if isinstance(value, (int, float)) else tuple(value)
    return pair * 2 if len(pair) == 1 else pair


def _pool(maximum: bool) -> Rule:
    """Blocks of k pixels: each output sees k inputs, and each input is seen by ⌈k/s⌉ at most."""
    rest = "dilation ceil_mode" if maximum else "ceil_mode count_include_pad divisor_override"

    def rule(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
        given = named(args, kwargs, f"input kernel_size stride padding {rest}")
        if given.get("dilation", 1) not in (1, (1, 1)) or given.get("divisor_override"):
            return None
        kernel = _pair(given["kernel_size"])
        step = _pair(given.get("stride") or kernel)
        seen = math.prod(math.ceil(k / s) for k, s in zip(kernel, step, strict=True))
        padded = given.get("padding", 0) not in (0, (0, 0)) or given.get("ceil_mode", False)
        if maximum or padded:  # rows of sum 1; at an edge fewer may be averaged
            constant = math.sqrt(seen)
        else:  # columns of at most seen/k
            constant = math.sqrt(seen / math.prod(kernel))
        return _averaged(u, constant, math.prod(kernel))

    return rule


_rule("avg_pool2d")(_pool(maximum=False))
_rule("max_pool2d")(_pool(maximum=True))


@_rule("interpolate")
def _resized(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """A resize of maps, the same along rows and columns: ‖A ⊗ B‖ = ‖A‖‖B‖, from its matrices."""
    # With both options torch's weights along an axis depend on the size of the other.
    if u.ndim != 4 or (kwargs["antialias"] and kwargs["align_corners"]):
        return None
    constant = magnitude = 1.0
    key = "size" if kwargs["scale_factor"] is None else "scale_factor"
    for axis in (0, 1):
        length, target = u.shape[2 + axis], list(_pair(kwargs[key]))
        target[1 - axis] = 1 if key == "size" else 1.0
        line = torch.eye(length, dtype=u.dtype).view(length, 1, length, 1)
        line = line if axis == 0 else line.mT
        matrix = F.interpolate(line, **(kwargs | {key: target})).flatten(1)
        constant *= dense_norm(matrix).upper
        magnitude *= dense_norm(matrix.abs()).upper
    # Its weights come from places, which are rounded: of 16 pixels, at an index below n.
    terms = 16 + max(u.shape[2:])
    return constant * UP, _averaged(u, magnitude, terms)[1]


@_rule("adaptive_avg_pool2d")
def _adaptive(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    pairs = list(zip(u.shape[-2:], out.shape[-2:], strict=True))
    if any(a % b for a, b in pairs):
        return None
    count = math.prod(a // b for a, b in pairs)
    return _averaged(u, 1.0 / math.sqrt(count), count)


@_rule("pad")
def _padded(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """With a constant, and not in place of samples."""
    given = named(args, kwargs, "input pad mode")
    inside = len(given["pad"]) <= 2 * (u.ndim - 1)
    return (1.0, 0.0) if given.get("mode", "constant") == "constant" and inside else None


@_rule("__getitem__")
def _item(u: Tensor, args: Any, kwargs: Any, out: Tensor) -> Bound | None:
    """Slices keep some entries; of the batch, all."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    kept = all(isinstance(i, slice) or i is Ellipsis for i in index)
    return (1.0, 0.0) if kept else None

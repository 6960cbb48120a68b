"""Tensors that carry a Lipschitz constant in the network's input and a bound on their error.

Every function of torch that sees one answers with one: by a rule (``function_bounds``), or where
none is known, with an infinite constant and a note. What leaves torch is refused.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from equilibria.engine.tree import sample_norm
from equilibria.problems.norms import SAFETY, UNIT

from .function_bounds import PRODUCTS, QUOTIENTS, RULES, UP, named


class CannotFollowError(Exception):
    """Why a network is not certified. No TypeError: an operator would take that as a hint to try
    another one, such as ``a + b`` for ``a += b``."""


class Tracked(Tensor):
    """A tensor [B, ...] with a Lipschitz constant in the input and an error bound [B]."""

    lipschitz: float
    error: Tensor
    rows: tuple[Tensor, Tracked, Tensor] | None
    """V, h and ‖h‖, where this is Vh + d."""
    entries: Tensor | None
    """e [1, ...]: no entry moves by more than ε·e when the input moves by ε in ℓ∞."""
    notes: list[str]
    version: int
    """Of the numbers: where torch counts another one, they were changed in place since."""
    numbers: Tensor
    """The values. The memory of the tensor itself holds NaN."""

    @staticmethod
    def wrap(value: Tensor, lipschitz: float, error: Tensor, notes: list[str]) -> Tracked:
        if value.is_inference():  # torch does not count changes of it
            raise CannotFollowError(
                "certify cannot follow values of the input through torch.inference_mode(); use "
                "torch.no_grad() in the network."
            )
        # What reads memory without asking torch, such as an extension in C++, finds NaN.
        hidden = torch.full(value.shape, math.nan, dtype=torch.float64, device=value.device)
        made: Tracked = hidden.as_subclass(Tracked)
        made.lipschitz, made.error, made.rows, made.notes = lipschitz, error, None, notes
        made.entries, made.version, made.numbers = None, value._version, value
        return made

    def bounded(self, entries: Tensor | None) -> None:
        """Take a bound on each entry, and what follows for the norm."""
        self.entries = entries
        if entries is not None:
            self.lipschitz = min(self.lipschitz, float(sample_norm([entries])) * (1.0 + 1e-9))

    def as_subclass(self, cls: Any) -> Any:
        """Itself: a network cannot take off what is known of it."""
        return self

    def current(self) -> Tracked:
        """Itself, or where its numbers were changed in place, them with nothing known."""
        if self.numbers._version == self.version:
            return self
        self.notes.append("no Lipschitz constant is known for a value that is changed in place")
        return self.unknown(self.numbers)

    def passed(self, value: Tensor, constant: float, own: Tensor | float = 0.0) -> Tracked:
        """``value``: of a function with this constant at self, with an error of its own."""
        rounding = SAFETY * 8 * UNIT * sample_norm([value]) + _TINY * value[0].numel()
        carried = torch.where(self.error > 0.0, self.error * constant, 0.0)
        lipschitz = self.lipschitz * constant + _TINY if self.lipschitz and constant else 0.0
        error = (carried + own + rounding) * UP
        return Tracked.wrap(value, lipschitz * UP, error, self.notes)

    def unknown(self, value: Tensor) -> Tracked:
        """``value``: made from self in a way of which nothing is known."""
        return Tracked.wrap(value, math.inf, torch.full_like(self.error, math.inf), self.notes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        leaves = pytree.tree_leaves((args, kwargs))
        sources = [leaf.current() for leaf in leaves if isinstance(leaf, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            if func == _DATA:  # the same memory, but changes of it would not be counted
                func, name = Tensor.detach, "detach"
            if func == _SET_DATA:
                raise CannotFollowError(
                    "certify cannot follow a network that assigns the data of a value that depends "
                    "on the input."
                )
            plain, options = pytree.tree_map_only(cls, attrgetter("numbers"), (args, kwargs))
            others = [t for t in leaves if type(t) is not cls and isinstance(t, Tensor)]
            before = _versions(others)
            out = None if name in _READS else func(*plain, **options)
            if _versions(others) != before:
                raise CannotFollowError(
                    f"certify cannot follow a network that writes values which depend on the input "
                    f"into another tensor ({name}); make a new tensor of them (cat, stack)."
                )
            if name in _READS or not _known_kinds(out) or _shapes_by_numbers(name, args):
                raise CannotFollowError(
                    f"certify cannot follow a network that decides by its numbers ({name} of a "
                    "value that depends on the input)."
                )
            if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(out)):
                return out
            found = None
            if isinstance(out, Tensor):
                rules = _torchs_own(func) and out.dtype == torch.float64
                first = bool(args) and (name in _ANY_ORDER or isinstance(args[0], cls))
                if rules and first:  # of other functions, the first argument is the input
                    found = _bounds(name, func, sources, plain, options, out)
            if found is None:
                sources[0].notes.append(f"no Lipschitz constant is known for {name}")
                return pytree.tree_map_only(Tensor, sources[0].unknown, out)
            if plain and out is plain[0]:  # such as relu(x, inplace=True): x has these bounds, too
                vars(args[0]).update(vars(found))
            return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What was not asked above: a scripted function, or one written in C++.

        Torch's interpreter loses the error, so the notes say it too.
        """
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, cls):
                leaf.notes.append(UNSEEN)
        raise CannotFollowError(UNSEEN)


UNSEEN = "certify cannot follow values of the input through a scripted function or one in C++."
_TINY = 1e-300
"""Where numbers underflow, errors are not relative to them."""


def _torchs_own(func: Any) -> bool:
    """Whether a function is torch's: others may have the same name."""
    home = getattr(func, "__module__", None) or "torch"
    return home.partition(".")[0] == "torch" and home.removeprefix("torch._ops") in (home, ".aten")


def _shapes_by_numbers(name: str, args: Any) -> bool:
    """Whether the shape of the answer may depend on the numbers."""
    if name == "__getitem__":
        index = pytree.tree_leaves(args[1:])
        return any(isinstance(i, Tracked) and i.numbers.dtype == torch.bool for i in index)
    return name in _COUNTS or (name == "where" and len(args) == 1)


class NoEscape(TorchFunctionMode):
    """Refuses what would make plain tensors of tracked ones without asking them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        leaves = pytree.tree_leaves((args, kwargs))
        copied = name in _COPIES and any(isinstance(leaf, Tracked) for leaf in leaves)
        if copied or torch._C._functorch.peek_interpreter_stack() is not None:
            what = name if copied else "torch.func"
            raise CannotFollowError(f"certify cannot follow values of the input through {what}.")
        return func(*args, **kwargs)


_COPIES = {"tensor", "as_tensor", "asarray", "from_dlpack"}


def _versions(tensors: list[Tensor]) -> list[int]:
    """How often each was changed in place, as far as torch counts."""
    return [0 if t.is_inference() else t._version for t in tensors]


_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_READS = {
    "__bool__", "__float__", "__int__", "__index__", "__contains__", "item", "tolist", "equal",
    "allclose", "is_nonzero", "apply_", "map_", "map2_", "data_ptr",
}  # fmt: skip
"""What would let a network branch on its numbers, or hands them to what is not torch."""
_COUNTS = {
    "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount",
    "repeat_interleave", "one_hot", "arange", "to_sparse", "pack_padded_sequence",
    "_pack_padded_sequence", "tensor_split",
}  # fmt: skip
"""What gives an answer whose shape depends on the numbers."""
_SUMS = {"add", "add_", "__add__", "__radd__", "sub", "sub_", "__sub__", "__rsub__"}
_ANY_ORDER = {"cat", *_SUMS, *PRODUCTS}
_FACTS = (int, str, type(None), torch.Size, torch.dtype, torch.device, torch.layout)
"""What may be known of a tensor apart from its numbers: shapes, kinds, places."""


def _known_kinds(out: Any) -> bool:
    """Whether an answer is made of tensors and facts: an array, say, would leave torch."""
    return all(isinstance(leaf, (Tensor, *_FACTS)) for leaf in pytree.tree_leaves(out))


def _bounds(
    name: str, func: Any, sources: list[Tracked], args: Any, kwargs: Any, out: Tensor
) -> Tracked | None:
    """``out`` of a function of ``sources`` with what is proven of it; None where nothing is."""
    if name in _SUMS:
        return _sum(sources, args, kwargs, out)
    if name == "cat":
        return _cat(sources, args, kwargs, out)
    u, rule = sources[0], RULES.get(name)
    if rule is None or len(sources) > 1 or out.ndim == 0 or len(out) != len(u):
        return None
    bound = rule(u.numbers, args, kwargs, out)
    if bound is None:
        return None
    found = u.passed(out, *bound)
    if name == "linear":
        weight = named(args, kwargs)["weight"].clone()  # it may be changed later
        found.rows = (weight, u, sample_norm([u.numbers]))
    if u.entries is not None:
        found.bounded(_moved(name, func, u.entries, u.numbers, args, kwargs))
    return found


def _sum(sources: list[Tracked], args: Any, kwargs: Any, out: Tensor) -> Tracked | None:
    if kwargs.get("alpha", 1) != 1 or len(args) > 2 or any(u.shape != out.shape for u in sources):
        return None
    first = sources[0].passed(out, 1.0)
    for other in sources[1:]:
        first.lipschitz = (first.lipschitz + other.lipschitz) * UP
        first.error = (first.error + other.error) * UP
    entries = [u.entries for u in sources if u.entries is not None]
    if len(entries) == len(sources):
        first.bounded(torch.stack(entries).sum(0) * (1.0 + 1e-9))
    return first


def _cat(sources: list[Tracked], args: Any, kwargs: Any, out: Tensor) -> Tracked | None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    parts = args[0] if args else kwargs["tensors"]
    if dim == 0 or len(sources) != len(parts) or len(out) != len(sources[0]):
        return None
    lipschitz = math.sqrt(sum(u.lipschitz**2 for u in sources)) * UP
    error = torch.stack([u.error for u in sources]).norm(dim=0) * UP
    return Tracked.wrap(out, lipschitz, error, sources[0].notes)


_ENTRYWISE = {"relu", "tanh", "softplus", "clamp", "clamp_min", "clamp_max", "abs", "neg", "relu6"}
_MOVES = {
    "flatten", "reshape", "view", "contiguous", "clone", "detach", "double", "to", "squeeze",
    "pixel_unshuffle",
}  # fmt: skip


def _moved(name: str, func: Any, e: Tensor, u: Tensor, args: Any, kwargs: Any) -> Tensor | None:
    """The bound on each entry after an operation on u, which has the bound e [1, ...]; or None."""
    if name in _ENTRYWISE:
        return e
    if name in PRODUCTS | QUOTIENTS:
        scaled: Tensor = func(*(e if a is u else abs(a) for a in args))
        return scaled.amax(0, keepdim=True) * (1.0 + 1e-9)
    if name in _MOVES and args:
        moved: Tensor = func(e.expand_as(args[0]).contiguous(), *args[1:], **kwargs)
        return moved[:1]
    if name not in ("linear", "conv2d"):
        return None
    rest = {key: value for key, value in kwargs.items() if key not in ("input", "weight", "bias")}
    weight = named(args, kwargs)["weight"]
    image: Tensor = func(e, weight.abs(), None, *args[3:], **rest)
    return image * (1.0 + 1e-9)  # and its rounding

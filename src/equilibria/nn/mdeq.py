"""MDEQ: one equilibrium of feature maps at several scales (Bai, Koltun and Kolter 2020).

With what stands around it: the stem before it, the heads for classes and for pixels after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.options import check_number
from equilibria.engine.solver import SolverOptions

from .constraints import Constraint, WeightNormalized, constrain
from .deq import MonitoredMapLayer
from .inputs import (
    check_groups,
    check_halving,
    check_input,
    check_kernel,
    check_sizes,
    lowered,
    solving_dtype,
    zeros_as,
)


def _small(conv: nn.Conv2d) -> nn.Conv2d:
    """Start from N(0, 0.01²), as the authors do where no weight normalization follows."""
    for p in conv.parameters():
        nn.init.normal_(p, std=0.01)
    return conv


def _conv(
    inputs: int, outputs: int, size: int, *, stride: int = 1, bias: bool = False
) -> nn.Conv2d:
    return _small(nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=bias))


@dataclass(frozen=True)
class _Plan:
    """The options that all parts of an MDEQ share."""

    expansion: int
    groups: int
    kernel_size: int
    affine: bool
    post_affine: bool
    constraint: Constraint
    calm: float

    def norm(self, channels: int, gain: float = 1.0) -> nn.GroupNorm:
        """A group norm whose weight, if it has one, starts with ``gain``."""
        norm = nn.GroupNorm(self.groups, channels, affine=self.affine)
        if self.affine:
            nn.init.constant_(norm.weight, gain)
        return norm

    def conv(self, inputs: int, outputs: int, size: int, *, gain: float = 1.0) -> nn.Module:
        """A convolution under the constraint; ``gain`` makes its start smaller.

        With weight normalization the authors' kernels keep torch's own initialization.
        """
        made = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
        if self.constraint is None:
            _small(made)
        made.weight.data.mul_(gain)
        return constrain(made, "weight", self.constraint)


class ScaleBlock(nn.Module):
    """h(z, u) = GN₃(ReLU(z + GN₂(m·(W₂ * ReLU(GN₁(W₁ * z))) + u))), z and u [B, C, H, W].

    The residual block of one scale; u is the injected input (or None), m the dropout mask
    [B, C, 1, 1] of this solve (or None). W₁ widens C to expansion·C. Weights are given from
    outside, evaluated once for a solve.

    With ``calm`` < 1 the input is heard at the start: where x is ``injected`` GN₂ starts with the
    weight 1/calm, elsewhere GN₃ with calm, for the other scales; W₂ starts smaller by calm².
    """

    def __init__(self, channels: int, plan: _Plan, *, injected: bool) -> None:
        super().__init__()
        wide, size = plan.expansion * channels, plan.kernel_size
        self.padding = size // 2
        self.conv1 = plan.conv(channels, wide, size)
        self.conv2 = plan.conv(wide, channels, size, gain=plan.calm**2)
        self.norm1 = plan.norm(wide)
        self.norm2 = plan.norm(channels, 1.0 / plan.calm if injected else 1.0)
        self.norm3 = plan.norm(channels, 1.0 if injected else plan.calm)

    def forward(
        self, z: Tensor, weights: Iterator[Tensor], injection: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        out = F.relu(self.norm1(F.conv2d(z, next(weights), padding=self.padding)))
        out = F.conv2d(out, next(weights), padding=self.padding)
        if mask is not None:
            out = out * mask
        if injection is not None:
            out = out + injection
        end: Tensor = self.norm3(F.relu(self.norm2(out) + z))
        return end


class Downsample(nn.Module):
    """From a finer scale to one ``levels`` coarser: that many 3 × 3 convolutions of stride 2."""

    def __init__(self, inputs: int, outputs: int, levels: int, plan: _Plan) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for level in range(levels):
            last = level == levels - 1
            width = outputs if last else inputs
            parts += [_conv(inputs, width, 3, stride=2), plan.norm(width)]
            if not last:
                parts.append(nn.ReLU())
        self.net = nn.Sequential(*parts)

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.net(z)
        return out


class Upsample(nn.Module):
    """From a coarser scale to one ``levels`` finer: 1 × 1 convolution, then nearest pixels.

    Its group norm starts with the weight ``calm``.
    """

    def __init__(self, inputs: int, outputs: int, levels: int, plan: _Plan) -> None:
        super().__init__()
        self.factor = float(2**levels)
        self.conv = _conv(inputs, outputs, 1)
        self.norm = plan.norm(outputs, plan.calm)

    def forward(self, z: Tensor) -> Tensor:
        return F.interpolate(self.norm(self.conv(z)), scale_factor=self.factor, mode="nearest")


class Fusion(nn.Module):
    """y_i = GN(V_i * ReLU(Σ_j φ_ij(h_j))): every scale hears every other, φ_ii = identity.

    V_i is 1 × 1; its group norm has half the groups.
    """

    def __init__(self, channels: tuple[int, ...], plan: _Plan) -> None:
        super().__init__()
        rows = []
        for i, outputs in enumerate(channels):
            row = nn.ModuleDict()
            for j, inputs in enumerate(channels):
                if j < i:
                    row[str(j)] = Downsample(inputs, outputs, i - j, plan)
                elif j > i:
                    row[str(j)] = Upsample(inputs, outputs, j - i, plan)
            rows.append(row)
        self.exchange = nn.ModuleList(rows)
        self.mix = nn.ModuleList(plan.conv(c, c, 1) for c in channels)
        half, affine = max(1, plan.groups // 2), plan.post_affine
        self.norm = nn.ModuleList(nn.GroupNorm(half, c, affine=affine) for c in channels)

    def forward(self, h: list[Tensor], weights: Iterator[Tensor]) -> tuple[Tensor, ...]:
        made = []
        for i, (row, norm) in enumerate(zip(self.exchange, self.norm, strict=True)):
            assert isinstance(row, nn.ModuleDict)
            total = h[i]
            for j, module in row.items():
                total = total + module(h[int(j)])
            made.append(norm(F.conv2d(F.relu(total), next(weights))))
        return tuple(made)


class MDEQ(MonitoredMapLayer):
    """z* = fuse(h_1(z*_1, x), h_2(z*_2), …, h_n(z*_n)), z_i [B, channels[i], H/2^i, W/2^i].

    One residual block a scale (``ScaleBlock``), then an exchange of all scales with all
    (``Fusion``): strided 3 × 3 convolutions down, 1 × 1 and nearest pixels up. The input x
    [B, channels[0], H, W] (a stem's features) is injected at the finest scale alone. The state is a
    tuple of tensors, the finest first; ``layer(x)`` returns that tuple, for ``MDEQClassifier`` or
    ``MDEQSegmenter``.

    Dropout is variational: one mask a sample, channel and block, drawn once a solve in training
    mode, so that the map stays one map. With all gains of the group norms at 1 (``calm=1``, the
    authors' start) no solver finds a fixed point of an untrained MDEQ; with ``calm=0.2`` (ours)
    they start so that the input speaks louder than the state, and the untrained layer converges.

    Args:
        channels: of each scale, the finest first.
        expansion: the widening inside the blocks.
        groups: of the group norms; must divide each entry of ``channels``.
        blocks: residual blocks a scale, a number or one for each; all but the first see no input.
        kernel_size: of the blocks, odd.
        dropout: probability in [0, 1) that a channel is left out.
        affine, post_affine: whether the group norms of blocks and exchange, and those after the
            fusion, have weights of their own.
        constraint: on the blocks' kernels and the 1 × 1 kernels of the fusion;
            ``WeightNormalized()`` in the paper.
        calm: in (0, 1], see above; 1.0 where ``affine=False``.
        jacobian_weight, solver, adjoint: as in DEQ.
    """

    shown = ("channels", "dropout", "jacobian_weight")

    def __init__(
        self,
        channels: Sequence[int],
        *,
        expansion: int = 5,
        groups: int = 8,
        blocks: int | Sequence[int] = 1,
        kernel_size: int = 3,
        dropout: float = 0.0,
        affine: bool = True,
        post_affine: bool = True,
        constraint: Constraint = WeightNormalized(),  # noqa: B008 — frozen
        calm: float = 0.2,
        jacobian_weight: float = 0.0,
        solver: SolverOptions | None = None,
        adjoint: Adjoint | None = None,
    ) -> None:
        super().__init__(solver, adjoint, jacobian_weight)
        self.channels = _counts("MDEQ", "channels", channels)
        each = (blocks,) * len(self.channels) if isinstance(blocks, int) else blocks
        self.blocks = _counts("MDEQ", "blocks", each, len(self.channels))
        check_sizes("MDEQ", {"expansion": expansion, "groups": groups})
        check_kernel("MDEQ", kernel_size)
        for i, c in enumerate(self.channels):
            check_groups("MDEQ", f"channels[{i}]", c, groups)
        self.dropout = dropout
        check_number(self, "dropout", low=0.0, high=1.0, high_open=True)
        self.calm = calm
        check_number(self, "calm", low=0.0, high=1.0, low_open=True)
        if calm != 1.0 and not affine:
            raise ValueError(
                f"MDEQ(affine=False, calm={calm:g}): there are no gains; use calm=1.0."
            )
        plan = _Plan(expansion, groups, kernel_size, affine, post_affine, constraint, calm)
        self.scales = nn.ModuleList(
            nn.ModuleList(ScaleBlock(c, plan, injected=i == k == 0) for k in range(count))
            for i, (c, count) in enumerate(zip(self.channels, self.blocks, strict=True))
        )
        self.fusion = Fusion(self.channels, plan) if len(self.channels) > 1 else None

    def inject(self, x: Tensor) -> tuple[Any, ...]:
        """x, checked, and in training mode the dropout masks [B, C, 1, 1] of this solve."""
        self.check_input(x)
        if not self.training or self.dropout == 0.0:
            return x, ()
        keep = 1.0 - self.dropout
        pairs = zip(self.channels, self.blocks, strict=True)
        channels = [c for c, count in pairs for _ in range(count)]
        return x, tuple(x.new_empty(x.shape[0], c, 1, 1).bernoulli_(keep) / keep for c in channels)

    def start(self, x: Tensor, *injected: Any) -> tuple[Tensor, ...]:
        height, width = x.shape[2:]
        shapes = [(x.shape[0], c, height >> i, width >> i) for i, c in enumerate(self.channels)]
        return tuple(zeros_as(x, shape, solving_dtype(x)) for shape in shapes)

    def weights(self) -> tuple[Tensor, ...]:
        """The kernels under a constraint, evaluated, in the order in which the map uses them."""
        scales: Any = self.scales
        convs = [conv for blocks in scales for b in blocks for conv in (b.conv1, b.conv2)]
        if self.fusion is not None:
            convs += self.fusion.mix
        return tuple(lowered(conv.weight) for conv in convs)

    def step(self, z: Any, *injected: Any) -> tuple[Tensor, ...]:
        return self._map(self.weights(), z, *injected)

    def bound_step(self) -> Callable[..., Any]:
        return partial(self._map, self.weights())

    def _map(
        self, weights: tuple[Tensor, ...], z: Any, x: Tensor, masks: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        kernels, rest = iter(weights), iter(masks)
        scales: Any = self.scales
        h = []
        for i, blocks in enumerate(scales):
            out = z[i]
            for k, block in enumerate(blocks):
                injection = x if i == k == 0 else None
                out = block(out, kernels, injection, next(rest, None))
            h.append(out)
        return (h[0],) if self.fusion is None else self.fusion(h, kernels)

    def check_input(self, x: Tensor) -> None:
        """Raise unless x is [B, channels[0], H, W] with H and W divisible by 2^(scales − 1)."""
        check_input(self, x, self.channels[0], convolutional=True)
        check_halving("MDEQ", x, len(self.channels) - 1)


def _counts(owner: str, name: str, value: object, length: int | None = None) -> tuple[int, ...]:
    """A tuple of positive integers, ``length`` of them if it is given."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise TypeError(f"{owner}({name}={value!r}): expected a sequence of integers.")
    if length is not None and len(value) != length:
        raise ValueError(f"{owner}({name}={value!r}): expected {length} entries, one a scale.")
    check_sizes(owner, {f"{name}[{i}]": v for i, v in enumerate(value)})
    return tuple(value)


# ---------------------------------------------------------------------- around it

_EXPANSION = 4


def _normalized(conv: nn.Conv2d) -> list[nn.Module]:
    return [conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU()]


class MDEQStem(nn.Sequential):
    """Images [B, in_channels, H, W] → features [B, channels, H/2^d, W/2^d] to be injected.

    Two 3 × 3 convolutions (more where d > 2), each with batch norm and ReLU, the first d of stride
    2; then, with ``pointwise``, a 1 × 1 one. The authors leave that out of their two-scale CIFAR
    network.

    ``channels`` is ``channels[0]`` of the MDEQ; d = ``downsample`` is 0 for CIFAR, 2 for ImageNet.
    """

    def __init__(
        self, channels: int, *, in_channels: int = 3, downsample: int = 0, pointwise: bool = True
    ) -> None:
        check_sizes("MDEQStem", {"channels": channels, "in_channels": in_channels})
        check_sizes("MDEQStem", {"downsample": downsample}, least=0)
        parts: list[nn.Module] = []
        for i in range(max(2, downsample)):
            stride = 2 if i < downsample else 1
            parts += _normalized(_conv(channels if i else in_channels, channels, 3, stride=stride))
        if pointwise:
            parts += _normalized(_conv(channels, channels, 1))
        super().__init__(*parts)


class _Bottleneck(nn.Module):
    """ReLU(BN(A₃ * ReLU(BN(A₂ * ReLU(BN(A₁ * z))))) + BN(S * z)), A₁, A₃, S 1 × 1 and A₂ 3 × 3."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        outputs = _EXPANSION * width
        self.narrow = _conv(inputs, width, 1)
        self.spatial = _conv(width, width, 3)
        self.widen = _conv(width, outputs, 1)
        norms = (nn.BatchNorm2d(c, affine=False) for c in (width, width, outputs))
        self.norm1, self.norm2, self.norm3 = norms
        self.skip: nn.Module = nn.Identity()
        if inputs != outputs:
            self.skip = nn.Sequential(_conv(inputs, outputs, 1), nn.BatchNorm2d(outputs))

    def forward(self, z: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.narrow(z)))
        out = F.relu(self.norm2(self.spatial(out)))
        return F.relu(self.norm3(self.widen(out)) + self.skip(z))


class MDEQClassifier(nn.Module):
    """States (z_1, …, z_n) of an MDEQ → logits [B, num_classes].

    y_1 = B_1(z_1), y_{i+1} = B_{i+1}(z_{i+1}) + D_i(y_i): each scale goes through a bottleneck to
    4·head_channels[i] channels and is added to the finer ones, brought down by strided 3 × 3
    convolutions. Then 1 × 1 to ``final_channels``, the mean over pixels, and a linear map.

    ``channels`` are those of the MDEQ, the finest first.
    """

    def __init__(
        self,
        channels: Sequence[int],
        num_classes: int,
        *,
        head_channels: Sequence[int],
        final_channels: int,
    ) -> None:
        super().__init__()
        name = "MDEQClassifier"
        check_sizes(name, {"num_classes": num_classes, "final_channels": final_channels})
        self.channels = _counts(name, "channels", channels)
        heads = _counts(name, "head_channels", head_channels, len(self.channels))
        wide = [_EXPANSION * c for c in heads]
        pairs = zip(self.channels, heads, strict=True)
        self.widen = nn.ModuleList(_Bottleneck(a, b) for a, b in pairs)
        self.down = nn.ModuleList(
            nn.Sequential(*_normalized(_conv(a, b, 3, stride=2, bias=True)))
            for a, b in itertools.pairwise(wide)
        )
        last = _conv(wide[-1], final_channels, 1, bias=True)
        self.final = nn.Sequential(*_normalized(last))
        self.linear = nn.Linear(final_channels, num_classes)

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        _check_states("MDEQClassifier", states, self.channels)
        y = self.widen[0](states[0])
        for down, widen, z in zip(self.down, self.widen[1:], states[1:], strict=True):
            y = widen(z) + down(y)
        logits: Tensor = self.linear(self.final(y).mean((2, 3)))
        return logits


class MDEQSegmenter(nn.Module):
    """States (z_1, …, z_n) of an MDEQ → logits [B, num_classes, H, W] at the finest scale.

    All scales are brought to the finest by bilinear interpolation and set beside each other; a
    1 × 1 convolution with batch norm and ReLU and a last convolution follow.

    ``channels`` are those of the MDEQ, the finest first; ``kernel_size``, odd, is that of the last.
    """

    def __init__(self, channels: Sequence[int], num_classes: int, *, kernel_size: int = 1) -> None:
        super().__init__()
        check_sizes("MDEQSegmenter", {"num_classes": num_classes})
        self.channels = _counts("MDEQSegmenter", "channels", channels)
        check_kernel("MDEQSegmenter", kernel_size)
        total = sum(self.channels)
        self.mix = nn.Sequential(*_normalized(_conv(total, total, 1, bias=True)))
        self.classify = _conv(total, num_classes, kernel_size, bias=True)

    def forward(self, states: Sequence[Tensor], size: tuple[int, int] | None = None) -> Tensor:
        """Logits; with ``size`` = (H, W) of the image they are interpolated to its pixels."""
        _check_states("MDEQSegmenter", states, self.channels)
        shape = states[0].shape[2:]
        same = [states[0], *(_bilinear(z, shape) for z in states[1:])]
        logits: Tensor = self.classify(self.mix(torch.cat(same, 1)))
        return logits if size is None else _bilinear(logits, size)


def _bilinear(z: Tensor, size: Sequence[int]) -> Tensor:
    return F.interpolate(z, size=tuple(size), mode="bilinear", align_corners=True)


def _check_states(owner: str, states: Sequence[Tensor], channels: tuple[int, ...]) -> None:
    found = tuple(z.shape[1] for z in states) if isinstance(states, (tuple, list)) else None
    if found != channels:
        given = type(states).__name__ if found is None else f"states of {found} channels"
        raise ValueError(
            f"{owner} takes the tuple of states of an MDEQ with channels {channels}, got {given}."
        )

"""MDEQ: one equilibrium of feature maps at several scales (Bai, Koltun and Kolter 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    channels_last,
    check_groups,
    check_input,
    check_kernel,
    check_sizes,
    lowered,
    solving_dtype,
)

__all__ = ["MDEQ"]


def _small(conv: nn.Conv2d) -> nn.Conv2d:
    """Start from N(0, 0.01²), as the authors do where no weight normalization follows."""
    nn.init.normal_(conv.weight, std=0.01)
    return conv


def _gain(norm: nn.GroupNorm, value: float) -> None:
    """Set the weight of a group norm, if it has one."""
    if norm.affine:
        nn.init.constant_(norm.weight, value)


class ScaleBlock(nn.Module):
    """h(z, u) = GN₃(ReLU(z + GN₂(m·(W₂ * ReLU(GN₁(W₁ * z))) + u))), z and u [B, C, H, W].

    The residual block of one scale; u is the injected input (or None), m the dropout mask
    [B, C, 1, 1] of this solve (or None). W₁ widens C to expansion·C. Weights are given from
    outside, evaluated once for a solve.

    ``calm`` < 1 makes the block listen to its input at the start: where x is ``injected`` GN₂
    starts with the weight 1/calm, so that z counts for little beside it; elsewhere GN₃ starts with
    calm, so that the other scales are heard; W₂ starts smaller by calm².
    """

    def __init__(
        self,
        channels: int,
        *,
        expansion: int,
        groups: int,
        kernel_size: int,
        affine: bool,
        constraint: Constraint,
        calm: float,
        injected: bool,
    ) -> None:
        super().__init__()
        wide, pad = expansion * channels, kernel_size // 2
        self.padding = pad
        # With weight normalization the authors' kernels keep torch's own initialization.
        first = nn.Conv2d(channels, wide, kernel_size, padding=pad, bias=False)
        second = nn.Conv2d(wide, channels, kernel_size, padding=pad, bias=False)
        if constraint is None:
            first, second = _small(first), _small(second)
        second.weight.data.mul_(calm**2)
        self.conv1 = constrain(first, "weight", constraint)
        self.conv2 = constrain(second, "weight", constraint)
        self.norm1 = nn.GroupNorm(groups, wide, affine=affine)
        self.norm2 = nn.GroupNorm(groups, channels, affine=affine)
        self.norm3 = nn.GroupNorm(groups, channels, affine=affine)
        if calm != 1.0:
            _gain(self.norm2, 1.0 / calm) if injected else _gain(self.norm3, calm)

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

    def __init__(
        self, inputs: int, outputs: int, levels: int, *, groups: int, affine: bool
    ) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for level in range(levels):
            last = level == levels - 1
            width = outputs if last else inputs
            parts.append(_small(nn.Conv2d(inputs, width, 3, stride=2, padding=1, bias=False)))
            parts.append(nn.GroupNorm(groups, width, affine=affine))
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

    def __init__(
        self, inputs: int, outputs: int, levels: int, *, groups: int, affine: bool, calm: float
    ) -> None:
        super().__init__()
        self.factor = float(2**levels)
        self.conv = _small(nn.Conv2d(inputs, outputs, 1, bias=False))
        self.norm = nn.GroupNorm(groups, outputs, affine=affine)
        _gain(self.norm, calm)

    def forward(self, z: Tensor) -> Tensor:
        return F.interpolate(self.norm(self.conv(z)), scale_factor=self.factor, mode="nearest")


class Fusion(nn.Module):
    """y_i = GN(V_i * ReLU(Σ_j φ_ij(h_j))): every scale hears every other, φ_ii = identity.

    V_i is 1 × 1; its group norm has half the groups.
    """

    def __init__(
        self,
        channels: tuple[int, ...],
        *,
        groups: int,
        affine: bool,
        post_affine: bool,
        constraint: Constraint,
        calm: float,
    ) -> None:
        super().__init__()
        rows = []
        for i, outputs in enumerate(channels):
            row = nn.ModuleDict()
            for j, inputs in enumerate(channels):
                if j < i:
                    row[str(j)] = Downsample(inputs, outputs, i - j, groups=groups, affine=affine)
                elif j > i:
                    row[str(j)] = Upsample(
                        inputs, outputs, j - i, groups=groups, affine=affine, calm=calm
                    )
            rows.append(row)
        self.exchange = nn.ModuleList(rows)
        mixes = [nn.Conv2d(c, c, 1, bias=False) for c in channels]
        if constraint is None:
            mixes = [_small(conv) for conv in mixes]
        self.mix = nn.ModuleList([constrain(conv, "weight", constraint) for conv in mixes])
        half = max(1, groups // 2)
        self.norm = nn.ModuleList([nn.GroupNorm(half, c, affine=post_affine) for c in channels])

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

    The networks of the paper for CIFAR-10 are, with ``MDEQStem`` and ``MDEQClassifier``,

    | channels | head channels | final | pointwise | parameters | the paper |
    |---|---|---|---|---|---|
    | (32, 64, 128, 256) | (10, 20, 40, 80) | 1280 | yes | 10,006,958 | 10 M |
    | (24, 24) | (8, 16) | 340 | no | 169,670 | 170 k |

    with ``post_affine=False``, ten classes, dropout 0.3 and 0.25. The authors' own configuration
    files have the heads (14, 28, 56, 112) to 1680 and (8, 16) to 200, with which we count
    11,097,438 and 158,890: the paper's round numbers are not theirs to the digit.

    Weights under a constraint are evaluated once a solve. Dropout is variational: one mask a
    sample, channel and block, drawn once a solve in training mode, so that the map stays one map.
    Group norm after every convolution makes the map blind to the scale of its weights, and with all
    its gains at 1 (``calm=1``, the authors' start) no solver finds a fixed point of an untrained
    MDEQ: they train a shallow weight-tied network first. With ``calm=0.2`` the gains start so that
    the input speaks louder than the state, and the untrained layer converges (ours). To train the
    shallow network first all the same, set
    ``layer.solver, layer.adjoint = Picard(rtol=0.0, max_steps=10), Unrolled()``.

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
        jacobian_weight, jacobian_samples: as in DEQ.
        solver, adjoint: Anderson() and Implicit() if not given. The authors' Broyden takes as many
            steps and twice the memory.
    """

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
        jacobian_samples: int = 1,
        solver: SolverOptions | None = None,
        adjoint: Adjoint | None = None,
    ) -> None:
        super().__init__(solver, adjoint, jacobian_weight, jacobian_samples)
        self.channels = _counts("channels", channels, None)
        self.blocks = _counts("blocks", blocks, len(self.channels))
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

        def scale(i: int, c: int, count: int) -> nn.ModuleList:
            return nn.ModuleList(
                ScaleBlock(
                    c,
                    expansion=expansion,
                    groups=groups,
                    kernel_size=kernel_size,
                    affine=affine,
                    constraint=constraint,
                    calm=calm,
                    injected=i == k == 0,
                )
                for k in range(count)
            )

        pairs = zip(self.channels, self.blocks, strict=True)
        self.scales = nn.ModuleList(scale(i, c, n) for i, (c, n) in enumerate(pairs))
        self.fusion: Fusion | None = None
        if len(self.channels) > 1:
            self.fusion = Fusion(
                self.channels,
                groups=groups,
                affine=affine,
                post_affine=post_affine,
                constraint=constraint,
                calm=calm,
            )

    # ------------------------------------------------------------------ the map

    def inject(self, x: Tensor) -> tuple[Any, ...]:
        """x, checked, and in training mode the dropout masks [B, C, 1, 1] of this solve."""
        self.check_input(x)
        if not self.training or self.dropout == 0.0:
            return x, ()
        keep = 1.0 - self.dropout
        masks = [
            torch.empty(x.shape[0], c, 1, 1, dtype=x.dtype, device=x.device).bernoulli_(keep) / keep
            for c, count in zip(self.channels, self.blocks, strict=True)
            for _ in range(count)
        ]
        return x, tuple(masks)

    def start(self, x: Tensor, *injected: Any) -> tuple[Tensor, ...]:
        """Zero at every scale, in the memory format of x."""
        height, width = x.shape[2:]
        form = torch.channels_last if channels_last(x) else torch.contiguous_format
        return tuple(
            torch.empty(
                (x.shape[0], c, height >> i, width >> i),
                dtype=solving_dtype(x),
                device=x.device,
                memory_format=form,
            ).zero_()
            for i, c in enumerate(self.channels)
        )

    def weights(self) -> tuple[Tensor, ...]:
        """The kernels under a constraint, evaluated, in the order in which the map uses them."""
        convs: list[nn.Module] = []
        for blocks in self._blocks():
            convs += [conv for block in blocks for conv in (block.conv1, block.conv2)]
        if self.fusion is not None:
            convs += list(self.fusion.mix)
        kernels: list[Any] = [conv.weight for conv in convs]
        return tuple(lowered(kernel) for kernel in kernels)

    def _blocks(self) -> list[list[ScaleBlock]]:
        return [list(scale) for scale in self.scales]  # type: ignore[call-overload]

    def step(self, z: Any, *injected: Any) -> tuple[Tensor, ...]:
        """T(z; x)."""
        return self._map(self.weights(), z, *injected)

    def bound_step(self) -> Callable[..., Any]:
        weights = self.weights()

        def step(z: Any, *injected: Any) -> tuple[Tensor, ...]:
            return self._map(weights, z, *injected)

        return step

    def _map(
        self, weights: tuple[Tensor, ...], z: Any, x: Tensor, masks: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        kernels, rest = iter(weights), iter(masks)
        h = []
        for i, blocks in enumerate(self._blocks()):
            out = z[i]
            for k, block in enumerate(blocks):
                injection = x if i == k == 0 else None
                out = block(out, kernels, injection, next(rest, None))
            h.append(out)
        return (h[0],) if self.fusion is None else self.fusion(h, kernels)

    def check_input(self, x: Tensor) -> None:
        """Raise unless x is [B, channels[0], H, W] with H and W divisible by 2^(scales − 1)."""
        check_input(self, x, self.channels[0], convolutional=True)
        factor = 2 ** (len(self.channels) - 1)
        if x.shape[2] % factor or x.shape[3] % factor:
            raise ValueError(
                f"MDEQ with {len(self.channels)} scales halves the map {len(self.channels) - 1} "
                f"times: H and W must be multiples of {factor}, got {tuple(x.shape[2:])}. Pad or "
                "crop the input."
            )

    def extra_repr(self) -> str:
        return f"{self.channels}, dropout={self.dropout:g}, {super().extra_repr()}"


def _counts(name: str, value: object, length: int | None) -> tuple[int, ...]:
    """A tuple of positive integers; one number stands for ``length`` of them."""
    if length is not None and isinstance(value, int):
        value = (value,) * length
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise TypeError(f"MDEQ({name}={value!r}): expected a sequence of integers.")
    if length is not None and len(value) != length:
        raise ValueError(f"MDEQ({name}={value!r}): expected {length} entries, one a scale.")
    check_sizes("MDEQ", {f"{name}[{i}]": v for i, v in enumerate(value)})
    return tuple(value)

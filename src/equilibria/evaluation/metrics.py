"""Metrics of logits against targets, added up batch by batch without waiting for the device.

    accuracy = mean [argmax p = y],   NLL = mean −log p_y,   Brier = mean Σ_k (p_k − [k = y])²
    ECE = Σ_b (n_b/N)·|accuracy_b − confidence_b|  over bins (lo, hi] of max p (Guo et al. 2017)
    IoU_k = C_kk / (Σ_j C_kj + Σ_i C_ik − C_kk),   mIoU = mean of those that are not 0/0

C the confusion matrix, by torchmetrics. The sums beside it are ours, in float64: torchmetrics has
no bins of a reliability diagram to read, no Brier score and no NLL of logits, and it would average
NaN away. A sample with NaN or infinity among its logits is named here (``nonfinite``) and counts
as wrong, in Σ_j C_kj too (``lost``); it stays out of NLL, Brier, the bins and ``confusion``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.optional import needs

from .model_on_data import check_whole

_IGNORED = -1


class NonFiniteError(ValueError):
    """Logits with NaN or infinity; ``samples`` names them."""

    def __init__(self, message: str, samples: tuple[int, ...]) -> None:
        super().__init__(message)
        self.samples = samples


def check_finite(nonfinite: tuple[int, ...], total: int, what: str) -> None:
    """Raise ``NonFiniteError`` if there are any."""
    if nonfinite:
        some = ", ".join(str(i) for i in nonfinite[:10])
        more = f" and {len(nonfinite) - 10} more" if len(nonfinite) > 10 else ""
        raise NonFiniteError(
            f"{what}: {len(nonfinite)} of {total} samples have logits with NaN or infinity: "
            f"numbers {some}{more}. Look at these inputs and at the weights: a solve may have "
            "diverged, or pass nonfinite='report' to count them as wrong.",
            nonfinite,
        )


@dataclass(frozen=True, eq=False)
class Reliability:
    """What happened in each of the B bins of confidence; NaN where a bin is empty."""

    edges: Tensor
    """[B + 1], from 0 to 1."""
    count: Tensor
    """Predictions in each bin, [B]."""
    confidence: Tensor
    """Mean confidence in each bin, [B]."""
    accuracy: Tensor
    """Share of right predictions in each bin, [B]."""

    @property
    def _gap(self) -> Tensor:
        used = self.count > 0
        return (self.accuracy[used] - self.confidence[used]).abs()

    @property
    def ece(self) -> float:
        """The expected calibration error; NaN without predictions."""
        share = self.count[self.count > 0].double() / self.count.sum()
        return float((share * self._gap).sum()) if len(share) else float("nan")

    @property
    def mce(self) -> float:
        """The largest gap of a bin; NaN without predictions."""
        return float(self._gap.max()) if len(self._gap) else float("nan")


@dataclass(frozen=True, eq=False, kw_only=True)
class _Counted:
    """What both tasks count."""

    samples: int
    confusion: Tensor
    """Long [K, K] of samples or pixels: row the class, column the prediction."""
    lost: Tensor
    """Long [K]: samples or pixels of each class whose logits are not finite."""
    nonfinite: tuple[int, ...] = ()
    """The samples whose logits are not finite, by number."""

    @property
    def _occurring(self) -> Tensor:
        return self.confusion.sum(1) + self.lost

    @property
    def per_class(self) -> Tensor:
        """Share of right predictions of each class, [K]; NaN for a class that does not occur."""
        return self.confusion.diagonal().double() / self._occurring


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassificationMetrics(_Counted):
    """Over all samples; NaN where nothing was counted."""

    accuracy: float
    top_k: float
    """Share of samples whose class is among the k largest logits."""
    k: int
    nll: float
    brier: float
    reliability: Reliability

    @property
    def ece(self) -> float:
        return self.reliability.ece

    @property
    def headline(self) -> dict[str, float]:
        top = {f"top-{self.k}": self.top_k} if self.k > 1 else {}
        rest = {"nll": self.nll, "brier": self.brier, "ece": self.ece}
        return {"accuracy": self.accuracy, **top, **rest}

    def to_dict(self) -> dict[str, Any]:
        more = {"per_class": self.per_class, "ece": self.ece, "mce": self.reliability.mce}
        found = {**vars(self), **more, "top_k": {"k": self.k, "accuracy": self.top_k}}
        del found["k"]
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentationMetrics(_Counted):
    """Over all pixels that count; NaN where none does."""

    pixels: int
    ignore_index: int | None = None

    @property
    def iou(self) -> Tensor:
        """[K]; NaN for a class that neither occurs nor was predicted, and for ``ignore_index``."""
        hit = self.confusion.diagonal().double()
        counts = torch.arange(len(hit)) != (-1 if self.ignore_index is None else self.ignore_index)
        found = hit / (self._occurring + self.confusion.sum(0) - hit)
        return found.where(counts, torch.nan)

    @property
    def miou(self) -> float:
        return float(self.iou.nanmean())

    @property
    def accuracy(self) -> float:
        return float(self.confusion.diagonal().double().sum() / self.pixels)

    @property
    def headline(self) -> dict[str, float]:
        return {"mIoU": self.miou, "pixel accuracy": self.accuracy}

    def to_dict(self) -> dict[str, Any]:
        means = {"miou": self.miou, "pixel_accuracy": self.accuracy}
        return {**vars(self), **means, "iou": self.iou, "per_class": self.per_class}


class _Meter:
    """Sums on the device of the first batch."""

    def __init__(self, classes: int) -> None:
        with needs("torchmetrics", "Evaluation"):
            from torchmetrics.classification import MulticlassConfusionMatrix
        # Of this process alone, as the sums: in a training of several one may evaluate by itself.
        how: Any = {"sync_on_compute": False, "ignore_index": _IGNORED, "validate_args": False}
        # The last column is that of samples without a finite answer.
        self._confusion = MulticlassConfusionMatrix(classes + 1, **how)
        self._bad: list[Tensor] = []

    def _count(self, guess: Tensor, targets: Tensor, finite: Tensor) -> None:
        bad = (~finite).view(-1, *[1] * (guess.ndim - 1))
        guess = guess.masked_fill(bad, self._confusion.num_classes - 1)
        self._confusion.to(guess.device).update(guess, targets)
        self._bad.append(~finite)

    def _read(self) -> dict[str, Any]:
        """What both tasks count; here the host waits."""
        if not self._bad:
            raise ValueError("no batch was given: there is nothing to compute.")
        bad = torch.cat(self._bad).cpu()
        table = self._confusion.compute().long().cpu()[:-1]
        return {
            "samples": len(bad),
            "confusion": table[:, :-1],
            "lost": table[:, -1],
            "nonfinite": tuple(bad.nonzero()[:, 0].tolist()),
        }


class ClassificationMeter(_Meter):
    """``update(logits, targets)`` batch by batch, then ``compute()``."""

    def __init__(self, classes: int, *, bins: int = 15, k: int = 5) -> None:
        super().__init__(classes)
        self.k = max(1, min(k, classes))
        self.bins = check_whole("bins", bins, 1)
        self._sums = torch.zeros(())

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits [N, K] floating, targets [N] long of 0 … K − 1."""
        if targets.shape != logits.shape[:1]:
            raise ValueError(
                f"expected targets [{logits.shape[0]}], got shape {tuple(targets.shape)}."
            )
        finite = logits.isfinite().all(1)
        kept = torch.where(finite[:, None], logits.double(), 0.0)
        log_p = kept.log_softmax(1)
        p = log_p.exp()
        own = targets[:, None]
        confidence = p.amax(1)
        # Of logits, as they may differ where p rounds to one number; an earlier class wins a tie.
        best = kept.argsort(dim=1, descending=True, stable=True)[:, : self.k]
        right, near = finite & (best[:, 0] == targets), finite & (best == own).any(1)
        brier = p.square().sum(1) - 2 * p.gather(1, own)[:, 0] + 1.0
        loss = -log_p.gather(1, own)[:, 0]
        counted = finite.double()
        rows = torch.stack([counted, counted * confidence, right.double()])
        # (lo, hi]: a confidence of exactly hi belongs below, and 1 to the last bin.
        bin_ = (confidence * self.bins).ceil().long().clamp(1, self.bins) - 1
        in_bins = torch.zeros(3, self.bins, dtype=torch.float64, device=logits.device)
        in_bins.scatter_add_(1, bin_.expand(3, -1), rows)
        whole = torch.stack([counted, near.double(), counted * loss, counted * brier])
        sums = torch.cat([whole.sum(1), in_bins.flatten()])
        self._sums = self._sums + sums
        self._count(best[:, 0], targets, finite)

    def compute(self) -> ClassificationMetrics:
        both = self._read()
        sums = self._sums.cpu()
        counted, near, loss, brier = sums[:4].tolist()
        mean = 1.0 / counted if counted else float("nan")
        count, confidence, hits = sums[4:].view(3, self.bins)
        edges = torch.linspace(0.0, 1.0, self.bins + 1, dtype=torch.float64)
        return ClassificationMetrics(
            **both,
            accuracy=float(hits.sum()) / both["samples"],
            top_k=near / both["samples"],
            k=self.k,
            nll=loss * mean,
            brier=brier * mean,
            reliability=Reliability(edges, count.long(), confidence / count, hits / count),
        )


class SegmentationMeter(_Meter):
    """``update(logits, targets)`` batch by batch, then ``compute()``."""

    def __init__(self, classes: int, ignore_index: int | None = None) -> None:
        super().__init__(classes)
        self.ignore_index = ignore_index

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """logits [N, K, H, W], targets [N, H, W] long of 0 … K − 1 or ``ignore_index``."""
        if targets.shape != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(
                f"the model gives maps of {tuple(logits.shape[2:])} pixels and the targets are "
                f"{tuple(targets.shape)}: they must agree."
            )
        finite = logits.isfinite().flatten(1).all(1)
        if self.ignore_index is not None:
            targets = targets.masked_fill(targets == self.ignore_index, _IGNORED)
        self._count(logits.argmax(1), targets, finite)

    def compute(self) -> SegmentationMetrics:
        both = self._read()
        pixels = int(both["confusion"].sum() + both["lost"].sum())
        return SegmentationMetrics(**both, pixels=pixels, ignore_index=self.ignore_index)


def classification_metrics(
    logits: Tensor, targets: Tensor, *, bins: int = 15, k: int = 5
) -> ClassificationMetrics:
    """All metrics of logits [N, K] against targets [N] at once."""
    if logits.ndim != 2 or logits.shape[0] == 0:
        raise ValueError(f"expected logits [N, K] with N of at least 1, got {tuple(logits.shape)}.")
    meter = ClassificationMeter(logits.shape[1], bins=bins, k=k)
    meter.update(logits, targets)
    return meter.compute()


def segmentation_metrics(
    logits: Tensor, targets: Tensor, *, ignore_index: int | None = None
) -> SegmentationMetrics:
    """mIoU and the rest of logits [N, K, H, W] against targets [N, H, W] at once."""
    if logits.ndim != 4 or logits.shape[0] == 0:
        raise ValueError(
            f"expected logits [N, K, H, W] of at least one sample, got {tuple(logits.shape)}."
        )
    meter = SegmentationMeter(logits.shape[1], ignore_index)
    meter.update(logits, targets)
    return meter.compute()

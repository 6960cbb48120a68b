"""The cells of OptEq (optimization induced equilibrium networks): Tables 3–5 and 7–10."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import recipes
from .experiment import Cell, Job, cells, printed
from .recipes import RATES, deep_opteq, job

ALPHAS = (0.01, 0.1, 0.4, 0.8, 1.0)
# ‖∂R(z)‖ is a tenth of ‖z‖ (125 images of CIFAR); the bandwidth is near ‖z − z'‖ of two images.
_DECORRELATION = {"kind": "Decorrelation", "weight": 300.0, "features": "channels"}
_HSIC = {"kind": "HSIC", "weight": 5000.0, "bandwidth": 15.0, "features": "channels"}
_INCAY = {"kind": "FeatureIncay", "weight": 4.8e6, "eps": 4000.0}
_NORM = {"kind": "SquaredNorm"}
_UNROLLED = {"kind": "Unrolled"}


def unrolling(steps: int = 20) -> dict[str, Any]:
    """K plain steps, differentiated step by step: "no Reg" in the tables."""
    solver = {"kind": "Picard", "rtol": 0.0, "atol": 0.0, "max_steps": steps}
    return {"solver": solver, "adjoint": dict(_UNROLLED)}


def averaging(regularizer: Mapping[str, Any], lipschitz: float | None = None) -> dict[str, Any]:
    """§5.2, the tables' †: 20 steps of SAM, differentiated step by step."""
    solver = {"kind": "SequentialAveraging", "max_steps": 20, "regularizer": dict(regularizer)}
    return {"solver": {**solver, "lipschitz": lipschitz}, "adjoint": dict(_UNROLLED)}


def changed(regularizer: Mapping[str, Any], form: str = "gradient") -> dict[str, Any]:
    """§5.1, the tables' *: the regularizer becomes part of the problem; 20 plain steps."""
    return {**unrolling(), "regularizer": dict(regularizer), "regularize": form}


def _implicit(threshold: float, back: float, steps: int) -> dict[str, Any]:
    """IFT: Broyden to a threshold, and the linear solve of the backward pass to another."""
    return {
        "solver": {"kind": "Broyden", "rtol": threshold, "max_steps": steps},
        "adjoint": {"kind": "Implicit", "solver": {"kind": "GMRES", "rtol": back}},
    }


# Row of Table 5 → name for the run, options.
_SETTINGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "no Reg": ("plain", unrolling()),
    "(½‖z‖²)†": ("norm-sam", averaging(_NORM)),
    "(2/(‖z‖²+2ε))†": ("incay-sam", averaging(_INCAY)),
    "(2/(‖z‖²+2ε))*": ("incay", changed(_INCAY)),
    "F_Dz†": ("decorrelation-sam", averaging(_DECORRELATION, 1.0)),
    "F_Dz*": ("decorrelation", changed(_DECORRELATION)),
    "HSIC†": ("hsic-sam", averaging(_HSIC, 1.0)),
    "HSIC*": ("hsic", changed(_HSIC)),
}
_TABLE_5 = {row: texts for row, *texts in printed("opteq-table5")}


def _by_alpha(row: str, setting: str) -> list[Cell]:
    """A row of Table 5, by whatever name; Table 3 prints some of them again."""
    tag, options = _SETTINGS[setting]
    made: list[Cell] = []
    for alpha, text in zip(ALPHAS, _TABLE_5[setting], strict=True):
        one = deep_opteq("deep_opteq_199k", f"{tag}-alpha-{alpha:g}", {**options, "alpha": alpha})
        made += cells(row, one, (f"α = {alpha:g}, accuracy in %", "accuracy", text))
    return made


def _penalized(
    row: str, tag: str, weight: float, kind: str, mean: str, accuracy: str
) -> list[Cell]:
    """§5.1 with λ‖z‖₁ or λ‖z‖², by the prox, which exists for every λ."""
    options = changed({"kind": kind, "weight": weight}, "prox")
    one = deep_opteq("deep_opteq_199k", tag, options, measures=("quality", "features"))
    what, metric = ("mean |z|", "mean_absolute") if kind == "L1" else ("mean z²", "mean_square")
    return cells(row, one, (what, metric, mean), ("accuracy in %", "accuracy", accuracy))


_DNN = cells(
    "DNN",
    deep_opteq("explicit_stack_cifar_3m", "203k", {"widths": [35, 70], "depth": 2}),
    ("accuracy in %", "accuracy", "82.7%"),
    note="ours has skips and batch norms: a stronger control than Eq 1",
)


def _compared(row: str, size: str, accuracy: str, one: Job | None) -> list[Cell]:
    """A row of Table 4."""
    unit = size[-1]
    note = "no neural ODE here" if one is None else ""
    column = (f"size in {unit}", f"parameters_{unit.lower()}", size)
    made = cells(row, one, column, note=note)
    return [*made, *cells(row, one, ("accuracy in %", "accuracy", accuracy))]


def _training(row: str, tag: str, options: Mapping[str, Any], *texts: str) -> list[Cell]:
    """A row of Table 8, at α = 0.8."""
    measures = ("quality", "times", "residual")
    one = deep_opteq("deep_opteq_199k", tag, {**options, "alpha": 0.8}, measures=measures)
    names = ("accuracy in %", "inference, s", "back-prop, s", "relative residual")
    metrics = ("accuracy", "seconds.forward", "seconds.backward", "residual")
    return cells(row, one, *zip(names, metrics, texts, strict=True))


def _unrolled(steps: int, *texts: str) -> list[Cell]:
    # The same run as "no Reg, α = 0.8" where K is 20.
    tag = "plain-alpha-0.8" if steps == 20 else f"unrolled-{steps}"
    return _training(f"Unrolling (K={steps})", tag, unrolling(steps), *texts)


_QUOTED = "this network is not in the table of models"


def _imagenet(model: str, tag: str = "", options: Mapping[str, Any] | None = None) -> Job:
    return job(
        model,
        "imagenet",
        tag,
        options=options,
        recipe=recipes.OPTEQ_IMAGENET,
        images=1_255_000,
        stand_in={"data": "cifar10", "image_size": 64, "epochs": 20, "batch_size": 256},
    )


_SMALL = {**unrolling(5), "regularizer": _DECORRELATION, "regularize": "gradient"}
_LEARNED = {**_SMALL, "learn_alpha": True, "alpha": 0.8}
_OURS = {
    "ResNet-18": _imagenet("resnet18_imagenet"),
    "ResNet-50": _imagenet("resnet50_imagenet"),
    "OptEq (learnable α's)": _imagenet("deep_opteq_small", "learned-alpha", _LEARNED),
    "OptEq-small": _imagenet("deep_opteq_small", "", _SMALL),
    "OptEq-Mid.": _imagenet("deep_opteq_middle", "", _SMALL),
}


def _large(row: str, top1: str, top5: str, size: str) -> list[Cell]:
    return cells(
        row,
        _OURS.get(row),
        ("top-1 in %", "accuracy", top1),
        ("top-5 in %", "top5", top5),
        ("size in M", "parameters_m", size),
        note="" if row in _OURS else _QUOTED,
    )


def _speed(row: str, text: str, model: str, tag: str, options: Mapping[str, Any]) -> list[Cell]:
    timed = job(
        model,
        "random",
        tag,
        first="speed",
        options=options,
        recipe={"image_size": 224, "batch_size": 96, "precision": "bf16-mixed"},
        rate=5000.0,
        measures=("throughput",),
        trained=False,
    )
    return cells(row, timed, ("images/s", "images_per_second", text))


def _quoted(row: str, text: str) -> list[Cell]:
    return cells(row, None, ("images/s", "accuracy", text), note=_QUOTED)


def _scene(row: str, model: str, *texts: str) -> list[Cell]:
    trained = job(
        model,
        "cityscapes",
        recipe={**recipes.SEGMENTATION, "image_size": 512},
        measures=("segmentation",),
        rate=RATES["segmentation"] / 8,
        images=2678,
        stand_in={"data": "camvid", "image_size": None, "epochs": 889},
    )
    names = ("mIoU in %", "mAcc in %", "aAcc in %")
    columns = zip(names, ("miou", "macc", "aacc"), texts or ("", "", ""), strict=True)
    return cells(row, trained, *columns, ("size in M", "parameters_m"))


_SMALLEST = "deep_opteq_162k"

CELLS = {
    "opteq-table3": [
        *_by_alpha("no Reg", "no Reg"),
        *_by_alpha("R_z†", "F_Dz†"),
        *_by_alpha("R_z*", "F_Dz*"),
        *_DNN,
        *_penalized("λ‖z‖₁, λ = 0.01", "l1-0.01", 0.01, "L1", "> 5", "86.4%"),
        *_penalized("λ‖z‖₁, λ = 0.15", "l1-0.15", 0.15, "L1", "0.81", "87.7%"),
        *_penalized("λ‖z‖₁, λ = 0.5", "l1-0.5", 0.5, "L1", "0.34", "86.9%"),
        *_penalized("λ‖z‖², λ = 0.01", "norm-0.01", 0.02, "SquaredNorm", "> 10", "87.3%"),
        *_penalized("λ‖z‖², λ = 1.0", "norm-1", 2.0, "SquaredNorm", "1.56", "87.6%"),
        *_penalized("λ‖z‖², λ = 10.0", "norm-10", 20.0, "SquaredNorm", "0.82", "86.7%"),
    ],
    "opteq-table4": [
        cell
        for row, size, accuracy, one in (
            (
                *("decorrelation (R*)", "1.4 M", "91.0%"),
                deep_opteq("deep_opteq_1m4", "decorrelation", changed(_DECORRELATION)),
            ),
            (
                *("decorrelation (R†)", "162 k", "86.0%"),
                deep_opteq(_SMALLEST, "decorrelation-sam", averaging(_DECORRELATION, 1.0)),
            ),
            ("HSIC (R*)", "162 k", "87.4%", deep_opteq(_SMALLEST, "hsic", changed(_HSIC))),
            ("no Reg", "162 k", "85.7%", deep_opteq(_SMALLEST, "plain", unrolling())),
            ("Neural ODE", "172 k", "53.7%", None),
            ("Aug. Neural ODE", "172 k", "60.6%", None),
            ("MON, single conv", "172 k", "74.1%", deep_opteq("mondeq_single", "recipe", {})),
            (
                *("MON, single conv (large)", "854 k", "82.5%"),
                deep_opteq("mondeq_single", "large", {"channels": [200]}),
            ),
        )
        for cell in _compared(row, size, accuracy, one)
    ],
    "opteq-table5": [cell for row in _TABLE_5 for cell in _by_alpha(row, row)],
    "opteq-table7": [cell for row in printed("opteq-table7") for cell in _large(*row)],
    "opteq-table8": [
        *_unrolled(5, "83.52%", "1.3s", "1.8s", "1.22e-02"),
        *_unrolled(10, "87.28%", "2.2 s", "3.3 s", "4.88e-03"),
        *_unrolled(20, "87.71%", "3.9 s", "6.4 s", "4.81e-04"),
        *_unrolled(40, "87.83%", "7.5 s", "12.7 s", "1.20e-05"),
        *_training(
            *("IFT (thd = 1e-03)", "implicit-1e-3", _implicit(1e-3, 1e-3, 50)),
            *("87.63%", "16.3 s", "6.7 s", "7.33e-04"),
        ),
        *_training(
            *("IFT (thd = 1e-02)", "implicit-1e-2", _implicit(1e-2, 1e-2, 50)),
            *("85.95%", "15.6 s", "1.3 s", "9.52e-03"),
        ),
    ],
    "opteq-table9": [
        *_speed("ResNet-50", "4597/s", "resnet50_imagenet", "", {}),
        *_quoted("MDEQ-single branch", "257/s"),
        *_speed("MDEQ", "1057/s", "mdeq_cifar", "coarse", {"downsample": 2}),
        *_speed("OptEq (unrolling K=5)", "1835/s", "deep_opteq_small", "unrolled-5", unrolling(5)),
        *_speed(
            *("OptEq (IFT with dw-conv)", "200/s", "deep_opteq_small", "implicit"),
            _implicit(1e-3, 1e-2, 18),
        ),
        *_quoted("OptEq (IFT w/o dw-conv)", "1137/s"),
    ],
    "opteq-table10": [
        *_scene("FCN", "fcn_seg", "71.47", "79.23", "95.56"),
        *_scene("Deep OptEq", "deep_opteq_seg", "74.47", "81.91", "95.93"),
        *_scene("FCN-8s on ResNet-18 (ours)", "fcn_resnet18"),
    ],
}

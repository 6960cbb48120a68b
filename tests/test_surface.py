"""What a user can do, written down: names, parameters, commands, flags, models, files of a run.

``surface.json`` is the list of version 0.1.0. What is on it is still there, or has moved
(``MOVED``), or was dropped for a reason (``DROPPED``, and CHANGELOG.md says so too). What is new
need not be on it. ``python -m tests.test_surface`` prints the present list.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest

LISTED = Path(__file__).with_name("surface.json")

# What begins so has moved to the other beginning, where it must be found.
MOVED = {
    # The study of the papers is a distribution of its own.
    "equilibria.experiments.": "equilibria_papers.tables.",
    "equilibria.theory.": "equilibria_papers.theory.",
    "equilibria.theory.monitors.": "equilibria_papers.theory.",  # now a module
    "equilibria.theory.audit": "equilibria_papers.claims",
    # What is proven has a package of its own.
    "equilibria.problems.Certificate": "equilibria.certify.Certificate",
    "equilibria.problems.CompositeCertificate": "equilibria.certify.CompositeCertificate",
    "equilibria.problems.Guarantee": "equilibria.certify.Guarantee",
    "equilibria.problems.MapCertificate": "equilibria.certify.MapCertificate",
    "equilibria.problems.certify": "equilibria.certify.certify",
    # One way to apply a block K times.
    "equilibria.nn.DEQ.repeat": "equilibria.nn.DEQ.repeated",
    "equilibria.nn.DEQ.repeated": "equilibria.nn.DEQ.repeated",
    **{  # one name for such callbacks
        f"equilibria.theory.{name}(told": f"equilibria_papers.theory.{name}(progress"
        for name in (
            *("compare_bounds", "network_bounds", "bounds.compare_bounds", "bounds.network_bounds"),
            *("bounds.demonstration_curves", "bounds.lipschitz_curves"),
        )
    },
}
PRIORS = ("Box", "CustomPrior", "Free", "LeakyNonNegative", "Logistic", "NonNegative")
PRIORS += ("ShiftedNonNegative", "SoftThreshold", "Softplus", "Tanh")


def _theory(reason: str, *names: str) -> dict[str, str]:
    return {f"equilibria.theory.{name}": reason for name in names}


def _both(package: str, name: str) -> tuple[str, str]:
    """A name that the theory and one of its packages export."""
    return name, f"{package}.{name}"


# What begins so is gone, and why.
DROPPED: dict[str, str] = {
    "equilibria.experiments.Listed.measured": "len(listed.longest), which has the numbers, too",
    "equilibria.experiments.Listed(measured": "the same",
    "equilibria.evaluation.Reliability.to_dict": "dataclasses.asdict gives the same",
    "equilibria.evaluation.CorruptionReport.mean_corruption_error": "a line of torch",
    **{
        f"equilibria.nn.{kind}{name}": "eq.jacobian_penalty, or collect_penalties"
        for kind in ("DEQ", "MDEQ")
        for name in (".forward_with_penalty", "(jacobian_samples")
    },
    **{
        f"equilibria.evaluation.timing.{name}": "a profile is one table and a list of suggestions"
        for name in (
            *("LayerProfile", "Memory", "Spread", "Suggestion"),
            *("PassProfile.group", "PassProfile.to_dict"),
            *(f"Profile{dot}{key}" for dot in "(." for key in ("compiled", "machine", "threads")),
            *(f"PassProfile{dot}{key}" for dot in "(." for key in ("batch", "eager", "marked")),
            *(f"PassProfile{dot}{key}" for dot in "(." for key in ("memory", "overhead", "waits")),
            *(f"profile_model({key}" for key in ("channels_last", "compile", "optimizer")),
            *(f"profile_model({key}" for key in ("progress", "repeats", "try_suggestions")),
        )
    },
    **{
        f"equilibria.{name}.{member}": "it served the profiler's marks inside solves; no marks now"
        for member in ("plain", "watch")
        for name in (
            *("Implicit", "OneStep", "Phantom", "Unrolled", "engine.Adjoint"),
            *("adjoints.Implicit", "adjoints.OneStep", "adjoints.Phantom", "adjoints.Unrolled"),
            "nn.TransposedSplitting",
        )
    },
    "equilibria bench --repeats": "--budget says how long it measures",
    "equilibria bench --try": "suggestions are no longer tried",
    **{
        f"equilibria.evaluation.{name}": "the papers' tables alone use it, and have it now"
        for name in (
            *("KnownUnknown", "SuperclassResult", "known_unknown_kl", "select_classes"),
            *("superclass_accuracy", "superclass_split"),
        )
    },
    **{
        f"equilibria.evaluation.{name}": "constants are those of CIFAR-10-C, to 64 pixels"
        for name in (
            *("corrupt(scale", "corruption_study(scale", "save_corruption_sheet(scale"),
            *("corruptions.Scale", "corruptions.corrupt(scale"),
        )
    },
    "equilibria.evaluation.gradcam(normalize": "maps are scaled to 0 … 1, as they always were",
    **{
        f"{place}.Auto.{name}": "Auto is options; the solver that it chooses has it"
        for place in ("equilibria", "equilibria.solvers")
        for name in ("fallback", "init", "residual_memory", "restart", "step", "take")
    },
    **{
        f"{place}.{prior}.{name}": reason
        for name, reason in {
            **dict.fromkeys(("conjugate", "has_conjugate"), "nothing in the library used it"),
            "subgradient_distance": "subdifferential gives the interval",
        }.items()
        for place, more in (("equilibria", ()), ("equilibria.problems", ("Prior", "WithL1")))
        for prior in (*PRIORS, *more)
    },
    **{
        f"equilibria.{problem}.snap": "a step with a tiny tau does the same"
        for problem in (*("Problem", "problems.HiddenProblem", "problems.Problem"),)
    },
    **{
        f"equilibria.{name}": "αT + (1 − α)I and A⁻¹T(A·) are a line each for a map of your own"
        for name in (
            *("problems.AffineProblem", "problems.MoreauProblem", "problems.HiddenProblem.moreau"),
            *(
                "problems.HiddenProblem.affine",
                "problems.Problem.affine",
                "problems.Problem.moreau",
            ),
            *("Problem.affine", "Problem.moreau"),
        )
    },
    **{
        f"equilibria.{place}HSIC{dot}{name}": "no table uses random Fourier features; HSIC is exact"
        for place in ("", "problems.")
        for dot in "(."
        for name in ("random_features", "seed")
    },
    "equilibria.problems.gaussian_feature_map": "the series needs inner products alone",
    # The theory keeps what its pages, its commands and the claims use.
    **_theory("a line of torch", "MultiBlock.bias", "MultiBlock.collapse", "wide_objective"),
    **_theory("call the layer", "MultiBlock.deep_step", "bounds.Demonstration.logits"),
    **_theory("step(z, as_printed=True)", "MultiBlock.step_as_printed"),
    **_theory("the least width is taken", "to_hidden_units(width)", "to_deep_opteq(width)"),
    **_theory("it is the module's", "KernelMonitor(model)", "monitors.KernelMonitor(model)"),
    **_theory("alignment is centered", *_both("ntk", "kernel_alignment(centered)")),
    **_theory("alignment is centered", *_both("ntk", "label_alignment(centered)")),
    **_theory("filter the reports by type", "bounds.Comparison.of"),
    **_theory("it is always measured", *_both("bounds", "lipschitz_report(around)")),
    **_theory("they are those of the head", *_both("bounds", "margin_report(logits)")),
    **_theory("the loss, in 20 levels", "landscapes.contour_figure(channel)"),
    **_theory("the loss, in 20 levels", "landscapes.contour_figure(levels)"),
    **_theory("filters, of all that trains", *_both("landscapes", "random_directions(chosen)")),
    **_theory("filters, of all that trains", *_both("landscapes", "random_directions(normalize)")),
    **_theory("all that trains moves", *_both("landscapes", "training_plane(chosen)")),
    **_theory("the claims have it", "monotone_ntk.StateJacobians", "monotone_ntk.state_jacobians"),
    **_theory("the claims have it", "monotone_ntk.residual_jacobians"),
    **_theory("the claims have it", "monotone_ntk.weight_jacobians"),
    **_theory("the claims have it", *_both("monotone_ntk", "commutation_matrix")),
    **_theory("the claims have it", "monotone_ntk.OutputJacobians"),
    **_theory("the claims have it", "monotone_ntk.output_jacobians"),
    **{
        key: "the thesis has no bias"
        for word in ("(b)", ".b", ".without_bias")
        for key in _theory("", *_both("monotone_ntk", f"ThesisModel{word}"))
    },
    **_theory("the thesis has no bias", "monotone_ntk.ClosedFormKernel(b)"),
    **_theory("the thesis has no bias", "monotone_ntk.ClosedFormKernel.b"),
    **_theory("a line of torch", "MultiBlock.permutation", "MultiBlock.weight"),
    **_theory("it is added where it is needed", "to_deep_opteq(reset)"),
    **{
        key: 'outputs="sum", fewer samples or parameters; 1 GiB of gradients is kept'
        for package, names in {
            "ntk": (
                *("Projection", "empirical_ntk(projection)", "empirical_ntk(memory)"),
                *(f"TangentKernel{dot}projection" for dot in "(."),
                *(f"TangentKernel{dot}relative_error" for dot in "(."),
            ),
            "monitors": ("KernelProbe(projection)", "KernelProbe(memory)"),
        }.items()
        for name in names
        for key in _theory("", *_both(package, name))
    },
    **_theory("the drift says whether training is linear", *_both("ntk", "LinearCurve")),
    **_theory("the drift says whether training is linear", *_both("ntk", "TrainingComparison")),
    **_theory("the drift says whether training is linear", *_both("ntk", "compare_training")),
    **_theory("the drift says whether training is linear", *_both("ntk", "linear_gradient_")),
    **_theory("the drift says whether training is linear", *_both("ntk", "study_kernels(training")),
    **_theory("the drift says whether training is linear", *_both("ntk", "KernelStudy(training")),
    **_theory("the drift says whether training is linear", *_both("ntk", "KernelStudy.training")),
    **_theory("it proves nothing", *_both("monitors", "BallConditioning")),
    **_theory("it proves nothing", *_both("monitors", "conditioning_on_ball")),
    **{
        key: "epochs; the loggers write files; the rows have the rest"
        for word in ("(unit", "(file", ".ball", ".on_train_batch_end")
        for key in _theory("", *_both("monitors", f"KernelMonitor{word}"))
    },
    **_theory("follow_training, on the weights of --keep-every", "training_recorder"),
    **_theory("follow_training, on the weights of --keep-every", "trajectories.training_recorder"),
    **_theory("path_figure has a panel for each checkpoint", "trajectories.training_figure"),
    **_theory("random directions, as in the thesis", *_both("landscapes", "training_plane")),
    **_theory("random directions, as in the thesis", "landscapes.TrainingPlane"),
    **_theory("random directions, as in the thesis", *_both("landscapes", "Surface(path")),
    **_theory("random directions, as in the thesis", *_both("landscapes", "Surface.path")),
    **_theory("contours in a plane", *_both("landscapes", "Grid(dims")),
    **_theory("contours in a plane", *_both("landscapes", "Grid.dims")),
    **_theory("contours in a plane", *_both("landscapes", "Grid.axes")),
    **_theory("contours in a plane", *_both("landscapes", "Surface.is_curve")),
    **_theory("contours in a plane", "landscapes.curve_figure", "landscapes.surface_figure"),
    **_theory("the table has a row for each layer", "bounds.network_curves"),
    "equilibria theory landscape --along-training": "random directions, as in the thesis",
    "equilibria theory landscape --curve": "contours in a plane",
    "equilibria theory landscape --redraw": "contour_figure([Surface.load(file)])",
    "equilibria theory ntk --memory": "1 GiB of gradients is kept",
    "equilibria theory ntk --projection": "--outputs sum, or fewer --samples",
    "equilibria theory ntk --train-steps": "the drift says whether training is linear",
    **_theory("the states are always kept", *_both("trajectories", "record_path(keep_states)")),
    **_theory("the layer's own start is taken", *_both("trajectories", "record_path(z0)")),
    **_theory("classes have their numbers", "trajectories.class_figure(names)"),
    **_theory("eight samples are drawn", "trajectories.path_figure(samples)"),
    **_theory("six panels", "trajectories.training_figure(columns)"),
    **_theory("six panels", "trajectories.training_figure(panels)"),
    **_theory(
        "a part of the calculators: import it from its module",
        *("bounds.Line", "bounds.LayerNumbers", "bounds.digit_vectors", "bounds.fresh_pair"),
        *("bounds.layer_inputs", "bounds.lipschitz_curves", "bounds.margin_curves"),
        *("bounds.margin_loss", "bounds.measure", "bounds.rescaled", "bounds.similarity_curves"),
        *("bounds.arc_cosine", "bounds.eq1", "bounds.eq48", "bounds.kerdeq_", "bounds.ours_at"),
        *("bounds.remark1", "bounds.remark2", "bounds.remark3", "bounds.summary"),
    ),
    **{
        f"equilibria.nn.MultiBranch({name})": "branches are solved apart, and averaged"
        for name in ("adjoint", "fuse", "joint", "solver")
    },
    **{
        f"equilibria.nn.{kind}.norm": "layer.operator().norm(shape) is the same"
        for kind in ("GEQ", "KerDEQ", "OptEq", "PolynomialEq", "SigmoidEq")
    },
    "equilibria.nn.DEQ(contraction)": "a block with contraction_bound() is asked",
    "equilibria.nn.DEQ.jacobian_penalty": "eq.jacobian_penalty(layer.step, z, layer.inject(x))",
    "equilibria.nn.MDEQ.jacobian_penalty": "eq.jacobian_penalty(layer.step, z, layer.inject(x))",
    "equilibria.nn.MDEQ.repeat": "layer.solve(x, solver=Picard(rtol=0.0, max_steps=K))",
    "equilibria.nn.DeepOptEq.block_step": "layer.bound_blocks()[l](z, c)",
    "equilibria.nn.OptEq.objective_state": "problem(x).objective(z) has the same minimum",
    "equilibria.nn.WeightNormalized(dim)": "weights are normalized by output",
    "equilibria.nn.WeightNormalized.dim": "weights are normalized by output",
    # Set when an object is made, so that no class lists them.
    "equilibria.data.LazyImages.device": "an attribute, still there",
    "equilibria.data.LazyImages.ndim": "an attribute, still there",
    "equilibria.data.LazyImages.shape": "an attribute, still there",
}


def packages(name: str) -> Iterator[ModuleType]:
    """A package and those below it that say what is public, with ``__all__``."""
    package = import_module(name)
    if hasattr(package, "__all__"):
        yield package
        exported = [getattr(package, name) for name in package.__all__]
        yield from (m for m in exported if inspect.ismodule(m) and not hasattr(m, "__path__"))
    for found in pkgutil.iter_modules(package.__path__, f"{name}."):
        if found.ispkg and not found.name.endswith(".cli"):
            yield from packages(found.name)


def parameters(item: Any) -> list[str]:
    """The names by which a call may give its arguments."""
    try:
        found = inspect.signature(item).parameters.values()
    except (TypeError, ValueError):
        return []
    names = [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in found:
        if p.kind is p.VAR_KEYWORD and "Unpack[" in str(p.annotation):
            hints = get_type_hints(item.__init__ if inspect.isclass(item) else item)
            names += get_type_hints(get_args(hints[p.name])[0])
    return names


def members(kind: type) -> set[str]:
    """Methods, properties and fields of ours, those of bases outside this repository left out."""
    return {
        name
        for base in kind.__mro__
        if base.__module__.startswith("equilibria")
        for name in {**vars(base), **vars(base).get("__annotations__", {})}
        if not name.startswith("_")
    }


def public_names() -> Iterator[str]:
    """``package.name``, ``package.name(parameter)`` and ``package.Class.member``."""
    for top in ("equilibria", "equilibria_papers"):
        for package in packages(top):
            yield package.__name__
            for name in package.__all__:
                item, where = getattr(package, name), f"{package.__name__}.{name}"
                yield where
                if callable(item):
                    yield from (f"{where}({given})" for given in parameters(item))
                if inspect.isclass(item):
                    yield from (f"{where}.{member}" for member in members(item))


def commands(command: Any, path: str) -> Iterator[str]:
    """Commands, their arguments and their flags, with all their spellings."""
    yield path
    for given in command.params:
        argument = given.param_type_name == "argument"
        names = [given.name.upper()] if argument else [*given.opts, *given.secondary_opts]
        yield from (f"{path} {name}" for name in names)
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{path} {name}")


def run_files(folder: Path) -> list[str]:
    """What a training leaves in its folder."""
    from equilibria.training import TrainConfig, fit

    config = TrainConfig(epochs=1, samples=64, out=folder / "run", workers=0)
    fit(config, progress=False)
    return sorted(
        path.name if path.is_file() else f"{path.name}/" for path in (folder / "run").iterdir()
    )


def surface(folder: Path) -> dict[str, list[str]]:
    """The whole list; ``folder`` is for the run."""
    import typer

    from equilibria import data, models
    from equilibria.cli.app import app

    return {
        "names": sorted(set(public_names())),
        "commands": sorted(set(commands(typer.main.get_command(app), "equilibria"))),
        "models": sorted(models.names()),
        "data": sorted(data.names()),
        "run files": run_files(folder),
    }


@pytest.fixture(scope="module")
def present(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return surface(tmp_path_factory.mktemp("surface"))


def _moved(entry: str) -> str:
    """Its present spelling: the longest beginning that moved counts."""
    for old in sorted((old for old in MOVED if entry.startswith(old)), key=len, reverse=True):
        return MOVED[old] + entry.removeprefix(old)
    return entry


@pytest.mark.parametrize("kind", ["names", "commands", "models", "data", "run files"])
def test_nothing_is_lost(kind: str, present: dict[str, list[str]]) -> None:
    listed = json.loads(LISTED.read_text("utf-8"))[kind]
    assert listed
    there = set(present[kind])
    lost = [
        entry
        for entry in listed
        if _moved(entry) not in there and not entry.startswith(tuple(DROPPED))
    ]
    assert not lost, "restore them, or say why in MOVED or DROPPED:\n" + "\n".join(lost)


def test_what_is_said_to_be_gone_was_there_and_is_gone(present: dict[str, list[str]]) -> None:
    listed = [e for entries in json.loads(LISTED.read_text("utf-8")).values() for e in entries]
    there = {entry for entries in present.values() for entry in entries}
    for start in (*MOVED, *DROPPED):
        assert [e for e in listed if e.startswith(start)], f"{start}: never was there"
    for start in DROPPED:
        back = [e for e in listed if e.startswith(start) and _moved(e) in there]
        assert not back, f"{start}: said to be dropped, but there are {back}"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(surface(Path(made)), indent=0, ensure_ascii=False))  # noqa: T201

"""Networks as programs that run without this library: torch.export (.pt2) and ONNX (.onnx).

The program maps normalized images [B, C, S, S], any B, to logits [B, K]; its metadata say how
images are normalized and what the classes are called. With early stop it also gives the steps [B]
that the slowest layer took and whether all layers passed their tolerance [B].

In eight bits the parameters of two or more dimensions are q·s as in ``models.save``; the file holds
q in int8 and one s for each row, and the runtime multiplies them.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria._version import __version__
from equilibria.engine import write_bytes
from equilibria.engine.optional import needs
from equilibria.engine.result import BackwardStats, Result, Solution, Stats
from equilibria.engine.solver import Solver, SolverOptions
from equilibria.nn import frozen_copy, observe
from equilibria.nn.observing import report

from .network import ModelConfig, Network
from .prediction import Prediction
from .weights import MOST_TEXT, ModelFileError, dequantize, quantize

FORMAT = "equilibria-export/1"
TOLERANCE = 1e-5
"""The largest difference between the exported program and PyTorch, relative to logits above 1."""
BATCHES = (1, 7)
"""The batch sizes that an exported program is compared at; it was traced with another."""
_KEY = "equilibria"
_MOST_BYTES = 2 << 30  # what an ONNX file without data beside it can hold


class ExportError(RuntimeError):
    """A network that cannot be exported, or whose program does not compute what it computes."""


@dataclass(frozen=True)
class Exported:
    """What ``export`` wrote."""

    path: Path
    format: str
    """"pt2" or "onnx"."""
    steps: int
    """Steps of each solve: the number, or with early stop the most."""
    early_stop: bool
    int8: bool
    difference: dict[int, float]
    """Batch size → largest |logit of the file − logit in PyTorch|, with the same steps and weights
    (in eight bits the rounded ones)."""
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path)}


def export(
    model: Network,
    path: str | os.PathLike[str],
    *,
    steps: int | None = None,
    early_stop: bool = False,
    int8: bool = False,
) -> Exported:
    """Write a classification network to a ``.pt2`` or ``.onnx`` file, and check it.

    The program runs on batches of 1 and of 7 random images before the file appears; a difference of
    more than 1e-5 to PyTorch is an ``ExportError``.

    Args:
        model: made by ``create`` or ``load``. It is exported in evaluation mode, in float32.
        path: where to; its ending says which format.
        steps: the number of steps of every solve, in place of the network's own solvers'
            tolerances. None keeps fixed steps as they are; a solver with a tolerance then needs
            ``early_stop``.
        early_stop: keep tolerances. Solves run in blocks of eight steps, restarted after each,
            until every sample has passed or ``max_steps`` (torch's ``while_loop``, ONNX's Loop).
        int8: keep the weights in eight bits (ONNX only).
    """
    place = Path(path)
    kind = _checked_kind(place, steps, early_stop, int8)
    network = _frozen(model)
    most, early_stop = _set_solvers(network, steps, early_stop)
    eight = _quantize(network) if int8 else {}
    about: dict[str, Any] = {"format": FORMAT, "library": __version__}
    about |= {"config": network.config.to_dict(), "extra": network.extra, "steps": most}
    about |= {"early_stop": early_stop, "int8": int8}
    size, channels = network.preprocessing.size, network.in_channels
    program = _Program(network, early_stop).eval()
    source = torch.Generator().manual_seed(0)

    def images(count: int) -> Tensor:
        return torch.randn(count, channels, size, size, generator=source)

    with _quiet(), torch.no_grad():
        try:
            sizes: Any = ({0: torch.export.Dim("batch")},)
            traced = torch.export.export(program, (images(3),), dynamic_shapes=sizes, strict=False)
            if kind == "onnx":
                data = _onnx(traced, about, eight)
            else:
                file = io.BytesIO()
                torch.export.save(traced, file, extra_files={f"{_KEY}.json": json.dumps(about)})
                data = file.getvalue()
        except Exception as error:
            raise ExportError(
                f"{network.config.name} cannot be exported to {kind} by torch {torch.__version__}: "
                f"{_cause(error)}"
            ) from error
        run = _runner(kind, data)
        # With early stop the program restarts its solver and the library does not: compared is
        # what torch computes by the same program.
        reference = traced.module() if early_stop else program
        difference = {}
        for count in BATCHES:
            x = images(count)
            wanted = reference(x)[0].double()
            gap = float((run(x).double() - wanted).abs().max())
            if not gap <= TOLERANCE * max(1.0, float(wanted.abs().max())):
                raise ExportError(
                    f"{place}: for a batch of {count} the exported program differs from PyTorch by "
                    f"{gap:.3g}, more than {TOLERANCE:g}; nothing was written."
                )
            difference[count] = gap
    write_bytes(place, data)
    return Exported(place, kind, most, early_stop, int8, difference, len(data))


def _checked_kind(place: Path, steps: int | None, early_stop: bool, int8: bool) -> str:
    kind = place.suffix.lstrip(".").lower()
    if kind not in ("pt2", "onnx"):
        raise ValueError(f"path={place}: expected a name that ends with .pt2 or .onnx.")
    if int8 and kind != "onnx":
        raise ValueError("int8=True: a .pt2 file keeps weights in float32; export to .onnx.")
    if steps is not None and (isinstance(steps, bool) or not 1 <= steps <= 1000):
        raise ValueError(f"steps={steps!r}: expected an integer from 1 to 1000.")
    if steps is not None and early_stop:
        raise ValueError(f"steps={steps} fixes what early_stop=True leaves open: give one of them.")
    return kind


class _Program(nn.Module):
    """x ↦ (logits,), with early stop (logits, steps, converged)."""

    def __init__(self, network: Network, early_stop: bool) -> None:
        super().__init__()
        self.network, self.early_stop = network, early_stop

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if not self.early_stop:
            return (self.network(images),)
        with observe(self.network) as seen:
            logits = self.network(images)
        found = [s for each in seen.solutions.values() for s in each]
        steps = torch.stack([s.stats.steps.to(torch.int64) for s in found]).amax(0)
        passed = torch.stack([s.converged for s in found if s.stats.syncs]).all(0)
        return logits, steps, passed


def _frozen(model: Network) -> Network:
    """A copy on the CPU whose weights are what their constraints make of them."""
    network = copy.deepcopy(getattr(model, "_orig_mod", model))
    if not isinstance(network, Network) or isinstance(network, OnnxNetwork):
        raise TypeError(f"export takes a network of models.create, got {type(network).__name__}.")
    if network.task != "classification":
        raise ValueError(
            f"{network.config.name} segments images of any shape; only classification networks, "
            "whose images have one size, are exported."
        )
    return frozen_copy(network.to("cpu", torch.float32))


def _set_solvers(network: Network, steps: int | None, early_stop: bool) -> tuple[int, bool]:
    """Give every layer its solver; the most steps of a solve (0: no layers), whether any stops."""
    most, stops = 0, False
    for name, module in network.named_modules():
        own = getattr(module, "solver", None)
        if not isinstance(own, SolverOptions):
            continue
        if not isinstance(own, Solver):
            raise ExportError(
                f"{name}: {type(own).__name__} chooses a solver while it runs, which an exported "
                "program cannot. Set layer.solver to one, such as Anderson()."
            )
        if steps is not None:
            own = dataclasses.replace(own, rtol=0.0, atol=0.0, max_steps=steps)
            module.solver = own
        elif not (own.fixed_steps or early_stop):
            raise ExportError(
                f"{name} solves to a tolerance ({type(own).__name__}). Export with a fixed number "
                "of steps, steps=N (--steps N), or with early_stop=True (--early-stop)."
            )
        most, stops = max(most, own.max_steps), stops or not own.fixed_steps
    return most, stops


def _quantize(network: Network) -> dict[str, tuple[Tensor, Tensor]]:
    """Replace weights w by q·s in float32; name → (q, s)."""
    made = {}
    for name, weight in network.named_parameters():
        if weight.ndim >= 2:
            whole, scale = made[name] = quantize(name, weight)
            weight.copy_(dequantize(whole, scale))
    return made


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says of its own exporter, and of packages that are not installed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _onnx(traced: Any, about: Mapping[str, Any], eight: Mapping[str, Any]) -> bytes:
    with needs("onnx and onnxscript", "Exporting to ONNX", extra="export"):
        import onnx
        import onnxscript  # noqa: F401
    names = ["logits", "steps", "converged"] if about["early_stop"] else ["logits"]
    made = torch.onnx.export(
        traced, dynamo=True, input_names=["images"], output_names=names, verbose=False
    )
    assert made is not None
    proto: Any = made.model_proto
    graph = proto.graph
    for tensor in list(graph.initializer):
        name = tensor.name.removeprefix("network.")
        if name not in eight:
            continue
        whole, scale = eight[name]
        graph.initializer.remove(tensor)
        parts = {f"{tensor.name}.int8": whole, f"{tensor.name}.scale": scale}
        for part, value in parts.items():
            graph.initializer.append(onnx.numpy_helper.from_array(value.numpy(), part))
        node = onnx.helper.make_node("DequantizeLinear", [*parts], [tensor.name], axis=0)
        graph.node.insert(0, node)
    for entry in list(proto.metadata_props):
        proto.metadata_props.remove(entry)
    proto.metadata_props.add(key=_KEY, value=json.dumps(about))
    _strip(graph)
    data: bytes = proto.SerializeToString()
    return data


def _strip(graph: Any) -> None:
    """Remove where in Python each node comes from: most of the bytes, and paths of this machine."""
    for node in graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _strip(attribute.g)


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0][:400]


def _runner(kind: str, data: bytes) -> Any:
    """x ↦ logits by what the file holds."""
    if kind == "pt2":
        program = torch.export.load(io.BytesIO(data)).module()
        return lambda x: program(x)[0]
    session = _session(data)
    return lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


# ---------------------------------------------------------------------- run an ONNX file


def _session(source: str | bytes) -> Any:
    with needs("onnxruntime", "Running an ONNX file", extra="export"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def load_onnx(path: str | os.PathLike[str]) -> OnnxNetwork:
    """The network in an ONNX file that ``export`` wrote, run by onnxruntime on the CPU.

    It classifies as the network that it was made from: ``preprocess``, ``predict``, ``classes``,
    and the evaluation. It has no weights to train and no layers to certify. The graph runs no code
    of its own, but may be of any size: open only files whose origin you know.
    """
    place = Path(path)
    if not place.is_file():
        raise FileNotFoundError(f"{place} does not exist: expected an ONNX file of models.export.")
    if place.stat().st_size > _MOST_BYTES:
        raise ModelFileError(f"{place} is larger than {_MOST_BYTES:,} bytes, the limit.")
    try:
        session = _session(str(place))
        text = session.get_modelmeta().custom_metadata_map.get(_KEY, "")
    except ImportError:
        raise
    except Exception as error:
        why = str(error).strip()[:300]
        raise ModelFileError(f"{place} is not a usable ONNX file: {why}") from error
    try:
        if len(text) > MOST_TEXT:
            raise ValueError(f"metadata of {len(text):,} characters; the limit is {MOST_TEXT:,}")
        about = json.loads(text or "{}")
        if about.get("format") != FORMAT:
            raise ValueError(f"format={about.get('format')!r}, expected {FORMAT!r}")
        network = OnnxNetwork(session, about).eval()
        _ = network.classes  # raises where they do not fit
        (given,) = session.get_inputs()
        shape = [network.in_channels, network.side, network.side]
        if given.name != "images" or given.shape[1:] != shape:
            raise ValueError(f"its input is {given.name} {given.shape}")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{place} was not written by models.export: {error}.") from error
    return network


class OnnxNetwork(Network):
    """A network that onnxruntime runs; made by ``load_onnx``.

    To those who observe its solves it is one layer: with early stop, the steps of its slowest layer
    and whether all have converged; else its fixed steps, and nothing of convergence.
    """

    is_equilibrium = True

    def __init__(self, session: Any, about: Mapping[str, Any]) -> None:
        config = ModelConfig(**about["config"])
        super().__init__(config.in_channels)
        self.config, self.extra = config, dict(about["extra"])
        self.side = self.preprocessing.size
        self.steps, self.early_stop = int(about["steps"]), bool(about["early_stop"])
        self._session = session

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxNetwork:
        """The session cannot be copied, and holds nothing that changes: copies share it."""
        memo[id(self._session)] = self._session
        made: OnnxNetwork = nn.Module.__new__(type(self))
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    def predict_normalized(self, x: Tensor, **options: Any) -> list[Prediction]:
        if options.get("certify") or options.get("stop"):
            raise ValueError("certify=True and stop= need layers, and an ONNX file has none.")
        return super().predict_normalized(x, **options)

    def logits(self, x: Tensor) -> Tensor:
        found = self._session.run(None, {"images": x.detach().cpu().float().contiguous().numpy()})
        logits, *rest = map(torch.from_numpy, found)
        if self.steps:
            self._report(logits, *rest)
        return logits.to(x.device)

    def _report(self, logits: Tensor, *rest: Tensor) -> None:
        unknown = torch.full((len(logits),), math.nan)
        steps = torch.full((len(logits),), self.steps)
        codes = torch.full((len(logits),), int(Result.fixed_steps), dtype=torch.int8)
        if self.early_stop:
            steps, passed = rest
            codes = torch.where(passed, int(Result.converged), int(Result.max_steps)).to(torch.int8)
        syncs = int(self.early_stop)
        stats = Stats(steps.int(), unknown, unknown, self.steps, syncs, BackwardStats())
        report(self, Solution(logits, codes, stats))

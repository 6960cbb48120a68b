"""Fine-tune a network of four-step layers to answer with two: accuracy and speed, before and after.

    python benchmarks/few_steps.py results/weights/geq_stack_cifar_8m.safetensors \\
        --data FOLDER --epochs 4 --out results
    python benchmarks/few_steps.py RUN_FOLDER --data FOLDER ...     (a chain, geq_cifar_5m)

The student starts from the weights of the teacher and takes ``--steps`` steps in each layer, of the
length that ``nn.calibrate_steps`` finds on 256 training images. ``before`` is the teacher with so
many steps of the certificate's length, ``calibrated`` with this length, both untrained. The loss of
a batch is

    (1 − a)·CE(labels, smoothed) + a·T²·KL(teacher ‖ student at temperature T) + f·‖Δfeatures‖²

with the teacher at ``--teacher-steps`` steps in evaluation mode, on the same augmented images.
``--random`` draws the student's number of steps from 1 to that of the teacher, anew for each batch,
``--steps`` in half of them. On a GPU: bf16, channels_last, CUDA graphs, images on the device.

Accuracy is that of the last ``--held-out`` training images, which the student is not trained on.
Published weights were trained on all of them: what is held out shows how much of the teacher's
answer is kept, not how it generalizes. ``--test`` measures the test images too, once before and
once after; nothing is chosen by them.

Writes few_steps_NAME.json after each epoch, few_steps_NAME.safetensors (the student) and
few_steps_NAME.ckpt, from which the same command goes on.

    python benchmarks/few_steps.py geq_stack_cifar_8m --profile --out results

needs no data: the kernels of one image, by name, with one step and in the explicit twin, on fresh
weights, each replayed as a CUDA graph, and images a second at batches of ``--batch`` and 1. Writes
few_steps_profile.json, with ``--tag NAME`` few_steps_profile_NAME.json.
"""

from __future__ import annotations

import copy
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _measure import Spread, race, wait
from _record import commit, parser, write
from torch import Tensor, nn

from equilibria import data, models
from equilibria.nn import calibrate_steps, frozen_copy, set_steps
from equilibria.training import GraphedModel

STEPS = (1, 2, 3, 4)


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    if options.profile:
        profiles(options, device)
        return
    teacher = loaded(options)
    if options.teacher_steps is None:
        options.teacher_steps = steps_of(teacher)
    teacher = set_steps(teacher, options.teacher_steps)
    teacher = teacher.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)
    kept, held, test = images(options, teacher, device)
    tau, plain = options.tau, of_steps(teacher, options.steps, options.terms)
    plain.to(device, memory_format=torch.channels_last).eval()
    if tau is None:
        tau = calibrate_steps(copy.deepcopy(teacher), calm(kept), options.steps)[1]
    student = of_steps(teacher, options.steps, options.terms, tau or None)
    student.to(device, memory_format=torch.channels_last)
    tuning = Tuning(student, teacher, kept, options)
    path = options.out / f"few_steps_{options.tag or teacher.config.name}"
    record = {
        "command": "python benchmarks/few_steps.py " + " ".join(sys.argv[1:]),
        "commit": options.commit or commit(),
        "torch": str(torch.__version__),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "model": teacher.config.name,
        "tau": tau or "that of the certificate",
        "held_out": len(held[1]),
        "held_out_is": "the last training images; the student is not trained on them, published "
        "weights were",
    }
    found = tuning.resume(path.with_suffix(".ckpt"), record)
    if not found:
        found = {**record, "before": measured(plain, teacher, held, test, options)}
        found["calibrated"] = measured(student, teacher, held, test, options)
        found["epochs"] = []
    for epoch in range(len(found["epochs"]), options.epochs):
        row = tuning.epoch(epoch)
        right, seconds = accuracy(student, held, options, options.steps)
        row |= {"held_out_accuracy": right, "evaluation_s": seconds}
        found["epochs"].append(row)
        print({k: round(v, 5) for k, v in row.items()}, flush=True)
        tuning.save(path.with_suffix(".ckpt"), found)
        write(path.with_suffix(".json"), found)
    tuning.whole.hook.remove()
    found["after"] = measured(student, teacher, held, test, options)
    write(path.with_suffix(".json"), found)
    found["speed"] = speeds(student, options, device)
    write(path.with_suffix(".json"), found)
    set_steps(student, options.steps)
    extra = {**teacher.extra, "steps_of_the_teacher": options.teacher_steps}
    models.save(student.float().cpu(), path.with_suffix(".safetensors"), extra=extra)
    for name in ("before", "calibrated", "after", "speed"):
        print(name, found[name])


def arguments() -> Namespace:
    made = parser(__doc__)
    add = made.add_argument
    add("weights", help="model.safetensors, the folder of a run that holds it, or a model's name")
    add("--data", type=Path, help="folder with the images; default: as equilibria.data.load")
    add("--set", default="cifar10", help="name of the data")
    add("--epochs", type=int, default=4)
    add("--steps", type=int, default=2, help="of the student")
    add("--teacher-steps", type=int, help="default: those that the network was trained with")
    add("--tau", type=float, help="step of the student; default: calibrated, 0: the certificate's")
    add("--terms", type=int, help="of the backward series; default: the model's own")
    add("--random", action="store_true", help="also train with other numbers of steps")
    add("--batch", type=int, default=512)
    add("--lr", type=float, default=0.02)
    add("--distill", type=float, default=0.9, help="a, the weight of the teacher")
    add("--temperature", type=float, default=2.0)
    add("--features", type=float, default=0.0, help="f, the weight of the head's inputs")
    add("--held-out", type=int, default=5000)
    add("--limit", type=int, help="train on the first so many images")
    add("--test", action="store_true", help="measure the test images, too")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--precision", choices=("bf16", "float32"), help="default: bf16 on a GPU")
    add("--repeats", type=int, default=20, help="of the speed measurements, at least")
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--tag", default="", help="name of the result instead of the model's")
    add("--commit", default="", help="recorded where git is not at hand")
    add("--profile", action="store_true", help="only count the kernels of one image, and end")
    options = made.parse_args()
    if options.precision is None:
        options.precision = "bf16" if options.device.startswith("cuda") else "float32"
    options.out.mkdir(parents=True, exist_ok=True)
    return options


# ------------------------------------------------------------------------------ networks and data


def loaded(options: Namespace) -> models.Network:
    if options.weights in models.names():  # fresh weights: for tests of this script
        card = data.load(options.set, "test", root=options.data, progress=False)
        shape = {"in_channels": card.channels, "image_size": card.images.shape[-1]}
        return models.create(options.weights, num_classes=len(card.classes), **shape)
    path = Path(options.weights)
    path = path / "model.safetensors" if path.is_dir() else path
    return models.load(path, dtype=torch.float32)


def steps_of(model: nn.Module) -> int:
    return max(m.solver.max_steps for m in model.modules() if hasattr(m, "solver"))


def calm(batches: data.Batches) -> Tensor:
    """256 training images as they are."""
    part = batches.dataset.subset(range(min(256, len(batches.dataset)))).to(batches.device)
    return part.normalize(part.images).to(memory_format=torch.channels_last)


def of_steps(
    model: models.Network, steps: int, terms: int | None = None, tau: float | None = None
) -> models.Network:
    """The same weights in a network that takes ``steps`` steps, also by its configuration."""
    config = model.config
    made = dict(config.options)
    solver = next(m.solver for m in model.modules() if hasattr(m, "solver"))
    made["solver"] = replace(solver, max_steps=steps)
    if tau is not None:
        made["solver"] = replace(made["solver"], tau=tau)
    if terms is not None:
        adjoint = next(m.adjoint for m in model.modules() if hasattr(m, "adjoint"))
        made["adjoint"] = replace(adjoint, steps=terms)
    shape = {"in_channels": config.in_channels, "image_size": config.image_size}
    student = models.create(config.name, config.num_classes, **shape, **made)
    student.load_state_dict(model.state_dict())
    return student


Labelled = tuple[Tensor, Tensor]


def images(
    options: Namespace, model: models.Network, device: torch.device
) -> tuple[data.Batches, Labelled, Labelled | None]:
    """Batches to train on, the images held out and those of the test, normalized on the device."""

    def load(split: str) -> data.ImageData:
        whole = data.load(options.set, split, root=options.data, progress=False)
        return whole.with_normalization_of(model.extra) if model.extra.get("mean") else whole

    def ready(part: data.ImageData) -> Labelled:
        part = part.to(device)
        x = part.normalize(part.images).to(memory_format=torch.channels_last)
        return x, part.targets

    whole = load("train")
    count = len(whole) - options.held_out
    if not 0 < options.held_out < len(whole):
        raise SystemExit(f"--held-out {options.held_out}: there are {len(whole)} training images.")
    kept = whole.subset(range(min(count, options.limit or count)))
    size = whole.images.shape[-1]
    augment = data.build_augmentation(["crop", "flip", {"cutout": {"size": size // 2}}])
    batches = data.Batches(
        kept, options.batch, shuffle=True, seed=options.seed, device=device, augment=augment,
        drop_last=True, channels_last=True,
    )  # fmt: skip
    held = ready(whole.subset(range(count, len(whole))))
    return batches, held, ready(load("test")) if options.test else None


# ------------------------------------------------------------------------------ training


class WithFeatures(nn.Module):
    """x ↦ the logits and, beside them, the input of the last linear layer, [B, K + F], float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
        self.hook = last.register_forward_pre_hook(self._keep)
        self._kept: Tensor | None = None

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._kept = inputs[0]

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        assert self._kept is not None
        return torch.cat([logits.float(), self._kept.float()], 1)


class Tuning:
    """The student, its optimizer and its batches; an epoch at a time."""

    def __init__(
        self, student: models.Network, teacher: models.Network, batches: data.Batches, options: Any
    ) -> None:
        self.options, self.batches, self.student = options, batches, student
        self.classes = teacher.config.num_classes
        # Hooks would travel with the student into its file: the teacher's is a copy.
        self.whole, guide = WithFeatures(student), WithFeatures(copy.deepcopy(teacher))
        self.teacher: Callable[[Tensor], Tensor] = Replayed(guide.eval(), options)
        # A captured graph has its number of steps in it: one for each.
        counts = range(1, options.teacher_steps + 1) if options.random else ()
        self.called: dict[int, Any] = {
            k: self.whole if options.eager else GraphedModel(self.whole)
            for k in {options.steps, *counts}
        }
        self.optimizer = torch.optim.SGD(
            student.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4,
            fused=options.device.startswith("cuda"),
        )  # fmt: skip
        total = max(options.epochs * len(batches), 2)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, options.lr, total_steps=total, pct_start=0.15, cycle_momentum=False
        )

    def epoch(self, epoch: int) -> dict[str, float]:
        """Train on every batch; the means of the losses, and images a second."""
        options, device = self.options, self.batches.device
        self.batches.set_epoch(epoch)
        draw = torch.Generator().manual_seed(options.seed * 1000 + epoch)
        sums = torch.zeros(3, device=device)
        self.student.train()
        wait(device)
        began = time.perf_counter()
        for x, y in self.batches:
            steps = options.steps
            if options.random and torch.rand((), generator=draw) < 0.5:
                steps = int(torch.randint(1, options.teacher_steps + 1, (), generator=draw))
            set_steps(self.student, steps)
            goal = self.teacher(x)
            with autocast(options):
                found = self.called[steps](x)
            loss, parts = self._loss(found.float(), goal, y)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            sums += parts
        wait(device)
        seconds = time.perf_counter() - began
        ce, kl, features = (sums / len(self.batches)).tolist()
        images = len(self.batches) * self.batches.batch_size
        return {
            "epoch": epoch + 1, "cross_entropy": ce, "kl": kl, "features": features,
            "seconds": seconds, "train_images_per_second": images / seconds,
        }  # fmt: skip

    def _loss(self, found: Tensor, goal: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, t, k = self.options.distill, self.options.temperature, self.classes
        ce = F.cross_entropy(found[:, :k], y, label_smoothing=0.1)
        answer, wanted = ((v[:, :k] / t).log_softmax(1) for v in (found, goal))
        kl = F.kl_div(answer, wanted, reduction="batchmean", log_target=True) * t * t
        features = F.mse_loss(found[:, k:], goal[:, k:]) / goal[:, k:].square().mean()
        loss = (1 - a) * ce + a * kl
        if self.options.features:
            loss = loss + self.options.features * features
        return loss, torch.stack([ce, kl, features]).detach()

    # ---- checkpoints

    def save(self, path: Path, record: dict[str, Any]) -> None:
        parts = {name: getattr(self, name).state_dict() for name in _PARTS}
        fresh = path.with_suffix(".part")
        torch.save({**parts, "record": record}, fresh)
        fresh.replace(path)

    def resume(self, path: Path, record: dict[str, Any]) -> dict[str, Any]:
        """What an earlier run with these options found, and its state; {} where there is none."""
        if not path.exists():
            return {}
        kept = torch.load(path, map_location=self.batches.device, weights_only=True)
        changed = [k for k in _SAME if kept["record"]["options"][k] != record["options"][k]]
        if changed:
            raise SystemExit(
                f"{path} was made with other options ({changed}): remove it, or --tag."
            )
        for name in _PARTS:
            getattr(self, name).load_state_dict(kept[name])
        found: dict[str, Any] = kept["record"]
        print(f"goes on after epoch {len(found['epochs'])} of {path}", flush=True)
        return found


_PARTS = ("student", "optimizer", "schedule")
_SAME = (
    "weights",
    "epochs",
    "steps",
    "tau",
    "teacher_steps",
    "random",
    "batch",
    "lr",
    "seed",
    "distill",
)


def autocast(options: Namespace) -> Any:
    kind = torch.device(options.device).type
    enabled = options.precision == "bf16"
    return torch.autocast(kind, torch.bfloat16, enabled=enabled, cache_enabled=False)


class Replayed:
    """A network in evaluation mode: a CUDA graph for the first shape, where there is a GPU."""

    def __init__(self, model: nn.Module, options: Namespace) -> None:
        self.model, self.options = model, options
        self.graph: Any = None

    @torch.no_grad()
    def eagerly(self, x: Tensor) -> Tensor:
        with autocast(self.options):
            out: Tensor = self.model(x)
        return out

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_cuda or self.options.eager:
            return self.eagerly(x)
        if self.graph is None:
            self.capture(x)
        if x.shape != self.x.shape:
            return self.eagerly(x)
        self.x.copy_(x)
        self.graph.replay()
        return self.out

    def capture(self, x: Tensor) -> Callable[[], None]:
        """The graph of this shape; its replay."""
        self.x = x.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.eagerly(self.x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.eagerly(self.x)
        replay: Callable[[], None] = self.graph.replay
        return replay


# ------------------------------------------------------------------------------ measurements


@torch.no_grad()
def accuracy(
    model: nn.Module, labelled: Labelled, options: Namespace, steps: int
) -> tuple[float, float]:
    """Share of right labels with ``steps`` steps, in eval mode, and the seconds that it took."""
    set_steps(model.eval(), steps)
    began = time.perf_counter()
    right = torch.zeros((), device=labelled[1].device)
    for x, y in zip(*(t.split(1000) for t in labelled), strict=True):
        with autocast(options):
            right += (model(x).argmax(1) == y).sum()
    return float(right) / len(labelled[1]), time.perf_counter() - began


def measured(
    student: nn.Module,
    teacher: nn.Module,
    held: Labelled,
    test: Labelled | None,
    options: Namespace,
) -> dict[str, Any]:
    """Accuracy at 1 to 4 steps, and the teacher's."""
    parts = {"held_out": held} | ({} if test is None else {"test": test})
    found: dict[str, Any] = {}
    for name, part in parts.items():
        counts = sorted({*STEPS, options.teacher_steps})
        found[name] = {str(k): accuracy(student, part, options, k)[0] for k in counts}
        found[name]["teacher"] = accuracy(teacher, part, options, options.teacher_steps)[0]
    set_steps(student, options.steps)
    print(found, flush=True)
    return found


def twin_of(model: models.Network) -> models.Network | None:
    """The explicit network of equal size, where there is one: two convolutions for each layer."""
    name = model.config.name.replace("geq", "explicit", 1)
    if name == model.config.name or name not in models.names():
        return None
    shared = models.describe(name).options
    options = {k: v for k, v in model.config.options.items() if k in shared}
    shape = {"in_channels": model.config.in_channels, "image_size": model.config.image_size}
    return models.create(name, model.config.num_classes, **shape, **options)


def speeds(student: models.Network, options: Namespace, device: torch.device) -> dict[str, Any]:
    """Images a second at inference, all timed in turn: 2 and 4 steps, and the explicit twin.

    "frozen": ``nn.frozen_copy``, which makes what depends on the weights alone once.
    """
    contestants: dict[str, Any] = {}
    for k in sorted({1, options.steps, options.teacher_steps}):
        contestants[f"{k} steps"] = set_steps(copy.deepcopy(student), k)
        contestants[f"{k} steps, frozen"] = frozen_copy(contestants[f"{k} steps"])
    twin = twin_of(student)
    if twin is not None:
        contestants["explicit twin"] = twin
    size = student.config.image_size
    found: dict[str, Any] = {} if twin else {"explicit twin": "none of equal size"}
    for batch in (options.batch, 1):
        x = torch.randn(batch, student.config.in_channels, size, size, device=device)
        x = x.to(memory_format=torch.channels_last)
        runs: dict[str, Any] = {}
        for name, model in contestants.items():
            model.to(device, memory_format=torch.channels_last).eval()
            way = Replayed(model, options)
            graphed = device.type == "cuda" and not options.eager
            runs[name] = way.capture(x) if graphed else partial(way.eagerly, x)
        least = options.repeats
        times = race(runs, device, budget=2.0, least=least, most=5 * least, warm=3)
        rows = {name: batch / Spread.of(part).median for name, part in times.items()}
        found[f"batch {batch}"] = rows
        if "explicit twin" in rows:
            found[f"times the twin, batch {batch}"] = {
                name: rows["explicit twin"] / rate for name, rate in rows.items()
            }
    print(found, flush=True)
    return found


@torch.no_grad()
def profiles(options: Namespace, device: torch.device) -> None:
    """Kernels of one image: how many, and the microseconds of each name in one replay."""
    from torch.profiler import ProfilerActivity, profile

    fresh = options.weights in models.names()
    own = models.create(options.weights) if fresh else loaded(options)
    options.teacher_steps = options.teacher_steps or steps_of(own)
    set_steps(own.eval(), 1)
    contestants = {"1 step": own, "1 step, frozen": frozen_copy(own), "explicit twin": twin_of(own)}
    size, graphed = own.config.image_size, device.type == "cuda"
    x = torch.randn(1, own.config.in_channels, size, size, device=device)
    x = x.to(memory_format=torch.channels_last)
    ways: dict[str, Replayed] = {}  # whose tensors the graphs read and write
    runs: dict[str, Any] = {}
    for name, model in contestants.items():
        if model is not None:
            model.to(device, memory_format=torch.channels_last).eval()
            ways[name] = way = Replayed(model, options)
            runs[name] = way.capture(x) if graphed else partial(way.eagerly, x)
    times = race(runs, device, budget=3.0, least=options.repeats, most=1000, warm=5)
    found: dict[str, Any] = {
        "command": "python benchmarks/few_steps.py " + " ".join(sys.argv[1:]),
        "commit": options.commit or commit(),
        "torch": str(torch.__version__),
        "machine": torch.cuda.get_device_name() if graphed else "CPU",
        "speed": speeds(own, options, device),
    }
    for name, run in runs.items():
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * graphed]
        for _ in range(2):  # the first profile of a process starts the tracer
            with profile(activities=activities) as recorded:
                run()
                wait(device)
        rows: dict[str, list[float]] = {}
        for event in recorded.events() or []:
            if ("CUDA" in str(event.device_type)) == graphed:
                row = rows.setdefault(event.name[:100], [0, 0.0])
                row[0], row[1] = row[0] + 1, round(row[1] + event.time_range.elapsed_us(), 2)
        ranked = dict(sorted(rows.items(), key=lambda item: -item[1][1]))
        found[name] = {
            "replay_us": round(1e6 * Spread.of(times[name]).median, 1),
            "kernels": sum(int(count) for count, _ in ranked.values()),
            "kernels_us": round(sum(us for _, us in ranked.values()), 1),
            "by_name": ranked,
        }
        print(name, {key: value for key, value in found[name].items() if key != "by_name"})
        for kernel, (count, us) in list(ranked.items())[:25]:
            print(f"  {count:5.0f} {us:9.1f} us  {kernel}")
    tag = f"_{options.tag}" if options.tag else ""
    write(options.out / f"few_steps_profile{tag}.json", found)


if __name__ == "__main__":
    main()

"""A run from its beginning to its files: ``fit``, and the callback that counts, logs and saves."""

from __future__ import annotations

import copy
import errno
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import safetensors.torch
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from torch import nn

from equilibria import models
from equilibria._version import __version__
from equilibria.data import ImageData
from equilibria.engine.files import SaveError, write_bytes, write_json, write_text
from equilibria.engine.options import OptionError

from . import processes, run_folder
from .average import WeightAverage
from .config import TrainConfig
from .epoch_metrics import EpochMetrics, warn_unsettled
from .logs import make_loggers, quiet_writers
from .module import EquilibriumModule
from .nonfinite import NonFiniteLoss, describe
from .processes import ProcessLostError
from .progress import Interrupted, Progress, StopRequest, TrainingBar, epoch_line
from .run_data import TrainBatches, load_data

_LIGHTNING = ("lightning.pytorch", "lightning.fabric")
_DTYPES = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}


@dataclass(frozen=True)
class TrainResult:
    """What a run left behind."""

    folder: Path
    weights: Path
    """model.safetensors: the averaged weights where there is an average."""
    checkpoint: Path
    """last.ckpt, to resume from."""
    metrics: dict[str, float]
    """Of the epoch whose weights were saved."""
    history: list[dict[str, Any]]
    """One entry per epoch."""
    model: nn.Module = field(repr=False)
    """The model with those weights, on the CPU, in eval mode."""


def fit(
    config: TrainConfig,
    *,
    resume: str | Path | None = None,
    data: tuple[ImageData, ImageData | None] | None = None,
    progress: bool = True,
    model: nn.Module | None = None,
    overwrite: bool = False,
    callbacks: Sequence[pl.Callback] = (),
) -> TrainResult:
    """Train a model as the configuration says, and write the run to its folder.

    Args:
        config: what to train, on what, how, where to.
        resume: a checkpoint or the folder of a run, to go on from there, and in that folder unless
            ``config.out`` names another than the run's config.yaml does. On one CPU the resumed run
            repeats the uninterrupted one bit for bit, from the end of an epoch and from Ctrl-C.
        data: (training, validation) instead of what ``config.data`` names; the second may be None.
        progress: whether to show a bar and the lines of the epochs on stderr.
        model: a network instead of the one that ``config.model`` names.
        overwrite: whether a run that is in the folder may be replaced.
        callbacks: of Lightning, beside our own.

    Raises:
        NonFiniteLoss: the loss became NaN; the report is in nonfinite.json.
        Interrupted: Ctrl-C or SIGTERM; the run was saved, the message says how to go on.
        CheckpointError: ``resume`` is no checkpoint, or one of another run.
        RunExistsError: the folder holds a run, and neither resume nor overwrite was given.
        RunInUseError: another training is writing to the folder; the message says whose it is.
        SaveError: a file could not be written, say on a full disk; the older one is intact.
        ProcessLostError: another process of the run was killed, failed or froze; resume.
    """
    if not isinstance(config, TrainConfig):
        raise TypeError(
            f"fit takes a TrainConfig, got {type(config).__name__}; TrainConfig.from_yaml(path) "
            "reads a file."
        )
    before = run_folder.random_state()
    try:
        with _lightning_without_remarks(), quiet_writers():
            return Run(config, resume, progress).go(data, model, overwrite, callbacks)
    finally:
        run_folder.restore_random_state(before)


class _Stop(Exception):
    """How a run leaves Lightning's loops: between two steps, after the checkpoint was written."""


class Run(Checkpoint):
    """One training: prepared, counted, logged, saved, stopped and ended. A callback, the last one.

    ``progress`` says how far it has come; ``request.asked = True`` stops it after the step, as
    Ctrl-C does. It saves and stops by itself, so that a resumed run is the uninterrupted one bit
    for bit: ModelCheckpoint and EarlyStopping rank by one number and take their settings from the
    checkpoint, and OnExceptionCheckpoint saves a step that was cut in two as if it were whole.
    """

    def __init__(self, config: TrainConfig, resume: str | Path | None, shown: bool) -> None:
        self.started, self.main = datetime.now(UTC), processes.rank() == 0
        self.progress = Progress()
        stopping = "stopping after this step; Ctrl-C again stops at once"
        self.request = StopRequest(partial(self._say, stopping))
        self.history: list[dict[str, Any]] = []
        self.began, self.in_step, self.exact = False, False, True
        self.final_state: dict[str, Any] = {}
        self._restored: dict[str, Any] = {}
        # The random numbers after the last step of an epoch that is not yet closed.
        self._ended: dict[str, Any] | None = None
        self.resume = None if resume is None else run_folder.find_checkpoint(resume)
        place = run_folder.find_place(config, self.resume)
        self.folder = run_folder.RunFolder(place)
        # Of a run that was moved ``out`` stays as it was: the next resume has to know it again.
        self.config = config.with_overrides(out=config.out or str(place)).resolved()
        self.bar = TrainingBar(self.progress, config.epochs) if shown and self.main else None

    def go(
        self,
        data: Any,
        model: nn.Module | None,
        overwrite: bool,
        callbacks: Sequence[pl.Callback],
    ) -> TrainResult:
        """Train, and write what is written at the end; the folder is locked meanwhile."""
        try:
            saved = self._prepare(data, model, overwrite)
            if self.finished:
                # Everything is trained; what may be missing are the files at the end.
                self.final_state = self._stored_weights(saved)
                return self._finish(None)
            del saved  # Lightning reads it again; two copies are not needed
            return self._train(callbacks)
        finally:
            if self.main:
                self.folder.close()
            if self.bar is not None:
                self.bar.close()

    def _say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.say(text)

    def _prepare(self, data: Any, model: nn.Module | None, overwrite: bool) -> dict[str, Any]:
        """Make data, model and folder ready; the checkpoint to resume from, if there is one."""
        config, place = self.config, self.folder.path
        continues = self.resume is not None and self.resume.parent.resolve() == place.resolve()
        if self.main:
            self.folder.check(resume=continues, overwrite=overwrite)
        run_folder.seed_all(config.seed)
        self.data = load_data(config, data, progress=self.bar is not None)
        self.model = _make_model(config, model, self.data.train)
        if getattr(self.model, "one_scale", False):
            self.data = self.data.one_scale()
        # A copy stays whole where the strategy cuts the model in pieces.
        self.whole = copy.deepcopy(self.model) if config.strategy == "fsdp" else self.model
        saved: dict[str, Any] = {}
        if self.resume is not None:
            saved = run_folder.read_checkpoint(self.resume)
            run_folder.check_checkpoint(self.resume, saved, config, self.model, self.data)
            entry = self._restored = saved[run_folder.ENTRY]
            vars(self.progress).update(entry["progress"])  # in place: the bar holds it too
            self.history = [dict(row) for row in entry["history"]]
            self.exact = entry.get("exact", True)
        self.average = None if config.ema is None else WeightAverage(config.ema)
        if self.main:
            # Not before all of the above went well: an old run is not lost to a typing error.
            self.folder.open(resume=continues, overwrite=overwrite)
            write_text(self.folder.config, config.to_yaml())
            if self.resume is not None and not continues:
                best = run_folder.RunFolder(self.resume.parent).weights
                if config.select == "best" and best.exists():  # of an epoch before the checkpoint
                    write_bytes(self.folder.weights, best.read_bytes())
                if self.finished:  # no other will be written
                    write_bytes(self.folder.checkpoint, self.resume.read_bytes())
        return saved

    def _train(self, callbacks: Sequence[pl.Callback]) -> TrainResult:
        try:
            trainer = self._trainer(callbacks)
        except MisconfigurationException as error:
            names = ("accelerator", "devices", "strategy")
            given = {name: getattr(self.config, name) for name in names}
            why = f": {error} `equilibria info` lists the devices."
            raise OptionError("TrainConfig", given, why) from error
        place: dict[str, Any] = {"device": trainer.strategy.root_device}
        place |= {"rank": trainer.global_rank, "world": trainer.world_size}
        self.batches = TrainBatches(self.data, self.config, self.progress, **place)
        self.module = self._module(trainer)
        try:
            with self.request, processes.announced(self.folder.advice):
                trainer.fit(self.module, self.batches, self.batches.valid, ckpt_path=self.resume)
                result = self._finish(trainer)
        except (_Stop, KeyboardInterrupt):  # the latter: a second Ctrl-C at the end
            raise self._interrupted(trainer) from None
        except SystemExit as error:  # how Lightning ends after a KeyboardInterrupt
            if isinstance(error.__context__, KeyboardInterrupt):
                raise self._interrupted(trainer) from None
            raise
        except RuntimeError as error:
            if trainer.world_size == 1 or not processes.is_lost(error):
                raise
            processes.leave_children(trainer, kill=True)
            raise ProcessLostError(
                "The processes of the training lost each other: one was killed, failed (it says "
                "why itself), or did not answer for process_timeout="
                f"{self.config.process_timeout:g} s. {self.folder.advice()}"
            ) from error
        if self.request.asked:  # too late to cut anything short; who asked wants nothing to follow
            said = "Interrupted as the last epoch ended: the training is complete, with all its"
            said += f" files in {result.folder}. There is nothing left to resume."
            raise Interrupted(said, result.checkpoint)
        return result

    def _trainer(self, callbacks: Sequence[pl.Callback]) -> pl.Trainer:
        config = self.config
        # After the average and before all others: a step that an exception of a later one ends
        # counts.
        count = LambdaCallback(
            on_train_batch_start=self._begin_step, on_train_batch_end=self._count_step
        )
        own = [callback for callback in (self.average, count, self.bar) if callback is not None]
        joint = [processes.JointNorms()] if config.sync_batchnorm else []
        return pl.Trainer(
            max_epochs=max(1, config.epochs - self.progress.epoch),
            accelerator=config.accelerator,
            devices=list(config.devices) if isinstance(config.devices, tuple) else config.devices,
            num_nodes=config.nodes,
            strategy=processes.Sharded() if config.strategy == "fsdp" else config.strategy,
            precision=config.precision,  # type: ignore[arg-type]
            callbacks=[*own, *callbacks, self],
            plugins=[run_folder.CheckpointFile(), *joint],
            default_root_dir=self.folder.path,
            logger=make_loggers(config, self.folder, self.progress.step) or False,
            log_every_n_steps=1,
            enable_progress_bar=self.bar is not None,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0 if self.data.valid is None else 1.0,
            # The first epoch after a resume is shorter than the others.
            reload_dataloaders_every_n_epochs=1,
            # The batches are shared out already.
            use_distributed_sampler=False,
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size > 1 and not self.config.compile:  # which takes minutes, of each
            processes.limit_wait(self.config.process_timeout)

    def _module(self, trainer: pl.Trainer) -> EquilibriumModule:
        if self.config.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        module = EquilibriumModule(
            self.model.train(),
            self.config,
            num_classes=self.data.train.num_classes,
            task=self.data.train.task,
            ignore_index=self.data.train.ignore_index,
            total_steps=self.config.epochs * self.batches.per_epoch,
            steps_per_epoch=self.batches.per_epoch,
        )
        module.logs = False
        uneven = self.data.train.ignore_index is not None or self.batches.uneven
        module.weighs = trainer.world_size > 1 and uneven
        module.on_nonfinite = lambda found: self._nonfinite(self.progress.step, found, trainer)
        return module

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint.pop("loops", None)
        checkpoint[run_folder.ENTRY] = {
            "format": run_folder.FORMAT,
            "version": __version__,
            "config": self.config.to_dict(),
            "images": len(self.data.train),
            "revision": self.config.model_revision,
            "progress": vars(self.progress).copy(),
            "history": [dict(row) for row in self.history],
            "finished": self.finished,
            "exact": self.exact,
            "random": self._ended or run_folder.random_state(),
            "metrics": self.module.metrics.state_dict(),
        }

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or too many went by without a better one.

        An epoch that was begun is brought to its end: its weights have no other numbers.
        """
        done, patience = len(self.history), self.config.early_stop or math.inf
        enough = done >= self.config.epochs or done - _best_epoch(self.history) >= patience
        return enough and not self.progress.batch

    def save(self, trainer: pl.Trainer) -> None:
        """Write last.ckpt, whole or not at all; also where the folder was removed under the run,
        which then ends: its logs and the weights of earlier epochs are gone."""
        lost = self._lost()
        if lost:
            self.folder.open(resume=False)
            write_text(self.folder.config, self.config.to_yaml())
        trainer.save_checkpoint(self.folder.checkpoint, weights_only=False)
        if lost:
            raise SaveError(
                errno.ENOENT,
                f"{self.folder.path} was removed or moved while the run was writing to it. It was "
                "made again, with config.yaml and last.ckpt: nothing of the training is lost. "
                f"Resume from {self.folder.path}",
            )

    def _lost(self) -> bool:
        """Whether the folder is the run's no more. A lock that alone was removed is made again."""
        if not self.main or self.folder.lock.held():
            return False
        file = self.folder.config
        there = file.is_file() and file.read_text(encoding="utf-8") == self.config.to_yaml()
        if there:
            self.folder.lock.take()
        return not there

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.module.step = self.progress.step
        if self._restored and trainer.world_size == 1:
            run_folder.restore_random_state(self._restored["random"])
        if trainer.global_rank:
            run_folder.seed_all(self.config.seed + self.progress.step + trainer.global_rank)
        elif self._restored:  # the sums of all processes
            self.module.metrics.load_state_dict(self._restored["metrics"])
        self.began = True
        if self.config.keep_every is not None and self.progress.step == 0:
            self._write_weights(self.folder.epoch(0), {})
        self.request.listen()
        if self._asked(trainer):
            raise _Stop

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.progress.batch == self.batches.per_epoch:  # stopped in its validation, or after it
            self._ended = self._restored["random"]
            if trainer.enable_validation:
                trainer.validating = True
                trainer.fit_loop.epoch_loop.val_loop.run()
                trainer.training = True

    def _begin_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self.in_step = True
        # After the step the schedule has moved on: at a milestone to another order of magnitude.
        self.progress.rate = float(trainer.optimizers[0].param_groups[0]["lr"])

    def _count_step(self, *_: Any) -> None:
        self.progress.batch += 1
        self.progress.step += 1
        self.in_step = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        logged = (self.progress.step - 1) % self.config.log_every == 0
        last = self.progress.batch == self.batches.per_epoch
        if logged:  # the one place in a step where the host waits for the device
            self._check_finite(trainer)
            latest = self.module.metrics.latest()
            norm = self.module.metrics.gradient_norm
            norms = {} if norm is None else {"gradient_norm": float(norm)}
            self._log(trainer, "train", {**latest, **norms, "lr": self.progress.rate})
            if self.bar is not None:
                self.bar.latest = latest
        if last:
            self._ended = run_folder.random_state()
        # After the last batch the epoch is brought to its end first.
        if (logged or trainer.world_size == 1) and self._asked(trainer) and not last:
            self.save(trainer)
            raise _Stop

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.module.metrics.end_steps()
        self._share_buffers(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check_finite(trainer)
        if self._lost():
            self.save(trainer)
        metrics = self.module.metrics
        if trainer.world_size > 1:
            metrics.reduce(self.module.device)
        means = metrics.row()
        row: dict[str, Any] = {
            "epoch": self.progress.epoch + 1,
            "step": self.progress.step,
            "lr": self.progress.rate,
            "train_loss": means.pop("loss"),
            "train_accuracy": means.pop("accuracy"),
            **self.module.validation,
            **means,
            **metrics.speed(),
        }
        # Files first, then what the checkpoint will say of them: one that is written in between, on
        # a second Ctrl-C, stands before all this, and it is done again.
        self._write_epoch(row)
        self.request.held = True
        self.history.append(row)
        self.progress.epoch, self.progress.batch, self._ended = row["epoch"], 0, None
        self.module.metrics, self.module.validation = EpochMetrics(), {}
        self.request.held = False
        if self.finished:
            trainer.should_stop = True
        self.save(trainer)
        self._log(trainer, "epoch", row)
        self._say(epoch_line(row, self.config.epochs))
        # Over processes all have to ask. A run that is finished goes on to write its files.
        if self._asked(trainer) and not self.finished:
            raise _Stop

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.average is not None:
            self.average.apply()
        self._share_buffers(trainer)
        self.final_state = {
            name.removeprefix("model."): value.detach().to("cpu", copy=True)
            for name, value in trainer.strategy.lightning_module_state_dict().items()
            if name.startswith("model.")
        }

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # A second Ctrl-C, or one that came from elsewhere: save what there is. With more than one
        # process the others are in the middle of something, and saving would hang.
        if isinstance(exception, KeyboardInterrupt) and trainer.world_size == 1:
            if self.average is not None:
                self.average.restore()
            self.exact &= not self.in_step
            if self.began and self.progress.step:  # before, the checkpoint is as it should be
                self.save(trainer)

    def _share_buffers(self, trainer: pl.Trainer) -> None:
        """The statistics of batch norms are each process's own: take those of the first."""
        if trainer.world_size > 1:
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, src=0)

    def _asked(self, trainer: pl.Trainer) -> bool:
        """Whether the run should stop; over processes, whether any of them was asked to."""
        if trainer.world_size > 1:
            flag = torch.tensor(float(self.request.asked), device=self.module.device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            if not flag:  # what was asked for meanwhile waits for the next time, by all of them
                return False
            self.request.asked = True
        return self.request.asked

    def _check_finite(self, trainer: pl.Trainer) -> None:
        step = self.module.guard.first_bad()
        if step is not None:
            # Noted on the device some steps ago: make that batch again and look at it now. The
            # weights have not moved since.
            batch = self.batches.batch(*divmod(step, self.batches.per_epoch))
            precision = trainer.precision_plugin
            with precision.forward_context():
                looked = self.module.examine(*precision.convert_input(batch))
            found = {"what": "loss or its gradient", "value": "NaN or infinite", **looked}
            self._nonfinite(step, found, trainer)

    def _log(self, trainer: pl.Trainer, group: str, values: Mapping[str, float]) -> None:
        finite = {f"{group}/{k}": float(v) for k, v in values.items() if math.isfinite(v)}
        for logger in trainer.loggers:
            logger.log_metrics(finite, self.progress.step)

    def _write_epoch(self, row: dict[str, Any]) -> None:
        """The files of an epoch: the history, and the weights if it is the best or one to keep."""
        rows, every = [*self.history, row], self.config.keep_every
        if self.main:
            self.folder.write_history(rows)
        best = self.config.select == "best" and _best_epoch(rows) == row["epoch"]
        kept = every is not None and row["epoch"] % every == 0
        if best or kept:
            with nullcontext() if self.average is None else self.average.in_place():
                if best:
                    self._write_weights(self.folder.weights, row)
                if kept:
                    self._write_weights(self.folder.epoch(row["epoch"]), row)

    def _write_weights(self, path: Path, row: Mapping[str, Any]) -> None:
        if self.main:
            self.folder.write_weights(path, self.whole, self.data, self.config, row)

    def _nonfinite(self, step: int, found: dict[str, Any], trainer: pl.Trainer) -> NoReturn:
        epoch, number = divmod(step, self.batches.per_epoch)
        report = {
            "epoch": epoch + 1,
            "batch": number,
            "step": step,
            **found,
            "indices": self.data.rows(self.batches.indices(epoch, number)),
            "data": self.data.train.name,
            "config": self.config.to_dict(),
        }
        # One name for each process that finds something.
        rank = trainer.global_rank
        path = self.folder.nonfinite.with_suffix(f".{rank}.json" if rank else ".json")
        write_json(path, report)
        raise NonFiniteLoss(f"{describe(report)} The report is {path}.", report, path)

    def _interrupted(self, trainer: pl.Trainer) -> Interrupted:
        processes.leave_children(trainer, kill=False)
        here, folder = self.progress, self.folder
        where = f"{here.epoch} of {self.config.epochs} epochs and {here.batch} batches of the next"
        if not folder.checkpoint.exists():
            return Interrupted(f"Interrupted after {where}; nothing was saved yet.", None)
        exact = "" if self.exact else " A step was cut in two: going on is not bit for bit."
        return Interrupted(
            f"Interrupted after {where}. Saved {folder.checkpoint}.{exact}",
            folder.checkpoint,
            exact=self.exact,
            folder=folder.path,
        )

    def _stored_weights(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The weights that a complete checkpoint stands for: its average, if it has one."""
        state = saved["state_dict"]
        self.model.load_state_dict({k.removeprefix("model."): v for k, v in state.items()})
        if self.average is not None:
            self.average.load_state_dict(saved["callbacks"][self.average.state_key])
            self.average.follow(self.model)
            self.average.apply()
        return dict(self.model.state_dict())

    def _recorded(self) -> bool:
        """Whether result.json is there, with the time and the device of the training that ended."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return bool(json.loads(self.folder.result.read_bytes())["epochs"] == len(self.history))
        return False

    def _finish(self, trainer: pl.Trainer | None) -> TrainResult:
        model, row = self.whole.cpu(), dict(self.history[-1])
        if self.config.select == "best" and self.folder.weights.exists():
            row = dict(self.history[_best_epoch(self.history) - 1])
            if trainer is not None:
                trainer.strategy.barrier("best weights written")
            model.load_state_dict(safetensors.torch.load_file(self.folder.weights))
        else:
            model.load_state_dict(self.final_state)
            self._write_weights(self.folder.weights, row)
        metrics = {
            name: float(value)
            for name, value in row.items()
            if name.startswith(("train_", "val_")) or name in ("solver_steps", "residual")
        }
        if self.main:
            self.folder.write_history(self.history)
        if self.main and not (trainer is None and self._recorded()):
            device = torch.device("cpu") if trainer is None else trainer.strategy.root_device
            described: Any = getattr(model, "config", None)
            known = isinstance(described, models.ModelConfig)
            result = {
                "metrics": metrics,
                "epoch": row["epoch"],
                "epochs": len(self.history),
                "parameters": models.count_parameters(model),
                "model": described.to_dict() if known else {"name": type(model).__name__},
                "data": self.data.describe(),
                "processes": 1 if trainer is None else trainer.world_size,
                "resumed": self.resume is not None,
            }
            result |= run_folder.provenance(self.started, device, self.config.seed)
            write_json(self.folder.result, result)
        if trainer is not None:
            trainer.strategy.barrier("result written")
        if self.main:  # everything is written, also where a warning is an error
            warn_unsettled(row)
        files = (self.folder.path, self.folder.weights, self.folder.checkpoint)
        return TrainResult(*files, metrics, self.history, model.eval())


def _best_epoch(history: Sequence[Mapping[str, float]]) -> int:
    """The first with the highest mean IoU or accuracy, and at equal ones the smallest loss; 0 where
    nothing was validated."""
    scores = [(-math.inf, -math.inf)]
    for row in history:
        right = row.get("val_miou", row.get("val_accuracy", -math.inf))
        scores.append((right, -row.get("val_loss", math.inf)))
    return max(range(len(scores)), key=scores.__getitem__)


def _make_model(config: TrainConfig, given: nn.Module | None, train: ImageData) -> nn.Module:
    if given is None:
        card = models.describe(config.model)
        if card.task != train.task:
            raise ValueError(
                f"{config.model} is a network for {card.task}, and {train.name} is data for "
                f"{train.task}; models.names(task={train.task!r}) lists what fits."
            )
        height, width = train.images.shape[2:]
        if card.task == "classification" and height != width:
            raise ValueError(
                f"{train.name} has images of {width} × {height} pixels, and {config.model} "
                "classifies squares: give an image_size (--image-size)."
            )
        given = models.create(
            config.model,
            train.num_classes,
            in_channels=train.channels,
            image_size=int(height) if height == width else None,
            **config.model_options,
        )
    elif not isinstance(given, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(given).__name__}.")
    # Before a checkpoint is read: Lightning converts after it, and float64 would be rounded.
    return given.to(_DTYPES[config.precision]) if config.precision in _DTYPES else given


@contextmanager
def _lightning_without_remarks() -> Iterator[None]:
    """On what it found and what one could buy; warnings stay."""
    levels = {name: logging.getLogger(name).level for name in _LIGHTNING}
    for name in _LIGHTNING:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Lightning looks for workers of a DataLoader; our batches are made on the device.
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            # Lightning's use of a part of torch that has a new name.
            warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

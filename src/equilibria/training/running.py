"""A run from its beginning to its files: prepare, train, end well or badly, write the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from equilibria import models
from equilibria.data import ImageData

from .averaging import Average, WeightAverage
from .checkpoints import ENTRY, WholeFiles, check_checkpoint, find_checkpoint, read_checkpoint
from .config import TrainConfig
from .folder import RunFolder, provenance
from .interrupts import Interrupted, Stop, StopRequest
from .keeper import RunKeeper, StepCounter
from .module import EquilibriumModule
from .nonfinite import NonFiniteLoss, describe
from .preparing import Prepared, prepare, read_weights, save_weights
from .progress import RichDisplay, SilentDisplay
from .randomness import seed_all
from .standing import Standing
from .storing import write_bytes, write_json
from .streams import ImageStreams
from .watching import warn_unsettled

__all__ = ["Run", "TrainResult", "process_rank"]


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
    """One entry an epoch."""
    model: nn.Module = field(repr=False)
    """The model with those weights, on the CPU, in eval mode."""


class Run:
    """The steps of ``fit``, in order."""

    def __init__(
        self,
        config: TrainConfig,
        resume: str | Path | None,
        data: tuple[ImageData, ImageData | None] | None,
        model: nn.Module | None,
        display: SilentDisplay,
        overwrite: bool,
        callbacks: tuple[pl.Callback, ...],
    ) -> None:
        self.started = datetime.now(UTC)
        self.main = process_rank() == 0
        self.display, self.callbacks = display, callbacks
        self.resume = None if resume is None else find_checkpoint(resume)
        place = config.folder
        if self.resume is not None and config.out is None:
            place = self.resume.parent
        self.folder = RunFolder(place)
        self.config = config.with_overrides(out=str(place)).resolved()
        continues = self.resume is not None and _same_place(self.resume.parent, place)
        if self.main:
            self.folder.check(resume=continues, overwrite=overwrite)
        seed_all(config.seed)
        self.made: Prepared = prepare(
            self.config, data, model, progress=isinstance(display, RichDisplay)
        )
        self.saved: dict[str, Any] = {}
        if self.resume is not None:
            self.saved = read_checkpoint(self.resume)
            check_checkpoint(self.resume, self.saved, self.config, self.made.model)
        if self.main:
            # Not before all of the above went well: an old run is not lost to a typing error.
            self.folder.open(resume=continues)
            self.folder.write_config(self.config)
            if self.resume is not None and not continues and config.select == "best":
                best = RunFolder(self.resume.parent).weights
                if best.exists():  # of an epoch before the checkpoint
                    write_bytes(self.folder.weights, best.read_bytes())

    def go(self) -> TrainResult:
        request = StopRequest(self._tell_stopping)
        average = None if self.config.ema is None else WeightAverage(self.config.ema)
        keeper = RunKeeper(
            self.config,
            self.folder,
            per_epoch=1,
            request=request,
            display=self.display,
            average=average,
            save_best=self._save_best,
            keep_epoch=self._keep_epoch,
        )
        if self.saved and self._complete():
            # Everything is trained; what may be missing are the files at the end.
            keeper.load_state_dict(self.saved["callbacks"][keeper.state_key])
            keeper.final_state = self._finished_weights()
            return self._finish(keeper, torch.device("cpu"), 1)
        trainer = self._trainer(keeper, average)
        self.saved = {}  # Lightning reads it again; two copies are not needed
        module, streams = self._module(trainer, keeper)
        path = None if self.resume is None else str(self.resume)
        try:
            with request:
                trainer.fit(module, datamodule=streams, ckpt_path=path)
                device, world = trainer.strategy.root_device, trainer.world_size
                result = self._finish(keeper, device, world, trainer)
        except (Stop, KeyboardInterrupt):  # the latter: a second Ctrl-C as the files were written
            raise self._interrupted(keeper) from None
        except SystemExit as error:  # how Lightning ends after a KeyboardInterrupt
            if isinstance(error.__context__, KeyboardInterrupt):
                raise self._interrupted(keeper) from None
            raise
        if request.asked:  # too late to cut anything short; who asked wants nothing to follow
            raise self._completed(result)
        return result

    # ------------------------------------------------------------------ before

    def _standing(self) -> Standing:
        return Standing(**self.saved[ENTRY]["standing"]) if self.saved else Standing()

    def _complete(self) -> bool:
        entry = self.saved[ENTRY]
        return bool(entry["standing"]["epoch"] >= self.config.epochs) or (
            bool(entry["finished"]) and self.config.early_stop is not None
        )

    def _trainer(self, keeper: RunKeeper, average: WeightAverage | None) -> pl.Trainer:
        config = self.config
        own: list[pl.Callback] = [StepCounter(keeper)]
        own += [] if average is None else [average]
        strategy: Any = config.strategy
        if strategy == "fsdp":
            from lightning.pytorch.strategies import FSDPStrategy

            strategy = FSDPStrategy(state_dict_type="full")
        devices: Any = list(config.devices) if isinstance(config.devices, tuple) else config.devices
        return pl.Trainer(
            max_epochs=config.epochs - self._standing().epoch,
            accelerator=config.accelerator,
            devices=devices,
            num_nodes=config.nodes,
            strategy=strategy,
            precision=config.precision,  # type: ignore[arg-type]
            callbacks=[*own, *self.callbacks, keeper],
            plugins=[WholeFiles()],
            default_root_dir=self.folder.path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0 if self.made.valid is None else 1.0,
            # The first epoch after a resume is shorter than the others.
            reload_dataloaders_every_n_epochs=1,
            # The streams shard by themselves.
            use_distributed_sampler=False,
        )

    def _module(
        self, trainer: pl.Trainer, keeper: RunKeeper
    ) -> tuple[EquilibriumModule, ImageStreams]:
        made, config = self.made, self.config
        streams = ImageStreams(
            made.train,
            made.valid,
            config,
            keeper.standing,
            device=trainer.strategy.root_device,
            rank=trainer.global_rank,
            world=trainer.world_size,
        )
        keeper.per_epoch = streams.per_epoch
        if config.channels_last:
            made.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        module = EquilibriumModule(
            made.model.train(),
            config,
            num_classes=made.train.num_classes,
            task=made.train.task,
            ignore_index=made.train.ignore_index,
            total_steps=config.epochs * streams.per_epoch,
            steps_per_epoch=streams.per_epoch,
        )

        def stop(found: dict[str, Any]) -> NoReturn:
            self._nonfinite(found, trainer, module, streams, keeper)

        module.on_nonfinite = stop
        return module, streams

    # ------------------------------------------------------------------ when it ends badly

    def _nonfinite(
        self,
        found: dict[str, Any],
        trainer: pl.Trainer,
        module: EquilibriumModule,
        streams: ImageStreams,
        keeper: RunKeeper,
    ) -> NoReturn:
        step = int(found.pop("deferred_step", keeper.standing.step))
        epoch, number = divmod(step, streams.per_epoch)
        if "what" not in found:
            # Noted on the device some steps ago: make that batch again and look at it now. The
            # weights have not moved since.
            x, y = streams.batch(epoch, number)
            with trainer.precision_plugin.forward_context():
                looked = module.examine(x, y)
            found = {"what": "loss or its gradient", "value": "NaN or infinite", **looked}
        report = {
            "epoch": epoch + 1,
            "batch": number,
            "step": step,
            **found,
            "indices": self.made.rows(streams.indices(epoch, number)),
            "data": self.made.train.name,
            "config": self.config.to_dict(),
        }
        # One name for each process that finds something.
        rank = trainer.global_rank
        path = self.folder.nonfinite if not rank else self.folder.path / f"nonfinite.{rank}.json"
        write_json(path, report)
        raise NonFiniteLoss(f"{describe(report)} The report is {path}.", report, path)

    def _tell_stopping(self) -> None:
        self.display.say("stopping after this step; Ctrl-C again stops at once")

    def _interrupted(self, keeper: RunKeeper) -> Interrupted:
        here = keeper.standing
        where = f"{here.epoch} of {self.config.epochs} epochs and {here.batch} batches of the next"
        if not self.folder.checkpoint.exists():
            return Interrupted(f"Interrupted after {where}; nothing was saved yet.", None)
        exact = "" if keeper.exact else " A step was cut in two: going on is not bit for bit."
        return Interrupted(
            f"Interrupted after {where}. Saved {self.folder.checkpoint}.{exact} Go on with "
            f"fit(TrainConfig.from_yaml({str(self.folder.config)!r}), "
            f"resume={str(self.folder.path)!r}).",
            self.folder.checkpoint,
            exact=keeper.exact,
        )

    @staticmethod
    def _completed(result: TrainResult) -> Interrupted:
        return Interrupted(
            f"Interrupted as the last epoch ended: the training is complete, with all its files in "
            f"{result.folder}. There is nothing left to resume.",
            result.checkpoint,
        )

    # ------------------------------------------------------------------ after

    def _finished_weights(self) -> dict[str, Any]:
        """The weights that a complete checkpoint stands for: its average, if it has one."""
        model = self.made.model
        state = self.saved["state_dict"]
        model.load_state_dict({k.removeprefix("model."): v for k, v in state.items()})
        if self.config.ema is not None:
            average = Average(model, self.config.ema)
            average.load_state_dict(self.saved["callbacks"]["WeightAverage"])
            average.apply()
        return dict(model.state_dict())

    def _save_best(self, row: dict[str, float]) -> None:
        if self.main:
            save_weights(self.made, self.folder.weights, self.config, row)

    def _keep_epoch(self, epoch: int, row: dict[str, float]) -> None:
        if self.main:
            save_weights(self.made, self.folder.epoch(epoch), self.config, row)

    def _finish(
        self,
        keeper: RunKeeper,
        device: torch.device,
        world: int,
        trainer: pl.Trainer | None = None,
    ) -> TrainResult:
        model = self.made.plain_model()
        row = dict(keeper.history[-1])
        best = self.config.select == "best" and self.folder.weights.exists()
        if best:
            row = dict(keeper.history[keeper.ranking.epoch - 1])
            if trainer is not None:
                trainer.strategy.barrier("best weights written")
            model.load_state_dict(read_weights(self.folder.weights))
        else:
            model.load_state_dict(keeper.final_state)
            if self.main:
                save_weights(self.made, self.folder.weights, self.config, row)
        metrics = {
            name: float(value)
            for name, value in row.items()
            if name.startswith(("train_", "val_")) or name in ("solver_steps", "residual")
        }
        if self.main:
            self.folder.write_history(keeper.history)
            self.folder.write_result(
                {
                    "metrics": metrics,
                    "epoch": row["epoch"],
                    "epochs": len(keeper.history),
                    "parameters": models.count_parameters(model),
                    "model": self.made.describe_model(),
                    "data": self.made.describe_data(),
                    "processes": world,
                    "resumed": self.resume is not None,
                    **provenance(self.started, device, self.config.seed),
                }
            )
        if trainer is not None:
            trainer.strategy.barrier("result written")
        if self.main:  # everything is written, also where a warning is an error
            warn_unsettled(row)
        return TrainResult(
            folder=self.folder.path,
            weights=self.folder.weights,
            checkpoint=self.folder.checkpoint,
            metrics=metrics,
            history=keeper.history,
            model=model.eval(),
        )


def process_rank() -> int:
    """This process among all, known before there is a trainer: from the environment."""
    return int(getattr(rank_zero_only, "rank", 0) or 0)


def _same_place(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()

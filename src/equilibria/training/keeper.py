"""The keeper of a run: where it stands, what it logged, what it saved, when it stops."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from equilibria._version import __version__

from .averaging import WeightAverage
from .checkpoints import ENTRY, FORMAT
from .config import TrainConfig
from .folder import RunFolder
from .interrupts import Stop, StopRequest
from .logs import ScalarLog
from .module import EquilibriumModule
from .progress import SilentDisplay
from .randomness import random_state, restore_random_state, seed_all
from .standing import Ranking, Standing
from .storing import SaveError
from .tally import Tally

__all__ = ["RunKeeper", "StepCounter"]


class StepCounter(pl.Callback):
    """The first of the callbacks: a step that an exception of a later one ends still counts."""

    def __init__(self, keeper: RunKeeper) -> None:
        self.keeper = keeper

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.keeper.begin_step()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self.keeper.count_step(_ours(pl_module))


class RunKeeper(Checkpoint):
    """Counts steps, reads the tally every ``log_every`` steps, writes history and checkpoint.

    Lightning's own loop state is not saved: a resumed run is a new fit over the epochs that are
    left, whose first one begins after the batches that were done. All that decides the numbers
    (weights, optimizer, schedule, average, random numbers, sums of the epoch) is in the checkpoint.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        *,
        per_epoch: int,
        request: StopRequest,
        display: SilentDisplay,
        average: WeightAverage | None,
        save_best: Callable[[dict[str, float]], None],
        keep_epoch: Callable[[int, dict[str, float]], None],
    ) -> None:
        self.config, self.folder, self.per_epoch = config, folder, per_epoch
        self.request, self.display, self.average = request, display, average
        self.save_best, self.keep_epoch = save_best, keep_epoch
        self.standing = Standing()
        self.history: list[dict[str, Any]] = []
        self.ranking = Ranking()
        self.finished = False
        """All epochs done, or stopped early."""
        self.exact = True
        """Whether the latest checkpoint stands between two steps."""
        self.final_state: dict[str, Any] = {}
        self._log: ScalarLog | None = None
        self._random: dict[str, Any] | None = None
        self._tally: dict[str, Any] | None = None
        self._window: dict[str, float] | None = None
        self._window_began = self._epoch_began = time.perf_counter()
        self._epoch_seen = 0.0
        self._in_step = False
        self._ended: dict[str, Any] | None = None
        """The random numbers after the last step of an epoch that is not yet closed."""

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {
            "standing": vars(self.standing).copy(),
            "history": [dict(row) for row in self.history],
            "ranking": {"best": list(self.ranking.best), "epoch": self.ranking.epoch},
            "finished": self.finished,
            "random": self._ended or random_state(),
            "tally": self._tally,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self.standing).update(state_dict["standing"])  # in place: the streams hold it too
        self.history = [dict(row) for row in state_dict["history"]]
        ranking = state_dict["ranking"]
        self.ranking = Ranking((ranking["best"][0], ranking["best"][1]), ranking["epoch"])
        self.finished = state_dict["finished"]
        self._random, self._tally = state_dict["random"], state_dict["tally"]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint.pop("loops", None)
        checkpoint[ENTRY] = {
            "format": FORMAT,
            "version": __version__,
            "config": self.config.to_dict(),
            "revision": self.config.model_revision,
            "standing": vars(self.standing).copy(),
            "finished": self.finished,
            "exact": self.exact,
        }

    def save(self, trainer: pl.Trainer, module: EquilibriumModule) -> None:
        """Write last.ckpt, whole or not at all."""
        self._tally = module.tally.state_dict()
        try:
            trainer.save_checkpoint(self.folder.checkpoint, weights_only=False)
        except SaveError as error:
            done = f"{self.standing.epoch} epochs and {self.standing.batch} batches"
            raise SaveError(
                error.errno,
                f"{error.strerror}. The run stopped after {done}; resume from the checkpoint that "
                f"is there with resume={str(self.folder.path)!r}",
            ) from error

    # ------------------------------------------------------------------ Lightning's hooks

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = _ours(pl_module)
        module.step, module.kept = self.standing.step, True
        module.tally = Tally()
        if self._tally is not None:
            module.tally.load_state_dict(self._tally)
        if self._random is not None and trainer.world_size == 1:
            restore_random_state(self._random)
        elif trainer.global_rank:
            seed_all(self.config.seed + self.standing.step + trainer.global_rank)
        self._window = dict(module.tally.total)
        self._window_began = self._epoch_began = time.perf_counter()
        self._epoch_seen = module.tally.total["count"]
        if trainer.is_global_zero:
            self._log = ScalarLog(self.folder.logs, self.standing.step)
        here = self.standing
        if self.config.keep_every is not None and here.step == 0:
            self.keep_epoch(0, {})
        self.display.start(self.config.epochs, self.per_epoch, here.epoch, here.batch)
        self.request.listen()
        if self._asked(trainer, module):
            raise Stop

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.standing.batch == self.per_epoch:  # a run that was stopped in this validation
            self._ended = self._random
            if trainer.enable_validation:
                trainer.validating = True
                trainer.fit_loop.epoch_loop.val_loop.run()
                trainer.training = True

    def begin_step(self) -> None:
        """Called before anything else in a step."""
        self._in_step = True

    def count_step(self, module: EquilibriumModule) -> None:
        """Called before all other callbacks once the weights have moved."""
        self.standing.batch += 1
        self.standing.step += 1
        module.step = self.standing.step
        self._in_step = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        module = _ours(pl_module)
        logged = (self.standing.step - 1) % self.config.log_every == 0
        if logged:
            self._read(trainer, module)
        self.display.step(self.standing.epoch, self.standing.batch)
        if self.standing.batch == self.per_epoch:
            self._ended = random_state()
        # After the last batch the epoch is brought to its end first.
        asked = self._asked(trainer, module) if logged or trainer.world_size == 1 else False
        if asked and self.standing.batch < self.per_epoch:
            self.save(trainer, module)
            raise Stop

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.display.validating()
        self._share_buffers(trainer, _ours(pl_module))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = _ours(pl_module)
        self._check_finite(module)
        module.tally.read()
        if trainer.world_size > 1:
            module.tally.reduce(module.device)
        row = self._row(trainer, module)
        better = self.ranking.better(row)
        # Files first, then what the checkpoint will say of them: one that is written in between,
        # on a second Ctrl-C, stands before all this, and it is done again.
        self._write_epoch(trainer, row, best=better and self.config.select == "best")
        self._begin_epoch(module, row, better)
        self.finished = self.standing.epoch >= self.config.epochs
        if self.ranking.waited(row) >= (self.config.early_stop or math.inf):
            self.finished = trainer.should_stop = True
        self.save(trainer, module)
        if self._log is not None:
            self._log.add("epoch", row, self.standing.step)
        self.display.epoch(row, self.config.epochs)
        # Over processes all have to ask. A run that is finished goes on to write its files.
        if self._asked(trainer, module) and not self.finished:
            raise Stop

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.average is not None and self.average.average is not None:
            self.average.average.apply()
        self._share_buffers(trainer, _ours(pl_module))
        state = trainer.strategy.lightning_module_state_dict()
        self.final_state = {
            name.removeprefix("model."): value.detach().to("cpu", copy=True)
            for name, value in state.items()
            if name.startswith("model.")
        }
        self.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # A second Ctrl-C, or one that came from elsewhere: save what there is. With more than one
        # process the others are in the middle of something, and saving would hang.
        if isinstance(exception, KeyboardInterrupt) and trainer.world_size == 1:
            if self.average is not None and self.average.average is not None:
                self.average.average.restore()
            self.exact = not self._in_step
            if self.standing.step:
                self.save(trainer, _ours(pl_module))
        self.close()

    def close(self) -> None:
        """Put display and logs away."""
        self.display.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    # ------------------------------------------------------------------ the parts

    @staticmethod
    def _share_buffers(trainer: pl.Trainer, module: EquilibriumModule) -> None:
        """The statistics of batch norms are each process's own: take those of the first."""
        if trainer.world_size > 1 and module.config.strategy != "fsdp":
            for buffer in module.model.buffers():
                torch.distributed.broadcast(buffer, src=0)

    def _asked(self, trainer: pl.Trainer, module: EquilibriumModule) -> bool:
        """Whether the run should stop; over processes, whether any of them was asked to."""
        if trainer.world_size == 1:
            return self.request.asked
        flag = torch.tensor(float(self.request.asked), device=module.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        self.request.asked = bool(flag)
        return self.request.asked

    def _check_finite(self, module: EquilibriumModule) -> None:
        bad = module.guard.first_bad()
        if bad is not None:
            module.on_nonfinite({"deferred_step": bad})

    def _read(self, trainer: pl.Trainer, module: EquilibriumModule) -> None:
        """The one place in a step where the host waits for the device."""
        module.tally.read()
        self._check_finite(module)
        latest = {**module.tally.means(self._window), **module.tally.solver_means()}
        now = time.perf_counter()
        seen = module.tally.total["count"] - (self._window or {"count": 0.0})["count"]
        if self._log is not None:
            rate = seen / max(now - self._window_began, 1e-9)
            more = {
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
                "gradient_norm": module.tally.grad_norm,
                "samples_per_second": rate,
            }
            self._log.add("train", {**latest, **more}, self.standing.step)
        self._window, self._window_began = dict(module.tally.total), now
        self.display.numbers(latest)

    def _row(self, trainer: pl.Trainer, module: EquilibriumModule) -> dict[str, Any]:
        """The row of the epoch that ends, in the history."""
        tally = module.tally
        seconds = time.perf_counter() - self._epoch_began
        means = tally.means()
        return {
            "epoch": self.standing.epoch + 1,
            "step": self.standing.step,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "train_loss": means["loss"],
            "train_accuracy": means["accuracy"],
            **module.validation,
            **tally.solver_means(),
            "seconds": round(seconds, 3),
            "images_per_second": round((tally.total["count"] - self._epoch_seen) / seconds, 1),
        }

    def _write_epoch(self, trainer: pl.Trainer, row: dict[str, Any], *, best: bool) -> None:
        """The files of an epoch: the history, and the weights if it is the best or one to keep."""
        if trainer.is_global_zero:
            self.folder.write_history([*self.history, row])
        kept = self.config.keep_every is not None and row["epoch"] % self.config.keep_every == 0
        if best or kept:
            with nullcontext() if self.average is None else self.average.in_place():
                if best:
                    self.save_best(row)
                if kept:
                    self.keep_epoch(row["epoch"], row)

    def _begin_epoch(self, module: EquilibriumModule, row: dict[str, Any], better: bool) -> None:
        """The epoch of ``row`` is over: count it, and begin a new tally."""
        self.history.append(row)
        if better:
            self.ranking = self.ranking.after(row)
        self.standing.epoch += 1
        self.standing.batch = 0
        self._ended = None
        module.tally = Tally()
        module.validation = {}
        self._epoch_seen = 0.0
        self._window = dict(module.tally.total)
        self._window_began = self._epoch_began = time.perf_counter()


def _ours(module: pl.LightningModule) -> EquilibriumModule:
    assert isinstance(module, EquilibriumModule)
    return module

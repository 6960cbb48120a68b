"""A log that cannot be written ends with one warning; no thread prints a traceback."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from equilibria.training import SaveError, TrainResult

from .small import At, config, run

pytest.importorskip("tensorboard")


def spoil(folder: Path, how: str) -> None:
    """The folder is removed, or its log cannot be written any more (for root too).

    It is moved away first, at one stroke: the thread of the log may write at this moment.
    """
    lost = folder if how == "removed" else folder / "tensorboard"
    lost.rename(folder.parent / "lost")
    if how == "unwritable":
        lost.write_text("")
    shutil.rmtree(folder.parent / "lost", ignore_errors=True)


@pytest.mark.parametrize("how", ["removed", "unwritable"])
@pytest.mark.parametrize("step", [2, 8])
def test_a_folder_that_is_lost_under_the_run(
    tmp_path: Path, how: str, step: int, capfd: Any, whole_run: TrainResult
) -> None:
    place = config(tmp_path / "run", loggers=["tensorboard"], log_every=1)
    lose = At(step, lambda: spoil(place.folder, how))
    if how == "removed":
        with pytest.raises(SaveError) as caught:
            run(place, callbacks=[lose])
        assert "was removed or moved while the run was writing" in str(caught.value)
        found = run(place, resume=place.folder)
    else:
        with pytest.warns(UserWarning, match=r"the tensorboard log in .* ends here") as seen:
            found = run(place, callbacks=[lose])
        assert len(seen) == 1
    assert "Traceback" not in capfd.readouterr().err
    assert found.history[-1]["train_loss"] == whole_run.history[-1]["train_loss"]
    assert (place.folder / "config.yaml").exists()

"""A log that cannot be written ends with one warning; no thread prints a traceback."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from equilibria.training import SaveError
from tests.optional import optional

from .small import At, config, run

event_file_writer = optional("tensorboard.summary.writer.event_file_writer")


def spoil(folder: Path, how: str) -> None:
    """The folder is removed, or its log cannot be written any more (for root too).

    It is moved away first, at one stroke: the thread of the log may write at this moment.
    """
    lost = folder if how == "removed" else folder / "tensorboard"
    lost.rename(folder.parent / "lost")
    if how == "unwritable":
        lost.write_text("")
    shutil.rmtree(folder.parent / "lost", ignore_errors=True)
    time.sleep(0.05)


@pytest.mark.parametrize("how", ["removed", "unwritable"])
@pytest.mark.parametrize("step", [2, 8])
def test_a_folder_that_is_lost_under_the_run(
    tmp_path: Path, how: str, step: int, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    thread = event_file_writer._AsyncWriterThread
    begin = thread.__init__
    monkeypatch.setattr(  # written at once, not every two minutes
        thread, "__init__", lambda self, queue, file, _: begin(self, queue, file, 0.0)
    )
    expected = run(config(tmp_path / "whole"))
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
    assert found.history[-1]["train_loss"] == expected.history[-1]["train_loss"]
    assert (place.folder / "config.yaml").exists()

"""Traces of steps by `torch.profiler`, and the names of a step's phases in them."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar

from torch.profiler import profile, record_function

_recording = False  # of this process, which has one profiler


def span(name: str) -> AbstractContextManager[object]:
    """Return a context whose operations get a name in the trace, while steps are recorded."""
    return record_function(name) if _recording else nullcontext()


class TorchTraceRecorder:
    """Records operations of the CPU and of a GPU, where there is one. For one thread, but `save`."""

    suffix: ClassVar[str] = ".trace.json.gz"
    folder: ClassVar[str] = "profile"

    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        """Start to record."""
        global _recording
        recorded = profile(record_shapes=False)  # by default, all kinds of devices that there are
        recorded.start()
        self._profile, _recording = recorded, True

    def step(self, number: int) -> AbstractContextManager[object]:
        """Return the context of a step, whose name viewers know."""
        return record_function(f"ProfilerStep#{number}")

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return a context whose operations get a name."""
        return record_function(name)

    def stop(self) -> None:
        """End the recording; `save` can follow on another thread."""
        global _recording
        _recording = False
        if self._profile is not None:
            self._profile.stop()

    def save(self, path: Path) -> None:
        """Write the recording as a Chrome trace, compressed."""
        assert self._profile is not None, "start comes first"
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target)

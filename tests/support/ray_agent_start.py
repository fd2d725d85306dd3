"""Starts the dashboard agent of a Ray node without its modules, which send metrics and serve a dashboard and jobs.

To import them takes a node of a test a second and a half of a core.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # the tests beside it are not Ray's
    from ray.dashboard import utils

    utils.get_all_modules = lambda kind: []
    sys.argv = [*sys.argv[1:], "--minimal"]
    runpy.run_path(sys.argv[0], run_name="__main__")

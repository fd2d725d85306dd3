"""The fixture of rank processes, for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.conformance.cases import Case
from tests.support.conformance.harness import Pool
from tests.support.conformance.server_processes import Kind

KERAS = ("tensorflow", "keras")
FILES = {  # that need more than the cases which their tests are made for
    "tests/programs/keras": (*KERAS, "trainwright.strategies.tensorflow.fit_workers"),
    "tests/conformance/test_parameter_servers": (*KERAS, "trainwright.strategies.tensorflow.ps.parameter_server"),
}


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Idle rank processes, kept between tests and ended after the last. Imports what the chosen tests need."""
    modules: set[str] = set()
    for item in request.session.items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        case = given.get("case", Kind(framework=given.get("framework", "")))
        modules.update(case.imports if isinstance(case, Case | Kind) else ())
        modules.update(*(needed for name, needed in FILES.items() if name in item.nodeid))
    shared = Pool(sorted(modules))
    yield shared
    shared.close()

"""The pool of processes that all conformance tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.conformance.cases import Case
from tests.support.conformance.harness import Pool
from tests.support.conformance.server_processes import Kind


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Idle rank processes, kept between tests and ended after the last. Imports what the chosen tests need."""
    given = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = [params.get("case", Kind(framework=params.get("framework", ""))) for params in given]
    modules = {module for case in chosen if isinstance(case, Case | Kind) for module in case.imports}
    shared = Pool(sorted(modules))
    yield shared
    shared.close()

"""A job under faults: it is trained unbroken, then while processes die and stores fail, and the two are compared.

In reading order: `catalogue` says which faults there are, `schedule` (pure) when each is due, `scene` (pure) what
stands at that moment, `course` drives one run in a process of its own, `injector` strikes, `verdict` (pure) compares,
`trial` puts them together, `page` shows what came of it.
"""

from __future__ import annotations

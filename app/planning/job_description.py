"""Descriptions of jobs: each field as text, functions by fingerprints of their code, to store, compare and show."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainwright.core.events import CODE_FIELD
from trainwright.core.initial_weights import InitialWeights
from trainwright.core.job import FIELD_ORDER, GROUP_OF, Job
from trainwright.core.plan import SUMMED_BY
from trainwright.core.redaction import redact
from trainwright.datasets.dataset import Index
from trainwright.planning.code_fingerprint import MEMORY_ADDRESS, SCHEME, CodeFingerprints

# Fields that determine where or how fast a job runs, but not what it computes.
_FREE = frozenset(
    {
        "storage", "workers", "min_workers", "max_workers", "shrink_s", "spares", "strategy", "plan", "probe",
        "preflight", "accelerator", "checkpoint_steps", "keeper_s", "keep", "failures", "on_crash_loop", "on_oom",
        "failures_an_hour", "place_deadline_s", "hang_deadline_s", "evaluate_epochs", "skip_limit", "preemption_s",
        "replace_stragglers", "devices", "tf_config", "on_loss", "threads_per_worker",
        "tpu", "trackers", "code", "best", "early_stop", "max_time", "profile", *SUMMED_BY,
    }
)  # fmt: skip
_DATA = ", data "  # the text behind it identifies a data set's content, wherever it is stored
_DIGESTS = re.compile(r" \[[0-9a-f]{8}\]|(?:, |\b)functions [0-9a-f]{8}\b")
_DIGEST = re.compile(r"[0-9a-f]{8}")
_HELPER = re.compile(r"\w+\(\) in ")  # a function that is no method
_LISTED = 6  # definitions of one field that are listed


def describe(
    job: Job, *, train: Index | None = None, evaluate: Index | None = None, weights: str = ""
) -> dict[str, str]:
    """Describe every field of a job as text, without secrets. The same job gives the same text in another process.

    Args:
        train: index of the training set.
        evaluate: index of the evaluation set.
        weights: digest of the files of `initial_weights`.
    """
    words = _describe(job, _Codes(), train, evaluate)
    return words | {"initial_weights": words["initial_weights"] + weights}


def imported_sources(job: Job) -> dict[str, str]:
    """Return module name -> file of the user's modules that the job's functions import when called."""
    codes = _Codes()
    _describe(job, codes)
    return codes.imported


def _describe(job: Job, codes: _Codes, train: Index | None = None, evaluate: Index | None = None) -> dict[str, str]:
    words = {name: codes.text(name, job.get(name)) for name in FIELD_ORDER if name != "trackers"}
    if job.training.profile is not None:
        words["profile"] = f"{job.training.profile[0]}:{job.training.profile[-1]}"
    words["trackers"] = ", ".join(type(each).__name__ for each in job.trackers)  # no more: they may hold a secret
    for name, index in (("train", train), ("evaluate", evaluate)):
        dataset = job.get(name)
        if dataset is not None:
            words[name] = f"{dataset!r}, {_rows(index)}{_DATA}{codes.contents(name, dataset.functions, index)}"
    options = InitialWeights.of(job.training.initial_weights)
    if options is not None:  # the same wherever the files are
        how = [(name, getattr(options, name)) for name in ("new", "unused", "rename")]
        named = "".join(f"{name}={codes.text('initial_weights', value)}, " for name, value in how if value)
        words["initial_weights"] = f"{options.path}{_DATA}{named}digest "
    words[CODE_FIELD] = codes.table()
    return {name: redact(text) for name, text in words.items()}


def select_fields(description: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return some fields of a description, with the definitions that they reach."""
    kept = {name: description[name] for name in names}
    scheme, fields = _decode_table(description[CODE_FIELD])
    return {
        **kept,
        CODE_FIELD: _encode_table(scheme, {name: reached for name, reached in fields.items() if name in kept}),
    }


def comparable(old: Mapping[str, str]) -> bool:
    """Return whether the code in an older description can be compared with a description made now."""
    return _decode_table(old.get(CODE_FIELD, ""))[0] == SCHEME


def description_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """List the differences in fields that matter to the result.

    A data set is the same wherever it is stored. More epochs matter only to a schedule, which may depend on the last
    step, and other evaluations only to a scheduler that gets their metric. A value that became a secret since the old
    description was written is no difference, nor is the default of an option that did not exist then. Code is not
    compared where another version of Python or an older trainwright wrote the old description; see `comparable`.
    """
    defaults = {name: _Codes().text(name, Job.default(name)) for name in GROUP_OF if name in new}
    old = defaults | {name: redact(words) for name, words in old.items()}
    before, now = (_decode_table(each.get(CODE_FIELD, "")) for each in (old, new))
    if CODE_FIELD in new and before[0] != now[0]:
        old, new = ({name: _DIGESTS.sub("", words) for name, words in each.items()} for each in (old, new))
    free = _FREE if new["schedule"] != "None" else _FREE | {"epochs"} | _free_epoch(old, new)
    free -= set() if new.get("schedule_metric", "None") == "None" else {"evaluate_epochs"}
    names = [
        name for name in new if name not in free and _essence(name, old.get(name, "")) != _essence(name, new[name])
    ]
    lines: list[str] = []
    for name in names:
        was, words = (_DIGESTS.sub("", each) for each in (old.get(name, "absent"), new[name]))
        reached = (before[1].get(name, {}), now[1].get(name, {}))
        if _essence(name, was) != _essence(name, words):
            lines.append(f"{name}: {was} -> {words}")
        elif not any(reached):  # no definitions are listed: only the digests tell the two apart
            lines.append(f"{name}: {old[name]} -> {new[name]}")
        else:
            lines += _changed(name, *reached)
    return lines


def _free_epoch(old: Mapping[str, str], new: Mapping[str, str]) -> set[str]:
    """Return `epoch_samples` where no epoch, of the old length or the new one, has a short last batch.

    Otherwise a step has other samples now, so that a run would read some again, or not at all.
    """
    lengths = [each.get("epoch_samples", "") for each in (old, new)]
    size = new.get("batch_size", "")
    fits = size.isdecimal() and all(each.isdecimal() and int(each) % int(size) == 0 for each in lengths)
    return {"epoch_samples"} if fits else set()


def _changed(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """List the definitions that a field reaches and that differ."""
    root = next(iter(new), "")
    found = [
        f"{label} {_compared(old[label], new[label])}" for label in new if old.get(label, new[label]) != new[label]
    ]
    # What is reached only now, or no longer, follows from a change elsewhere.
    found = found or [f"{label} is used now, and was not" for label in new if label not in old]
    found = found or [f"{label} was used, and is no longer" for label in old if label not in new]
    found = found or ["it uses the same functions in another order"]
    found = [f"helper {words}" if _HELPER.match(words) and not words.startswith(root) else words for words in found]
    more = len(found) - _LISTED
    return [f"{name}: {words}" for words in found[:_LISTED]] + ([f"{name}: {more} more changes"] if more > 0 else [])


def _compared(old: str, new: str) -> str:
    return "changed" if _DIGEST.fullmatch(old) or _DIGEST.fullmatch(new) else f"changed from {old} to {new}"


def state_relevant_fields(description: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a description that a process's state depends on; see `description_changes`."""
    return {name: _essence(name, words) for name, words in description.items() if name not in _FREE}


def _essence(name: str, words: str) -> str:
    return words.rpartition(_DATA)[2] if name in ("train", "evaluate", "initial_weights") else words


def _rows(index: Index | None) -> str:
    return f"{index.rows:,} rows in {len(index.groups):,} row groups" if index else "not read"


def _encode_table(scheme: str, fields: Mapping[str, Mapping[str, str]]) -> str:
    """Encode definitions by the field that reaches them; each is written once."""
    parts: dict[tuple[str, str], int] = {}
    rows = {
        name: [parts.setdefault(item, len(parts)) for item in reached.items()]
        for name, reached in fields.items()
        if reached
    }
    return json.dumps({"scheme": scheme, "parts": [list(item) for item in parts], "fields": rows})


def _decode_table(text: str) -> tuple[str, dict[str, dict[str, str]]]:
    """Return the scheme and the definitions by field; the scheme is "" for a text that is no table."""
    try:
        table = json.loads(text)
        parts = [(str(label), str(value)) for label, value in table["parts"]]
        return str(table["scheme"]), {name: dict(parts[n] for n in rows) for name, rows in table["fields"].items()}
    except (ValueError, TypeError, KeyError, IndexError):
        return "", {}


class _Codes:
    """Texts of a job's fields, and the definitions that they reach."""

    def __init__(self) -> None:
        self._prints = CodeFingerprints()
        self._fields: dict[str, dict[str, str]] = {}

    @property
    def imported(self) -> dict[str, str]:
        """Of all fields so far; see `CodeFingerprints`."""
        return self._prints.imported

    def table(self) -> str:
        """Of all fields so far; see `_encode_table`."""
        return _encode_table(SCHEME, self._fields)

    def contents(self, name: str, functions: Iterable[Any], index: Index | None) -> str:
        """Return digests of a data set's rows and of the functions applied to them."""
        given = tuple(functions)
        code = self._digest(name, given) if given else ""
        return (index.hash[:8] if index else "") + (f", functions {code}" if code else "")

    def text(self, name: str, value: Any) -> str:
        """Return the text of a field's value; functions by name and digest."""
        if isinstance(value, Mapping):
            items = sorted(value.items(), key=str)
            return ", ".join(f"{self.text(name, key)}={self.text(name, item)}" for key, item in items)
        if isinstance(value, tuple | list):
            return f"({', '.join(self.text(name, item) for item in value)})" if value else "()"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(self.text(name, item) for item in value))}}}"
        if callable(value):
            called = value if inspect.isclass(value) else getattr(value, "__qualname__", type(value).__name__)
            return f"{str(called).replace('<locals>.', '')} [{self._digest(name, value)}]"
        return MEMORY_ADDRESS.sub("", str(value))

    def _digest(self, name: str, value: Any) -> str:
        return self._prints.digest(value, self._fields.setdefault(name, {}))[:8]

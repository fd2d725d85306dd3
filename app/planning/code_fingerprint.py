"""Fingerprints of functions and objects, which change with the user's code and constants that they reach.

They follow the user's own modules: functions, classes with methods and bases, globals that are read, closures,
defaults, arguments of partials and wrapped functions. Installed packages count by name and version. Code is compared as
bytecode without positions and docstrings: workers get the bytecode, whatever the file on disk says meanwhile, and it
holds neither comments nor layout.
"""

from __future__ import annotations

import bisect
import builtins
import dis
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np

from trainwright.core.pickling import is_user_file, is_user_module
from trainwright.core.redaction import redact

SCHEME = f"bytecode of Python {sys.version_info[0]}.{sys.version_info[1]}, form 2"
"""Scheme of the fingerprints: those of different schemes cannot be compared."""

_Refs = list[tuple[Any, ...]]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_VALUES = 20_000  # objects that are encoded for one definition, at most
_DEPTH = 40  # levels of values in values
_LONG = 1000  # plain items of a container that are encoded at once
_MOST_ITEMS = 200_000  # of a container that are encoded: the first and the last
_ARRAY_BYTES = 16 * 1024**2  # of a larger array, a million numbers are encoded
_SHOWN = re.compile(r"-?\d[\w.+-]{0,23}|True|False|None")  # numbers and versions, which are shown as they are
_POSITIONS = {"__doc__", "__firstlineno__", "__static_attributes__", "__qualname__", "__module__"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_SKIPPED = {"NOP", "CACHE", "RESUME", "EXTENDED_ARG", "PRECALL"}
_NOTEBOOK = re.compile(r"<ipython-input|ipykernel_|<stdin>")
MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the repr of an object without one of its own
# Objects whose state is that of a process: compared by type.
_BY_TYPE = {
    "_asyncio", "_contextvars", "_io", "_queue", "_random", "_socket", "_thread", "_weakref", "asyncio", "concurrent",
    "contextvars", "io", "logging", "multiprocessing", "os", "queue", "random", "socket", "subprocess", "tempfile",
    "threading", "weakref",
}  # fmt: skip
_RANDOM = ("numpy.random", "torch._C.Generator", "jax.random")
_COMPILED = "_torchdynamo_orig_callable"  # what torch.compile keeps of a function, beside much that is a process's own
_KERAS = {"keras", "tensorflow", "tf_keras"}


@dataclass(kw_only=True)
class _Definition:
    """A definition that a value reaches."""

    label: str  # such as `scale() in job.py`
    text: str = ""  # the compared text: a digest, a version or a number
    refs: _Refs = field(default_factory=list)  # keys of the definitions that it reaches directly, in order
    owner: Any = None  # keeps its key, an `id`, from being reused


class CodeFingerprints:
    """Fingerprints of several values that may share definitions.

    Attributes:
        imported: module name -> file, for modules and packages of the user that functions import when called.
    """

    def __init__(self) -> None:
        self.imported: dict[str, str] = {}
        self._parts: dict[tuple[Any, ...], _Definition] = {}
        self._labels: Counter[str] = Counter()
        self._pending: list[tuple[_Definition, Callable[[_Refs], str]]] = []
        self._left = _VALUES
        self._homes = {tempfile.gettempdir(): "<temporary>"}

    def digest(self, value: Any, reached: dict[str, str] | None = None) -> str:
        """Return the digest of a value with all definitions that it reaches.

        Args:
            value: a function, or any other object.
            reached: filled with label -> text of each reached definition, in order.
        """
        refs: _Refs = []
        self._left = _VALUES
        own = _short(redact(self._encode(value, refs)))
        self._settle()
        parts = list(self._reached(refs))
        if reached is not None:
            reached.update({part.label: part.text for part in parts})
            if not isinstance(value, FunctionType | type):
                reached[_unused(f"arguments or attributes of {_name(value)}", reached)] = own
        return _sha([own, *(part.text for part in parts)])

    def _reached(self, refs: _Refs) -> Iterator[_Definition]:
        seen: set[tuple[Any, ...]] = set()
        waiting = refs[::-1]
        while waiting:
            key = waiting.pop()
            if key not in seen:
                seen.add(key)
                yield self._parts[key]
                waiting.extend(reversed(self._parts[key].refs))

    def _settle(self) -> None:
        while self._pending:
            part, make = self._pending.pop()
            self._left = _VALUES
            part.text = _short(redact(make(part.refs)))

    def _refer(self, refs: _Refs, key: tuple[Any, ...], label: str, owner: Any, make: Callable[[_Refs], str]) -> None:
        if key not in self._parts:
            self._labels[label] += 1
            number = self._labels[label]
            part = _Definition(label=label if number == 1 else f"{label} #{number}", owner=owner)
            self._parts[key] = part
            self._pending.append((part, make))
        refs.append(key)

    # --- values ---------------------------------------------------------------------------------------------------

    def _encode(self, value: Any, refs: _Refs, above: tuple[int, ...] = ()) -> str:
        kind = type(value)
        if kind is str:
            return repr(self._placed(value))
        if kind in _PLAIN:
            return repr(value)
        self._left -= 1
        if id(value) in above or len(above) > _DEPTH or self._left < 0:
            return f"<{kind.__qualname__}>"  # a cycle, or more than is looked at
        return self._object(value, refs, (*above, id(value)))

    def _object(self, value: Any, refs: _Refs, above: tuple[int, ...]) -> str:
        def inner(item: Any) -> str:
            return self._encode(item, refs, above)

        match value:
            case type():
                return self._class(value, refs)
            case FunctionType():
                return self._function(value, refs, above)
            case ModuleType():
                return self._module(value, refs)
            case MethodType():
                return f"{inner(value.__func__)} of {inner(value.__self__)}"
            case functools.partial():
                return f"partial({inner(value.func)}, {inner(value.args)}, {inner(value.keywords)})"
            case staticmethod() | classmethod():
                return f"{type(value).__name__} {inner(value.__func__)}"
            case property():
                return f"property {inner((value.fget, value.fset, value.fdel))}"
            case BuiltinFunctionType():
                owner = "" if isinstance(value.__self__, ModuleType | None) else inner(value.__self__)
                return f"{self._foreign(value, refs)} {owner}"
            case enum.Enum():
                return f"{inner(type(value))}.{value.name}"
            case PurePath():
                return repr(self._placed(str(value)))
            case re.Pattern():
                return f"{value.pattern!r} {value.flags}"
        return self._container(value, refs, above) or self._instance(value, refs, above)

    def _container(self, value: Any, refs: _Refs, above: tuple[int, ...]) -> str:
        """Return the text of a container, or "" for another object. The order of sets and mappings does not matter."""
        kind = type(value)
        if not isinstance(value, dict | MappingProxyType | list | tuple | set | frozenset):
            return ""
        name = kind.__name__ if kind.__module__ == "builtins" else self._encode(kind, refs, above)
        size, items = len(value), _bounded(value)
        found: list[str]
        if size > _LONG and all(type(item) in _PLAIN for item in items):
            words = map(repr, items) if isinstance(value, list | tuple) else sorted(map(repr, items))
            found = [_sha(words)]
            if isinstance(value, dict | MappingProxyType):
                found += [self._encode([value[item] for item in sorted(items, key=repr)], refs, above)]
        elif isinstance(value, dict | MappingProxyType):
            keys = items if isinstance(value, OrderedDict) else sorted(items, key=_order)
            found = [f"{self._encode(key, refs, above)}: {self._encode(value[key], refs, above)}" for key in keys]
            if isinstance(value, defaultdict):
                found.append(self._encode(value.default_factory, refs, above))
        elif isinstance(value, set | frozenset):
            found = sorted(self._encode(item, refs, above) for item in sorted(items, key=_order))
        else:
            found = [self._encode(item, refs, above) for item in items]
        return f"{name} {size} {found}"

    def _instance(self, value: Any, refs: _Refs, above: tuple[int, ...]) -> str:
        kind = type(value)
        place = f"{kind.__module__}.{kind.__qualname__}"
        root = kind.__module__.partition(".")[0]
        bases = {base.__module__.partition(".")[0] for base in kind.__mro__}
        name = self._encode(kind, refs, above)
        wrapped = _wrapped(value)
        if wrapped is not None and not _is_user_class(kind):
            return f"{name} of {self._encode(wrapped, refs, above)}"
        if root in _BY_TYPE or place.startswith(_RANDOM) or bases & {"_io", "_thread", "_random"}:
            return name
        if hasattr(kind, "__array__"):
            return f"{name} {_array(value, lambda items: self._encode(items, refs, above))}"
        if bases & _KERAS:
            config = _keras_config(value)
            more = _lost_by_config(value, config or {}) if _is_user_class(kind) else {}
            return f"{name} {self._encode(config, refs, above)}{self._encode(more, refs, above) if more else ''}"
        state = dict(_state(value))
        if isinstance(state.get("_modules"), dict):  # of a torch module, which calls them in this order
            state["_modules"] = list(state["_modules"].items())
        if state:
            held = self._encode(state, refs, above)
            return f"{name} {held}"
        if _is_user_class(kind):
            return name
        try:
            text = repr(value)
        except Exception:  # of a library's object that cannot say what it is
            return name
        return name if MEMORY_ADDRESS.search(text) else f"{name} {text}"

    def _placed(self, text: str) -> str:
        """Return a path without the folders that differ between machines or processes."""
        if not text.startswith(os.sep):
            return text
        for home, name in self._homes.items():
            if text == home or text.startswith(home + os.sep):
                return name if name == "<temporary>" else name + text[len(home) :]
        return text

    # --- definitions ----------------------------------------------------------------------------------------------

    def _function(self, function: FunctionType, refs: _Refs, above: tuple[int, ...]) -> str:
        code = function.__code__
        name = code.co_qualname.replace("<locals>.", "")  # wraps() gives a wrapper the name of what it wraps
        if not _is_users_function(function):
            wrapped = vars(function).get(_COMPILED)
            if wrapped is not None:
                return f"{self._foreign(function, refs)} of {self._encode(wrapped, refs, above)}"
            held = [cell for cell in map(_contents, function.__closure__ or ()) if cell is not function]
            more = [held, {key: item for key, item in vars(function).items() if not key.startswith("__torch")}]
            inner = self._encode(more, refs, above) if held or vars(function) else ""
            return f"{self._foreign(function, refs)} {inner}"
        where = _file(code.co_filename)
        self._home(function.__globals__.get("__file__"), code.co_filename)
        label = f"lambda in {where}" if name.endswith("<lambda>") else f"{name}() in {where}"

        def make(own: _Refs) -> str:
            facts = [self._code(code, function.__globals__, own)]
            given = (function.__defaults__, function.__kwdefaults__, vars(function))
            facts += [self._encode(item, own) for item in given]
            for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
                facts.append(self._closed_over(variable, cell, name, where, own))
            return "\0".join(facts)

        self._refer(refs, ("function", id(function)), label, function, make)
        return name.rpartition(".")[2]

    def _closed_over(self, variable: str, cell: CellType, name: str, where: str, refs: _Refs) -> str:
        value = _contents(cell)
        if isinstance(value, FunctionType | type | ModuleType):
            return self._encode(value, refs)
        label = f"variable {variable} that {name}() in {where} closes over"
        self._refer(refs, ("cell", id(cell)), label, (cell, value), lambda own: self._encode(value, own))
        return variable

    def _class(self, kind: type, refs: _Refs) -> str:
        if not _is_user_class(kind):
            return self._foreign(kind, refs)
        where = _file(_class_file(kind))
        self._home(getattr(sys.modules.get(kind.__module__), "__file__", None), _class_file(kind))

        def make(own: _Refs) -> str:
            facts = [self._encode(base, own) for base in (type(kind), *kind.__bases__) if base is not type]
            for name, value in sorted(vars(kind).items()):
                function = getattr(value, "__func__", value)
                if not (name.startswith("__") and name.endswith("__")) or isinstance(function, FunctionType):
                    facts.append(f"{name} {self._encode(value, own)}" if not name.startswith("_abc_") else "")
            return "\0".join(facts)

        self._refer(refs, ("class", id(kind)), f"class {_qualname(kind)} in {where}", kind, make)
        return kind.__name__

    def _foreign(self, value: Any, refs: _Refs) -> str:
        """Return the name of an installed object; the version of its distribution counts too."""
        module = str(getattr(value, "__module__", None) or "")
        self._installed(module, refs)
        return f"{module}.{_qualname(value)}"

    def _installed(self, module: str, refs: _Refs) -> None:
        root = module.partition(".")[0]
        version = _version(root)
        if version:
            self._refer(refs, ("version", root), root, None, lambda own: version)

    def _module(self, module: ModuleType, refs: _Refs) -> str:
        """Return the text of a module used as a value: the user's by its code, an installed one by its version."""
        file = getattr(module, "__file__", None)
        if file and is_user_module(module):
            return self._source(file, module.__name__, refs)
        self._installed(module.__name__, refs)
        return module.__name__

    def _source(self, file: str, name: str, refs: _Refs) -> str:
        """Add the code of a module's file and of the user's modules that it imports, without running it."""
        is_package = os.path.basename(file) == "__init__.py"
        space = {"__package__": name if is_package else name.rpartition(".")[0]}

        def make(own: _Refs) -> str:
            try:
                code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
            except (OSError, SyntaxError, ValueError):
                return "unreadable"
            return self._code(code, space, own)

        self._refer(refs, ("file", os.path.realpath(file)), f"module {Path(file).name}", None, make)
        return Path(file).name

    def _home(self, *files: str | None) -> None:
        """Register the folder of a user's module: paths below it are shortened to their part below it."""
        for file in files:
            folder = os.path.dirname(os.path.abspath(file)) if file and not file.startswith("<") else ""
            if folder.count(os.sep) > 1:
                self._homes.setdefault(folder, "<beside the code>")
                return

    # --- code -----------------------------------------------------------------------------------------------------

    def _code(self, code: CodeType, space: Mapping[str, Any], refs: _Refs) -> str:
        """Return bytecode as text: constants by value, jumps by instruction, local variables by number."""
        kept = _kept(code)
        offsets = [instruction.offset for instruction in kept]
        written = {item.argval for item in kept if item.opname == "STORE_GLOBAL"}
        words = [repr((code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], code.co_flags & 0xFF))]
        words.append(code.co_exceptiontable.hex())
        for number, item in enumerate(kept):
            if item.opcode in _JUMPS:
                word = str(bisect.bisect_left(offsets, item.argval))
            elif item.opcode in dis.hasconst:
                word = self._constant(item.argval, space, refs)
            elif item.opname in ("LOAD_GLOBAL", "LOAD_NAME") and item.argval in written:
                word = item.argval  # a state that the function keeps
            elif item.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                word = self._global(item.argval, _chain(kept[number + 1 :]), space, code.co_filename, refs)
            elif item.opname == "IMPORT_NAME":
                word = self._imported(item.argval, kept[max(0, number - 2)].argval, kept[number + 1 :], space, refs)
            elif item.opcode in dis.hasname or item.opcode in dis.hascompare:
                word = str(item.argval)
            else:
                word = str(item.arg)
            words.append(f"{item.opname} {word}")
        return "\n".join(words)

    def _constant(self, value: Any, space: Mapping[str, Any], refs: _Refs) -> str:
        if isinstance(value, CodeType):
            return self._code(value, space, refs)
        if isinstance(value, tuple):
            return f"({', '.join(self._constant(item, space, refs) for item in value)})"
        return self._encode(value, refs) if isinstance(value, frozenset) else repr(value)

    def _global(self, name: str, chain: Iterator[str], space: Mapping[str, Any], file: str, refs: _Refs) -> str:
        """Return the text of a global that is read, or of an attribute of a user's module."""
        if name not in space or (name.startswith("__") and name.endswith("__")):
            return name if hasattr(builtins, name) else f"global {name}"
        value = space[name]
        while isinstance(value, ModuleType) and is_user_module(value):
            attribute = next(chain, None)
            if attribute is None or attribute not in vars(value):
                break
            space, name, file = vars(value), attribute, str(value.__file__)
            value = space[name]
        if isinstance(value, FunctionType | type | ModuleType | BuiltinFunctionType):
            return self._encode(value, refs)
        self._home(space.get("__file__"), file)
        label = f"global {name} in {_file(file)}"
        self._refer(refs, ("global", id(space), name), label, (space, value), lambda own: self._encode(value, own))
        return f"global {name}"

    def _imported(
        self, name: str, level: Any, following: list[dis.Instruction], space: Mapping[str, Any], refs: _Refs
    ) -> str:
        """Return the name of a module that a function imports itself; follow its file where it is the user's."""
        package = str(space.get("__package__") or "")
        names = []
        for item in following:
            if item.opname == "IMPORT_FROM":
                names.append(item.argval)
            elif not item.opname.startswith("STORE"):
                break
        try:
            full = (
                importlib.util.resolve_name("." * level + name, package) if isinstance(level, int) and level else name
            )
        except ImportError:
            return name
        for candidate in (full, *(f"{full}.{each}" for each in names)):
            file = _module_file(candidate)
            if file and is_user_file(file) and not _ours(candidate):
                self._source(file, candidate, refs)
                above = (candidate.rsplit(".", count)[0] for count in range(candidate.count(".") + 1))
                self.imported |= {each: found for each in above if (found := _module_file(each))}
        self._installed(full, refs)
        return full


def _is_user_class(kind: type) -> bool:
    """Return whether a class is the user's: in neither an installed module nor one of trainwright."""
    if _ours(kind.__module__) or kind.__module__ in ("builtins", "__builtin__"):
        return False
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ == "__main__":
        return True
    return is_user_module(module)


def _is_users_function(function: FunctionType) -> bool:
    file, module = function.__code__.co_filename, str(function.__module__)
    if _ours(module) or _ours(str(function.__globals__.get("__name__"))):
        return False
    if file.startswith("<") and not _NOTEBOOK.search(file):  # made by a decorator, such as dataclass
        return module == "__main__" or module not in sys.modules or is_user_module(sys.modules[module])
    return is_user_file(file)


def _ours(module: str) -> bool:
    return module.partition(".")[0] == "trainwright"


def _qualname(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__
    return str(name).replace("<locals>.", "")


def _name(value: Any) -> str:
    if isinstance(value, tuple):
        return "its functions"
    return _qualname(value.func) if isinstance(value, functools.partial) else _qualname(value)


def _unused(label: str, labels: Iterable[str]) -> str:
    """Return the label, with a number where it is taken."""
    taken = sum(each.partition(" #")[0] == label for each in labels)
    return f"{label} #{taken + 1}" if taken else label


def _file(path: str) -> str:
    return "the notebook" if _NOTEBOOK.search(path) else os.path.basename(path)


def _class_file(kind: type) -> str:
    functions = (getattr(value, "__func__", value) for _, value in sorted(vars(kind).items()))
    files = [each.__code__.co_filename for each in functions if isinstance(each, FunctionType)]
    written = [file for file in files if not file.startswith("<string>") and is_user_file(file)]
    return written[0] if written else str(getattr(sys.modules.get(kind.__module__), "__file__", kind.__module__))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield attributes of an object, without cached properties and the fields that a dataclass does not compare.

    It runs no code of the object's class.
    """
    fields = getattr(type(value), "__dataclass_fields__", {})
    for name, item in _attributes(value):
        if (name not in fields or fields[name].compare) and not _is_cached(value, name):
            yield name, item


def _is_cached(value: Any, name: str) -> bool:
    """Return whether an attribute is the value of a `cached_property`, which is there only after its first use."""
    found = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
    return isinstance(found, functools.cached_property)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from (getattr(value, "__dict__", None) or {}).items()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if not name.startswith("__") and type(vars(kind).get(name)).__name__ == "member_descriptor":
                try:
                    yield name, object.__getattribute__(value, name)
                except AttributeError:  # not assigned
                    continue


def _wrapped(value: Any) -> Any:
    """Return the function that `tf.function` or `torch.compile` wrapped; None where it is unknown."""
    held = getattr(value, "__dict__", None) or {}
    if _COMPILED in held and isinstance(held.get("_modules"), dict):
        return held["_modules"].get("_orig_mod")
    return held.get("__wrapped__") if isinstance(held.get("__wrapped__"), FunctionType) else None


def _keras_config(value: Any) -> Any:
    """Return the configuration of a Keras layer, loss or model; its variables are initialized at random."""
    try:
        return value.get_config()
    except Exception:  # a model's own class need not have one
        return None


def _lost_by_config(value: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a Keras loss of a user's class that its configuration does not have."""
    if "Loss" not in {base.__name__ for base in type(value).__mro__}:
        return {}
    known = {*config, "dtype", "dtype_policy"}
    return {name: item for name, item in _state(value) if name.lstrip("_") not in known}


def _array(value: Any, encode: Callable[[Any], str]) -> str:
    """Return the digest of an array's values; for parameters and variables, initialized at random, type and shape."""
    shape, dtype = getattr(value, "shape", ""), getattr(value, "dtype", "")
    facts = f"{tuple(shape) if shape else ''} {dtype}"
    if getattr(value, "requires_grad", False) is True or type(value).__name__.endswith("Variable"):
        return facts
    stored = getattr(value, "nbytes", 0) or 8 * getattr(value, "size", 0)
    if type(value).__module__.partition(".")[0] not in ("numpy", "torch") and stored > _ARRAY_BYTES:
        return facts  # it may lie in a file or on a device
    try:
        array = np.asarray(value)
    except Exception:
        try:
            array = np.asarray(value.double())  # NumPy has no such type, such as bfloat16
        except Exception:  # on the meta device, or on a device that this machine does not have
            return facts
    if array.nbytes > _ARRAY_BYTES:
        array = array.flat[np.linspace(0, array.size - 1, 1_000_000).astype(np.int64)]
    if array.dtype.hasobject:
        return f"{facts} {encode(array.tolist())}"
    return f"{facts} {hashlib.sha256(array.tobytes()).hexdigest()}"


def _bounded(value: Any) -> list[Any]:
    """Return the items of a container; the first and last ones of a very large one, none where it has no order."""
    if len(value) <= _MOST_ITEMS:
        return list(value)
    half = _MOST_ITEMS // 2
    return [*value[:half], *value[-half:]] if isinstance(value, list | tuple) else []


def _order(item: Any) -> str:
    return f"{type(item).__qualname__} {item!r}" if type(item) in _PLAIN else f"{_qualname(item)} {_line(item)}"


def _line(item: Any) -> str:
    if isinstance(item, frozenset):
        return repr(sorted(map(_order, item)))
    if isinstance(item, tuple):
        return repr(tuple(map(_order, item)))
    code = getattr(item, "__code__", None)
    return f"{code.co_firstlineno:08}" if isinstance(code, CodeType) else MEMORY_ADDRESS.sub("", str(item))


def _kept(code: CodeType) -> list[dis.Instruction]:
    """Return instructions without fillers, and without a class body's stores of its own position and docstring."""
    found = [item for item in dis.get_instructions(code) if item.opname not in _SKIPPED]
    stores = {n for n, item in enumerate(found) if item.opname == "STORE_NAME" and item.argval in _POSITIONS}
    stores |= {n - 1 for n in stores}
    return [item for n, item in enumerate(found) if n not in stores]


def _chain(following: list[dis.Instruction]) -> Iterator[str]:
    """Yield the names of attributes that are read one after another."""
    for item in following:
        if item.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return
        yield item.argval


def _module_file(name: str) -> str | None:
    """Return the source file of a module, found without running it; a package's is its `__init__`."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return getattr(loaded, "__file__", None)
    parent, _, last = name.rpartition(".")
    try:
        if not parent:
            spec = importlib.util.find_spec(name)
            return spec.origin if spec is not None and spec.has_location else None
    except (ImportError, ValueError):
        return None
    above = _module_file(parent)
    if above is None or os.path.basename(above) != "__init__.py":
        return None
    found = (Path(above).parent / last).with_suffix(".py"), Path(above).parent / last / "__init__.py"
    return next((str(each) for each in found if each.is_file()), None)


@functools.cache
def _version(root: str) -> str:
    """Return the version of an installed distribution without its build; "" for Python's, ours and the user's."""
    if not root or root in sys.stdlib_module_names or root in ("trainwright", "__main__"):
        return ""
    try:
        return importlib.metadata.version(root).partition("+")[0]
    except (importlib.metadata.PackageNotFoundError, ValueError):
        module = sys.modules.get(root)
        version = getattr(module, "__version__", "")
        return version.partition("+")[0] if isinstance(version, str) and not is_user_module(module) else ""


def _short(text: str) -> str:
    return text if _SHOWN.fullmatch(text) else _sha([text])[:8]


def _sha(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()

"""The blocks that a model repeats: what is gathered, or computed again, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn


def blocks(model: nn.Module) -> list[nn.Module]:
    """Modules of one class that a list or sequence holds several of, the outermost; none with parameters of others."""
    sites = Counter(_sites(model))
    found: list[nn.Module] = []
    _collect(model, sites, found)
    return found


def outside(model: nn.Module, modules: Iterable[nn.Module], cuts: Iterable[str]) -> list[nn.Module]:
    """Those of a model's modules inside of which none is at which it is cut."""
    inside = [name.split(".") for name in cuts]
    names = {module: name.split(".") for name, module in model.named_modules()}
    paths = [(module, names[module]) for module in modules]
    return [
        module for module, path in paths if not any(len(cut) > len(path) and cut[: len(path)] == path for cut in inside)
    ]


def _collect(module: nn.Module, sites: Counter[int], found: list[nn.Module]) -> None:
    children = list(module.children())
    repeated: Counter[type] = Counter()
    if isinstance(module, nn.ModuleList | nn.Sequential):
        repeated.update(type(child) for child in children if next(child.parameters(), None) is not None)
    for child in children:
        if repeated[type(child)] > 1 and _alone(child, sites):
            found.append(child)
        else:
            _collect(child, sites, found)


def _alone(module: nn.Module, sites: Counter[int]) -> bool:
    """Whether it is a module that is called, and all uses of its parameters lie within it."""
    container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not container and all(sites[key] == count for key, count in Counter(_sites(module)).items())


def _sites(module: nn.Module) -> Iterator[int]:
    """Each place of the tree that holds a parameter, by the parameter's identity."""
    for _, owner in module.named_modules(remove_duplicate=False):
        yield from (id(parameter) for parameter in owner._parameters.values() if parameter is not None)


def parts(model: nn.Module) -> list[nn.Module]:
    """The modules that a model consists of; of containers, which are not called, what they hold."""
    found: list[nn.Module] = []
    for child in model.children():
        found += parts(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return found

"""Digests of tensors, by which replicas and frozen parameters are compared.

A digest is a sum of a tensor's memory, in words of 64 bits, each multiplied by an odd number of its own: any single
change is seen for certain, any other but for one case in 2**63, also where the same values stand in other places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from trainwright.core.data import fold_seed

ROW_WORDS = 1 << 15  # words that are multiplied by the same factors: these stay in a processor's cache
_BLOCK = 128  # rows that are multiplied at once on an accelerator, which has no product of integer matrices


def tensor_digest(tensor: Tensor) -> Tensor:
    """Return a tensor's digest, one int64 on its device."""
    if tensor.layout is torch.sparse_coo:
        found = tensor.detach().coalesce()
        return tensor_digest(torch.cat((tensor_digest(found.indices()), tensor_digest(found.values()))))
    words = _words(tensor)
    factors = _factors(words.device)
    while len(words) != 1:
        whole = len(words) // ROW_WORDS
        rows, rest = words[: whole * ROW_WORDS].view(whole, ROW_WORDS), words[whole * ROW_WORDS :]
        words = torch.cat((_products(rows, factors), _products(rest.unsqueeze(0), factors[: len(rest)])))
    return words


def named_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of tensors and their names: 16 hexadecimal digits."""
    names = [text_hash(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}") for name in sorted(tensors)]
    return f"{fold_seed(*names, *digests(tensors[name] for name in sorted(tensors))):016x}"


def text_hash(text: str) -> int:
    """Return a 56-bit number that depends on every character."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return digests of tensors; each device is waited for once."""
    sums = [tensor_digest(tensor) for tensor in tensors]
    found: dict[int, int] = {}
    for device in {one.device for one in sums}:
        places = [place for place, one in enumerate(sums) if one.device == device]
        found |= zip(places, torch.cat([sums[place] for place in places]).tolist(), strict=True)
    return [found[place] for place in range(len(sums))]


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as 64-bit words, padded with zeros; one zero for an empty tensor."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return torch.zeros(1, dtype=torch.int64, device=flat.device)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    if flat.nbytes % 8 == 0:
        return flat.view(torch.int64)
    memory = flat.view(torch.uint8)
    size = len(memory) // 8 * 8
    last = memory.new_zeros(8)
    last[: len(memory) - size] = memory[size:]
    return torch.cat((memory[:size].view(torch.int64), last.view(torch.int64)))


def _products(rows: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of each row's words times the factors, modulo 2**64."""
    if rows.device.type == "cpu":
        return rows @ factors
    return torch.cat([(block * factors).sum(1) for block in torch.split(rows, _BLOCK)])


@cache
def _factors(device: torch.device) -> Tensor:
    """Return pseudo-random odd 64-bit numbers: SplitMix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy((mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64)).to(device)

"""CRC-32C (Castagnoli; RFC 3720, appendix B.4) of many records at once, in numpy.

Without its first and last inversion the CRC is linear over GF(2), and zeros in front do not change it. So records are
filled up in front to whole blocks, the blocks' CRCs are sums (xor) over tables, and neighbours are joined in pairs:
crc(a + b) = shift(crc(a), len(b)) xor crc(b), where `shift`, feeding zeros, is linear too.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]

_POLYNOMIAL = 0x82F63B78
_BLOCK = 64
_BLOCK_BITS = 6
_BLOCKS = 1 << 14  # looked at together
_MASK_DELTA = 0xA282EAD8


def crc32c(data: bytes, starts: Offsets, stops: Offsets) -> Words:
    """CRC-32C of data[start:stop] for each pair: (records,) uint32."""
    sizes = stops - starts
    blocks = np.maximum(-(-sizes // _BLOCK), 1)
    lasts = np.cumsum(blocks)
    behind = np.repeat(lasts, blocks) - 1 - np.arange(lasts[-1] if len(lasts) else 0)  # blocks after each in its record
    high = np.repeat(stops, blocks) - behind * _BLOCK
    sums = _joined(_block_sums(data, np.repeat(starts, blocks), high), blocks)
    return ~(sums ^ _shifted(np.full(len(sizes), 0xFFFFFFFF, np.uint32), sizes))


def masked(sums: Words) -> Words:
    """As TFRecord stores them: rotated right by 15 bits, plus a constant."""
    return ((sums >> np.uint32(15)) | (sums << np.uint32(17))) + np.uint32(_MASK_DELTA)


def _block_sums(data: bytes, starts: Offsets, stops: Offsets) -> Words:
    """Raw CRC of the bytes start..stop, at most _BLOCK; where they are fewer, zeros stand in front."""
    padded = np.frombuffer(bytes(_BLOCK) + data, np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(padded, _BLOCK)
    place = np.arange(_BLOCK)
    tables, columns = _position_tables(), (place * 256).astype(np.uint16)
    sums = np.empty(len(stops), np.uint32)
    for first in range(0, len(stops), _BLOCKS):
        part = slice(first, first + _BLOCKS)
        rows = windows[stops[part]]
        short = np.flatnonzero(stops[part] - starts[part] < _BLOCK)
        sizes = (stops[part] - starts[part])[short]
        rows[short] *= place >= _BLOCK - sizes[:, None]
        sums[part] = np.bitwise_xor.reduce(tables.take(rows + columns), axis=1)
    return sums


def _joined(sums: Words, counts: Offsets) -> Words:
    """One raw CRC for each record from those of its blocks: neighbours join in pairs, counted from its end."""
    level = _BLOCK_BITS
    while len(sums) > len(counts):
        behind = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(sums))
        left = behind % 2 == 1
        sums = np.where(left, _shift(sums, _shift_tables(level)), sums)
        heads = np.zeros(len(sums), dtype=bool)
        heads[np.cumsum(counts) - counts] = True
        sums = np.bitwise_xor.reduceat(sums, np.flatnonzero(left | heads))
        counts, level = -(-counts // 2), level + 1
    return sums


def _shifted(sums: Words, sizes: Offsets) -> Words:
    """Each raw CRC after as many zero bytes as its size, by powers of two."""
    for level in range(int(sizes.max(initial=0)).bit_length()):
        sums = np.where(sizes >> level & 1, _shift(sums, _shift_tables(level)), sums)
    return sums


def _shift(sums: Words, tables: Words) -> Words:
    low, second, third, high = (sums >> np.uint32(8 * byte) & np.uint32(0xFF) for byte in range(4))
    shifted: Words = tables[0][low] ^ tables[1][second] ^ tables[2][third] ^ tables[3][high]
    return shifted


@cache
def _shift_tables(level: int) -> Words:
    """(4, 256): what 2**level zero bytes make of each byte of a raw CRC."""
    if level:
        half = _shift_tables(level - 1)
        return _shift(half, half)
    values = np.arange(256, dtype=np.uint32)
    table = values
    for _ in range(8):
        table = np.where(table & 1, table >> np.uint32(1) ^ np.uint32(_POLYNOMIAL), table >> np.uint32(1))
    return np.stack([table, *(values << np.uint32(8 * byte) for byte in range(3))])


@cache
def _position_tables() -> Words:
    """(_BLOCK * 256,): raw CRC of a block that is zero but for one byte, by its place and value."""
    tables = [_shift_tables(0)[0]]
    for _ in range(_BLOCK - 1):
        tables.append(_shift(tables[-1], _shift_tables(0)))
    return np.concatenate(tables[::-1])

"""Fingerprint the bytes of a tensor: at memory speed, and for a tensor that comes in pieces.

    rows of bytes, as 64-bit words w[i, j];   fingerprint = BLAKE2b( shape, all sum_j w[i, j], all sum_i w[i, j] )

Both sums wrap. Many sums of rows, as of a stack of experts, are made fewer before they are hashed: sixteenths of them
are added up, with the weights 1, 3, 5 ... 31. One changed element changes the sums of its row and its column. Rows that
changed places change the order of the row sums, and columns that of the column sums. So a fingerprint finds what goes
wrong between memories: a tensor that was not written, or is torn, stale, or off by one. The trade-off: it does not
protect against somebody who makes two tensors look alike; a cryptographic hash of every byte would take several times
as long as the push itself.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_fp8.numerics import kernels

DIGITS = 16
MANY, PARTS = 4096, 16
"""From ``MANY`` sums of rows on, ``PARTS`` sums are added to one before they are hashed, which takes longer."""
MAGNITUDES = (torch.bfloat16, torch.float16, torch.float32)
CODES = torch.float8_e4m3fn


class Fingerprint:
    """Fingerprints a tensor whose rows come piece by piece, in order."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []
        self._columns: torch.Tensor | None = None
        self._width, self._count = 0, 0

    def add(self, rows: torch.Tensor) -> None:
        """Add the next rows. All dimensions but the last count rows; every element of a vector is a row."""
        matrix = as_matrix(rows.detach())
        of_rows, of_columns, _ = kernels.sums(matrix, magnitudes=False) or _sums(matrix, magnitudes=False)
        self.add_sums(of_rows, of_columns, matrix.shape[1] * matrix.itemsize)

    def copy(self, rows: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """Add the next rows, copy them ``into`` memory of their shape and dtype, if given, and return the rows' largest
        magnitudes.

        These are those of BF16, FP16, FP32 or E4M3 values, in FP32 (NaN if one is), and say nothing of other types. On
        a CPU one pass over memory does all three.
        """
        matrix = as_matrix(rows.detach())
        to = None if into is None else as_matrix(into)
        is_copy = into is not None and to is not None and to.data_ptr() != into.data_ptr()  # it has no such view
        done = None if is_copy else kernels.sums(matrix, to)
        if done is None and into is not None:
            into.copy_(rows)
        of_rows, of_columns, largest = _sums(matrix) if done is None else done
        self.add_sums(of_rows, of_columns, matrix.shape[1] * matrix.itemsize)
        return largest

    def add_sums(self, of_rows: torch.Tensor, of_columns: torch.Tensor, width: int) -> None:
        """Add the next rows, of ``width`` bytes, of which somebody else has made the sums."""
        self._width, self._count = width, self._count + of_rows.shape[0]
        self._rows.append(of_rows)
        self._columns = of_columns if self._columns is None else self._columns + of_columns

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of what came, by row and by column: both of a changed word change by as much as the word."""
        assert self._columns is not None
        if len(self._rows) > 1:
            self._rows = [torch.cat(self._rows)]
        return self._rows[0], self._columns

    def close(self) -> None:
        """Keep no more of the sums than ``digest`` needs: all rows have come. Those that came are overwritten."""
        if self._is_long():
            self._rows = [_fewer(self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows))]

    def digest(self) -> str:
        """Return sixteen hexadecimal digits. The sums stay on the tensor's device until here."""
        if self._columns is None:
            return _digest(self._count, self._width)
        of_rows = [_fewer(torch.cat(self._rows))] if self._is_long() else self._rows
        return _digest(self._count, self._width, torch.cat([*of_rows, self._columns]).cpu().numpy())

    def _is_long(self) -> bool:
        """Return whether there are so many sums of rows that fewer are made of them; ``close`` may have done that."""
        return self._count >= MANY and sum(of_rows.shape[0] for of_rows in self._rows) == self._count


def digest_of(count: int, width: int, sums: NDArray[np.int64]) -> str:
    """Return the digest of ``count`` rows of ``width`` bytes whose sums somebody has: of all rows, then of columns."""
    if count >= MANY:
        sums = np.concatenate([_fewer(torch.from_numpy(sums[:count])).numpy(), sums[count:]])
    return _digest(count, width, sums)


def _digest(count: int, width: int, sums: NDArray[np.int64] | None = None) -> str:
    whole = hashlib.blake2b(f"{count}x{width}".encode(), digest_size=DIGITS // 2)
    if sums is not None:
        whole.update(sums.data)
    return whole.hexdigest()


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor as a matrix: a view, unless its rows do not lie one after the other."""
    return tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)


def _sums(matrix: torch.Tensor, magnitudes: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ``kernels.sums`` does, in torch."""
    raw = matrix.contiguous().view(torch.uint8)
    if raw.shape[1] % 8:
        raw = torch.nn.functional.pad(raw, (0, -raw.shape[1] % 8))
    if raw.storage_offset() % 8:
        raw = raw.clone()
    words = raw.view(torch.int64)
    largest = words.new_zeros(len(words)).float()
    if magnitudes and matrix.dtype in MAGNITUDES:
        low, high = torch.aminmax(matrix, dim=1)
        largest = torch.maximum(-low, high).float()
    elif magnitudes and matrix.dtype == CODES:
        largest = (matrix.view(torch.uint8) & 0x7F).amax(1).view(CODES).float()
    return words.sum(1), words.sum(0), largest


def _fewer(of_rows: torch.Tensor) -> torch.Tensor:
    """Add up the sixteenths of some sums, which may be overwritten. All weights are odd, so that no bit of a row's sum
    is lost."""
    if left := -of_rows.shape[0] % PARTS:
        of_rows = torch.nn.functional.pad(of_rows, (0, left))
    parts = of_rows.view(PARTS, -1)
    if parts.is_cpu:  # in numpy, since torch would wake all threads for so little
        return torch.from_numpy(np.einsum("i,ij->j", np.arange(1, 2 * PARTS, 2), parts.numpy()))
    return parts.mul_(torch.arange(1, 2 * PARTS, 2, device=parts.device)[:, None]).sum(0)


def fingerprint(*tensors: torch.Tensor) -> str:
    """Return the fingerprint of a tensor, or of several (codes and their scales) as one."""
    return together([_of(tensor) for tensor in tensors])


def together(digests: list[str]) -> str:
    """Return the fingerprint of tensors that belong together, made of their own fingerprints."""
    return (
        digests[0]
        if len(digests) == 1
        else hashlib.blake2b(" ".join(digests).encode(), digest_size=DIGITS // 2).hexdigest()
    )


def _of(tensor: torch.Tensor) -> str:
    print_ = Fingerprint()
    print_.add(tensor)
    return print_.digest()

"""Fingerprint the bytes of a tensor: at memory speed, and for a tensor that comes in pieces.

    rows of bytes, as 64-bit words w[i, j];   fingerprint = BLAKE2b( shape, all sum_j w[i, j], all sum_i w[i, j] )

Both sums wrap. One changed element changes the sums of its row and its column. Rows that changed places change the
order of the row sums, and columns that of the column sums. So a fingerprint finds what goes wrong between memories: a
tensor that was not written, or is torn, stale, or off by one. The trade-off: it does not protect against somebody who
makes two tensors look alike; a cryptographic hash of every byte would take several times as long as the push itself.
"""

from __future__ import annotations

import hashlib

import torch

DIGITS = 16


class Fingerprint:
    """Fingerprints a tensor whose rows come piece by piece, in order."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []
        self._columns: torch.Tensor | None = None
        self._width = 0

    def add(self, rows: torch.Tensor) -> None:
        """Add the next rows. All dimensions but the last count rows; every element of a vector is a row."""
        matrix = rows.detach().contiguous().view(-1, rows.shape[-1] if rows.dim() > 1 else 1)
        raw = matrix.view(torch.uint8)
        self._width = raw.shape[1]
        if self._width % 8:
            raw = torch.nn.functional.pad(raw, (0, -self._width % 8))
        if raw.storage_offset() % 8:
            raw = raw.clone()
        words = raw.view(torch.int64)
        self._rows.append(words.sum(1))
        columns = words.sum(0)
        self._columns = columns if self._columns is None else self._columns + columns

    def change(self, rows: torch.Tensor, columns: torch.Tensor, differences: torch.Tensor) -> None:
        """Add differences of 64-bit words to what came: both sums of a changed word change by the same.

        ``rows`` and ``columns`` say where the words lie in the tensor, in which a row is a whole number of words.
        """
        assert self._columns is not None
        self._rows = [torch.cat(self._rows).index_add_(0, rows, differences)]
        self._columns.index_add_(0, columns, differences)

    def digest(self) -> str:
        """Return sixteen hexadecimal digits. The sums stay on the tensor's device until here."""
        rows = sum(map(len, self._rows))
        whole = hashlib.blake2b(f"{rows}x{self._width}".encode(), digest_size=DIGITS // 2)
        if self._columns is not None:
            whole.update(torch.cat([*self._rows, self._columns]).cpu().numpy().tobytes())
        return whole.hexdigest()


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

"""A short name for the bytes of a tensor, at memory speed and for a tensor that comes in pieces.

    rows of bytes, as 64-bit words w[i, j];   fingerprint = BLAKE2b( shape, all sum_j w[i, j], all sum_i w[i, j] )

Both sums wrap. One changed element changes its row's and its column's sum, and rows or columns that changed places show
in the other sum, so it finds what goes wrong between memories: a tensor that was not written, or written elsewhere,
torn, stale, off by one. It is no defence against somebody who wants two tensors to look alike. The trade-off: a
cryptographic hash of every byte would cost several times what the push itself does.
"""

from __future__ import annotations

import hashlib

import torch

DIGITS = 16


class Fingerprint:
    """Of a tensor whose rows come piece by piece, in order."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []
        self._columns: torch.Tensor | None = None
        self._width = 0

    def add(self, rows: torch.Tensor) -> None:
        """The next rows. All but the last dimension count them; of a vector, every element is one."""
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

    def digest(self) -> str:
        """Sixteen hexadecimal digits. The sums lie where the tensor lies, and are fetched here, once."""
        rows = sum(map(len, self._rows))
        whole = hashlib.blake2b(f"{rows}x{self._width}".encode(), digest_size=DIGITS // 2)
        if self._columns is not None:
            whole.update(torch.cat([*self._rows, self._columns]).cpu().numpy().tobytes())
        return whole.hexdigest()


def fingerprint(*tensors: torch.Tensor) -> str:
    """Of a tensor, or of codes and their scales as one."""
    return together([_of(tensor) for tensor in tensors])


def together(digests: list[str]) -> str:
    """The fingerprint of several tensors that belong together, from their own."""
    return (
        digests[0]
        if len(digests) == 1
        else hashlib.blake2b(" ".join(digests).encode(), digest_size=DIGITS // 2).hexdigest()
    )


def _of(tensor: torch.Tensor) -> str:
    print_ = Fingerprint()
    print_.add(tensor)
    return print_.digest()

# mypy: ignore-errors
"""Rows as columns, as one Triton kernel: a program loads a rectangle by its rows and stores it by its columns.

Both ways move 16 bytes at once where everything is aligned; what lies between is turned in shared memory. torch's own
copy of a transpose moves bytes one by one, and takes nine times as long on an H100.
"""

import triton
import triton.language as tl

from nemo_fp8.numerics.kernels.triton_kernels import _left, _pointers


@triton.jit(
    do_not_specialize=["rows", "cols", "stride", "into_stride"], do_not_specialize_on_alignment=["x_ptr", "into_ptr"]
)
def turn_kernel(
    x_ptr, into_ptr, rows: tl.int64, cols: tl.int64, stride: tl.int64, into_stride: tl.int64,
    ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write a rectangle of ROWS x COLS elements, turned."""
    across = tl.cdiv(cols, COLS).to(tl.int32)
    first_row = (tl.program_id(0) // across).to(tl.int64) * ROWS
    first_col = (tl.program_id(0) % across).to(tl.int64) * COLS
    rows_left, cols_left = _left(rows, first_row, ROWS, ALIGNED), _left(cols, first_col, COLS, ALIGNED)
    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)
    inside = (row < rows_left)[:, None] & (col < cols_left)[None, :]
    at = _pointers(x_ptr, first_row * stride + first_col, row, col, stride, ALIGNED)
    turned = tl.trans(tl.load(at, mask=inside, other=0))
    inside = (col < cols_left)[:, None] & (row < rows_left)[None, :]
    at = _pointers(into_ptr, first_col * into_stride + first_row, col, row, into_stride, ALIGNED)
    tl.store(at, turned, mask=inside)

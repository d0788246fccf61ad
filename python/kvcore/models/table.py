"""Rows that ids look up: those of an array, or those of a packed matrix, which a product may stream over as well.

float32[ids] = widen(rows[ids])                 an array in the type that weights are held in
             = round(linear.rows(ids))          packed blocks of a file; rounded as the array of them would be
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvcore._kvcore import Linear

NUMPY_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
"""What weights are held in, as numpy has it."""


class Table:
    """Rows for ids.

    Args:
        held: the rows in ``dtype``, or the packed matrix whose rows they are.
        dtype: what each value is rounded to: float32, float16 or bfloat16.
        is_output: whether it is the output matrix, too, of which a step reads everything anyway.
    """

    def __init__(self, held: npt.NDArray[Any] | Linear, dtype: str, *, is_output: bool = False) -> None:
        self._held = held
        self._dtype = NUMPY_DTYPES[dtype]
        self._is_output = is_output

    def __call__(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """float32 [ids, width]."""
        if isinstance(self._held, Linear):
            rows: npt.NDArray[Any] = self._held.rows(ids).astype(self._dtype, copy=False)
        else:
            rows = self._held[ids]
        return rows.astype(np.float32, copy=False)

    def idle_nbytes(self, num_ids: int) -> int:
        """Bytes that a step does not read which looks up so many rows."""
        length = self._held.out_features if isinstance(self._held, Linear) else len(self._held)
        return 0 if self._is_output else max(0, length - num_ids) * (self._held.nbytes // length)

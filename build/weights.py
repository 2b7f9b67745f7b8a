"""The weights file of an engine directory: raw tensors, aligned, written one at a time.

Both graphs of an engine refer to it as ONNX external data, so what they share (embeddings, lm_head)
is stored once and mapped, not copied, when a session loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper

ALIGNMENT = 4096  # a page of memory; ONNX Runtime maps from the page that a tensor starts in


class WeightsFile:
    """Appends tensors to `path`; gives the external-data reference of each by its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb")
        self._tensors: dict[str, TensorProto] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def bytes_written(self) -> int:
        return self._file.tell()

    def add(self, name: str, array: np.ndarray) -> str:
        """Write `array` (float32, uint8 or int8) unless `name` is there already; gives `name`."""
        if name in self._tensors:
            return name
        offset = -(-self._file.tell() // ALIGNMENT) * ALIGNMENT
        self._file.seek(offset)
        data = np.ascontiguousarray(array)
        # Not tofile: its OSError has no errno, so a full disk would not be told from other faults.
        self._file.write(data.reshape(-1).view(np.uint8).data)
        tensor = TensorProto(
            name=name,
            dims=data.shape,
            data_type=helper.np_dtype_to_tensor_dtype(data.dtype),
            data_location=TensorProto.EXTERNAL,
        )
        entries = {"location": self.path.name, "offset": offset, "length": data.nbytes}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        self._tensors[name] = tensor
        return name

    def tensor(self, name: str) -> onnx.TensorProto:
        """The initializer that refers to the tensor `name`."""
        return self._tensors[name]

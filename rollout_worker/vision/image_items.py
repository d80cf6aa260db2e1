"""Encodes an image's arrays as vLLM's generate route takes them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy.typing as npt

# Number of vLLM's msgpack extension for the bytes of a tensor (vllm 0.32, `v1/serial_utils.py`).
_RAW_VIEW = 3


def encode_item(arrays: Mapping[str, npt.NDArray[Any]], fields: Mapping[str, str]) -> str:
    """Encode arrays as vLLM's `mm_serde.decode_mm_kwargs_item` reads them.

    Args:
        fields: For each array, its kind of field: `flat`, rows that stand behind those of other images, or `batched`,
            one for each image.
    """
    item = {}
    for name, array in arrays.items():
        field: dict[str, Any]
        if fields[name] == "flat":
            field = {"keep_on_cpu": False, "slices": [[0, len(array), None]], "dim": 0}
        else:
            field = {"keep_on_cpu": array.dtype.kind == "i"}
            array = array[0]
        tensor = [array.dtype.name, list(array.shape), msgspec.msgpack.Ext(_RAW_VIEW, array.tobytes())]
        item[name] = {"data": tensor, "field": [fields[name], field]}
    return base64.b64encode(msgspec.msgpack.encode(item)).decode()

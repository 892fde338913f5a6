"""Pictures beside the prompt of a row: pixels become files, which are read as those of any other request."""

from __future__ import annotations

import struct

import numpy as np

from services.common.errors import InvalidRequest
from services.gateway.apis.triton.rows import Row
from services.gateway.core.request_service import RequestService
from services.pb import gateway_pb2

_BITMAP = struct.Struct("<2sIIIIiiHHIIiiII")  # the two headers of a BMP file


async def pictures_of(row: Row, service: RequestService) -> list[gateway_pb2.MessagePicture]:
    """First those of pixels. Raises `InvalidRequest` for too many, and if the model sees none."""
    pixels, urls = row.get("image_bytes_input", ()), row.get("image_url_input", ())
    service.check_pictures(len(pixels) + len(urls))
    files = []
    if len(pixels):
        if not pixels.size:
            raise InvalidRequest(f"image_bytes_input has pictures of {pixels.shape[1:]}", "image_bytes_input")
        files = await service.heavy_work.in_thread(lambda: [_bitmap(each) for each in pixels])
        await service.heavy_work.turn()  # messages copy them: a millisecond for each megabyte or two
    return [
        *(gateway_pb2.MessagePicture(data=each) for each in files),
        *(gateway_pb2.MessagePicture(url=each) for each in urls),
    ]


def _bitmap(pixels: np.ndarray) -> bytes:
    """A BMP file of pixels [height, width, 3]. Its first row is the lowest, and it has blue before red."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, -(-width * 3 // 4) * 4), dtype=np.uint8)
    rows[:, : width * 3] = pixels[::-1, :, ::-1].reshape(height, width * 3)
    begin, size = _BITMAP.size, rows.nbytes
    sizes = (begin + size, 0, begin, begin - 14, width, height, 1, 24, 0, size)
    return _BITMAP.pack(b"BM", *sizes, 0, 0, 0, 0) + rows.tobytes()

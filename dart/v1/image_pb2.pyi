from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Image(_message.Message):
    __slots__ = ("sha256", "media_type", "width_pixels", "height_pixels", "data")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_PIXELS_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_PIXELS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    media_type: str
    width_pixels: int
    height_pixels: int
    data: bytes
    def __init__(self, sha256: _Optional[bytes] = ..., media_type: _Optional[str] = ..., width_pixels: _Optional[int] = ..., height_pixels: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

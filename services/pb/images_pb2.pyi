from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pictures(_message.Message):
    __slots__ = ("shapes",)
    SHAPES_FIELD_NUMBER: _ClassVar[int]
    shapes: _containers.RepeatedCompositeFieldContainer[PictureShape]
    def __init__(self, shapes: _Optional[_Iterable[_Union[PictureShape, _Mapping]]] = ...) -> None: ...

class PictureShape(_message.Message):
    __slots__ = ("num_tiles", "height", "width", "original_height", "original_width", "resample")
    NUM_TILES_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_WIDTH_FIELD_NUMBER: _ClassVar[int]
    RESAMPLE_FIELD_NUMBER: _ClassVar[int]
    num_tiles: int
    height: int
    width: int
    original_height: int
    original_width: int
    resample: int
    def __init__(self, num_tiles: _Optional[int] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., original_height: _Optional[int] = ..., original_width: _Optional[int] = ..., resample: _Optional[int] = ...) -> None: ...

class MemoryFile(_message.Message):
    __slots__ = ("process_id", "descriptor", "inode", "num_bytes")
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    process_id: int
    descriptor: int
    inode: int
    num_bytes: int
    def __init__(self, process_id: _Optional[int] = ..., descriptor: _Optional[int] = ..., inode: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class PicturePart(_message.Message):
    __slots__ = ("hash", "values", "forgotten", "file")
    HASH_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    values: bytes
    forgotten: _containers.RepeatedScalarFieldContainer[bytes]
    file: MemoryFile
    def __init__(self, hash: _Optional[bytes] = ..., values: _Optional[bytes] = ..., forgotten: _Optional[_Iterable[bytes]] = ..., file: _Optional[_Union[MemoryFile, _Mapping]] = ...) -> None: ...

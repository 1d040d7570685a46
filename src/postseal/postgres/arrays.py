"""Arrays, and some single values, in PostgreSQL's binary form, packed by hand.

A group commit passes some twenty arrays of up to some hundred values. psycopg's own list dumper looks at each value's
type; here the type is known, and packing is one join. The form (src/backend/utils/adt/arrayfuncs.c, array_recv):
dimensions, null flag, element type, length, lower bound, then each value after its length in bytes, -1 for NULL; all
integers big-endian.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from struct import Struct
from typing import ClassVar

from psycopg.abc import AdaptContext
from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format

_HEADER = Struct(">iiIii")
_LENGTH = Struct(">i")
_NULL = _LENGTH.pack(-1)
_INT8 = Struct(">q")
_INTERVAL = Struct(">qii")
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class _Packed(bytes):
    """A value that is packed already; each subclass is one PostgreSQL type, and of an array has its elements' too."""

    __slots__ = ()
    oid: ClassVar[int]
    element_oid: ClassVar[int]


class Int8(_Packed):
    """The type int8."""

    oid = 20


class Uuid(_Packed):
    """The type uuid."""

    oid = 2950


class Interval(_Packed):
    """The type interval."""

    oid = 1186


class Int8Array(_Packed):
    """The type int8[]."""

    oid, element_oid = 1016, 20


class BoolArray(_Packed):
    """The type bool[]."""

    oid, element_oid = 1000, 16


class TextArray(_Packed):
    """The type text[]."""

    oid, element_oid = 1009, 25


class ByteaArray(_Packed):
    """The type bytea[]."""

    oid, element_oid = 1001, 17


class UuidArray(_Packed):
    """The type uuid[]."""

    oid, element_oid = 2951, 2950


class TimestampArray(_Packed):
    """The type timestamptz[]."""

    oid, element_oid = 1185, 1184


def int8(value: int) -> Int8:
    """Pack an integer of 64 bits."""
    return Int8(_INT8.pack(value))


def uuid(value: bytes) -> Uuid:
    """Pack a UUID, given as its 16 bytes."""
    return Uuid(value)


def interval(value: timedelta) -> Interval:
    """Pack a length of time, as microseconds alone."""
    return Interval(_INTERVAL.pack(value // _MICROSECOND, 0, 0))


def int8s(values: Sequence[int]) -> Int8Array:
    """Pack integers of 64 bits."""
    lengths_and_values = [8] * (2 * len(values))
    lengths_and_values[1::2] = values
    body = Struct(">" + "iq" * len(values)).pack(*lengths_and_values)
    return Int8Array(_header(Int8Array, len(values), has_null=False) + body)


def bools(values: Sequence[bool]) -> BoolArray:
    """Pack booleans."""
    body = b"".join([b"\0\0\0\1\1" if value else b"\0\0\0\1\0" for value in values])
    return BoolArray(_header(BoolArray, len(values), has_null=False) + body)


def texts(values: Sequence[str | None]) -> TextArray:
    """Pack texts and NULLs."""
    return TextArray(_pack(TextArray, [value if value is None else value.encode() for value in values]))


def byteas(values: Sequence[bytes | None]) -> ByteaArray:
    """Pack byte strings and NULLs."""
    return ByteaArray(_pack(ByteaArray, values))


def uuids(values: Sequence[bytes]) -> UuidArray:
    """Pack UUIDs, each given as its 16 bytes."""
    length = _LENGTH.pack(16)
    body = length + length.join(values) if values else b""
    return UuidArray(_header(UuidArray, len(values), has_null=False) + body)


def timestamps(values: Sequence[datetime | None]) -> TimestampArray:
    """Pack moments, each with its time zone, and NULLs."""
    packed = [value if value is None else _INT8.pack((value - _EPOCH) // _MICROSECOND) for value in values]
    return TimestampArray(_pack(TimestampArray, packed))


def _pack(kind: type[_Packed], values: Sequence[bytes | None]) -> bytes:
    length = _LENGTH.pack
    packed = [_NULL if value is None else length(len(value)) + value for value in values]
    return _header(kind, len(values), has_null=None in values) + b"".join(packed)


def _header(kind: type[_Packed], count: int, *, has_null: bool) -> bytes:
    return _HEADER.pack(1, has_null, kind.element_oid, count, 1)


class _PackedDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: _Packed) -> Buffer:
        return obj


def register(context: AdaptContext) -> None:
    """Let `context` (a connection) pass packed values as they are."""
    for kind in (Int8, Uuid, Interval, Int8Array, BoolArray, TextArray, ByteaArray, UuidArray, TimestampArray):
        dumper = type(f"{kind.__name__}Dumper", (_PackedDumper,), {"oid": kind.oid})
        context.adapters.register_dumper(kind, dumper)

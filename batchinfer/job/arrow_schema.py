"""The Arrow schema that pyarrow keeps in a Parquet file must be that of the file's columns.

pyarrow takes from it what Parquet cannot say, and passes over what does not go with the columns:
a damaged footer can so make a list a struct.
"""

from __future__ import annotations

import base64

import pyarrow as pa
import pyarrow.parquet as pq

Shape = tuple["str | Shape", ...]

_KEY = b"ARROW:schema"


def check_arrow_schema(metadata: pq.FileMetaData, schema: pa.Schema) -> None:
    """Check how columns are nested, and the names in them.

    Args:
        metadata: the file's; a file of another writer has no Arrow schema, and nothing to check.
        schema: as pyarrow makes it of both.

    Raises:
        ValueError: they are nested in another way, or something in it is no text.
    """
    kept = (metadata.metadata or {}).get(_KEY)
    if kept is None:
        return
    stored = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(kept)))
    if _shape_of(pa.struct(list(stored))) != _shape_of(pa.struct(list(schema))):
        raise ValueError("its footer is damaged: columns are nested otherwise than its schema says")


def _shape_of(kind: pa.DataType) -> Shape:
    if isinstance(kind, pa.BaseExtensionType):
        return _shape_of(kind.storage_type)
    if pa.types.is_timestamp(kind):
        _ = kind.tz  # UnicodeDecodeError, where it is no text; times of 96 bits lose theirs
    if pa.types.is_struct(kind):
        fields = ((field.name, _shape_of(field.type)) for field in kind)
        return ("struct", *(part for field in fields for part in field))
    if pa.types.is_map(kind):
        return ("map", _shape_of(kind.key_type), _shape_of(kind.item_type))
    if not pa.types.is_dictionary(kind) and hasattr(kind, "value_field"):  # lists of all kinds
        return ("list", _shape_of(kind.value_type))
    return ("value",)

"""Iterators over row files: JSON lines and arrays, csv, tsv, parquet, Arrow, and data sets from `datasets`.

Files are read in pieces, so memory use is independent of the file size. An unreadable row becomes a `BadRow` in the
same place, and reading continues if the next row can be located. Otherwise (an open quote, a damaged row group) reading
stops with an error.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from offload.errors import ConfigError, counted, describe
from offload.extras.data.sources import SourceFile
from offload.extras.data.storage import DataSet, first_bad_byte, library, open_decompressed

Row = tuple[str, "dict[str, Any] | BadRow | Any"]
"""(Row name for messages, row content)."""

_MAX_ROW_BYTES = 64 << 20
"""A larger row means a file without line ends, or a quote that never closes."""
_PIECE_BYTES = 8 << 20  # decoded table bytes at once
_MAX_PIECE_ROWS = 1024
_BLOCK_CHARS = 1 << 20
_CUT_CHARS = 16
"""A cut name or escape in JSON, such as -Infinit, is reported at most this far before the end of the text."""
_SIGN = re.compile(r"[ \t\r\n]*([\[,\]]?)[ \t\r\n]*")  # before an element of a JSON array, and after the last
_UNDECODED = re.compile("[\udc80-\udcff]")
_DELIMITERS = {"csv": ",", "tsv": "\t"}
ROWS_AS_TEXT = frozenset({"json", *_DELIMITERS})
"""Containers with a text for each row. The others have typed columns."""
_TABLES = {
    "parquet": ("pyarrow.parquet", "parquet file"),
    "arrow": ("pyarrow", "Arrow file (IPC, as a file or a stream)"),
}
"""Module and name of each container of columns."""
_EXPECTED = "One record a line is expected, or one array of records."


class BadRow(ConfigError):
    """One row violates the format; others may be valid."""


@contextmanager
def open_text(file: SourceFile) -> Iterator[io.TextIOWrapper]:
    """Open a file as UTF-8 text, decompressed. Read errors inside the context become ConfigError."""
    try:
        # utf-8-sig: a byte order mark at the start is no text.
        with open_decompressed(file.place) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig") as text:
            yield text
    except UnicodeDecodeError as error:
        if _is_binary(file):
            raise ConfigError(
                f"{file.place} is a binary file, not text ({first_bad_byte(file.place)}). Extract the text first, or "
                f"leave it out of {file.setting}."
            ) from error
        raise ConfigError(
            f"{file.place} is not UTF-8 text ({first_bad_byte(file.place)}: {error.reason}). Convert it, such as by "
            f"`iconv -f LATIN1 -t UTF-8 IN > OUT`, or leave it out of {file.setting}."
        ) from error


def _is_binary(file: SourceFile) -> bool:
    """Return True for a zero byte among the first bytes: no text in any 8-bit encoding has one."""
    with open_decompressed(file.place) as stream:
        return b"\0" in stream.read(_PIECE_BYTES)


def json_reason(error: Exception, begin: int = 0) -> str:
    """Return the reason for invalid JSON, with the character from 1, counted from `begin`.

    The line in the error counts lines in the value, not in the file.
    """
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos - begin + 1}"
    return str(error)


def _is_cut(error: Exception, num_chars: int) -> bool:
    """Return whether more text may make JSON of `num_chars` characters valid."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    # An open string is reported at its start.
    return error.msg.startswith("Unterminated string") or error.pos >= num_chars - _CUT_CHARS


def columns_of(file: SourceFile) -> list[str] | None:
    """Return a table's column names. None: each row has separate keys (JSON). Raises ConfigError."""
    if file.container == "json":
        return None
    if file.container in _DELIMITERS:
        with _open_csv(file) as (names, _):
            return names
    if isinstance(file.place, DataSet):
        return list(file.place.rows.column_names)
    table = _open_table(file)
    # The other schema of a parquet file lists each value within a column.
    if file.container == "parquet":
        return list(table.schema_arrow.names)
    return list(table.schema.names)


def read_rows(file: SourceFile, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows in a file in order. `columns`: table columns to read; None: all. Raises ConfigError."""
    if file.container == "json":
        return _json_rows(file)
    if file.container in _DELIMITERS:
        return _csv_rows(file)
    if columns is None:
        columns = columns_of(file) or ()
    return _table_rows(file, list(columns))


# -- JSON ------------------------------------------------------------------------------------------------------------


def _json_rows(file: SourceFile) -> Iterator[Row]:
    with open_decompressed(file.place) as stream:
        # A look without reading on: the ending .json stands for both lines and an array.
        if stream.peek(64)[:64].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _json_array(file)
            return
        number = 0
        # The limit keeps a file without line ends from filling memory.
        while line := stream.readline(_MAX_ROW_BYTES):
            number += 1
            where = f"{file.place}:{number}"
            if len(line) == _MAX_ROW_BYTES and not line.endswith(b"\n"):
                yield where, BadRow(f"{where} is longer than {_MAX_ROW_BYTES:,} bytes. One record a line is expected.")
                while line and not line.endswith(b"\n"):
                    line = stream.readline(_MAX_ROW_BYTES)
            elif line.strip():
                try:
                    yield where, json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a thousand brackets
                    yield where, BadRow(f"{where} is not valid JSON: {json_reason(error)}. {_EXPECTED}")


def _json_array(file: SourceFile) -> Iterator[Row]:
    """Yield the elements in a JSON array. The array may be larger than memory.

    An element above the limit is a `BadRow` if its end is in memory. Otherwise the next element cannot be located.
    """
    decode = json.JSONDecoder().raw_decode
    buffer = ""
    at = 0  # in the buffer
    number = 0  # records begun
    expected = "["

    def refill() -> bool:
        """Read on; the block doubles for each retry on an incomplete element."""
        nonlocal buffer, at
        if block := text.read(max(_BLOCK_CHARS, len(buffer) - at)):
            buffer, at = buffer[at:] + block, 0
        return bool(block)

    with open_text(file) as text:
        while True:
            sign = _SIGN.match(buffer, at)
            assert sign is not None
            # The sign may continue beyond the buffer: blanks, then a comma.
            if sign.end() == len(buffer) and refill():
                continue
            at = sign.end()
            if sign[1] == "]" and expected == ",":
                break
            if sign[1] != expected:
                raise ConfigError(
                    f"{file.place} is not valid JSON: after record {number} a comma or a bracket is expected, not "
                    f"{sign[1] or buffer[at : at + 1] or 'the end of the file'!r}. {_EXPECTED}"
                )
            expected = ","
            # An empty array.
            if not number and buffer.startswith("]", at):
                continue
            number += 1
            where = f"{file.place}, record {number}"
            # The limit is compared with characters, and none is less than a byte.
            too_long = f"{where} is longer than {_MAX_ROW_BYTES:,} bytes."
            while True:
                try:
                    value, end = decode(buffer, at)
                except (ValueError, RecursionError) as error:
                    # An element cut by the end of the buffer is invalid too. More text tells the two apart.
                    has_room = len(buffer) - at < _MAX_ROW_BYTES
                    if has_room and refill():
                        continue
                    if not has_room and _is_cut(error, len(buffer)):
                        raise ConfigError(f"{too_long} {_EXPECTED}") from error
                    raise ConfigError(f"{where} is not valid JSON: {json_reason(error, at)}. {_EXPECTED}") from error
                # A number may continue: 1 | e-5. Three more characters tell.
                if end + 2 < len(buffer) or not refill():
                    break
            if end - at > _MAX_ROW_BYTES:
                value = BadRow(too_long)
            at = end
            yield where, value
        if at < len(buffer):
            raise ConfigError(f"{file.place} is not valid JSON: there is more text after the array. {_EXPECTED}")


# -- csv, tsv --------------------------------------------------------------------------------------------------------


@contextmanager
def _open_csv(file: SourceFile) -> Iterator[tuple[list[str], Any]]:
    """Open a table: column names, and a reader for the other rows."""
    csv.field_size_limit(_MAX_ROW_BYTES)  # process-wide; the default of 131,072 characters is too small
    # Invalid UTF-8 becomes lone surrogates, so the error can name the row.
    options: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    with open_decompressed(file.place) as stream, io.TextIOWrapper(stream, **options) as text:
        # strict: `"a"b` is an error, not the text ab.
        reader = csv.reader(text, delimiter=_DELIMITERS[file.container], strict=True)
        try:
            names: list[str] = next((fields for fields in reader if fields), [])
        except csv.Error as error:
            raise ConfigError(f"{file.place}:1 is not a valid header of a {file.container} file: {error}.") from error
        # A row as a dictionary would keep the last of two columns, without a word.
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"{file.place}:1 names the column {repeated[0]!r} twice: rename one of them.")
        yield names, reader


def _csv_rows(file: SourceFile) -> Iterator[Row]:
    with _open_csv(file) as (names, reader):
        while True:
            # Before the read: a row with line ends in a quote is named by the first line.
            where = f"{file.place}:{reader.line_num + 1}"
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                reason = str(error)
                if "unexpected end" in reason or "field limit" in reason:
                    longer = ""
                    if "limit" in reason:
                        longer = f"has a field of more than {_MAX_ROW_BYTES:,} characters; perhaps it "
                    raise ConfigError(
                        f"{where} {longer}opens a quote that never closes, so the rest of the file would be one field: "
                        'double the quotes inside of a field ("" for "), or take the quote.'
                    ) from error
                yield where, BadRow(f"{where} is not a valid row of a {file.container} file: {reason}.")
                continue
            if not fields:
                continue
            # `datasets` fills short rows with empty texts. Here such a row is a bad one.
            if len(fields) != len(names):
                columns = f"{counted(len(names), 'column')} ({', '.join(names[:8])})"
                yield where, BadRow(f"{where} has {counted(len(fields), 'field')}, but the header has {columns}.")
                continue
            if any(_UNDECODED.search(text) for text in fields if not text.isascii()):
                yield where, BadRow(f"{where} is not UTF-8 text.")
                continue
            yield where, dict(zip(names, fields, strict=True))


# -- parquet, Arrow, data sets ---------------------------------------------------------------------------------------


def _open_table(file: SourceFile) -> Any:
    """Return a pyarrow.parquet.ParquetFile, or an Arrow reader (IPC, as a file or a stream)."""
    place = file.place
    module, title = _TABLES[file.container]
    arrow = library(module, f"{place}, a {title},")
    try:
        if file.container == "parquet":
            # Options for little memory: 18 MiB in place of 2 GiB for one row group of 766 MiB (docs/lab-log.md).
            return arrow.ParquetFile(
                place.path or place.open(),
                pre_buffer=False,  # a row group may be as large as the file
                buffer_size=1 << 20,
                page_checksum_verification=True,
            )
        # Mapped, a file takes no memory of the process. Behind a URL there is nothing to map.
        if place.path:
            source = arrow.memory_map(str(place))
        else:
            source = arrow.PythonFile(place.open())
        # Both forms have the ending .arrow; `datasets` writes streams.
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            return arrow.ipc.open_file(source)
        return arrow.ipc.open_stream(source)
    except Exception as error:  # pyarrow raises OSError, ValueError and others
        raise ConfigError(f"{place} is not a readable {title}, or is truncated: {error}.") from error


def _table_parts(file: SourceFile, names: list[str]) -> Iterator[tuple[str, Iterator[Any]]]:
    """Yield the parts of a table in order: (name; rows as pyarrow tables or record batches)."""
    if isinstance(file.place, DataSet):
        rows = file.place.rows.select_columns(names).with_format("arrow")
        step = _piece_rows(file.num_bytes, len(rows))
        yield "the data set", rows.iter(step)
        return
    table = _open_table(file)
    if file.container == "arrow":
        batches = table
        # A stream is read in order alone. A file gives each batch by number.
        if hasattr(table, "get_batch"):
            batches = map(table.get_batch, range(table.num_record_batches))
        yield "the table", (batch.select(names) for batch in batches)
        return
    for index in range(table.num_row_groups):
        group = table.metadata.row_group(index)
        step = _piece_rows(group.total_byte_size, group.num_rows)
        name = f"row group {index} of {table.num_row_groups}"
        yield name, table.iter_batches(step, [index], names, use_threads=False)


def _table_rows(file: SourceFile, names: list[str]) -> Iterator[Row]:
    """Yield the rows of a table, numbered from 0 as in `datasets`. A read error raises ConfigError."""
    row = 0
    for part, batches in _table_parts(file, names):
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:  # see _open_table
                raise ConfigError(
                    f"{file.place} is damaged in {part}, from row {row:,} on: "
                    f"{' '.join(str(error).split())[:200]}. Write it again, or leave it out."
                ) from error
            if batch is None:
                break
            step, in_json = _piece_rows(batch.nbytes, batch.num_rows), json_columns(batch.schema)
            for begin in range(0, batch.num_rows, step):
                # Python objects take many times the bytes of a column, so a batch is converted in pieces.
                for content in _contents(batch.slice(begin, step)):
                    where = f"{file.place}, row {row}"
                    if isinstance(content, Exception):
                        content = BadRow(f"{where} has a value without a Python form: {describe(content)}.")
                    else:
                        content = _from_json(without_nulls(content, in_json), in_json)
                    yield where, content
                    row += 1


def _contents(piece: Any) -> list[Any]:
    """Return the rows in a piece, maps as dictionaries. An unreadable row is an exception."""
    try:
        return list(piece.to_pylist(maps_as_pydicts="strict"))
    except Exception as error:  # a date after the year 9999, a key twice in a map
        if piece.num_rows == 1:
            return [error]
        return [each for at in range(piece.num_rows) for each in _contents(piece.slice(at, 1))]


def json_columns(schema: Any) -> Any:
    """Return the places of JSON in a row, for `_from_json` and `without_nulls`.

    `datasets` has columns, elements and keys of the type `Json()`: `arrow.json` in Arrow, or a text and a note in the
    metadata. A place is True, a dictionary by keys, or a list with the place in each element. None: no JSON. A map
    (from Spark, duckdb, polars) is a place too: a null in it is a value.
    """
    # The types of `datasets` stand in the metadata of the schema.
    features = json.loads((schema.metadata or {}).get(b"huggingface") or "{}").get("info", {}).get("features") or {}
    found = {field.name: _json_places(field.type, features.get(field.name)) for field in schema}
    return {name: place for name, place in found.items() if place} or None


def _json_places(arrow_type: Any, feature: Any) -> Any:
    # The note may lack a column, and has a list in place of an object for some types.
    if not isinstance(feature, dict):
        feature = {}
    is_json = getattr(arrow_type, "extension_name", "") == "arrow.json" or feature.get("_type") == "Json"
    if is_json:
        return feature.get("decode", True)
    if hasattr(arrow_type, "key_type"):
        return True
    if hasattr(arrow_type, "value_field"):  # lists
        place = _json_places(arrow_type.value_type, feature.get("feature"))
        if not place:
            return None
        return [place]
    if not hasattr(arrow_type, "fields"):  # no structure
        return None
    found = {field.name: _json_places(field.type, feature.get(field.name)) for field in arrow_type.fields}
    return {name: place for name, place in found.items() if place} or None


def _from_json(value: Any, place: Any) -> Any:
    """Return a value with the JSON at the given places parsed. A text without valid JSON is unchanged."""
    if isinstance(place, dict) and isinstance(value, dict):
        return {key: _from_json(each, place.get(key)) for key, each in value.items()}
    if isinstance(place, list) and isinstance(value, list):
        return [_from_json(each, place[0]) for each in value]
    if place is not True or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def without_nulls(value: Any, in_json: Any = None) -> Any:
    """Remove null values: in a message column, each message has the keys of all messages.

    `in_json`: places of parsed JSON, in which a null is a value.
    """
    if isinstance(value, dict) and in_json is not True:
        places = in_json or {}
        return {key: without_nulls(each, places.get(key)) for key, each in value.items() if each is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list) and in_json is not True:
        (place,) = in_json or (None,)
        return [without_nulls(each, place) for each in value]
    return value


def _piece_rows(num_bytes: int, num_rows: int) -> int:
    """Return the row count per decoded piece."""
    return min(max(_PIECE_BYTES * num_rows // max(num_bytes, 1), 1), _MAX_PIECE_ROWS)

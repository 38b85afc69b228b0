"""Columns with every type in Arrow: rows as `datasets` gives them, or as pyarrow does where `datasets` refuses."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from offload.extras.data.rows import BadRow, read_rows
from tests.data.asked import files_of

_ID, _TEXT = pa.int8(), pa.string()
_STRUCT, _MAP = pa.struct([("a", _ID)]), pa.map_(_TEXT, _ID)
_VALUES: dict[pa.DataType, Any] = {
    pa.null(): None,
    pa.bool_(): True,
    **dict.fromkeys((_ID, pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()), 3),
    pa.uint64(): 2**63,
    **dict.fromkeys((pa.float16(), pa.float32(), pa.float64()), 1.5),
    **dict.fromkeys((_TEXT, pa.large_string(), pa.string_view(), pa.dictionary(_ID, _TEXT)), "a"),
    pa.run_end_encoded(pa.int32(), _TEXT): "a",
    **dict.fromkeys((pa.binary(), pa.binary(3), pa.large_binary(), pa.binary_view()), b"abc"),
    **dict.fromkeys((pa.date32(), pa.date64()), date(2020, 1, 2)),
    **dict.fromkeys((pa.time32("s"), pa.time64("ns")), time(1, 2)),
    **dict.fromkeys((pa.timestamp("s"), pa.timestamp("us", "Europe/Berlin")), datetime(2020, 1, 2)),
    pa.timestamp("ns"): datetime(2020, 1, 2),
    **dict.fromkeys((pa.duration("s"), pa.duration("ns")), timedelta(1)),
    pa.month_day_nano_interval(): pa.MonthDayNano([1, 2, 3]),
    **dict.fromkeys(
        (pa.decimal32(5, 2), pa.decimal64(9, 2), pa.decimal128(9, 2), pa.decimal256(50, 2)), Decimal("1.25")
    ),
    **{make(_ID): [1, 2] for make in (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)},
    **{each: [1, 2] for each in (pa.list_(_ID, 2), pa.fixed_shape_tensor(_ID, [2]))},
    _STRUCT: {"a": 1},
    _MAP: [("k", 1), ("none", None)],
    pa.map_(_ID, pa.struct([("m", _MAP)])): [(1, {"m": [("k", 1)]})],
    pa.list_(_MAP): [[("k", 1)], []],
    pa.struct([("m", _MAP), ("t", _TEXT)]): {"m": [("k", None)], "t": "b"},
    pa.uuid(): b"0123456789abcdef",
    pa.bool8(): 1,
    pa.json_(): '{"a": [null, 1]}',
    pa.opaque(_TEXT, "type", "vendor"): "a",
}
_UNION = pa.array([0, 1], _ID)
_ARRAYS = {
    "sparse": pa.UnionArray.from_sparse(_UNION, [pa.array([1, 2]), pa.array(["a", "b"])]),
    "dense": pa.UnionArray.from_dense(_UNION, pa.array([0, 0], pa.int32()), [pa.array([1]), pa.array(["a"])]),
}


def _array(arrow_type: pa.DataType) -> pa.Array:
    values = [_VALUES[arrow_type], None]
    if isinstance(arrow_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(arrow_type, pa.array(values, arrow_type.storage_type))
    if pa.types.is_run_end_encoded(arrow_type):
        return pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), pa.array(values, _TEXT))
    return pa.array(values, arrow_type)


_ARRAYS |= {str(arrow_type): _array(arrow_type) for arrow_type in _VALUES}


def _rows_as_others_have_them(table: pa.Table) -> list[dict[str, Any]]:
    try:
        return datasets.Dataset(table).to_list()
    except ValueError:  # no such type in `datasets`
        return table.to_pylist(maps_as_pydicts="strict")


def _write(table: pa.Table, path: Path) -> Path:
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
    elif path.suffix == ".feather":
        pa.feather.write_feather(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    return path


@pytest.mark.parametrize("name", _ARRAYS)
def test_every_type_is_read(name: str, tmp_path: Path) -> None:
    """Break: take a map for a structure."""
    table = pa.table({"text": ["one", "two"], "x": _ARRAYS[name]})
    expected = [
        {key: value for key, value in row.items() if value is not None} for row in _rows_as_others_have_them(table)
    ]
    for suffix in (".parquet", ".feather", ".arrow"):
        try:
            path = _write(table, tmp_path / f"rows{suffix}")
        except pa.ArrowNotImplementedError:  # parquet lacks the type
            continue
        (file,) = files_of(str(path))
        assert [row for _, row in read_rows(file)] == expected
        assert [row for _, row in read_rows(file, ["text"])] == [{"text": "one"}, {"text": "two"}]


def test_no_type_is_left_out() -> None:
    known = {getattr(pa.lib, name) for name in dir(pa.lib) if name.startswith("Type_")}
    # pyarrow makes no arrays of the other two intervals.
    known -= {pa.lib.Type_INTERVAL_MONTHS, pa.lib.Type_INTERVAL_DAY_TIME}
    assert known <= {array.type.id for array in _ARRAYS.values()}


def test_a_value_without_a_python_form_is_a_bad_row(tmp_path: Path) -> None:
    twice = pa.array([[("k", 1), ("k", 2)], [("k", 1)]], _MAP)
    for array in (pa.array([10**12, 0], pa.timestamp("s")), twice):
        (file,) = files_of(str(_write(pa.table({"x": array}), tmp_path / "rows.parquet")))
        (_, bad), (_, good) = read_rows(file)
        assert isinstance(bad, BadRow)
        assert "rows.parquet, row 0 has a value without a Python form: " in str(bad)
        assert good == pa.table({"x": array}).slice(1).to_pylist(maps_as_pydicts="strict")[0]

"""The page with published speeds beside our plans."""

import json

from benchmarks import published


def test_the_page_has_the_stored_plans() -> None:
    """Break: another figure in a row."""
    stored = json.loads(published.STORED.read_text())
    assert stored.keys() <= {row.title for row in published.ROWS}
    page = (published.STORED.parent / "published.md").read_text()
    assert page == published.page(stored) + "\n", "run `python -m benchmarks.published --most 0`"

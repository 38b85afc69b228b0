"""Micro-batches and passes chosen for `train.tokens_per_step`, beside a search over all equal parts."""

from __future__ import annotations

from typing import Any

import pytest

from offload.app.config.config import Config
from offload.extras.plan import alternatives
from offload.extras.plan.alternatives import divisors, in_parts, place
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine

ROWS, LENGTH = 8, 2048
GIVEN = {
    "lora.rank": 4,
    "model.preset": "small",
    "data.sequence_length": LENGTH,
    "train.tokens_per_step": ROWS * LENGTH,
    "train.compile": "never",
    "train.recompute": "always",
    "offload.parameters": "cpu",
    "offload.optimizer": "cpu",
    "offload.activations": "cpu",
    "offload.update": "cpu",
    "offload.graphs": "device",
    "offload.prefetch": 0,
}
MACHINE = read_machine("rtx-4090").with_(device_bytes=1 << 31)


def chosen(forecaster: Forecaster, host_mib: int, **options: Any) -> Forecast:
    hardware = MACHINE.with_(host_bytes=host_mib << 20)
    return in_parts(forecaster, forecaster.predict(forecaster.config, hardware, times=False), **options)


def parts_of(forecast: Forecast) -> tuple[int, int | None]:
    return forecast.config.train.passes, forecast.config.train.micro_batch_size


def cut(forecaster: Forecaster, passes: int, size: int, host_mib: int = 1024, *, times: bool = False) -> Forecast:
    """Return the forecast of these parts."""
    given = {"train.passes": passes, "train.micro_batch_size": size}
    config = forecaster.config.with_settings({key: (value, "resolved") for key, value in given.items()})
    return forecaster.predict(config, MACHINE.with_(host_bytes=host_mib << 20), times=times)


@pytest.fixture(scope="module")
def forecaster() -> Forecaster:
    return Forecaster(Config.load(None, GIVEN), 1)


@pytest.mark.slow
@pytest.mark.parametrize("host_mib", [1024, 180])
def test_the_fewest_passes_with_room_on_the_host_and_there_the_largest_micro_batch(
    forecaster: Forecaster, host_mib: int
) -> None:
    """Break: begin with the most passes, or with the smallest micro-batch."""
    fitting = [
        (passes, -size)
        for passes in divisors(ROWS)
        for size in divisors(ROWS // passes)
        if cut(forecaster, passes, size, host_mib).fits
    ]
    passes, size = min(fitting)
    assert (passes > 1) == (host_mib == 180), "memory of the host ends"
    assert parts_of(chosen(forecaster, host_mib, times=False)) == (passes, -size)


def test_more_passes_come_before_tiles(forecaster: Forecaster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of tiles take minutes for a large model. Break: try them for each number of passes."""
    tried: list[int] = []
    monkeypatch.setattr(alternatives, "_tile", lambda _, found: tried.append(found.config.train.passes))
    assert chosen(forecaster, 180, times=False).config.train.passes > 1
    assert not tried
    assert not chosen(forecaster, 1, times=False).fits
    assert tried == divisors(ROWS)


def test_rows_are_halved_in_twice_the_passes_as_long_as_that_is_faster(
    forecaster: Forecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: stop at the fastest of the first tries."""
    monkeypatch.setattr(alternatives, "_pace", lambda _, parts, **__: (parts_of(parts)[1] or ROWS) / parts_of(parts)[0])
    assert parts_of(chosen(forecaster, 1024)) == (2, 1)
    monkeypatch.setattr(alternatives, "_pace", lambda _, parts, **__: abs(parts_of(parts)[0] - 2))
    assert parts_of(chosen(forecaster, 1024))[0] == 2


def test_no_other_parts_are_faster(forecaster: Forecaster) -> None:
    """Break: return the slowest."""
    found = place(forecaster, chosen(forecaster, 1024))
    assert found.timing is not None
    for passes, size in ((1, ROWS), (1, ROWS // 2), (2, 4), (ROWS, 1)):
        other = cut(forecaster, passes, size, times=True).timing
        assert other is not None
        assert found.timing.step_seconds <= 1.001 * other.step_seconds


def test_nothing_fits_in_one_row_at_a_time_and_the_users_parts_stay(forecaster: Forecaster) -> None:
    found = chosen(forecaster, 1)
    assert (parts_of(found), found.fits) == ((1, 1), False)
    given = Forecaster(Config.load(None, {**GIVEN, "train.passes": 2}), 1)
    assert parts_of(chosen(given, 1024, times=False)) == (2, ROWS // 2)

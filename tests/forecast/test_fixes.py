"""Changes tried if a plan does not fit, and the notes on changes to training itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from offload.app.config.config import Config
from offload.app.training.planner import planned_advice
from offload.engine.engine import Engine
from offload.errors import DoesNotFitError, common, is_common
from offload.extras.plan import alternatives
from offload.extras.plan.alternatives import Tries, apply_change, find_fix, place_or_fix
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.levers import INSTEAD, changes, effects
from offload.extras.plan.levers import fixes as fixes_of
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.run_forecast import describe_misfit
from offload.plan import describe_fit, describe_times

ON_DISK = {"offload.parameters": "nvme", "offload.optimizer": "nvme", "offload.gradients": "nvme"}
UNCLIPPED = {"train.max_grad_norm": None}


def fixes(over: set[str], **settings: Any) -> list[dict[str, Any]]:
    """Return the changes tried for a plan over budget on the tiers `over`."""
    found: Any = SimpleNamespace(
        config=Config.load(None, {"train.micro_batch_size": 1, **settings}),
        memory=SimpleNamespace(shortfalls=dict.fromkeys(over, 1), is_one_memory=False),
        hardware=SimpleNamespace(rates=SimpleNamespace(has_disk=True, has_bf16=True)),
        prepared=SimpleNamespace(plan=SimpleNamespace(update="cpu")),
        refusal="",
        num_replicas=1,
        num_groups=1,
    )
    return [*fixes_of(found, exact=True), *fixes_of(found, exact=False)]


@pytest.mark.parametrize(
    ("over", "settings", "on_disk", "unclipped"),
    [
        ({"device"}, {"offload.nvme_dir": ["/disk"]}, True, False),  # a tied weight is cut if its sums are on disk
        ({"device"}, {}, False, False),
        ({"device"}, {"offload.nvme_dir": ["/disk"], "offload.gradients": "nvme"}, False, False),
        ({"cpu"}, {"offload.nvme_dir": ["/disk"]}, True, True),
        ({"cpu"}, {"train.max_grad_norm": None}, False, False),
        ({"cpu"}, {"optimizer.name": "mezo"}, False, False),
    ],
)
def test_gradients_go_to_disk_or_wait_for_no_norm_before_a_step_has_fewer_rows(
    over: set[str], settings: dict[str, Any], on_disk: bool, unclipped: bool
) -> None:
    tried = fixes(over, **settings)
    assert (ON_DISK in tried) == on_disk
    assert (UNCLIPPED in tried) == unclipped
    rows = [index for index, change in enumerate(tried) if "train.batch_size" in change]
    assert rows
    assert all(tried.index(each) < rows[0] for each in (ON_DISK, UNCLIPPED) if each in tried)


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"train.batch_size": 8}, [2, 8]),
        ({"train.batch_size": 8, "optimizer.name": "mezo"}, []),
        ({"train.batch_size": 1}, []),
    ],
)
def test_more_passes_are_tried_before_fewer_rows(settings: dict[str, Any], passes: list[int]) -> None:
    tried = fixes({"cpu"}, **settings)
    assert [change["train.passes"] for change in tried if "train.passes" in change] == passes
    training = [index for index, change in enumerate(tried) if effects(change)]
    assert all("train.passes" not in change for change in tried[min(training) :])


@pytest.mark.parametrize(("rows", "passes"), [(8, [2, 8]), (2, [2]), (1, [])])
def test_passes_of_whole_micro_batches_are_listed_for_a_gpu(rows: int, passes: list[int]) -> None:
    found: Any = SimpleNamespace(
        config=Config.load(None, {"train.batch_size": 4 * rows, "train.micro_batch_size": 4}),
        hardware=SimpleNamespace(device="cuda", rates=SimpleNamespace(flops_per_s={}, has_bf16=True)),
        prepared=SimpleNamespace(plan=SimpleNamespace(update="cpu", residence=SimpleNamespace(common="cpu"))),
        num_groups=1,
        num_ranks=1,
    )
    assert [change["train.passes"] for change in changes(INSTEAD, found) if "train.passes" in change] == passes


Fits = Callable[[Mapping[str, Any]], bool]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fits], list[Mapping[str, Any]]]:
    """Return a function that replaces planning by a condition on the change, and returns the changes tried."""

    def replace_planning(fits: Fits) -> list[Mapping[str, Any]]:
        seen: list[Mapping[str, Any]] = []

        def judge(_forecaster: Any, _prediction: Any, change: Mapping[str, Any]) -> bool:
            seen.append(change)
            return fits(change)

        exact_ones = [{"train.recompute": "always"}, {"offload.activations": "cpu"}]
        monkeypatch.setattr(alternatives, "_fits", judge)
        monkeypatch.setattr(
            alternatives, "fixes", lambda _, *, exact: exact_ones if exact else [{"train.batch_size": 1}]
        )
        monkeypatch.setattr(alternatives, "_larger_budgets", lambda *_: {"offload.device_memory": "3MiB"})
        return seen

    return replace_planning


def test_a_larger_budget_comes_before_other_training_and_after_all_else(tried: Any) -> None:
    anything: Any = SimpleNamespace(num_made=0, config=Config())
    tried(lambda change: "train.batch_size" in change)
    assert find_fix(anything, anything, Tries(anything, 1)) == {"offload.device_memory": "3MiB"}
    tried(lambda change: len(change) == 2)
    found = find_fix(anything, anything, Tries(anything, 1))
    assert found == {"train.recompute": "always", "offload.activations": "cpu"}
    seen, none_left = tried(lambda _: True), Tries(anything, 0)
    assert find_fix(anything, anything, none_left) == {}
    assert none_left.is_cut
    assert not seen


@pytest.mark.parametrize("most", [1, 1000])
def test_a_search_ends_after_a_number_of_forecasts_and_tells_no_result_then(most: int) -> None:
    """The number alone decides, so that the advice is the same on a busy machine."""
    forecaster, initial = misfit(**{"offload.host_memory": "1MiB", "offload.optimizer": "cpu"})
    found = place_or_fix(forecaster, initial, lambda _: None, most)
    _, advice, *_ = describe_fit(found)
    if most == 1:
        assert (found.fix, found.untried_after) == ("", 1)
        assert "before all changes were tried" in advice
        assert "offload plan --tries 4" in advice
    else:
        assert found.untried_after is None
        assert found.fix in advice


def test_a_larger_device_budget_is_a_change_for_the_host() -> None:
    """A small one cuts the tied embedding into rows, and its gradients are then summed on the host."""
    on_disk = {**ON_DISK, "offload.nvme_dir": ["/disk"], "train.precision": "bf16", "train.micro_batch_size": 1}
    forecaster, initial = misfit(**on_disk, **{"offload.device_memory": "1700KiB", "offload.host_memory": "1200KiB"})
    assert initial.memory.shortfalls.keys() == {"cpu"}
    change = alternatives._larger_budgets(forecaster, initial)
    assert change.keys() == {"offload.device_memory"}
    assert alternatives._fits(forecaster, initial, change)


def misfit(**settings: Any) -> tuple[Forecaster, Forecast]:
    """Return a forecaster, and a plan of the built-in model."""
    config = Config.load(None, {"train.batch_size": 2, "data.sequence_length": 64, **settings})
    forecaster = Forecaster(config, 1)
    return forecaster, forecaster.predict(config, read_machine("h100").with_(device="cpu", device_bytes=None))


def test_a_run_that_does_not_fit_is_refused_first_and_has_no_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    forecaster, initial = misfit(**{"offload.host_memory": "1MiB", "offload.optimizer": "cpu"})
    said: list[str] = []

    def search(_forecaster: Any, _prediction: Any, tries: Tries) -> dict[str, Any]:
        assert len(said) == 1, "a search before the refusal"
        assert tries.has_more()
        return {}

    monkeypatch.setattr(alternatives, "find_fix", search)
    monkeypatch.setattr(alternatives, "place", lambda _, prediction: prediction)
    found = place_or_fix(forecaster, initial, said.append)
    assert "of host memory are missing. Looking for another placement, or the smallest change" in said[0]
    assert found.timing is None
    assert not any(line.startswith(("step:", "busy")) for line in describe_times(found))
    shortage, advice = describe_fit(found)
    assert shortage == found.shortage == said[0].partition(" Looking")[0]
    assert "no change" in advice
    assert "offload plan" not in advice, "the advice is of that command"
    monkeypatch.setattr(alternatives, "changes", lambda *_: [{"train.batch_size": 1}])
    monkeypatch.setattr(alternatives, "_try_change", Mock(side_effect=AssertionError("a try after the last")))
    others = alternatives.alternatives(forecaster, initial, found, Tries(forecaster, 0))
    assert [other.change for other in others] == ["--offload.host_memory 2GiB"], "the limit, not the machine"
    error = DoesNotFitError("64 KiB too little.", "Lower something that was not tried.")
    assert "was not tried" in str(error)
    with pytest.raises(DoesNotFitError) as raised, planned_advice(describe_misfit(found)):
        raise common(error)
    missing = shortage.removeprefix("it does not fit: ")
    assert str(raised.value).startswith(f"64 KiB too little. With all that a step needs, {missing} No change")
    assert is_common(raised.value), "one rank prints the error"
    with pytest.raises(DoesNotFitError, match="not tried"), planned_advice(""):
        raise DoesNotFitError("64 KiB too little.", "Lower something that was not tried.")


def test_rows_kept_whole_are_no_need_of_a_cpu() -> None:
    """Without a budget, all graphs are kept there: `auto` recomputes before it refuses."""
    forecaster, whole = misfit(**{"train.batch_size": 16})
    kept = whole.memory.total("device")
    small = whole.hardware.with_(host_bytes=int(0.8 * (kept + whole.memory.operations_bytes)))
    initial = forecaster.predict(whole.config, small)
    assert not initial.fits
    found = place_or_fix(forecaster, initial, lambda _: None)
    assert found.fits
    assert "--train.recompute" in found.placement_flags
    assert found.timing is not None


@pytest.mark.slow
def test_a_larger_budget_is_planned_and_narrowed() -> None:
    forecaster, initial = misfit(**{"offload.device_memory": "1MiB", "train.micro_batch_size": 2})
    found = alternatives._larger_budgets(forecaster, initial)
    (budget,) = found.values()
    assert alternatives._fits(forecaster, initial, found)
    _, larger = misfit(**{"offload.device_memory": budget})
    assert larger.config.offload.device_memory < 1.1 * larger.memory.total("device") + (1 << 18)


@pytest.mark.slow
def test_layers_are_cut_for_the_device_where_the_host_is_short() -> None:
    """The forecast then has the cut that a run with more host memory makes, and no shortage of the device."""
    _, found = misfit(**{"offload.device_memory": "2752KiB", "offload.host_memory": "4MiB", "offload.optimizer": "cpu"})
    assert found.memory.shortfalls.keys() == {"cpu"}
    assert "row blocks" in found.prepared.structure.splitting.description


_LLAMA = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.parametrize(
    ("budget", "length", "settings", "cut"),
    [
        ("300KiB", 48, {"train.recompute": "auto"}, "split into modules"),
        pytest.param(
            "120KiB",
            8,
            {"offload.activations": "cpu", "train.head_chunk_bytes": 4096},
            "row blocks",
            marks=pytest.mark.slow,
        ),
        pytest.param("300KiB", 48, {"train.recompute": "always"}, "split into modules", marks=pytest.mark.slow),
        pytest.param("264KiB", 48, {"offload.activations": "cpu"}, "split into modules", marks=pytest.mark.slow),
        ("264KiB", 48, {"offload.graphs": "cpu", "train.recompute": "always"}, "split into modules"),
    ],
)
def test_a_step_runs_in_the_memory_of_the_plan_where_units_are_smaller_than_blocks(
    budget: str, length: int, settings: dict[str, Any], cut: str
) -> None:
    settings = {"train.batch_size": 1, "data.sequence_length": length, "offload.optimizer": "cpu"} | settings
    config = Config.load(None, {"offload.device_memory": budget, **settings})
    forecaster, cpu = Forecaster(config, 1, _LLAMA), read_machine("h100").with_(device="cpu", device_bytes=None)
    short = forecaster.predict(config, cpu, times=False)
    config = apply_change(config, {"offload.device_memory": short.memory.total("device")})
    found = forecaster.predict(config, cpu, times=False)
    assert (short.fits, found.fits) == (False, True)
    assert cut in found.prepared.structure.splitting.description
    model = AutoModelForCausalLM.from_config(_LLAMA, dtype=torch.float32).train()
    ids = torch.arange(length).view(1, length)
    with Engine(model, settings=found.prepared.settings) as engine:
        engine.step({"input_ids": ids, "labels": ids})

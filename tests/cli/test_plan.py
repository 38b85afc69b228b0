"""`python -m offload.plan` in the test process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from offload import plan
from offload.errors import ConfigError
from offload.extras.plan.machine_files import _find, read_machine
from offload.plan import main
from offload.sizes import parse_size
from tests.cli.conftest import LLAMA

SMALL = ("--model.preset", "small", "--hardware", "rtx-4090", "--data.sequence_length", "256")
HOST = ("--offload.parameters", "cpu", "--offload.optimizer", "cpu")
DISK = ("--offload.parameters", "nvme", "--offload.optimizer", "nvme", "--offload.nvme_dir")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_plan_for_a_described_machine_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    memory = ("--offload.host_memory", "80GiB", "--host-memory", "100GiB")  # the smaller of both is the limit
    code, found = told(capsys, *SMALL, *HOST, *memory)
    assert (code, found["fits"], found["machine"]) == (0, True, "RTX 4090")
    assert {found["tiers"][tier]["budget_bytes"] for tier in ("pinned", "cpu")} == {80 << 30}
    assert set(found["tiers"]) == {"device", "pinned", "cpu"}
    for tier in found["tiers"].values():
        assert tier["bytes"] == sum(each["bytes"] for each in tier["allocations"]) <= tier["budget_bytes"]
    names = [{each["name"] for each in found["tiers"][tier]["allocations"]} for tier in ("pinned", "cpu")]
    assert names == [{"weights", "gradients"}, {"low", "exp avg", "exp avg sq"}]
    assert found["step_seconds"] > 0
    assert found["bound_by"] in found["lane_seconds"]
    assert 0 < found["mfu"] < 1
    assert found["tokens_per_second"] == pytest.approx(8 * 256 / found["step_seconds"])
    assert "--optimizer.states int8" in [each["change"] for each in found["alternatives"]]
    assert all(set(each) >= {"change", "step_seconds", "fits"} for each in found["alternatives"])
    fitting = {each["change"]: each["step_seconds"] for each in found["alternatives"] if each["fits"]}
    assert {each["change"]: each["step_seconds"] for each in found["levers"]} == fitting
    assert found["hides_from_tokens"] > 0
    assert found["copy_bytes"] > 0
    assert 0 < found["lent_bytes"] <= found["tiers"]["device"]["budget_bytes"] - found["tiers"]["device"]["bytes"]


def test_the_first_words_come_before_the_imports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch and transformers take seconds to load."""

    def importing() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "importing", importing)
    with pytest.raises(KeyboardInterrupt):
        plan.main(["--model.preset", "gpt-oss-120b", "--hardware", "rtx-4090"])
    assert capsys.readouterr().err == "planning preset gpt-oss-120b on rtx-4090 ...\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "limit"), [(("--host-memory", "5GiB"), "1GiB"), (("--offload.host_memory", "80GiB"), "60GiB")]
)
def test_the_limit_of_the_host_is_the_smaller_of_budget_and_memory(
    more: tuple[str, ...], limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = told(capsys, *SMALL, *HOST, *more, "--tries", "1")
    assert {found["tiers"][tier]["budget_bytes"] for tier in ("pinned", "cpu")} == {parse_size(limit)}


def test_a_quantization_that_is_not_planned_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}))
    length = ("--data.sequence_length", "32", "--train.batch_size", "1")
    _, found = told(capsys, "--model.path", str(file), "--hardware", "rtx-4090", *length)
    assert [note for note in found["notes"] if "(mxfp4) is not planned" in note and "Set --lora.rank" in note]


@pytest.mark.slow
def test_alternatives_are_those_that_alter_something(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = told(capsys, *SMALL)
    told_of = {each["change"]: each["tokens_per_second"] / found["tokens_per_second"] for each in found["alternatives"]}
    assert code == 0
    assert "--train.batch_size 16 --train.micro_batch_size 8" in told_of
    assert "32 GiB more host memory" not in told_of, "nothing is on disk"
    assert "--optimizer.states bf16" not in told_of, "as fast"
    assert all(abs(ratio - 1) > 0.02 for ratio in told_of.values())
    tight = ("--offload.device_memory", "300MiB", "--train.recompute", "always")
    _, found = told(capsys, *SMALL, *HOST, *tight)
    assert ("--train.batch_size 16 --train.micro_batch_size 8", False) in [
        (each["change"], each["fits"]) for each in found["alternatives"]
    ], "what would not fit is worth to know"
    disk = ("--offload.parameters", "auto", "--offload.optimizer", "auto", "--offload.nvme_dir", str(tmp_path))
    host = ("--offload.device_memory", "600MiB", "--offload.host_memory", "150MiB")
    _, found = told(capsys, *SMALL, *disk, *host)
    assert "nvme" in found["tiers"]
    assert "32 GiB more host memory" in [each["change"] for each in found["alternatives"]]


@pytest.mark.slow
def test_where_it_does_not_fit_alternatives_are_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    where = (*HOST, "--offload.host_memory", "400MiB")
    code, found = told(capsys, *SMALL, *where)
    assert (code, found["fix"]) == (3, "--optimizer.states bf16")
    assert [each["change"] for each in found["alternatives"]] == ["--optimizer.states int8", "1 GiB more host memory"]
    assert all(each["fits"] for each in found["alternatives"])


@pytest.mark.slow
def test_a_budget_that_no_setting_meets_is_told_what_it_has_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("--model.preset", "tiny", "--hardware", "rtx-4090", "--train.precision", "fp32")
    small = ("--offload.device_memory", "1MiB", "--offload.host_memory", "1MiB")
    code, found = told(capsys, *tiny, *small, "--gpus", "2")
    assert code == 3
    given = found["fix"].split()
    assert given[::2] == ["--offload.device_memory", "--offload.host_memory"]
    code, fixed = told(capsys, *tiny, *given, "--gpus", "2")
    assert (code, fixed["fits"]) == (0, True)
    _, other = told(capsys, "--model.preset", "70b", "--hardware", "rtx-4090")
    assert not other["fits"]
    assert "memory" not in (other["fix"] or ""), "the machine has no more, and no budget is set"


@pytest.mark.slow
def test_weights_in_bf16_alone_are_offered_where_the_hosts_memory_does_not_reach(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mezo = (*SMALL, "--optimizer.name", "mezo", *HOST)
    sizes = []
    for master in ("fp32", "bf16"):
        _, found = told(capsys, *mezo, "--optimizer.master", master)
        on_host = [each for tier in ("pinned", "cpu") for each in found["tiers"].get(tier, {}).get("allocations", ())]
        sizes.append({each["name"]: each["bytes"] for each in on_host})
    assert sizes == [{"weights": sizes[1]["weights"], "low": sizes[1]["weights"]}, {"weights": sizes[1]["weights"]}]
    code, found = told(capsys, *mezo, "--offload.host_memory", str(sizes[1]["weights"] + (1 << 20)))
    assert (code, found["fix"]) == (3, "--optimizer.master bf16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings", "fix"),
    [
        (
            "8b",
            ("--data.sequence_length", "4096", "--train.batch_size", "16"),
            "--train.micro_batch_size 1 --offload.nvme_dir FOLDER",
        ),
        (
            "1b",
            (*HOST, "--offload.host_memory", "8GiB"),
            "--offload.optimizer nvme --offload.nvme_dir FOLDER",
        ),
    ],
    ids=["open", "placed"],
)
def test_what_does_not_fit_leaves_with_3_and_a_change_that_does(
    capsys: pytest.CaptureFixture[str], model: str, settings: tuple[str, ...], fix: str
) -> None:
    """The plan proposes the smallest change: with open tiers an NVMe folder. The search then decides the placement."""
    words = ("--model.preset", model, "--hardware", "rtx-4090", *settings)
    code, found = told(capsys, *words)
    assert (code, found["fits"]) == (3, False)
    assert found["shortfalls"]["cpu"] > 0
    assert found["fix"] == fix
    code, fixed = told(capsys, *words, *found["fix"].split())
    assert (code, fixed["fits"]) == (0, True), found["fix"]


@pytest.mark.slow
def test_where_the_disk_is_written_its_endurance_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, found = told(capsys, "--model.preset", "1b", "--hardware", "rtx-4090", *DISK, str(tmp_path))
    written = found["nvme_written_bytes_per_step"]
    assert written == pytest.approx(12 * found["num_parameters"], rel=0.02), "weights, their low halves, two moments"
    assert found["nvme_written_bytes_per_day"] == pytest.approx(written / found["step_seconds"] * 86400)
    assert found["nvme_endurance_days"] > 0


@pytest.mark.slow
def test_ranks_share_the_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = told(capsys, *SMALL, *DISK, str(tmp_path), "--gpus", "8", "--offload.zero_stage", "3")
    assert code == 0
    rates = read_machine("rtx-4090").rates
    most_bytes = rates.nvme_write_bytes_per_s * found["step_seconds"]
    assert found["nvme_written_bytes_per_step"] <= most_bytes * (1 + 1e-9)


@pytest.mark.slow
def test_a_disk_of_which_nothing_is_known_tells_no_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    described = yaml.safe_load(_find("rtx-4090").read_text())
    for figures in (described["rates"], described["sources"]):
        del figures["nvme_read_bytes_per_s"], figures["nvme_write_bytes_per_s"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(described))
    where = ("--offload.optimizer", "nvme", "--offload.nvme_dir", str(tmp_path))
    _, found = told(capsys, *SMALL[:2], "--hardware", str(tmp_path / "mine.yaml"), *where)
    assert found["step_seconds"] is None
    assert any("disk rate of RTX 4090" in note for note in found["notes"])


@pytest.mark.slow
def test_where_host_and_device_are_one_memory_less_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Saved graphs for a step need 196 GiB. The states take 75 GiB of the device, so less than 30 GiB remain."""
    words = ("--model.preset", "8b", "--hardware", "gb10", "--train.micro_batch_size", "2")
    code, found = told(capsys, *words, "--data.sequence_length", "4096", "--optimizer.states", "bf16")
    assert (code, found["fits"]) == (0, True)
    device = found["tiers"]["device"]
    assert not {"pinned", "host"} & found["tiers"].keys()
    assert device["bytes"] <= device["budget_bytes"] <= 0.9 * (112 << 30)
    kept = next(each["bytes"] for each in device["allocations"] if each["name"] == "kept tensors")
    assert 4 << 30 < kept < device["bytes"]


@pytest.mark.slow
def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model.preset", "8b", "--hardware", "rtx-4090", "--offload.host_memory", "100GiB")
    assert main([*words]) == 3
    assert "the smallest change that fits: --offload.nvme_dir FOLDER" in capsys.readouterr().out.splitlines()
    assert main([*SMALL[:4], "--train.compile", "never"]) == 0
    shown = capsys.readouterr().out
    for text in ("RTX 4090", "device", "exp avg sq", "step: ", "-bound", " tokens a step; this step has ", "it fits."):
        assert text in shown
    gains = [float(gain) for gain in re.findall(r"^instead: .*: ([\d.]+)x$", shown, re.MULTILINE)]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) > 1, "what moves the number most comes first"
    assert "instead: --train.compile auto (compiled blocks round differently): " in shown


@pytest.mark.slow
def test_the_placement_is_the_one_that_train_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """The placement is the fastest one in the search, or the only one that fits."""
    slow = (*SMALL, "--offload.device_memory", "400MiB", "--offload.throttle", "{h2d: 100MiB}")
    tight = ("--model.preset", "tiny", "--train.batch_size", "16", "--offload.device_memory", "8MiB")
    for words in (slow, tight):
        code, given = told(capsys, *words)
        assert (code, given["fits"]) == (0, True)
        assert given["placement"]
        _, taken = told(capsys, *words, *given["placement"].split())
        assert taken["tiers"].keys() == given["tiers"].keys()
        assert taken["step_seconds"] == pytest.approx(given["step_seconds"])
        assert taken["placement"] is None, "there is nothing faster left"
    main([*tight])
    assert f"placement, chosen by a search: {given['placement']}, " in capsys.readouterr().out


WITHOUT_AUTO = [
    *(f"--offload.{kind}=cpu" for kind in ("parameters", "optimizer", "gradients", "activations", "update")),
    *("--train.recompute=always", "--train.clip=deferred", "--offload.prefetch=1"),
]


@pytest.mark.slow
def test_plan_is_of_several_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """On a slow link each machine with enough memory has a replica. With more tokens per step the link is hidden.

    Break: divide the machine memory over all ranks; leave the network out of the step bound.
    """
    words = ("--model.preset", "tiny", "--hardware", "h100", "--data.sequence_length", "64", "--gpus", "2")
    words += ("--train.batch_size", "16", *WITHOUT_AUTO, "--offload.zero_stage", "3", "--machines", "2", "--link")
    code, slow = told(capsys, *words, "100Mbit")
    assert (code, slow["ranks"], slow["machines"], slow["replicas"]) == (0, 2, 2, 2)
    assert slow["bound_by"] == "network"
    assert slow["step_seconds"] == pytest.approx(slow["network_bytes_per_step"] / 12.5e6, rel=0.2)
    assert slow["hides_from_tokens"] > 16 * 64
    _, fast = told(capsys, *words, "400Gbit")
    assert fast["bound_by"] == "compute"
    assert fast["step_seconds"] < slow["step_seconds"]
    _, over_all = told(capsys, *words, "100Mbit", "--offload.replicas", "1")
    assert over_all["replicas"] == 1
    # 4 to 6 bytes per parameter, because weights on the device are gathered once. Replicas send 3.
    assert 4 / 3 <= over_all["network_bytes_per_step"] / slow["network_bytes_per_step"] <= 2
    assert over_all["step_seconds"] > slow["step_seconds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hardware"], "--hardware is given without a value"),
        (["--hardware", "rtx-409"], "rtx-4090"),
        (["--hardwear", "h100"], "did you mean hardware"),
        ([*SMALL, "--machines", "2"], "their network rate is unknown: give --link"),
        ([*SMALL, "--machines", "0"], "--machines is '0'; it should be a whole number of machines"),
        ([*SMALL, "--tries", "none"], "--tries is 'none'; it should be a whole number of forecasts"),
        ([*SMALL, "--link", "25Gbit"], "--link is 25Gbit, but the run is on 1 machine.*set --machines"),
        ([*SMALL, "--link", "fast"], '--link is .fast.; it should be a rate such as "25Gbit"'),
        (
            [*SMALL, "--machines", "2", "--link", "1Gbit", "--offload.replicas", "3"],
            "offload.replicas is 3, but 2 ranks cannot .* one of 1, 2, or to auto",
        ),
    ],
)
def test_wrong_words_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(words)

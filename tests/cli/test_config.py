"""The configuration in Python: origins, resolved values, YAML round trip, sizes."""

from __future__ import annotations

import json
import re
import typing
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.app.config.at_resume import AT_RESUME, resumed
from offload.app.config.command_line import parse_config
from offload.app.config.config import Config, all_keys
from offload.app.config.rules import RULE_SETTINGS
from offload.app.config.sections import OffloadSection, nested_types
from offload.app.training.decisions import BUILTIN_DEVICE_MEMORY, FROM_NUM_STEPS, decide, resolve
from offload.app.training.parts import make_settings
from offload.errors import ConfigError, counted
from offload.extras.plan.alternatives import to_flags, written_size
from offload.optim.rules import RULES
from offload.planning.settings import Settings
from offload.retired import RETIRED
from offload.setting_texts import KEYS
from offload.sizes import parse_size
from offload.tiers.placement import Placement
from offload.train import DESCRIPTION

ODD: list[Any] = [
    *({}, [], [1], ["x"], [{}], [[]], [None], {1: 2}, {None: None}, True, None, -1, 10**400, "", "x", "\x00", b"x"),
    *(float("inf"), float("nan"), "[", "[{}]", "{[1]: 2}", "1e400", object(), set(), range(3), (1, {})),
    *({"a": value} for value in (None, True, {}, {"b": {}}, {"rule": {}}, {"rule": []}, {"lr": [1]})),
    *([["a", {"rule": {}}]], [[{}, {}]], [[[], {}]], {"h2d": {"bandwidth": {}}}, {"h2d": {"latency_seconds": []}}),
]


@pytest.mark.parametrize(("section", "key"), [key.split(".") for key in all_keys()])
def test_a_value_of_any_kind_is_taken_or_refused_by_name(section: str, key: str) -> None:
    for value in ODD:
        with suppress(ValueError, ConfigError):  # pydantic errors are ValueErrors
            Config(**{section: {key: value}})


def test_every_default_may_be_given_as_the_command_line_gives_it() -> None:
    config = Config.load(None, {})
    for key, value in config.items():
        if isinstance(value, bool | int | float | str):
            assert Config.load(None, {key: str(value)}).get(key) == value, key


def test_sources_are_read_in_axolotls_words_and_checked_by_themselves(tmp_path: Path) -> None:
    text = "[{path: a.csv, type: completion, columns: {text: body}, weight: 2}, {path: b, split: test, weight: 0.5}]"
    config = Config.load(None, {"data.sources": text, "data.eval_source": "c*.jsonl"}, origin="command line")
    first = {"path": "a.csv", "type": "jsonl", "weight": 2, "columns": {"text": "body"}}
    assert config.data.sources == (first, {"path": "b", "split": "test", "weight": 0.5})
    assert config.data.eval_source == ({"path": "c*.jsonl"},)
    resolved = resolve(config, has_accelerator=False, max_positions=None)
    assert resolved.data.eval_share == 0.0, "there is something to evaluate on"
    (tmp_path / "run.yaml").write_text(resolved.to_yaml())
    assert Config.load(tmp_path / "run.yaml").data == resolved.data
    assert resumed(resolved, json.loads(json.dumps(resolved.to_dict())), "there").data == resolved.data
    for wrong, words in (
        ("[{pth: a}]", "no key 'pth'.*did you mean path"),
        ("[{path: a, type: shargpt}]", "did you mean sharegpt"),
        ("[{path: a, weight: 0}]", "a number above 0"),
        ("[{weight: 1}]", "needs its path"),
        ("[{path: a, weight: 1}, {path: b}]", "gives no weight to b"),
        ("[3]", "a path or a mapping"),
    ):
        with pytest.raises(ConfigError, match=f"data.sources.*{words}"):
            Config.load(None, {"data.sources": wrong})


def test_the_earlier_name_of_a_key_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data:\n  eval_fraction: 0.25\n")
    config = Config.load(tmp_path / "run.yaml")
    assert (config.data.eval_share, config.origin("data.eval_share")) == (0.25, "file")
    assert Config(data={"eval_fraction": 0.5}).data.eval_share == 0.5
    saved = {"data.eval_fraction": (0.125, "command line"), "train.steps": (3, "default")}  # from an older checkpoint
    assert resumed(Config.load(None, {}), saved, "there").data.eval_share == 0.125
    parsed = parse_config(["--data.eval_fraction", "0.3"], prog="train", description="")
    assert (
        parsed.data.eval_share == parse_config(["--data.eval-fraction=0.3"], prog="t", description="").data.eval_share
    )
    with pytest.raises(ConfigError, match=r"data\.eval_fraction is the earlier name of data\.eval_share, and both"):
        Config.load(None, {"data.eval_fraction": 0.1, "data.eval_share": 0.1})


@pytest.mark.parametrize(
    ("key", "off", "on", "words"),
    [
        ("train.noise_scale", False, True, "two runs at different batch sizes"),
        ("train.loss_type", "sigmoid", "hinge", "TRL's DPOTrainer the mixin of OffloadTrainer"),
        ("train.loss_type", "sigmoid", "ipo", "TRL's DPOTrainer the mixin of OffloadTrainer"),
    ],
)
def test_a_removed_setting_is_refused_with_a_replacement(
    tmp_path: Path, key: str, off: Any, on: Any, words: str
) -> None:
    """The former default is ignored: old configurations run."""
    section, name = key.split(".")
    path, origins = tmp_path / "run.yaml", {"train.steps": (3, "file")}
    path.write_text(f"{section}:\n  {name}: {str(off).lower()}\n")
    assert Config.load(path).to_dict() == Config(**{section: {name: off}}).to_dict() == Config.load().to_dict()
    assert resumed(Config.load(), {**origins, key: (off, "default")}, "there").train.steps == 3
    path.write_text(f"{section}:\n  {name}: {str(on).lower()}\n")
    for refused in (
        lambda: Config.load(path),
        lambda: Config(**{section: {name: on}}),
        lambda: parse_config([f"--{key}", str(on)], prog="train", description=""),
    ):
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)} is no longer a setting: .*{words}"):
            refused()
    saved = {**origins, key: (on, "command line")}
    if RETIRED[key].resumes:
        assert resumed(Config.load(), saved, "there").train.steps == 3
    else:
        with pytest.raises(ConfigError, match=words):
            resumed(Config.load(), saved, "there")


def test_an_unknown_preset_gives_the_list_and_the_nearest() -> None:
    for wrong, nearest in (("Qwen3-14B", "qwen3-14b"), ("gpt-oss", "gpt-oss-20b")):
        with pytest.raises(ConfigError, match=rf"one of tiny, .*phi-4, .* \(did you mean {nearest}\?\)"):
            Config.load(None, {"model.preset": wrong})


def test_every_key_has_help() -> None:
    for section in Config.SECTIONS.values():
        assert section.__doc__
        assert all(field.description and field.description.endswith(".") for field in section.model_fields.values())
    told = OffloadSection.model_fields["device_memory"].description
    assert told is not None
    assert f"({BUILTIN_DEVICE_MEMORY >> 20}MiB for the built-in run" in told
    spelled_out = Config.load(Path(__file__).parents[2] / "examples/stdlib.yaml")
    assert spelled_out.offload.device_memory == BUILTIN_DEVICE_MEMORY


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *[("6GiB", 6 * 2**30), ("512MiB", 2**29), ("1.5GB", 1_500_000_000), ("100 kib", 102_400), ("7B", 7)],
        *[("64G", 2**36), ("80g", 80 * 2**30), ("512 M", 2**29), ("1.5T", 3 * 2**39), ("0", 0), (0, 0)],
        *[(7000, 7000), (2e3, 2000), ("2e6", 2_000_000), ("2_000_000", 2_000_000), ("none", None), (None, None)],
    ],
)
def test_sizes(text: Any, num_bytes: int | None) -> None:
    assert parse_size(text) == num_bytes
    assert Config.load(None, {"offload.host_memory": text}).offload.host_memory == num_bytes


@pytest.mark.parametrize(
    ("given", "meant"), [("6", "6GiB"), (6, "6GiB"), ("64", "64GiB"), ("8192", "8192MiB"), (7.0, "7.0GiB")]
)
def test_a_budget_that_lost_its_unit_is_asked_for_it(given: Any, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"offload\.device_memory is .*did you mean {meant}\?.*bytes are meant"):
        Config.load(None, {"offload.device_memory": given})


def test_sizes_and_numbers_are_written_as_people_read_them() -> None:
    sizes = {
        15915223612: "14.8GiB",
        6 << 30: "6GiB",
        1305 << 20: "1.27GiB",
        100 << 20: "100MiB",
        1023: "1023B",
        0: "0B",
    }
    assert {num_bytes: written_size(num_bytes) for num_bytes in sizes} == sizes
    assert all(0.99 * num_bytes <= (parse_size(text) or 0) <= num_bytes for num_bytes, text in sizes.items())
    assert to_flags(
        {"offload.optimizer_memory": 15915223612, "offload.prefetch": 2, "offload.graphs_memory": None}
    ) == ("--offload.optimizer_memory 14.8GiB --offload.prefetch 2 --offload.graphs_memory none")
    assert [counted(number, "step") for number in (0, 1, 2, 1070)] == ["0 steps", "1 step", "2 steps", "1,070 steps"]


@pytest.mark.parametrize("text", ["6 gigs", "GiB", "-1", "nan", "inf", "", "1.2.3MB", True, [1]])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ConfigError, match="6GiB"):
        parse_size(text)


@given(st.integers(0, 2**62))
def test_a_number_of_bytes_is_itself(num_bytes: int) -> None:
    assert parse_size(f"{num_bytes}B") == pytest.approx(num_bytes, rel=1e-15)
    assert num_bytes >= 2**53 or parse_size(num_bytes) == num_bytes


def test_the_file_is_below_and_the_command_line_above(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  steps: 5\n  batch_size: 3\noptimizer:\n  lr: 1e-3\ndata:\ncheckpoint: {}\n")
    config = Config.load(file, {"train.steps": "7"}, origin="command line")
    assert (config.train.steps, config.train.batch_size, config.optimizer.lr) == (7, 3, 1e-3)
    found = [config.origin(key) for key in ("train.steps", "train.batch_size", "train.epochs")]
    assert found == ["command line", "file", "default"]


def test_python_values_are_checked_and_have_an_origin() -> None:
    config = Config(train={"steps": 5})
    assert config.origin("train.steps") == "python"
    config.train.batch_size = 3
    assert config.origin("train.batch_size") == "python"
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        config.train.batch_size = 0
    with pytest.raises(ConfigError, match=r"train\.steps"):
        Config(train={"steps": 0})
    assert Config().train.steps is None  # instances do not share defaults


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("checkpoint.every", "-1", "checkpoint.every is '-1'; it should be greater than or equal to 1, or 'auto'."),
        ("checkpoint.every", "x", "checkpoint.every is 'x'; it should be a valid integer, or 'auto'."),
        ("optimizer.betas", [0.9], "optimizer.betas is [0.9]; there are too few values."),
    ],
)
def test_a_setting_of_several_types_has_one_sentence_in_our_words(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config.load(None, {key: value})
    assert str(refused.value) == said


def test_a_value_of_a_wrong_type_is_refused_by_its_key() -> None:
    """Break: remove a rule's field from the table."""
    keys = {key.partition(".")[2]: key for key in reversed(all_keys())}  # of two sections, the first has the name
    names = {
        field.name for owner in (Settings, Placement, *map(RULES.__getitem__, RULE_SETTINGS)) for field in fields(owner)
    }
    assert {name: keys[name] for name in names & keys.keys()} == KEYS
    with pytest.raises(ConfigError, match=r"^train\.precision is 16; it must be str\.$"):
        Settings(precision=16)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^LOMO\.clip_norm is 'a'; it must be float \| None\.$"):
        RULES["lomo"](clip_norm="a")  # type: ignore[call-arg]


def test_a_clipping_norm_of_0_is_none() -> None:
    for unclipped in (0, "0", 0.0, "none", None):
        assert Config.load(None, {"train.max_grad_norm": unclipped}).train.max_grad_norm is None
    assert Settings(max_grad_norm=0).max_grad_norm is None
    for message, make in (
        ("greater than or equal to 0", lambda: Config(train={"max_grad_norm": -1})),
        ("train.max_grad_norm is -1; it must be a finite number, 0 or more", lambda: Settings(max_grad_norm=-1)),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


class TestResumed:
    def test_the_table_names_keys_and_sections(self) -> None:
        assert set(AT_RESUME) <= {*all_keys(), *Config.SECTIONS}

    def test_what_nobody_set_is_as_it_was(self) -> None:
        was = Config.load(None, {"train.steps": 7, "data.source": ["a", "b"], "optimizer.betas": [0.8, 0.9]})
        was = resolve(was, has_accelerator=False, max_positions=None).with_resolved(
            train__clip="deferred", offload__prefetch=3
        )
        saved = json.loads(json.dumps(was.to_dict()))
        given = {"run.dir": "here", "train.log_every": 5, "optimizer.lr": 0.5, "data.num_workers": 3}
        now = resumed(Config.load(None, given), saved, "there")
        assert now.changes == [
            "data.num_workers is 3 and was none",
            "train.log_every is 5 and was 10",
            f"optimizer.lr is 0.5 and was {was.optimizer.lr}",
        ]
        assert (now.train.steps, now.data.source, now.optimizer.betas) == (7, ("a", "b"), (0.8, 0.9))
        assert (now.train.clip, now.train.precision, now.optimizer.schedule) == ("deferred", "fp32", "cosine")
        assert (now.run.dir, now.train.log_every, now.optimizer.lr, now.data.num_workers) == ("here", 5, 0.5, 3)
        assert now.offload.prefetch == "auto"
        assert (now.origin("train.steps"), now.origin("train.clip")) == ("python", "resolved")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("train.batch_size", 3),
            ("train.tokens_per_step", 512),
            ("data.source", "other.txt"),
            ("run.seed", 1),
            ("train.precision", "bf16"),
        ],
    )
    def test_what_would_make_another_run_is_refused(self, key: str, value: Any) -> None:
        saved = resolve(Config(), has_accelerator=False, max_positions=None).to_dict()
        with pytest.raises(ConfigError, match=f"{key} is .* and was .* in the run of there"):
            resumed(Config.load(None, {key: value}), saved, "there")

    def test_rows_of_tokens_stay_on_another_number_of_ranks(self) -> None:
        """Break: decide the rows again."""
        given = {"train.tokens_per_step": 2048, "data.sequence_length": 256}
        was = resolve(Config.load(None, given), has_accelerator=False, max_positions=None)
        for again, num_ranks in (({}, 3), (given, 3), ({"train.batch_size": 8}, 1)):
            now = resumed(Config.load(None, again), json.loads(json.dumps(was.to_dict())), "there")
            now = resolve(now, has_accelerator=False, max_positions=None, num_ranks=num_ranks)
            assert (now.train.batch_size, now.train.tokens_per_step, now.changes) == (8, 2048, [])

    def test_the_same_files_may_be_named_in_another_way(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Break: compare the names alone."""
        for name in ("a.txt", "b.txt"):
            (tmp_path / name).write_text("text")
        (tmp_path / "link.txt").symlink_to("a.txt")
        monkeypatch.chdir(tmp_path)
        was = resolve(Config.load(None, {"data.source": ["a.txt", "b.txt"]}), has_accelerator=False, max_positions=None)
        for names in ([str(tmp_path / "a.txt"), "./b.txt"], ["link.txt", "b.txt"]):
            now = resumed(Config.load(None, {"data.source": names}), was.to_dict(), "there")
            assert now.data.source == tuple(names)
        for names in (["a.txt"], ["b.txt", "a.txt"]):
            with pytest.raises(ConfigError, match=r"data.source is .* and was"):
                resumed(Config.load(None, {"data.source": names}), was.to_dict(), "there")

    def test_epochs_are_counted_anew(self) -> None:
        saved = Config(train={"epochs": 1}).with_resolved(train__steps=10).to_dict()
        now = decide(
            resumed(Config(train={"epochs": 3}), saved, "there"), FROM_NUM_STEPS, lambda epochs: int(10 * epochs)
        )
        assert now.train.steps == 30

    def test_the_same_command_again_is_no_change(self) -> None:
        given = {"train.clip": "auto", "optimizer.warmup_steps": 3, "run.dir": "here", "offload.prefetch": "auto"}
        given |= {"data.source": ["a"], "data.sequence_length": 64, "train.precision": "auto"}
        was = resolve(Config.load(None, given), has_accelerator=False, max_positions=None)
        was = was.with_resolved(train__clip="deferred", optimizer__warmup_steps=12, offload__prefetch=3)
        assert not resumed(Config.load(None, given), json.loads(json.dumps(was.to_dict())), "there").changes


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("offload.throttle", "{h2d: 100MiB}", {"h2d": "100MiB"}),
        ("offload.throttle", "{h2d: 1000, d2h: 2.5e+6}", {"h2d": 1000, "d2h": 2.5e6}),
        ("offload.throttle", "{update: {bandwidth: 1GB}}", {"update": {"bandwidth": "1GB"}}),
        ("offload.throttle", "none", None),
        ("offload.throttle", {"h2d": {"latency_seconds": 0.5}}, {"h2d": {"latency_seconds": 0.5}}),
        *(("offload.prefetch", text, value) for text, value in (("auto", "auto"), ("0", 0), ("8", 8), (3, 3))),
        *(("train.head_chunk_bytes", text, value) for text, value in (("1MiB", 1 << 20), (4096, 4096))),
        *(("train.head_chunk_bytes", text, value) for text, value in (("auto", "auto"), ("none", None))),
        ("optimizer.groups", {"bias$|norm": {"lr_scale": 0.5}}, (("bias$|norm", {"lr_scale": 0.5}),)),
        ("optimizer.betas", ["0.8", "0.99"], (0.8, 0.99)),
        ("data.source", ["a file.txt", "b*.txt # no comment"], ("a file.txt", "b*.txt # no comment")),
        ("offload.device_memory", "6MiB", 6 << 20),
        ("train.max_grad_norm", "none", None),
        ("run.name", "it's: 1", "it's: 1"),
    ],
)
def test_values_are_read_from_text_and_python_and_written_back(key: str, text: Any, value: Any, tmp_path: Path) -> None:
    config = Config.load(None, {key: text})
    assert config.get(key) == value
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert Config.load(tmp_path / "config.yaml").get(key) == value


def test_a_note_is_a_comment_beside_the_origin(tmp_path: Path) -> None:
    config = Config().with_note("offload.prefetch", "as it goes")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert "prefetch: auto  # default; as it goes\n" in config.to_yaml()
    assert "as it goes" not in Config().to_yaml()
    assert Config.load(tmp_path / "config.yaml").offload.prefetch == "auto"


OWN = {"model__path": "m", "max_positions": 130}


@pytest.mark.parametrize(
    ("num_ranks", "given", "found"),
    [
        (1, {"train.tokens_per_step": 1000}, 3),  # rows have 256 tokens
        (2, {"train.tokens_per_step": 1000}, 2),
        (4, {"train.tokens_per_step": 2048, "train.sequence_parallel": 2}, 8),
        (1, {"train.tokens_per_step": 1000, "train.batch_size": 3}, 3),  # as a written configuration has both
        (1, {"train.tokens_per_step": 1000, "train.batch_size": 8}, "is 8, but train.tokens_per_step is 1000, which m"),
        (4, {"train.tokens_per_step": 1000}, "1000, but a row takes 256 tokens, .* --train.tokens_per_step to 1024 or"),
        (1, {"train.tokens_per_step": 1000, "train.micro_batch_size": 4}, "to 3 or less"),
        (1, {"train.tokens_per_step": 4096, "train.micro_batch_size": 16, "train.passes": 16}, 16),
        (1, {"train.tokens_per_step": 2048, "train.method": "dpo", "data.source": ["a"]}, 4),  # pairs
    ],
)
def test_tokens_are_whole_rows_equally_many_on_each_rank(num_ranks: int, given: Any, found: int | str) -> None:
    config = Config.load(None, {"data.sequence_length": 256, **given})
    config.check_ranks(num_ranks)
    if isinstance(found, int):
        assert resolve(config, has_accelerator=False, max_positions=None, num_ranks=num_ranks).train.batch_size == found
        return
    with pytest.raises(ConfigError, match=found):
        resolve(config, has_accelerator=False, max_positions=None, num_ranks=num_ranks)


class TestResolve:
    def resolved(
        self, has_accelerator: bool = False, max_positions: int | None = None, has_bf16: bool = True, **values: Any
    ) -> Config:
        config = Config.load(None, {key.replace("__", "."): value for key, value in values.items()})
        return resolve(config, has_accelerator=has_accelerator, has_bf16=has_bf16, max_positions=max_positions)

    @pytest.mark.parametrize(
        ("given", "found"),
        [
            ({}, {"train.clip": "auto", "offload.prefetch": "auto", "train.precision": "fp32"}),
            ({}, {"model.preset": "tiny", "train.steps": 400, "train.max_seconds": 90.0, "data.sequence_length": 256}),
            ({}, {"offload.device_memory": 9 << 20}),
            ({"has_accelerator": True}, {"offload.device_memory": None, "train.precision": "bf16"}),
            ({"has_accelerator": True, "has_bf16": False}, {"train.precision": "fp16"}),
            ({"has_accelerator": True, "has_bf16": False, "optimizer__name": "mezo"}, {"train.precision": "fp32"}),
            ({"has_accelerator": True, "optimizer__name": "mezo"}, {"train.precision": "bf16"}),
            (OWN, {"model.init": "pretrained", "data.sequence_length": 128, "optimizer.lr": 2e-5}),
            (OWN, {"offload.device_memory": None, "train.max_seconds": None}),
            ({"model__path": "m/config.json"}, {"model.init": "random"}),
            ({"train__steps": 7, "optimizer__lr": 0.5}, {"train.steps": 7, "train.max_seconds": None}),
            ({"optimizer__lr": 0.5, "optimizer__schedule": "wsd"}, {"optimizer.lr": 0.5, "optimizer.schedule": "wsd"}),
            ({"train__precision": "bf16"}, {"train.precision": "bf16"}),
            ({"train__max_seconds": 5}, {"train.steps": None, "optimizer.schedule": "constant"}),
            ({"train__epochs": 2}, {"train.steps": 100, "optimizer.warmup_steps": 5}),
            ({"optimizer__name": "mezo", "optimizer__master": "bf16"}, {"train.precision": "bf16"}),
        ],
    )
    def test_what_is_open_follows_from_what_is_given(self, given: dict[str, Any], found: dict[str, Any]) -> None:
        """A model of one's own has no hidden limits."""
        config = decide(
            self.resolved(**{"max_positions": 1024, **given}), FROM_NUM_STEPS, lambda epochs: int(epochs * 50)
        )
        assert {key: config.get(key) for key in found} == found
        assert given or config.origin("train.steps") == "resolved"

    @pytest.mark.parametrize(
        "given", [{"optimizer__name": "mezo", "optimizer__master": "bf16"}, {"train__matmul": "fp8_rowwise"}]
    )
    def test_what_needs_bf16_is_refused_where_bf16_is_emulated(self, given: dict[str, Any]) -> None:
        emulating = {"has_accelerator": True, "has_bf16": False, **given}
        with pytest.raises(ConfigError, match=r"optimizer\.master is bf16|train\.matmul is fp8_rowwise"):
            make_settings(self.resolved(**emulating))
        told = self.resolved(**emulating, train__precision="bf16")
        assert make_settings(told).precision == "bf16", "the user may choose the emulation"
        assert make_settings(self.resolved(**given)).precision == "bf16"

    def test_own_data_is_read_once_unless_a_length_is_set(self) -> None:
        own = {"data__source": ["notes.txt"], "model__path": "folder"}
        for source in (own, {"data__sources": [{"path": "notes.txt"}], "model__path": "folder"}):
            config = self.resolved(**source)
            assert (config.train.steps, config.train.epochs, config.train.max_seconds) == (None, 1.0, None)
            assert (config.optimizer.schedule, config.origin("train.epochs")) == ("cosine", "resolved")
            assert decide(config, FROM_NUM_STEPS, lambda epochs: round(7 * epochs)).train.steps == 7
        for key, value in (("train__steps", 3), ("train__epochs", 2.0), ("train__max_seconds", 9.0)):
            config = self.resolved(**own, **{key: value})
            lengths = {each: getattr(config.train, each) for each in ("steps", "epochs", "max_seconds")}
            assert {name: length for name, length in lengths.items() if length} == {key.removeprefix("train__"): value}
        assert self.resolved(data__source=["builtin:stdlib-chat"]).train.steps == 400

    def test_timing_leaves_the_built_in_run_boxed_and_what_says_where_states_are_does_not(self) -> None:
        for timing in ({"offload__throttle": {"h2d": 1000}}, {"offload__prefetch": 1}, {"offload__zero_stage": 0}):
            assert self.resolved(**timing).offload.device_memory == 9 * 2**20, timing
        for where in ({"offload__parameters": "cpu"}, {"offload__host_memory": "1GiB"}, {"train__batch_size": 2}):
            assert self.resolved(**where).offload.device_memory is None, where


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=lambda f: f.name)
def test_examples_are_sound(file: Path) -> None:
    given = {"model.path": "/models/my-8b", "data.source": "chats/*.jsonl"} if file.stem in ("finetune", "dpo") else {}
    resolve(Config.load(file, given), has_accelerator=True, max_positions=4096)


@pytest.mark.parametrize(
    ("name", "rate", "betas", "decay", "norm"),
    [
        ("adamw", 4e-3, (0.9, 0.95), 0.01, 1.0),
        ("lion", 4e-4, (0.9, 0.99), 0.1, 1.0),
        ("adafactor", 4e-2, (0.9, 0.95), 0.0, 1.0),
        ("lomo", 0.4, (0.9, 0.95), 0.0, None),
        ("adalomo", 4e-2, (0.9, 0.95), 0.0, None),
        ("muon", 4e-3, (0.9, 0.95), 0.1, 1.0),
    ],
)
def test_rules_have_defaults_of_their_own(
    name: str, rate: float, betas: Any, decay: float, norm: float | None, tmp_path: Path
) -> None:
    def resolved(**given: Any) -> tuple[Any, ...]:
        values = {key.replace("__", "."): value for key, value in given.items()} | {"optimizer.name": name}
        config = resolve(Config.load(None, values), has_accelerator=False, max_positions=None)
        (tmp_path / "config.yaml").write_text(config.to_yaml())
        assert dict(Config.load(tmp_path / "config.yaml").items()) == dict(config.items())
        return config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay, config.train.max_grad_norm

    assert resolved() == (pytest.approx(rate), betas, decay, norm)
    given = resolved(optimizer__lr=1.0, optimizer__weight_decay=0.5, train__max_grad_norm=0.5)
    assert given == (1.0, betas, 0.5, 0.5)
    if "betas" in RULE_SETTINGS[name].keys:
        assert resolved(optimizer__betas=(0.8, 0.9))[1] == (0.8, 0.9)


def test_what_a_rule_lacks_is_refused_unless_a_group_has_it() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.d is 2\.0, but adamw has .*adafactor or adalomo"):
        Config.load(None, {"optimizer.d": 2.0})
    config = Config.load(None, {"optimizer.d": 2.0, "optimizer.groups": "{mlp: {rule: adafactor, lr_scale: 2}}"})
    assert config.optimizer.groups == (("mlp", {"rule": "adafactor", "lr_scale": 2.0}),)
    with pytest.raises(ConfigError, match=r"optimizer\.groups .*'adagrad'"):
        Config.load(None, {"optimizer.groups": "{mlp: {rule: adagrad}}"})


MEZO = {"optimizer.name": "mezo", "train.precision": "bf16", "optimizer.master": "bf16"}


@pytest.mark.parametrize(
    ("was", "key", "value"),
    [
        ({"optimizer.states": "int8", "optimizer.lr": 0.5}, "optimizer.states", "bf16"),
        (MEZO, "optimizer.master", "fp32"),
    ],
)
def test_another_width_of_states_may_go_on_with_a_run_that_is_reset(was: dict[str, Any], key: str, value: str) -> None:
    before = resolve(Config.load(None, was), has_accelerator=False, max_positions=None)
    saved, given = before.to_dict(), {"optimizer.name": before.optimizer.name, key: value}
    assert resumed(Config.load(None, {}), saved, "there").get(key) == was[key]
    with pytest.raises(ConfigError, match=rf"{key} is '{value}' and was '{was[key]}'.*--optimizer\.reset"):
        resumed(Config.load(None, given), saved, "there")
    config = resumed(Config.load(None, {**given, "optimizer.reset": True}), saved, "there")
    assert {name: config.get(name) for name in was} == {**was, key: value}, "the rest is as it was"


def test_another_rule_may_go_on_with_a_run_that_is_reset() -> None:
    was = resolve(Config.load(None, {"optimizer.warmup_steps": 3}), has_accelerator=False, max_positions=None)
    with pytest.raises(ConfigError, match=r"optimizer\.name is 'lomo' and was 'adamw'"):
        resumed(Config.load(None, {"optimizer.name": "lomo"}), was.to_dict(), "there")
    config = resumed(Config.load(None, {"optimizer.name": "lomo", "optimizer.reset": True}), was.to_dict(), "there")
    config = resolve(config, has_accelerator=False, max_positions=None)
    assert config.optimizer.warmup_steps == 3
    assert (config.optimizer.lr, config.train.max_grad_norm) == (pytest.approx(0.4), None), "of its own, not AdamW's"
    later = resumed(Config.load(None, {}), config.to_dict(), "there")
    assert (later.optimizer.name, later.optimizer.reset) == ("lomo", False)


MAIN = """
run.dir run.seed
model.path model.preset model.init
data.source data.format data.tokenizer data.sequence_length data.packing data.eval_source
train.method train.steps train.epochs train.max_seconds train.batch_size train.micro_batch_size train.precision
train.recompute train.compile train.max_grad_norm train.eval_every
optimizer.name optimizer.lr optimizer.weight_decay optimizer.freeze optimizer.schedule optimizer.warmup_steps
lora.rank lora.alpha lora.target_modules lora.adapter
offload.parameters offload.optimizer offload.device_memory offload.host_memory offload.nvme_dir offload.frozen_weights
checkpoint.every checkpoint.resume checkpoint.export
"""
"""Settings in --help. A new setting is in --help-extra alone."""


@pytest.mark.parametrize("columns", [80, 100, 132])
def test_the_first_help_has_whole_sentences_about_the_main_settings(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: cut a text at the end of its line; leave out the choices of a setting."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        parse_config(["--help"], prog="python -m offload.train", description=DESCRIPTION)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert re.findall(r"(?m)^  --(\w+\.\w+) ", shown) == MAIN.split()
    assert max(map(len, shown.splitlines())) <= min(columns, 110)
    text = " ".join(shown.split())
    for key in MAIN.split():
        section, name = key.split(".")
        field = Config.SECTIONS[section].model_fields[name]
        assert str(field.description).partition(". ")[0].rstrip(".") in text, key
        choices = [word for part in nested_types(field.annotation) for word in typing.get_args(part)]
        assert not [word for word in choices if isinstance(word, str) and not re.search(rf"\b{word}\b", text)], key
    with pytest.raises(SystemExit):
        parse_config(["--help-extra"], prog="python -m offload.train", description=DESCRIPTION)
    shown = capsys.readouterr().out
    assert not [key for key in all_keys() if f"--{key}" not in shown]
    assert max(map(len, shown.splitlines())) <= columns


@pytest.mark.parametrize("text", ["010", "1_000", "12", "0x10", "0b11", "0o17", "1:30"])
def test_a_number_reads_alike_in_a_file_and_as_a_word(tmp_path: Path, text: str) -> None:
    """PyYAML reads 010 as 8 and 1:30 as 90. Break: keep its numbers."""
    file = tmp_path / "run.yaml"
    file.write_text(f"train:\n  steps: {text}\n")
    found = []
    for load in (lambda: Config.load(file), lambda: Config.load(overrides={"train.steps": text})):
        try:
            found.append(str(load().train.steps))
        except ConfigError as error:
            found.append(str(error))
    assert found[0] == found[1]

"""File search: builtins, files, folders, globs; the train and eval split by file; errors for missing files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets.data_files import DataFilesDict, get_data_patterns

from offload.errors import ConfigError
from offload.extras.data.dataset import Dataset
from offload.extras.data.docstrings import docstring_chats
from offload.extras.data.sources import SourceFile, find_files, hash_files, held_out_files, split_hash
from offload.extras.data.storage import LocalFile
from tests.data.asked import files_of, source_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.md", "sub/deep/c.py", "sub/d.jsonl", ".hidden.txt", ".git/e.txt", "image.png", "t.npy"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "data"


def names(files: list[SourceFile]) -> list[str]:
    return [file.name for file in files]


def test_a_folder_is_searched_in_order(folder: Path) -> None:
    notes: list[str] = []
    assert names(files_of(str(folder), "text", notes=notes)) == ["a.md", "b.txt", "sub/deep/c.py"]
    assert notes == [
        f"3 files of {folder} are not read, because of the ending: 1 .png, 1 .jsonl, 1 .npy. A glob reads any ending."
    ]
    for name in ("sub/d.jsonl", "t.npy"):
        (folder / name).unlink()
    assert names(files_of(str(folder))) == ["a.md", "b.txt", "sub/deep/c.py"]
    (folder / "sub/d.jsonl").write_text("")
    (folder / "t.npy").write_text("")
    assert names(files_of(str(folder), "messages")) == ["sub/d.jsonl"]
    assert names(files_of(str(folder), "tokens")) == ["t.npy"]


def test_globs_are_relative_to_their_fixed_part(folder: Path) -> None:
    assert names(files_of(f"{folder}/**/*.py")) == ["sub/deep/c.py"]
    assert names(files_of(f"{folder}/sub/*")) == ["d.jsonl"]
    assert names(files_of(f"{folder}/*.png", "text")) == ["image.png"], (
        "a glob decides by itself which endings it means"
    )


def test_several_sources_keep_their_order_and_a_file_comes_once(folder: Path) -> None:
    files = files_of([f"{folder}/b.txt", f"{folder}/*.md", f"{folder}/*.txt"])
    assert names(files) == ["b.txt", "a.md"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere.txt", ["nowhere.txt", "does not exist"]),
        ("{folder}/pipes/a.txt", ["a.txt' is no regular file", "Write the data into a file"]),
        ("{folder}/pipes", ["a.txt' is no regular file"]),
        ("{folder}/*.csv", ["*.csv", "matches no file"]),
        ("{folder}/empty", ["a folder without a file", ".jsonl"]),
        ("builtin:stdlb", ["builtin:stdlb", "did you mean builtin:stdlib"]),
        ("", ["names nothing"]),
    ],
)
def test_what_is_not_there_is_named(folder: Path, source: str, words: list[str]) -> None:
    (folder / "empty").mkdir()
    (folder / "pipes").mkdir()
    os.mkfifo(folder / "pipes/a.txt")
    with pytest.raises(ConfigError, match=r"data\.source") as error:
        files_of(source.format(folder=folder))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            "notes.md part-0.parquet",
            ["several kinds", "1 file of columns (part-0.parquet)", "'{folder}/**/*.parquet'"],
        ),
        ("notes.md a.jsonl b.jsonl", ["2 files of records (a.jsonl, b.jsonl)", "'{folder}/**/*.jsonl'"]),
        ("a.txt b.npy", ["1 file of text (a.txt)", "1 file of token ids (b.npy)"]),
        ("a.txt b.csv c.png", ["1 file of table (b.csv)"]),
        ("dataset_info.json data-00000-of-00001.arrow", ["dataset_info.json", "save_to_disk"]),
        ("data/part-0.parquet", ["part-0.parquet is empty"]),
        ("text.txt.bz2", ["text.txt.bz2 is a compressed file", "bunzip2"]),
        (
            "train.jsonl test.jsonl",
            ["several splits: test.jsonl (test), train.jsonl (train)", "'{folder}/train.jsonl'"],
        ),
        (
            "data/train-0.csv data/train-1.csv data/test-0.csv notes.md",
            ["several kinds", "'{folder}/data/train-*.csv'"],
        ),
        ("train.jsonl dev/a.jsonl", ["dev/a.jsonl (validation), train.jsonl (no split)", "'{folder}/train.jsonl'"]),
        ("train/0.bin val/0.bin", ["several splits: train/0.bin (train), val/0.bin (validation)"]),
    ],
)
def test_a_folder_that_leaves_a_choice_or_cannot_be_read_is_refused(
    tmp_path: Path, files: str, words: list[str]
) -> None:
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=r"data\.source") as error:
        files_of(str(tmp_path))
    assert not [word for word in words if word.format(folder=tmp_path) not in str(error.value)], str(error.value)


def test_the_advised_glob_is_read_and_a_card_beside_rows_is_not(tmp_path: Path) -> None:
    """A data set cloned from the hub. Break: read README.md as a second file type."""
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("a card")
    for name in ("train-0", "train-1", "test-0"):
        (tmp_path / f"data/{name}.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(ConfigError, match="several splits") as error:
        files_of(str(tmp_path))
    advised = str(error.value).partition("such as '")[2].partition("'")[0]
    assert [file.place.name.name for file in files_of(advised)] == ["train-0.jsonl", "train-1.jsonl"]
    (tmp_path / "data/test-0.jsonl").unlink()
    notes: list[str] = []
    assert len(find_files(source_of(str(tmp_path)), notes)) == 2
    assert "README.md is not read, as the card" in notes[0]


@pytest.mark.parametrize("name", [b"data/caf\xe9.txt", b"fran\xe7ais/a.txt"])
def test_names_are_bytes(tmp_path: Path, dataset_of: Callable[..., Dataset], name: bytes) -> None:
    """Archives from other systems have such names. Break: encode a name as UTF-8."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    path.parent.mkdir(exist_ok=True)
    path.write_text("one two three " * 50)
    for source in (path, path.parent):
        assert dataset_of(source).num_train_rows


_SHAPES = """
train.jsonl test.jsonl | train-00000-of-00001.jsonl test-00000-of-00001.jsonl | train_sft.jsonl test_sft.jsonl
data/train_sft-00000-of-00001.jsonl data/test_sft-00000-of-00001.jsonl data/train_gen-00000-of-00001-ab12.jsonl
train_sft-00000-of-00002.jsonl train_sft-00001-of-00002.jsonl test_sft-00000-of-00001.jsonl
my_train.jsonl my_eval.jsonl | en_train.jsonl en_validation.jsonl | data.train.jsonl data.test.jsonl
corpus-train-1.jsonl corpus-test-1.jsonl | train/a.jsonl test/a.jsonl | a/train.jsonl a/dev.jsonl
train1.jsonl val2.jsonl
training.jsonl testing.jsonl evaluation.jsonl | train.jsonl valid.jsonl | my-train-data/a.jsonl my-val/b.jsonl
train/test.jsonl train/b.jsonl | train_test.jsonl | a/b/train/c/d.jsonl a/b/eval/c/d.jsonl | train.jsonl dev/a.jsonl
train-v1.2.jsonl dev-v1.2.jsonl | a.jsonl b.jsonl | latest.jsonl contest.jsonl | trainer.jsonl tests.jsonl | test.jsonl
train.jsonl more.jsonl | dev.jsonl | test/a.jsonl test/b.jsonl | data/a.jsonl data/b.jsonl
sub/train-00000-of-00001.jsonl
data/en-00000-of-00001.jsonl data/fr-00000-of-00001.jsonl | train.txt valid.txt test.txt | wiki.train.txt wiki.test.txt
2024train3.jsonl 2024test3.jsonl | evaluations.jsonl a.jsonl | validate.jsonl train.jsonl
train.csv test.csv | train.parquet.jsonl | data/train-00000-of-00001.jsonl extra/test.jsonl | test.train.jsonl
"""


@pytest.mark.parametrize("shape", _SHAPES.replace("\n", "|").strip("|").split("|"))
def test_the_splits_of_a_folder_are_those_of_datasets(tmp_path: Path, shape: str) -> None:
    """Break: compare whole names."""
    for name in shape.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    theirs = DataFilesDict.from_patterns(get_data_patterns(str(tmp_path)), str(tmp_path))
    splits = {
        split: {Path(path).relative_to(tmp_path).as_posix() for path in theirs[split]} for split in map(str, theirs)
    }
    every = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    has_splits = splits != {"train": every}
    for split, expected in splits.items():
        if has_splits:
            assert set(names(find_files(source_of(str(tmp_path), split=split), []))) == expected
    refused = [f"{tmp_path}/**/*.*"] * (len(splits) > 1)
    for source in (str(tmp_path), f"file://{tmp_path}"):
        # The last: `datasets` has one split of dev/a.jsonl and train.jsonl, the first alone.
        if len(splits) > 1 or not ("train" in splits or set().union(*splits.values()) == every):
            refused.append(source)
        else:
            assert set(names(files_of(source))) == next(iter(splits.values()))
    for source in refused:
        for data_format in ("auto", "messages"):
            # A format of rows reads no texts.
            if data_format == "auto" or ".txt" not in shape:
                with pytest.raises(ConfigError, match="files of several splits"):
                    files_of(source, data_format)


def test_files_of_no_split_are_told_beside_train_and_refused_beside_test(tmp_path: Path) -> None:
    for name in ("a.jsonl", "train.jsonl"):
        (tmp_path / name).write_text("")
    notes: list[str] = []
    assert names(files_of(str(tmp_path), notes=notes)) == ["train.jsonl"]
    assert notes == [f"{tmp_path} has the split train by its file names. Files of no split are not read: a.jsonl."]
    assert names(files_of(f"{tmp_path}/*")) == ["a.jsonl", "train.jsonl"], "a glob names each file"
    (tmp_path / "train.jsonl").rename(tmp_path / "Test.jsonl")
    for source in (tmp_path, tmp_path / "*"):
        with pytest.raises(ConfigError, match=r"Test.jsonl \(test\), a.jsonl \(no split\)"):
            files_of(str(source))
    assert names(files_of([f"{tmp_path}/Test.jsonl", f"{tmp_path}/a.jsonl"])) == ["Test.jsonl", "a.jsonl"]


def test_a_file_with_several_names_is_read_once_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: compare unresolved paths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    Path("a.jsonl").write_text("{}\n")
    Path("link.jsonl").symlink_to("a.jsonl")
    Path("hard.jsonl").hardlink_to("a.jsonl")
    other_names = [f"{tmp_path}/a.jsonl", "sub/../a.jsonl", "link.jsonl", "hard.jsonl", f"file://{tmp_path}/a.jsonl"]
    for other in ["a.jsonl", *other_names, "*.jsonl"]:
        notes: list[str] = []
        assert names(files_of(["a.jsonl", other], notes=notes)) == ["a.jsonl"]
        (note,) = notes
        assert "names some files twice; each is read once: " in note
        assert (f"{other} (the file a.jsonl)" in note) == (other in other_names)


def test_sources_have_test_files(tmp_path: Path) -> None:
    for name in ("train.py", "test.py"):
        (tmp_path / name).write_text("")
    assert names(files_of(str(tmp_path))) == ["test.py", "train.py"]


@pytest.mark.parametrize(
    ("name", "content", "data_format", "words"),
    [
        ("rows.jsonl", b"PAR1", "auto", "begins as a parquet file"),
        ("notes.txt", b"%PDF-1.7\n\xe2\xe3", "auto", "a PDF document: .*pdftotext"),
        ("notes.pdf", b"%PDF-1.7\n\xe2\xe3", "text", "a PDF document: .*pdftotext"),
        ("notes.docx", b"PK\3\4", "auto", "an office document or a book: .*pandoc"),
        ("model.txt", b"GGUF", "auto", "model weights, not text"),
        ("notes.txt", b"Two answers.\n", "preference", "is a text, and train.method dpo.*prompt, chosen and rejected"),
        ("rows.csv", b"ARROW1", "auto", "begins as an Arrow file"),
        ("text.txt", b"\x1f\x8b\x08", "text", "begins as a .gz file"),
        ("rows.jsonl", b"\x28\xb5\x2f\xfd", "auto", "begins as a .zst file"),
        ("rows.parquet.gz", b"\x1f\x8b\x08", "auto", "is a compressed file of columns"),
        ("ids.bin.zst", b"", "tokens", "is a compressed file"),
        ("text", b"PK\x03\x04", "auto", "is a compressed file"),
    ],
)
def test_a_file_that_would_be_read_as_what_it_is_not_is_refused(
    tmp_path: Path, name: str, content: bytes, data_format: str, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    for source in (tmp_path / name, tmp_path / "*"):
        with pytest.raises(ConfigError, match=words) as error:
            files_of(str(source), data_format)
        assert name in str(error.value)


def test_a_table_is_text_where_that_is_asked_for_and_ids_may_begin_as_they_like(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n")
    assert names(files_of(str(tmp_path / "rows.csv"), "text")) == ["rows.csv"]
    (tmp_path / "ids.bin").write_bytes(b"\x1f\x8b\x08\0")
    assert names(files_of(str(tmp_path / "ids.bin"))) == ["ids.bin"]
    with pytest.raises(ConfigError, match=r"\*' matches files of several kinds"):
        files_of(f"{tmp_path}/*")


def test_a_builtin_source_has_one_format() -> None:
    with pytest.raises(ConfigError, match=r"data\.format=alpaca cannot read builtin:stdlib"):
        files_of("builtin:stdlib", "alpaca")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_named(folder: Path) -> None:
    (folder / "b.txt").chmod(0)
    with pytest.raises(ConfigError, match=r"b\.txt cannot be read"):
        files_of(str(folder / "b.txt"))


def test_the_standard_library_without_tests_and_tables() -> None:
    files = files_of("builtin:stdlib")
    found = names(files)
    assert found == sorted(found, key=lambda name: name.split("/"))
    assert {"argparse.py", "asyncio/tasks.py", "json/decoder.py"} <= set(found)
    parts = {part for name in found for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "encodings", "__pycache__"}
    assert sum(file.num_bytes for file in files) > 2_000_000
    assert names(files_of("builtin:stdlib-chat")) == found


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3])
def test_the_split_by_file_is_near_what_was_asked(fraction: float) -> None:
    files = files_of("builtin:stdlib")
    held_out = held_out_files(files, fraction)
    share = sum(file.num_bytes for file in files if file.name in held_out) / sum(file.num_bytes for file in files)
    assert 0.9 * fraction < share <= fraction
    assert held_out == held_out_files(list(reversed(files)), fraction), "the order of files plays no part"


def test_too_few_files_are_not_split() -> None:
    def file(name: str, num_bytes: int) -> SourceFile:
        return SourceFile(LocalFile(Path(name)), name, "text", num_bytes)

    assert held_out_files([file("a", 1000)], 0.5) == frozenset()
    assert held_out_files([file("a", 1_000_000), file("b", 100)], 0.1) == frozenset(), "100 bytes stand for nothing"
    assert len(held_out_files([file("a", 1000), file("b", 1000)], 0.5)) == 1
    assert held_out_files([file("a", 1000), file("b", 1000)], 0.0) == frozenset()


def test_the_hash_is_of_names_and_contents_not_of_places(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "x.txt").write_text("content")
    one, two = (files_of(str(tmp_path / place)) for place in ("one", "two"))
    assert hash_files(one) == hash_files(two)
    (tmp_path / "two" / "x.txt").write_text("contend")
    assert hash_files(one) != hash_files(files_of(str(tmp_path / "two")))


def test_split_hash_is_uniform_and_fixed() -> None:
    values = [split_hash(f"file{i}") for i in range(4000)]
    assert all(0 <= value < 1 for value in values)
    assert 0.47 < sum(values) / 4000 < 0.53
    assert split_hash("argparse.py") == pytest.approx(0.25961, abs=1e-5), "another hash would move every split"


def test_docstrings_become_chats() -> None:
    source = (
        '"""Module."""\n'
        "def documented(x):\n"
        '    """Say what x is.\n\n    Twice.\n    """\n'
        "def silent(): pass\n"
        "class Box:\n"
        '    """A box."""\n'
        "    async def open(self):\n"
        '        """Open it."""\n'
        "    class Lid:\n"
        '        """Its lid."""\n'
    )
    chats = list(docstring_chats(source, "pkg/__init__.py"))
    assert [line for line, _ in chats] == [2, 8, 10, 12]
    subjects = ["pkg.documented", "pkg.Box", "pkg.Box.open", "pkg.Box.Lid"]
    for (_, messages), subject in zip(chats, subjects, strict=True):
        assert [message["role"] for message in messages] == ["user", "assistant"]
        assert f"`{subject}`" in messages[0]["content"]
    assert [messages[1]["content"] for _, messages in chats] == [
        "Say what x is.\n\nTwice.",
        "A box.",
        "Open it.",
        "Its lid.",
    ]
    assert chats == list(docstring_chats(source, "pkg/__init__.py"))
    assert f"`{'pkg.sub.documented'}`" in next(docstring_chats(source, "pkg/sub.py"))[1][0]["content"]

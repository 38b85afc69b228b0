"""Tokenized documents on disk: written in pieces and memory-mapped for reading, so neither needs the whole in memory.

A folder has one .npy file per column:

- tokens: uint16 or uint32 [tokens].
- documents: int64 [documents + 1], document starts; the last entry is the end.
- trained: bool [tokens], only if some token is untrained.
- bytes: uint32 [tokens], only for eval text: UTF-8 bytes per token.
- pictured: uint8 [bytes], only with pictures: one JSON line per document with the text and the pictures.
- lines: int64 [documents + 1], only with pictures: line starts in `pictured`.
- pictures: uint8 [bytes], only with pictures: bytes for pictures without a file.

The columns are independent of the row layout.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import xxhash
from numpy.lib import format as npy

from offload.extras.data.pictures import Picture, PictureDocument
from offload.extras.data.sources import hash_text

_HEADER_BYTES = 128  # numpy reserves header room for the final length in one dimension
_HASHED = ("tokens", "documents", "trained")
"""Columns in the content hash. Byte counts follow from the tokens; columns of pictures hold paths."""


def id_type(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """Return the integer type of stored ids."""
    # Half the bytes wherever the vocabulary permits, as nanoGPT and others have it.
    if vocab_size <= 65536:
        return np.uint16
    return np.uint32


class TokenFile:
    """A finished folder, memory-mapped."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        """Open `folder`.

        Raises OSError, ValueError or KeyError if the columns contradict the result of `TokenWriter.finish`.
        """
        # Mapped: ranks of one machine share the pages, and data larger than memory are read as needed.
        self._columns = {name: _open(folder / f"{name}.npy", number) for name, number in meta["columns"].items()}
        self.tokens = self._columns["tokens"]
        self.documents = self._columns["documents"]
        self.trained = self._columns.get("trained")

        self.has_pictures = "lines" in self._columns
        self.has_one_picture_each: bool = meta["has_one_picture_each"]
        """True if each document has exactly one picture."""
        self.content_hash: str = meta["content_hash"]
        self.num_last: int = meta["num_last"]
        """Last tokens of a document, kept when the document is cut."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def unmasked(self) -> TokenFile:
        """Return the same documents with all tokens trained."""
        # The mapped arrays are shared.
        whole = copy.copy(self)
        whole.trained = None
        return whole

    def trained_bytes(self, begin: int, end: int) -> int | None:
        """Return the UTF-8 bytes of text under the trained tokens in [begin, end). None: not known."""
        if "bytes" not in self._columns:
            return None
        byte_counts = self._columns["bytes"][begin:end]
        if self.trained is not None:
            byte_counts = byte_counts[self.trained[begin:end]]
        return int(byte_counts.sum(dtype=np.int64))

    def picture_document(self, document: int) -> PictureDocument:
        """Return the text and the pictures for a document."""
        begin, end = self._columns["lines"][document : document + 2]
        text, pictures = json.loads(self._columns["pictured"][begin:end].tobytes())
        return PictureDocument(text, tuple(self._picture(*each) for each in pictures))

    def _picture(self, name: str, digest: str, path: str | None, span: tuple[int, int]) -> Picture:
        if path is not None:
            return Picture(name, Path(path), digest=digest)
        return Picture(name, None, self._columns["pictures"][slice(*span)].tobytes(), digest)


class TokenWriter:
    """Appends documents to a new folder."""

    def __init__(
        self, folder: Path, vocab_size: int, masked: bool, has_pictures: bool = False, num_last: int = 0
    ) -> None:
        """Create `folder`.

        `masked`: keep a training mask, dropped in the end if all tokens are trained. `has_pictures`: documents may have
        pictures. `num_last`: as in `TokenFile`.
        """
        folder.mkdir()
        self._num_last = num_last
        types: dict[str, type] = {"tokens": id_type(vocab_size), "documents": np.int64}
        types["bytes"] = np.uint32  # written until the first text without counts, then dropped
        if masked:
            types["trained"] = np.bool_
        if has_pictures:
            types |= {"lines": np.int64, "pictured": np.uint8, "pictures": np.uint8}
        self._columns = {name: _Column(folder / f"{name}.npy", np.dtype(each)) for name, each in types.items()}
        for name in ("documents", "lines"):
            if name in self._columns:
                self._columns[name].append(np.zeros(1))

        self._all_trained = True
        self._has_one_picture_each = has_pictures
        # Of texts and digests: a moved folder of pictures has the same data.
        self._picture_digest = xxhash.xxh3_128()

    def append(
        self,
        ids: np.ndarray,
        trained: np.ndarray | None,
        closes: bool,
        num_bytes: np.ndarray | None = None,
        picture_document: PictureDocument | None = None,
    ) -> None:
        """Append ids [n] to the current document. `closes` ends the document.

        `trained`: mask [n]; None: all trained. `num_bytes`: text bytes per token [n]; None: not known, and then dropped
        for the whole folder. `picture_document`: text and pictures for a whole document.
        """
        columns = self._columns
        if picture_document is not None:
            self._append_pictures(picture_document)
        columns["tokens"].append(ids)
        if num_bytes is None:
            self._drop("bytes")
        elif "bytes" in columns:
            columns["bytes"].append(num_bytes)
        if "trained" in columns:
            # Another document may have a mask, so the column has an item for each token.
            if trained is None:
                trained = np.ones(len(ids), bool)
            columns["trained"].append(trained)
            self._all_trained &= bool(trained.all())
        if closes:
            columns["documents"].append(np.asarray([columns["tokens"].num_items]))

    def _append_pictures(self, document: PictureDocument) -> None:
        lines, stored = self._columns["pictured"], self._columns["pictures"]
        pictures = []
        for each in document.pictures:
            begin = stored.num_items
            if each.data:
                stored.append(np.frombuffer(each.data, np.uint8))
            pictures.append((each.name, each.digest, each.path, (begin, stored.num_items)))
        # A path is no JSON value, and becomes a text.
        line = json.dumps((document.text, pictures), default=str)
        lines.append(np.frombuffer(line.encode(), np.uint8))
        self._columns["lines"].append(np.asarray([lines.num_items]))
        self._picture_digest.update(repr([document.text, *(each.digest for each in document.pictures)]).encode())
        self._has_one_picture_each &= len(pictures) == 1

    def _drop(self, name: str) -> None:
        if column := self._columns.pop(name, None):
            column.finish()
            column.path.unlink()

    def finish(self) -> dict[str, Any]:
        """Close the files. Return the metadata for `TokenFile`."""
        # A mask of ones is dropped: the same tokens without a mask have the same hash.
        if self._all_trained:
            self._drop("trained")
        digests = {name: column.finish() for name, column in self._columns.items()}
        hashed = [digests[name] for name in _HASHED if name in digests]
        if "lines" in self._columns:
            hashed.append(self._picture_digest.hexdigest())
        return {
            "columns": {name: column.num_items for name, column in self._columns.items()},
            "has_one_picture_each": self._has_one_picture_each,
            "content_hash": hash_text(" ".join(hashed)),
            "num_last": self._num_last,
        }


class _Column:
    """One .npy file with unknown length. `finish` rewrites the header."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path = path
        self._dtype = dtype
        self._stream: BinaryIO = path.open("wb")
        self._digest = xxhash.xxh3_128()
        self.num_items = 0
        self._write_header()  # room for the final one

    def append(self, items: np.ndarray) -> None:
        data = np.ascontiguousarray(items, self._dtype)
        self._stream.write(data.data)
        self._digest.update(data.data)
        self.num_items += len(data)

    def finish(self) -> str:
        """Close the file. Return a hash of the items."""
        # The length is known only now. The header has the same size for any length.
        self._stream.seek(0)
        self._write_header()
        self._stream.close()
        return self._digest.hexdigest()

    def _write_header(self) -> None:
        description = {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.num_items,)}
        npy.write_array_header_1_0(self._stream, description)
        assert self._stream.tell() == _HEADER_BYTES


def _open(path: Path, num_items: int) -> np.ndarray:
    mode: Literal["r"] | None = "r"
    if not num_items:
        mode = None  # an empty array cannot be mapped
    array = np.asarray(np.load(path, mmap_mode=mode))
    if array.shape != (num_items,):
        raise ValueError(f"{path} holds {array.shape} items instead of {num_items}")
    return array

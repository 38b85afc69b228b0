"""Tokenized documents on disk: written in pieces, read through a memory map, so that neither needs the memory of the
whole.

A folder holds tokens.npy (uint16 or uint32 [tokens]), documents.npy (int64 [documents + 1], where each begins; the last
entry is the end) and, only where something is not trained, trained.npy (bool [tokens]). Of text that is evaluated on it
also holds bytes.npy (uint32 [tokens]): of how many bytes of the text each token is. The files do not depend on how rows
are cut from them.

Of documents with pictures it also holds what each was made of, as a line of JSON: pictured.npy (uint8 [bytes]), and
lines.npy (int64 [documents + 1], where each line begins); and of pictures that are in no file the bytes, pictures.npy
(uint8 [bytes]).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.lib import format as npy

from offload.data.pictures import Picture, Pictured
from offload.data.sources import hash_text

_HEADER_BYTES = 128  # numpy leaves room in a one-dimensional header for the final length


class TokenStore:
    """A finished folder, memory-mapped."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        """Open `folder`; raises OSError, ValueError or KeyError when the files do not agree with what
        `TokenWriter.finish` returned."""
        self.num_tokens: int = meta["num_tokens"]
        self.num_documents: int = meta["num_documents"]
        self.content_hash: str = meta["content_hash"]
        self.tokens = _open(folder / "tokens.npy", self.num_tokens)
        self.documents = _open(folder / "documents.npy", self.num_documents + 1)
        self.trained = _open(folder / "trained.npy", self.num_tokens) if meta["masked"] else None
        self._bytes = _open(folder / "bytes.npy", self.num_tokens) if meta["has_bytes"] else None
        self.pictured = PicturedStore(folder, self.num_documents, meta["pictured"]) if meta["pictured"] else None
        """What documents with pictures were made of; None of text alone."""

    def trained_bytes(self, begin: int, end: int) -> int | None:
        """Return how many bytes of text the trained ones of tokens [begin, end) are of; None where it is not known."""
        if self._bytes is None:
            return None
        found = self._bytes[begin:end]
        return int((found if self.trained is None else found[self.trained[begin:end]]).sum(dtype=np.int64))


class PicturedStore:
    """What documents with pictures were made of, memory-mapped."""

    def __init__(self, folder: Path, num_documents: int, meta: dict[str, Any]) -> None:
        """Open `folder`; raises as `TokenStore` does."""
        self.one_each: bool = meta["one_each"]
        """Whether each document has one picture."""
        self._starts = _open(folder / "lines.npy", num_documents + 1)
        self._lines = _open(folder / "pictured.npy", meta["num_bytes"])
        self._data = _open(folder / "pictures.npy", meta["num_data_bytes"])

    def at(self, document: int) -> Pictured:
        """Return what a document was made of."""
        begin, end = self._starts[document : document + 2]
        text, pictures = json.loads(self._lines[begin:end].tobytes())
        return Pictured(text, tuple(self._picture(*each) for each in pictures))

    def _picture(self, name: str, digest: str, path: str | None, span: tuple[int, int]) -> Picture:
        data = self._data[slice(*span)].tobytes() if path is None else None
        return Picture(name, None if path is None else Path(path), data, digest)


class TokenWriter:
    """Appends documents to a new folder."""

    def __init__(self, folder: Path, vocab_size: int, masked: bool, pictured: bool = False) -> None:
        """Begin `folder`. `masked`: some tokens may be untrained, so a mask is kept, and dropped if none was.
        `pictured`: documents may have pictures.
        """
        folder.mkdir()
        self._folder = folder
        self._tokens = _Column(folder / "tokens.npy", np.dtype(np.uint16 if vocab_size <= 65536 else np.uint32))
        self._documents = _Column(folder / "documents.npy", np.dtype(np.int64))
        self._trained = _Column(folder / "trained.npy", np.dtype(np.bool_)) if masked else None
        self._bytes: _Column | None = _Column(folder / "bytes.npy", np.dtype(np.uint32))
        self._documents.append(np.zeros(1))
        self._all_trained = True
        self._pictured = _PicturedWriter(folder) if pictured else None

    def append(
        self,
        ids: np.ndarray,
        trained: np.ndarray | None,
        closes: bool,
        num_bytes: np.ndarray | None = None,
        pictured: Pictured | None = None,
    ) -> None:
        """Append ids [n], their mask [n] (None: all trained) and the bytes of text of each [n] (None: not known, and so
        of no token) to the current document; `closes` ends it. `pictured`: what a whole document was made of.
        """
        if self._pictured is not None and pictured is not None:
            self._pictured.append(pictured)
        self._tokens.append(ids)
        if self._bytes is not None and num_bytes is not None:
            self._bytes.append(num_bytes)
        elif self._bytes is not None:
            self._bytes.finish()
            self._bytes.path.unlink()
            self._bytes = None
        if self._trained is not None:
            self._trained.append(np.ones(len(ids)) if trained is None else trained)
            self._all_trained &= trained is None or bool(trained.all())
        if closes:
            self._documents.append(np.asarray([self._tokens.num_items]))

    def finish(self) -> dict[str, Any]:
        """Close the files and return what `TokenStore` needs to open them."""
        masked = self._trained is not None and not self._all_trained
        digests = [self._tokens.finish(), self._documents.finish()]
        if self._trained is not None:
            digest = self._trained.finish()
            if masked:
                digests.append(digest)
            else:
                self._trained.path.unlink()
        if self._bytes is not None:  # which tell nothing new of the tokens, and are in no digest
            self._bytes.finish()
        pictured = None
        if self._pictured is not None:
            pictured, digest = self._pictured.finish()
            digests.append(digest)
        return {
            "num_tokens": self._tokens.num_items,
            "num_documents": self._documents.num_items - 1,
            "masked": masked,
            "has_bytes": self._bytes is not None,
            "pictured": pictured,
            "content_hash": hash_text(" ".join(digests)),
        }


class _PicturedWriter:
    """Appends what documents with pictures were made of."""

    def __init__(self, folder: Path) -> None:
        self._lines, self._data = (
            _Column(folder / name, np.dtype(np.uint8)) for name in ("pictured.npy", "pictures.npy")
        )
        self._starts = _Column(folder / "lines.npy", np.dtype(np.int64))
        self._starts.append(np.zeros(1))
        self._digest, self._one_each = xxhash.xxh3_128(), True

    def append(self, document: Pictured) -> None:
        pictures = []
        for each in document.pictures:
            begin = self._data.num_items
            if each.data:
                self._data.append(np.frombuffer(each.data, np.uint8))
            path = None if each.path is None else str(each.path)
            pictures.append((each.name, each.digest, path, (begin, self._data.num_items)))
        self._lines.append(np.frombuffer(json.dumps((document.text, pictures)).encode(), np.uint8))
        self._starts.append(np.asarray([self._lines.num_items]))
        parts = [document.text, *(each.digest for each in document.pictures)]  # wherever these lie
        self._digest.update(repr(parts).encode())
        self._one_each &= len(pictures) == 1

    def finish(self) -> tuple[dict[str, Any], str]:
        """Close the files; return what `PicturedStore` needs to open them, and a hash of the contents."""
        for column in (self._lines, self._data, self._starts):
            column.finish()
        meta = {"num_bytes": self._lines.num_items, "num_data_bytes": self._data.num_items, "one_each": self._one_each}
        return meta, self._digest.hexdigest()


class _Column:
    """One .npy file of unknown length: the header is written again when the length is known."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self._dtype = path, dtype
        self._stream: BinaryIO = path.open("wb")
        self._digest = xxhash.xxh3_128()
        self.num_items = 0
        self._write_header()

    def append(self, items: np.ndarray) -> None:
        data = np.ascontiguousarray(items, self._dtype)
        self._stream.write(data.data)
        self._digest.update(data.data)
        self.num_items += len(data)

    def finish(self) -> str:
        self._stream.seek(0)
        self._write_header()
        self._stream.close()
        return self._digest.hexdigest()

    def _write_header(self) -> None:
        description = {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.num_items,)}
        npy.write_array_header_1_0(self._stream, description)
        assert self._stream.tell() == _HEADER_BYTES


def _open(path: Path, num_items: int) -> np.ndarray:
    array = np.asarray(np.load(path, mmap_mode="r" if num_items else None))  # nothing cannot be mapped
    if array.shape != (num_items,):
        raise ValueError(f"{path} holds {array.shape} items instead of {num_items}")
    return array

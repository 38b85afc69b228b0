"""Tokenized documents on disk: written in pieces and memory-mapped for reading, so neither needs the whole in memory.

Files in a folder:

- tokens.npy: uint16 or uint32 [tokens].
- documents.npy: int64 [documents + 1], document starts; the last entry is the end.
- trained.npy: bool [tokens], only if some token is untrained.
- bytes.npy: uint32 [tokens], only for eval text: UTF-8 bytes per token.
- pictured.npy: uint8 [bytes], only with pictures: one JSON line per document with the text and the pictures.
- lines.npy: int64 [documents + 1], only with pictures: line starts in pictured.npy.
- pictures.npy: uint8 [bytes], only with pictures: bytes for pictures without a file.

The files are independent of the row layout.
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


class TokenStore:
    """A finished folder, memory-mapped."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        """Open `folder`.

        Raises OSError, ValueError or KeyError if the files contradict the result of `TokenWriter.finish`.
        """
        self.num_tokens: int = meta["num_tokens"]
        self.num_documents: int = meta["num_documents"]
        self.content_hash: str = meta["content_hash"]
        # Mapped: ranks of one machine share the pages, and data larger than memory are read as needed.
        self.tokens = _open(folder / "tokens.npy", self.num_tokens)
        self.documents = _open(folder / "documents.npy", self.num_documents + 1)
        self.trained = _open(folder / "trained.npy", self.num_tokens) if meta["masked"] else None
        self._bytes = _open(folder / "bytes.npy", self.num_tokens) if meta["has_bytes"] else None
        self.picture_store = PictureStore(folder, self.num_documents, meta["pictured"]) if meta["pictured"] else None
        """Document texts and pictures. None: text only."""

    def unmasked(self) -> TokenStore:
        """Return the store with all tokens trained."""
        # The mapped arrays are shared.
        whole = copy.copy(self)
        whole.trained = None
        return whole

    def trained_bytes(self, begin: int, end: int) -> int | None:
        """Return the UTF-8 bytes of text under the trained tokens in [begin, end). None: not known."""
        if self._bytes is None:
            return None
        byte_counts = self._bytes[begin:end]
        return int((byte_counts if self.trained is None else byte_counts[self.trained[begin:end]]).sum(dtype=np.int64))


class PictureStore:
    """Document texts and pictures, memory-mapped."""

    def __init__(self, folder: Path, num_documents: int, meta: dict[str, Any]) -> None:
        """Open `folder`. Raises as `TokenStore` does."""
        self.has_one_picture_each: bool = meta["one_each"]
        """True if each document has exactly one picture."""
        self._starts = _open(folder / "lines.npy", num_documents + 1)
        self._lines = _open(folder / "pictured.npy", meta["num_bytes"])
        self._data = _open(folder / "pictures.npy", meta["num_data_bytes"])

    def at(self, document: int) -> PictureDocument:
        """Return the text and the pictures for a document."""
        begin, end = self._starts[document : document + 2]
        text, pictures = json.loads(self._lines[begin:end].tobytes())
        return PictureDocument(text, tuple(self._picture(*each) for each in pictures))

    def _picture(self, name: str, digest: str, path: str | None, span: tuple[int, int]) -> Picture:
        data = self._data[slice(*span)].tobytes() if path is None else None
        return Picture(name, None if path is None else Path(path), data, digest)


class TokenWriter:
    """Appends documents to a new folder."""

    def __init__(self, folder: Path, vocab_size: int, masked: bool, has_pictures: bool = False) -> None:
        """Create `folder`.

        `masked`: keep a training mask, dropped in the end if all tokens are trained. `has_pictures`: documents may have
        pictures.
        """
        folder.mkdir()
        self._folder = folder
        # Half the bytes wherever the vocabulary permits.
        self._tokens = _Column(folder / "tokens.npy", np.dtype(np.uint16 if vocab_size <= 65536 else np.uint32))
        self._documents = _Column(folder / "documents.npy", np.dtype(np.int64))
        self._trained = _Column(folder / "trained.npy", np.dtype(np.bool_)) if masked else None
        # Written until the first text without counts, then dropped.
        self._bytes: _Column | None = _Column(folder / "bytes.npy", np.dtype(np.uint32))
        self._documents.append(np.zeros(1))
        self._all_trained = True
        self._picture_writer = _PictureWriter(folder) if has_pictures else None

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
        if self._picture_writer is not None and picture_document is not None:
            self._picture_writer.append(picture_document)
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
        """Close the files. Return the metadata for `TokenStore`."""
        masked = self._trained is not None and not self._all_trained
        digests = [self._tokens.finish(), self._documents.finish()]
        if self._trained is not None:
            digest = self._trained.finish()
            # A mask of ones is dropped: the same tokens without a mask have the same hash.
            if masked:
                digests.append(digest)
            else:
                self._trained.path.unlink()
        if self._bytes is not None:  # not in the content hash: byte counts follow from the tokens
            self._bytes.finish()
        picture_meta = None
        if self._picture_writer is not None:
            picture_meta, digest = self._picture_writer.finish()
            digests.append(digest)
        return {
            "num_tokens": self._tokens.num_items,
            "num_documents": self._documents.num_items - 1,
            "masked": masked,
            "has_bytes": self._bytes is not None,
            "pictured": picture_meta,
            "content_hash": hash_text(" ".join(digests)),
        }


class _PictureWriter:
    """Appends document texts and pictures."""

    def __init__(self, folder: Path) -> None:
        self._lines = _Column(folder / "pictured.npy", np.dtype(np.uint8))
        self._data = _Column(folder / "pictures.npy", np.dtype(np.uint8))
        self._starts = _Column(folder / "lines.npy", np.dtype(np.int64))
        self._starts.append(np.zeros(1))
        # Not the digests of the columns: these hold paths, and a moved folder has the same data.
        self._digest = xxhash.xxh3_128()
        self._one_each = True

    def append(self, document: PictureDocument) -> None:
        pictures = []
        for each in document.pictures:
            begin = self._data.num_items
            if each.data:
                self._data.append(np.frombuffer(each.data, np.uint8))
            path = None if each.path is None else str(each.path)
            pictures.append((each.name, each.digest, path, (begin, self._data.num_items)))
        self._lines.append(np.frombuffer(json.dumps((document.text, pictures)).encode(), np.uint8))
        self._starts.append(np.asarray([self._lines.num_items]))
        parts = [document.text, *(each.digest for each in document.pictures)]  # independent of picture location
        self._digest.update(repr(parts).encode())
        self._one_each &= len(pictures) == 1

    def finish(self) -> tuple[dict[str, Any], str]:
        """Close the files. Return (metadata for `PicturedStore`, content hash)."""
        for column in (self._lines, self._data, self._starts):
            column.finish()
        meta = {"num_bytes": self._lines.num_items, "num_data_bytes": self._data.num_items, "one_each": self._one_each}
        return meta, self._digest.hexdigest()


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
    mode: Literal["r"] | None = "r" if num_items else None  # an empty array cannot be mapped
    array = np.asarray(np.load(path, mmap_mode=mode))
    if array.shape != (num_items,):
        raise ValueError(f"{path} holds {array.shape} items instead of {num_items}")
    return array

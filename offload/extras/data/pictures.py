"""Pictures in a conversation: byte source and text order."""

from __future__ import annotations

import base64
import io
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

import xxhash

from offload.errors import counted, errno_text
from offload.extras.data.rows import BadRow
from offload.extras.data.storage import library

PLACE = "<image>"
"""Placeholder for a picture in a text message, with a separate picture column."""
_TYPES = ("image", "image_url")
"""Types of picture parts in a message."""
_TEXT_TYPES = (None, "text")
_INLINE = re.compile(r"data:[^,]*;base64,", re.ASCII)


@dataclass(frozen=True)
class Picture:
    """A picture named or stored in a row."""

    name: str
    """Display name."""
    path: Path | None
    """File path. None: the row holds the bytes."""
    data: bytes | None = None
    """Bytes stored in the row, or None."""
    digest: str = ""
    """Content hash, set after reading."""

    def read(self) -> bytes:
        """Return the encoded picture bytes. Raises BadRow."""
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise BadRow(f"the picture {self.path} cannot be read: {errno_text(error.errno or 0)}.") from error
        except ValueError as error:  # a zero byte in the name
            raise BadRow(f"the picture {str(self.path)!r} cannot be read: {error}.") from error


@dataclass(frozen=True)
class PictureDocument:
    """Origin of a document with pictures."""

    text: str
    """Conversation as rendered by the template, with a placeholder per picture."""
    pictures: tuple[Picture, ...]
    """Pictures in placeholder order."""


def hash_picture(data: bytes) -> str:
    """Return the content hash of a picture."""
    return xxhash.xxh3_128_hexdigest(data)


def decode_picture(data: bytes, name: str) -> Any:
    """Decode a picture as transformers does: a PIL.Image in RGB, rotated by EXIF.

    Raises BadRow and MissingLibraryError.
    """
    pillow = library("PIL.Image", f"{name}, a picture,", extra="pictures", package="pillow")
    from transformers.image_utils import load_image

    try:
        return load_image(pillow.open(io.BytesIO(data)))
    except Exception as error:  # Pillow raises OSError, ValueError, SyntaxError and others
        raise BadRow(f"the picture {name} is damaged, or has a format that Pillow cannot read: {error}.") from error


class PictureMatcher:
    """Matches the pictures in a row with the placeholders in the messages."""

    def __init__(self, column: Any, folder: Path | None, where: str) -> None:
        """`column`: pictures in order.

        None: the messages name the pictures. `folder`: base for relative paths, or None. `where`: row name for errors.
        """
        self._has_column = column is not None
        given = column or []
        # A row with one picture may have it without a list.
        if not isinstance(given, list):
            given = [given]
        self._column = deque(given)  # not yet in a message
        self._num_pictures = len(self._column)
        self._folder = folder
        self._where = where
        self.pictures: list[Picture] = []
        """Pictures so far, in order."""

    def parts(self, content: Any, where: str) -> Any:
        """Return the message content as picture templates expect: a list of parts, or a text if all parts are texts.

        Parts of other types stay as they are, for the chat template. `where`: message name for errors. Raises BadRow.
        """
        # Without a column, `<image>` is a text like any other.
        if isinstance(content, str) and self._has_column:
            content = _split(content)
        if not isinstance(content, list):
            return content
        parts = [self._part(part, where) for part in content]
        if all(part["type"] == "text" for part in parts):
            return "".join(part["text"] for part in parts)
        return parts

    def check(self) -> None:
        """Raise BadRow for pictures without a placeholder."""
        if self._column:
            raise BadRow(
                f"{self._where} has {counted(self._num_pictures, 'image')} but "
                f"{counted(len(self.pictures), 'placeholder')}: put each image into a message, as {PLACE} in its text "
                "or as a part {'type': 'image'}."
            )

    def _part(self, part: Any, where: str) -> dict[str, Any]:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str | None):
            raise BadRow(f"{where} has a part of content that is no object with a 'type': {part!r:.80}.")
        if part.get("type") in _TEXT_TYPES:
            if not isinstance(part.get("text"), str):
                raise BadRow(f"{where} has a part of content of type 'text' without a string 'text': {part!r:.80}.")
            return {"type": "text", "text": part["text"]}
        if part["type"] not in _TYPES:
            return part
        # The names of transformers, OpenAI and others.
        value = next((part[key] for key in ("image", "path", "url", "image_url") if part.get(key)), None)
        if value is None and isinstance(part.get("base64"), str):
            value = f"data:image;base64,{part['base64'].rpartition(',')[2]}"
        if value is None:
            if not self._column:
                raise BadRow(
                    f"{where} has more placeholders than its row has images ({self._num_pictures}): name the picture "
                    "in the part as 'path', or add it to the column 'images'."
                )
            value = self._column.popleft()
        if part.get("type") == "image_url" and isinstance(value, dict):
            value = value.get("url")
        self.pictures.append(self._picture(value, where))
        return {"type": "image"}

    def _picture(self, value: Any, where: str) -> Picture:
        """Return the picture for a path, or for bytes with a path as in `datasets`. Raises BadRow."""
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            return Picture(str(value.get("path") or f"picture {len(self.pictures) + 1}"), None, value["bytes"])
        path = value
        if isinstance(value, dict):
            path = value.get("path")
        if not isinstance(path, str) or not path:
            raise BadRow(f"{where}: a picture must be a path, or bytes in a column of `datasets`, not {value!r:.80}.")
        # A data: URI, as in rows for the API of OpenAI.
        if inline := _INLINE.match(path):
            return Picture(f"picture {len(self.pictures) + 1}", None, _from_base64(path[inline.end() :], where))
        if path.startswith("file://"):
            path = url2pathname(path.removeprefix("file://").removeprefix("localhost"))
        if path.startswith("data:"):
            raise BadRow(
                f"{where}: the picture {path:.80} is a data: URI without base64: write data:image/png;base64,..."
            )
        if "://" in path:
            raise BadRow(
                f"{where}: the picture {path:.80} is not on this machine: download it, and give the path of the file."
            )
        try:
            place = Path(path).expanduser()
        except RuntimeError as error:  # ~NAME for a user without a home
            raise BadRow(f"{where}: the picture {path:.80} has no place: {error}") from error
        if self._folder is not None:
            return Picture(path, (self._folder / place).absolute())
        if not place.is_absolute():
            raise BadRow(
                f"{where}: the picture {path} has a relative path, but the row comes from no file: give an absolute "
                "path."
            )
        return Picture(path, place)


def parts_of(content: Any) -> list[dict[str, Any]]:
    """Return a content as a list of parts, the form that templates for picture models expect."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content)


def has_picture(content: list[dict[str, Any]]) -> bool:
    """Return True if one of the parts is a picture."""
    return any(part["type"] in _TYPES for part in content)


def _from_base64(text: str, where: str) -> bytes:
    try:
        # Line ends are usual in base64. Other foreign characters mean damage.
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise BadRow(f"{where}: a picture in base64 cannot be decoded: {error}.") from error


def _split(text: str) -> list[dict[str, str]]:
    """Split a text into parts, with a picture part for each placeholder."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(PLACE)):
        parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": piece}] * bool(piece)
    return parts

"""Conversations with pictures to tokens and tensors, with the processor from the model folder.

A processor replaces each picture by many tokens, depending on the picture size, and may add others around them. The
processor output for a whole conversation is used unchanged. Token character ranges, in the text with the inserted
characters, then separate answer tokens from the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.errors import ConfigError, MissingLibraryError, counted, describe, shorten
from offload.extras.data.chat import ChatRenderer, Segments
from offload.extras.data.pictures import Picture, PictureDocument, decode_picture, hash_picture, parts_of
from offload.extras.data.records import Chat
from offload.extras.data.rows import BadRow
from offload.extras.data.text_encoder import EncodedDocument, EncodeRequest, TextEncoder, training_mask
from offload.extras.data.tokenizer import place_of

if TYPE_CHECKING:
    import torch


def load_processor(path: str | None) -> Any:
    """Load the processor from a model folder or a downloaded hub name.

    Raises ConfigError. Raises MissingLibraryError if transformers lacks a library for the processor.
    """
    from transformers import AutoProcessor

    needs = "the data have pictures, so a processor in the model's folder must turn them into tensors; "
    if path is None:
        raise ConfigError(f"{needs}set --model.path to a folder with config.json, tokenizer and processor.")
    try:
        processor: Any = AutoProcessor.from_pretrained(place_of(path), local_files_only=True)
    except ImportError as error:
        raise MissingLibraryError(
            f"{needs}the processor of {path} cannot be loaded: {shorten(describe(error))}"
        ) from error
    except Exception as error:  # transformers raises many exception types for a folder without a processor
        raise ConfigError(f"{needs}no processor can be loaded from {path}: {shorten(describe(error))}") from error
    if getattr(processor, "image_processor", None) is None or not isinstance(
        getattr(processor, "image_token", None), str
    ):
        raise ConfigError(
            f"{needs}{path} has only a {type(processor).__name__}, and no processor for text with pictures "
            "(processor_config.json or preprocessor_config.json, of a class with an image_token). Give the folder of a "
            "model with such a processor."
        )
    if not processor.tokenizer.is_fast:
        raise ConfigError(
            f"{needs}its tokenizer in {path} is not a fast one (tokenizer.json), and so returns no character offsets. "
            "Give a model with a fast tokenizer."
        )
    # Some folders keep the template in the tokenizer alone.
    processor.chat_template = processor.chat_template or processor.tokenizer.chat_template
    if not processor.chat_template:
        raise ConfigError(
            f"{needs}the processor of {path} has no chat template, so the position of a picture in the text is "
            "unknown: put a template into chat_template.jinja there."
        )
    tokenizer = processor.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # batch rows are padded
    return processor


class PictureEncoder(TextEncoder):
    """Encodes conversations with pictures, each a `Chat`, in this process or in a worker."""

    def __init__(self, processor: Any, renderer: ChatRenderer, train_on_prompt: bool) -> None:
        super().__init__(processor.tokenizer, renderer, train_on_prompt)
        self._processor = processor
        self._placeholder: str = processor.image_token
        self._ending: str = processor.tokenizer.eos_token or ""

    def draft_documents(self, request: EncodeRequest) -> list[EncodedDocument]:
        """Return the documents for a conversation. Raises BadRow."""
        chat = request.record
        assert isinstance(chat, Chat)
        pictures, images = [], []
        try:
            for picture in chat.pictures:
                data = picture.read()
                # The hash is stored with the tokens: a picture changed later would not match their number.
                pictures.append(replace(picture, digest=hash_picture(data)))
                images.append(decode_picture(data, picture.name))
        except BadRow as bad:
            raise BadRow(f"{chat.where}: {bad}") from bad
        documents = self._renderer.render_documents(
            replace(chat, messages=[_in_parts(message) for message in chat.messages])
        )
        return [
            self._document(request, chat.where, segments, pictures, images, len(documents) > 1)
            for segments in documents
        ]

    def _document(
        self,
        request: EncodeRequest,
        where: str,
        segments: Segments,
        pictures: list[Picture],
        images: list[Any],
        is_part: bool,
    ) -> EncodedDocument:
        """Return a document with text and pictures. Raises BadRow and ConfigError.

        `is_part`: one document out of several for a conversation, possibly ending before the last pictures.
        """
        text = "".join(text for text, _ in segments)
        written = text.rstrip()
        # The end token is part of the text here, since the processor decides the tokens.
        if self._ending and segments and not written.endswith((*self._ends,)):
            self._renderer.findings.num_extended += written.endswith(self._specials)
            segments = [*segments, (self._ending, segments[-1][1])]
            text += self._ending
        number = text.count(self._placeholder)
        if number > len(images) or (number < len(images) and not is_part):
            raise BadRow(
                f"{where} has {counted(len(images), 'picture')}, but the rendered conversation has {number} "
                f"placeholders for pictures ({self._placeholder}): a message contains this placeholder as text, or the "
                "chat template does not support pictures."
            )
        try:
            encoding = run_processor(self._processor, [text], [images[:number]], return_offsets_mapping=True)
            widths = [self._width(image) for image in images[:number]]
        except Exception as error:  # processors raise any exception, e.g. for a picture of one pixel
            raise BadRow(f"{where}: the processor refuses this row: {shorten(describe(error))}") from error
        offsets: list[tuple[int, int]] = encoding["offset_mapping"][0]
        with_blanks = _with_widths(segments, self._placeholder, widths)
        # Ranges beyond the text mean further characters, and their place is unknown.
        if max(end for _, end in offsets) > sum(len(text) for text, _ in with_blanks):
            raise ConfigError(
                f"{where}: {type(self._processor).__name__} adds text outside of the picture placeholders, so the "
                "answers cannot be found among the tokens; give a model with another processor."
            )
        ids, trained = np.asarray(encoding["input_ids"][0], np.int64), training_mask(offsets, with_blanks)
        return EncodedDocument(
            where,
            request.in_eval,
            ids,
            trained,
            closes=True,
            picture_document=PictureDocument(text, tuple(pictures[:number])),
        )

    def _width(self, image: Any) -> int:
        """Return the number of characters that the processor writes for a picture.

        Measured by the position of a letter behind the picture, because token ranges exclude blanks.
        """
        encoding = self._processor(
            text=[f"{self._placeholder}x"], images=[[image]], add_special_tokens=False, return_offsets_mapping=True
        )
        return int(encoding["offset_mapping"][0][-1][1]) - 1


class PictureInputs:
    """Builds the model inputs for rows with pictures: runs the processor on texts and pictures."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        """The transformers processor, saved with the model."""

    def of(self, documents: Sequence[PictureDocument], ids: np.ndarray) -> dict[str, torch.Tensor]:
        """Return all processor outputs for these rows except the ids.

        `ids`: int64 [rows, tokens], known from preparation. Raises ConfigError if the processor now makes other ids, or
        if a picture changed.
        """
        try:
            images = [[_read_again(picture) for picture in document.pictures] for document in documents]
            outputs = run_processor(
                self.processor,
                [document.text for document in documents],
                images,
                padding="max_length",
                max_length=ids.shape[1],
                padding_side="right",
                return_tensors="pt",
            )
        except ConfigError:
            raise
        except Exception as error:  # processors raise any exception
            raise ConfigError(f"the processor refuses the pictures of a batch: {shorten(describe(error))}") from error
        inputs: dict[str, torch.Tensor] = dict(outputs)
        # Some processors cut or pad pictures by their neighbours in a batch.
        if not np.array_equal(inputs.pop("input_ids").numpy(), ids):
            raise ConfigError(
                "the processor returns other tokens for rows in a batch than for each row alone (as prepared), so "
                "larger batches cannot be trained on. Set --train.batch_size to the number of ranks, for one row on "
                "each."
            )
        return inputs


def run_processor(processor: Any, texts: list[str], images: list[list[Any]], **options: Any) -> Any:
    """Run a processor on rendered conversations with pictures.

    Special tokens are added as in the processor's `apply_chat_template`.
    """
    # The template may have written the BOS, and the tokenizer would add a second one.
    bos = processor.tokenizer.bos_token
    if bos is not None and texts[0].startswith(bos):
        options["add_special_tokens"] = False
    given = None  # a processor refuses lists without a picture
    if any(images):
        given = images
    return processor(text=texts, images=given, **options)


def _read_again(picture: Picture) -> Any:
    """Return a prepared picture. Raises ConfigError if the file changed."""
    data = picture.read()
    if hash_picture(data) != picture.digest:
        raise ConfigError(
            f"the picture {picture.path} has changed since the data were prepared: restore the file, or rename it in "
            "the data, so that they are prepared again."
        )
    return decode_picture(data, picture.name)


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with a list of parts, the form that templates for picture models expect."""
    return {**message, "content": parts_of(message["content"])}


def _with_widths(segments: Segments, placeholder: str, widths: Sequence[int]) -> Segments:
    """Return the text with `widths` untrained blanks in place of the pictures."""
    remaining, with_blanks = iter(widths), Segments()
    for text, trained in segments:
        for number, piece in enumerate(text.split(placeholder)):
            # A placeholder stands before each piece but the first.
            if number:
                with_blanks.append((" " * next(remaining), False))
            with_blanks.append((piece, trained))
    return with_blanks

"""Upload of an export to the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from transformers.utils import ADAPTER_CONFIG_NAME

from offload.errors import ConfigError, OffloadError, shorten, warn

_CARD = "README.md"


class HubUpload:
    """An upload to a repository. Made before the export, so that a wrong name or token costs no export."""

    def __init__(self, name: str, *, private: bool) -> None:
        """Raises ConfigError for a wrong name, without a token, and if the hub cannot be reached or refuses."""
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ConfigError(f"--push is {name}, and the hub does not take this name: {error}") from error
        if constants.HF_HUB_OFFLINE:
            raise ConfigError("--push needs the hub, but HF_HUB_OFFLINE is set: unset it, or leave --push out.")
        if get_token() is None:
            raise ConfigError(
                "--push needs a token of the hub with the right to write, and there is none: run `hf auth login`, or "
                "set HF_TOKEN."
            )
        self._name = name
        self._api = HfApi(endpoint=constants.ENDPOINT)
        try:
            # None leaves an existing repository unchanged.
            made = self._api.create_repo(name, private=private or None, exist_ok=True)
        except Exception as error:
            self._fail(f"--push is {name}, and the repository cannot be made", error, ConfigError)
        self._name = made.repo_id

    def push(self, folder: Path) -> str:
        """Upload a folder, and return the address. Raises OffloadError; the folder stays."""
        left_out = None
        if self._has_local_base(folder):  # the hub refuses a card with a local base
            left_out = [_CARD]
        try:
            self._api.upload_folder(
                repo_id=self._name, folder_path=folder, commit_message="Upload an export", ignore_patterns=left_out
            )
        except Exception as error:
            self._fail(
                f"the upload to {self._name} failed. {folder} is complete: `hf upload {self._name} {folder}` uploads "
                "it later. The reason",
                error,
                OffloadError,
            )
        return f"{self._api.endpoint}/{self._name}"

    def _fail(self, what: str, error: Exception, kind: type[OffloadError]) -> NoReturn:
        # A user can do something about an answer, and only wait without one.
        place = f"no answer from {self._api.endpoint}"
        if isinstance(error, HfHubHTTPError) and error.response is not None:
            place = "the answer of the hub"
        reason = shorten(" ".join(f"{type(error).__name__}: {error}".split()))
        raise kind(f"{what} ({place}): {reason}") from error

    def _has_local_base(self, folder: Path) -> bool:
        """Return whether the folder has an adapter over a folder of this machine. Warns then."""
        path = folder / ADAPTER_CONFIG_NAME
        if not path.is_file():  # a whole model
            return False
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
        if not base or not Path(base).exists():
            return False
        warn(
            f"{ADAPTER_CONFIG_NAME} names the base {base}, a folder of this machine: others cannot load the adapter "
            f"from {self._name}. Train with --model.path set to the name of the base on the hub, or push the export "
            "with --merge. The model card is left out, because the hub refuses this name there."
        )
        return True

"""Write a model that streams as a Hugging Face folder, from views of the master planes. Only what rests on disk is
copied: it is in host memory until the folder is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.tiers.store import Store


def export_model(model: nn.Module, store: Store, indices: Mapping[int, int], folder: Path | None) -> None:
    """Write configuration and safetensors into `folder`; None on a rank that only gives what it holds. Collective.

    `indices` maps the id of what hangs in the model for a parameter to its index in the store. transformers' own writer
    renames, splits and drops tied names; any other module becomes one `model.safetensors` under its own names.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    viewed: dict[int, torch.Tensor] = {}  # tied names have one tensor
    for name, tensor in model.state_dict(keep_vars=True).items():
        index = indices.get(id(tensor))
        if index is not None and index not in viewed:
            viewed[index] = _own_storage(store.view(index))
            if folder is None:
                viewed[index] = viewed[index][:0]
        tensors[name] = tensor.detach() if index is None else viewed[index]
    if folder is None:
        return
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    if save_pretrained is not None:
        save_pretrained(folder, state_dict=tensors)
        return
    from safetensors.torch import save_file

    seen: set[int] = set()
    unique = {}
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in seen or not tensor.numel():
            seen.add(tensor.data_ptr())
            unique[name] = tensor.contiguous()
    save_file(unique, folder / "model.safetensors", metadata={"format": "pt"})


def _own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return the same memory under a storage of its own, so that writers do not take an arena's parameters for
    tied ones.
    """
    if view.device.type != "cpu":
        return view.cpu()
    flat = view.reshape(-1)
    raw = flat.view(torch.uint8).numpy()
    return torch.from_numpy(raw).view(view.dtype).view(view.shape)

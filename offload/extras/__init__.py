"""Extras: features outside the core and the application, each in a folder. An extra may import the core and the
application; only `ENTRIES` names extras in the other direction.
"""

from __future__ import annotations

from collections.abc import Mapping

ENTRIES: Mapping[str, Mapping[str, str]] = {
    "attention": {"shared": "offload.extras.large.shared_attention:SharedAttention"},
    "format": {"huggingface": "offload.hf.write"},
    "method": {"forwards": "offload.extras.zeroth.forwards:Forwards"},
    "rule": {"mezo": "offload.extras.zeroth.mezo:MeZO"},
    "splitting": {
        "rows": "offload.extras.large.cutting:RowCutting",
        "experts": "offload.extras.large.cut_experts:cut_experts",
    },
    "stage": {  # the innermost first
        "compiled": "offload.extras.large.compiled_forwards:CompiledForwards",
        "tiled": "offload.extras.large.tiled_forwards:TiledForwards",
        "experts": "offload.extras.large.streamed_experts:ExpertStreams",
    },
}
"""For each door (`offload.doors`) the names and places of the objects from extras: "module:name", or a module."""

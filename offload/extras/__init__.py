"""Extras: features outside the core and the application, each in a folder. An extra may import the core and the
application; only `ENTRIES` names extras in the other direction.
"""

from __future__ import annotations

from collections.abc import Mapping

ENTRIES: Mapping[str, Mapping[str, str]] = {
    "codec": {"int8": "offload.extras.quant.codecs:INT8", "nf4": "offload.extras.quant.codecs:NF4"},
    "link codec": {"int8": "offload.extras.quant.codecs:INT8"},
    "gradient codec": {"int8": "offload.extras.quant.codecs:INT8", "int4": "offload.extras.quant.codecs:INT4"},
    "quantized format": {
        "fp8": "offload.extras.quant.formats:BlockFp8",
        "mxfp4": "offload.extras.quant.formats:GptOss",
        "bitsandbytes": "offload.extras.quant.formats:BitsAndBytes",
        "compressed-tensors": "offload.extras.quant.formats:CompressedTensors",
    },
    "method": {"forwards": "offload.extras.zeroth.forwards:Forwards"},
    "rule": {"mezo": "offload.extras.zeroth.mezo:MeZO"},
}
"""For each door (`offload.doors`) the names and places of the objects from extras: "module:name"."""

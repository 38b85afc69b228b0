"""Extras: features outside the core and the application, each in a folder. An extra may import the core and the
application, and the extras in its line of `NEEDS`; only `ENTRIES` names extras in the other direction.
"""

from __future__ import annotations

from collections.abc import Mapping

ENTRIES: Mapping[str, Mapping[str, str]] = {
    "attention": {
        "documents": "offload.extras.large.document_attention:DocumentAttention",
        "shared": "offload.extras.large.shared_attention:SharedAttention",
        "sinks": "offload.extras.large.sink_attention:SinkAttention",
    },
    "conflicts": {
        "adapters": "offload.extras.adapters.conflicts:CONFLICTS",
        "contrastive": "offload.extras.contrastive.conflicts:CONFLICTS",
        "distill": "offload.extras.distill.conflicts:CONFLICTS",
        "preferences": "offload.extras.prefs.conflicts:CONFLICTS",
        "forwards": "offload.extras.zeroth.conflicts:CONFLICTS",
    },
    "engine conflicts": {
        "blocks": "offload.extras.large.conflicts:CONFLICTS",
        "codecs": "offload.extras.quant.conflicts:CONFLICTS",
        "forwards": "offload.extras.zeroth.conflicts:ENGINE_CONFLICTS",
    },
    "exchange": {"dispatch": "offload.extras.large.dispatch:FromOwner"},
    "exporter": {"adapter": "offload.extras.adapters.export:export_checkpoint"},
    "format": {"huggingface": "offload.app.hf.write"},
    "codec": {
        "int8": "offload.extras.quant.codecs:INT8",
        "fp8": "offload.extras.quant.fp8_codec:FP8",
        "nf4": "offload.extras.quant.codecs:NF4",
    },
    "link codec": {"int8": "offload.extras.quant.codecs:INT8"},
    "gradient codec": {"int8": "offload.extras.quant.codecs:INT8", "int4": "offload.extras.quant.codecs:INT4"},
    "quantized format": {
        "fp8": "offload.extras.quant.formats:BlockFp8",
        "mxfp4": "offload.extras.quant.formats:GptOss",
        "bitsandbytes": "offload.extras.quant.formats:BitsAndBytes",
        "compressed-tensors": "offload.extras.quant.formats:CompressedTensors",
    },
    "method": {"forwards": "offload.extras.zeroth.forwards:Forwards"},
    "model form": {"tensors": "offload.extras.large.tensor_parallel:open_parts"},
    "objective": {
        **dict.fromkeys(("dpo", "orpo", "reward"), "offload.extras.prefs.preferences:Preferences"),
        "contrastive": "offload.extras.contrastive.objective:Contrastive",
        "distill": "offload.extras.distill.objective:FromTeacher",
    },
    "planner": {"forecast": "offload.extras.plan.run_forecast:forecast_run"},
    "probe": {"measured": "offload.extras.plan.probe:probe"},
    "report": {"page": "offload.extras.tools.reporting.page:report_run"},
    "rule": {
        "lion": "offload.extras.rules.lion:Lion",
        "adafactor": "offload.extras.rules.factored:Adafactor",
        "lomo": "offload.extras.rules.lomo:LOMO",
        "adalomo": "offload.extras.rules.factored:AdaLomo",
        "muon": "offload.extras.rules.muon:Muon",
        "mezo": "offload.extras.zeroth.mezo:MeZO",
    },
    "splitting": {
        "rows": "offload.extras.large.cutting:RowCutting",
        "experts": "offload.extras.large.cut_experts:cut_experts",
    },
    "stage": {  # the innermost first
        "products": "offload.extras.large.kept_products:KeptProducts",
        "compiled": "offload.extras.large.compiled_forwards:CompiledForwards",
        "tiled": "offload.extras.large.tiled_forwards:TiledForwards",
        "experts": "offload.extras.large.streamed_experts:ExpertStreams",
        "fp8": "offload.extras.quant.products:Fp8Products",
        "dispatch": "offload.extras.large.dispatch:DispatchStage",
    },
    "task": {"rows": "offload.extras.data.task:FileRows"},
    "trainable": {
        "adapter": "offload.extras.adapters.over_base:AdapterOverBase",
        "restarts": "offload.extras.adapters.restarts:RestartingAdapter",
    },
}
"""For each door (`offload.doors`) names and places of the objects from extras, and of the application's
model format and probe: "module:name", or a module.
"""
UNUSED: Mapping[str, Mapping[str, tuple[str, object]]] = {
    "stage": {
        "products": ("recompute", "always"),
        "compiled": ("compile", "never"),
        "tiled": ("sequence_tile", "none"),
        "experts": ("placement.experts", "whole"),
        "fp8": ("matmul", "precision"),
        "dispatch": ("dispatch", "never"),
    },
}
"""For each door, names of objects that are left out with a setting: (path in the settings, value)."""
NEEDS: Mapping[str, tuple[str, ...]] = {
    "contrastive": ("data",),
    "data": ("tools",),  # the HTML page
    "distill": ("adapters", "data", "frozen"),
    "frozen": ("data",),
    "generate": ("adapters", "data"),
    "integrations": ("rules",),
    "large": ("quant",),
    "plan": ("adapters", "large", "quant", "zeroth"),
    "prefs": ("adapters", "data", "frozen"),
    "tools": ("large", "plan"),  # machine rates
    "zeroth": ("adapters",),
}
"""For each extra the other extras with imported modules. Other extras import the core and the application alone."""

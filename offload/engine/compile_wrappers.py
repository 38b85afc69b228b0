"""Remove torch.compile wrappers from a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from offload.errors import first_names, warn

_MOST_NAMES = 3


def remove_compile_wrappers(model: nn.Module, compiles: str = "always") -> nn.Module:
    """Return the model with the original forwards instead of compiled ones.

    Applies to the whole model, inner modules (`torch.compile(module)`, `module.compile()`) and compiled forwards set on
    modules, since compiled code cannot trace through streamed weights. Calls to a compiled wrapper go to the module
    itself. Forwards compiled in a class body, and compiled functions called by a forward, stay compiled. `compiles`:
    the engine's setting, for the warning text.
    """
    compiled_names = []
    if _is_wrapper(model):
        compiled_names.append("the model")
        model = _unwrap(model)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        for key, child in module._modules.items():
            if child is not None and _is_wrapper(child):
                module._modules[key] = _unwrap(child)
                compiled_names.append(f"{name}.{key}".lstrip("."))
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = None
            compiled_names.append(name or "the model")
        if _is_compiled(forward := vars(module).get("forward")):
            own = forward._torchdynamo_orig_callable
            # A method of the class needs no attribute on the module.
            if getattr(own, "__func__", None) is type(module).forward:
                del module.forward
            else:
                module.forward = own
            compiled_names.append(name or "the model")
    if compiled_names:
        names = [name.replace("._orig_mod", "") for name in dict.fromkeys(compiled_names)]
        listed = first_names(names, _MOST_NAMES, " and {} more")
        instead = "; compile=always compiles blocks"
        if compiles == "always":
            instead = ": the engine compiles blocks"
        warn(f"torch.compile was removed from {listed}, because it cannot trace offloaded weights{instead}.")
    return model


def _is_wrapper(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules


def _unwrap(wrapper: Any) -> nn.Module:
    """Return the wrapped module, and redirect wrapper calls to the module."""
    module: nn.Module = wrapper._orig_mod
    wrapper.forward = module.__call__
    return module


def _is_compiled(forward: Any) -> bool:
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")

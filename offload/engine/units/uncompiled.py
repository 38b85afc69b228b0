"""A model without what torch.compile has put around it and its modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from offload.errors import warn

_MOST_NAMES = 3


def uncompiled(model: nn.Module, compiles: str = "auto") -> nn.Module:
    """Return the model with its own forwards in the places of those that torch.compile has made of them: of the whole,
    of modules in it (`torch.compile(module)`, `module.compile()`), of forwards that were put into modules. They could
    not look through weights that come and go. Whoever calls what was compiled calls the module itself. A forward that
    its class has compiled, and functions that a forward calls, stay.

    `compiles`: whether the engine compiles blocks, auto or never, for the warning where there was anything.
    """
    found = []
    if _is_wrapper(model):
        found.append("the model")
        model = _unwrapped(model)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        for key, child in module._modules.items():
            if child is not None and _is_wrapper(child):
                module._modules[key] = _unwrapped(child)
                found.append(f"{name}.{key}".lstrip("."))
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = None
            found.append(name or "the model")
        if _is_compiled(forward := vars(module).get("forward")):
            own = forward._torchdynamo_orig_callable
            if getattr(own, "__func__", None) is type(module).forward:
                del module.forward
            else:
                module.forward = own
            found.append(name or "the model")
    if found:
        names = [name.replace("._orig_mod", "") for name in dict.fromkeys(found)]
        rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        warn(
            f"torch.compile was taken off {', '.join(names[:_MOST_NAMES])}{rest}, since it cannot look through weights "
            f"that come and go{': the engine' if compiles == 'auto' else '; compile=auto'} compiles blocks."
        )
    return model


def _is_wrapper(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules


def _unwrapped(wrapper: Any) -> nn.Module:
    """Return the module in a wrapper, which hands calls on to it from here on."""
    module: nn.Module = wrapper._orig_mod
    wrapper.forward = module.__call__
    return module


def _is_compiled(forward: Any) -> bool:
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")

"""Imports Megatron-Bridge on a machine without Transformer Engine.

One of the bridge's files imports transformer_engine at its top. `import_bridge()` provides empty modules
during the import and removes them afterwards: if they stayed, other libraries would find a Transformer
Engine. It also tells the bridge the names of the local layers.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import re
import sys
import types
from collections.abc import Sequence
from copy import copy
from typing import Any

_ROOT = "transformer_engine"


class _EmptyModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package attribute, read by the import system
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            value: Any = importlib.import_module(f"{self.__name__}.{name}")
        else:
            value = type(name, (object,), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != _ROOT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_bridge() -> types.ModuleType:
    """Import and return megatron.bridge, after megatron.core, which must not see the empty modules."""
    if "megatron.bridge" in sys.modules:
        return sys.modules["megatron.bridge"]
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401 - it looks for TE now, and finds none

    hidden = {_ROOT: sys.modules.pop(_ROOT)} if _ROOT in sys.modules else {}
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    logging.disable(logging.INFO)  # the bridge logs each name that the empty modules lack
    try:
        bridge = importlib.import_module("megatron.bridge")
        # The bridge took megatron-core's placeholders for Transformer Engine's classes; isinstance() raises
        # for them.
        adapters = importlib.import_module("megatron.bridge.peft.utils")
        adapters.HAVE_TE = adapters.HAVE_TE_PYTORCH_GROUPED_LINEAR = False  # type: ignore[attr-defined]
        _name_local_layers()
        return bridge
    finally:
        logging.disable(logging.NOTSET)
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == _ROOT]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _name_local_layers() -> None:
    """Let the bridge convert the weights of the local layers in every family.

    Some families name experts only as Transformer Engine's grouped layer does, `experts.linear_fc1.weight3`,
    and not as local ones, `experts.local_experts.3.linear_fc1.weight`.
    """
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type("LocalAttention", "column")  # each rank holds the sinks of its own heads
    for linear in ("LocalRowParallelLinear", "LocalRowParallelLinearLayerNorm"):
        AutoMapping.register_module_type(linear, "row")
    add_norms = MegatronMappingRegistry._add_separate_layernorm_mappings

    def add_names(registry: MegatronMappingRegistry) -> None:
        add_norms(registry)
        known = {mapping.megatron_param for mapping in registry.mappings}
        for mapping in list(registry.mappings):
            grouped = mapping.megatron_param
            local = re.sub(r"experts\.(linear_fc[12]\.\w+)\*$", r"experts.local_experts.*.\1", grouped)
            if local != grouped and local not in known:
                other = copy(mapping)
                other.megatron_param = local
                registry.mappings.append(other)

    MegatronMappingRegistry._add_separate_layernorm_mappings = add_names

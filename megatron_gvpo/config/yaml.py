"""Reads YAML as people write it: 1e-5 is a number, `off` and 2026-01-31 are words, no key comes twice."""

from __future__ import annotations

import re
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """PyYAML's SafeLoader with other rules for words.

    SafeLoader reads YAML 1.1, where 1e-5 is a string, `off` is a boolean and 2026-01-31 is a date.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is given twice."""
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # the loader's own error refuses such a key
            if key_node.value in seen:
                problem = f"key {key_node.value!r} given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


# For a field of type bool, pydantic still understands yes, no, on and off.
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in of_first if not tag.endswith((":bool", ":timestamp"))]
    for first, of_first in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$")
Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))

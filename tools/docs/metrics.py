"""The metrics reference, from the table in the code."""

from __future__ import annotations

from megatron_gvpo.core.metric_names import SECTIONS


def page() -> str:
    parts = [_HEAD]
    for title, metrics in SECTIONS.items():
        parts.append(f"## {title}")
        rows = [f"| `{m.name}` | {m.unit} | {m.meaning} |" for m in metrics]
        parts.append("\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


_HEAD = """# Metrics

Generated from `megatron_gvpo/core/metrics.txt`.

Every step adds a line to `OUTPUT_DIR/metrics.jsonl`; TensorBoard and the tracking services get it, too.
A run logs the metrics that apply to its method and engine. `<...>` stands for a name or a number.
[How to read the metrics](../howto/metrics.md) says which to watch."""

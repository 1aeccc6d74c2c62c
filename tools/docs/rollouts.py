"""The reference of the rollout files, from the table of columns in the code."""

from __future__ import annotations

from megatron_gvpo.observe.rollouts.schema import COLUMNS


def page() -> str:
    rows = [
        f"| `{c.name}` | {c.type or 'struct: a field for each component'} | {c.meaning} |" for c in COLUMNS
    ]
    return "\n".join([_HEAD, "| column | type | meaning |", "|---|---|---|", *rows]) + "\n"


_HEAD = """# Rollout files

Generated from `megatron_gvpo/observe/rollouts/schema.py`.

`OUTPUT_DIR/rollouts/step_000012.parquet` has the responses of training step 12, and `eval_000012.parquet`
those of the evaluation after it, a row each. [Read the responses](../howto/read_rollouts.md) has examples.
New versions may add columns, so select the columns that you read.
"""

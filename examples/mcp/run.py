"""Trains a small model, by GVPO, to call the tools of an MCP server instead of guessing.

    python examples/mcp/run.py [key.sub=value ...]

The arguments go to the GVPO run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import small_examples as small

if __name__ == "__main__":
    # This Python runs the server: it has the package mcp.
    server = [{"command": [sys.executable, str(Path(__file__).with_name("calculator_server.py"))]}]
    sys.exit(small.run_example("mcp", f"rollout.conversation.mcp={json.dumps(server)}"))

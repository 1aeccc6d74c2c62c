"""Makes two small models with random weights, a student and a teacher, and problems for both.

    python examples/distill/make_task.py --out DIR [--seed 0]

It writes DIR/student and DIR/teacher, checkpoints of Qwen2's architecture with 0.8 M and 3.2 M parameters and
one tokenizer, and DIR/data: the quickstart's sums, of six numbers each. Half of the demonstrations show the
intermediate steps.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

_QUICKSTART = Path(__file__).parents[1] / "quickstart" / "make_task.py"
_SPEC = importlib.util.spec_from_file_location("quickstart_task", _QUICKSTART)
assert _SPEC is not None and _SPEC.loader is not None
quickstart = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(quickstart)

WIDTHS = {"student": 128, "teacher": 256}
quickstart.LEVELS = {1: quickstart.Level(share=1.0, operands=6)}
quickstart.WORKED = 0.5
quickstart.SIZES = {"train": 3072, "validation": 64, "test": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the distillation's models and data.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, width in WIDTHS.items():
        quickstart.make_model(options.out / name, options.seed, width)
    quickstart.make_data(options.out / "data", options.seed)


if __name__ == "__main__":
    main()

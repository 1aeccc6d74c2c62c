"""Pushes a run's exported model to the Hugging Face hub."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.record import write_complete
from megatron_gvpo.runs.written import EXPORT, json_object

if TYPE_CHECKING:
    from megatron_gvpo.settings.sections import CheckpointConfig, HubConfig

log = logging.getLogger(__name__)

_PUSHED = "pushed_to"  # key of export.json: the repository that has this export


class HubError(RuntimeError):
    """The export could not be pushed; it is complete on the disk."""


def prepare_repository(settings: HubConfig) -> None:
    """Make the repository if it does not exist, which shows that the token may write there.

    Raises ConfigError, which names the repository and the hub's answer.
    """
    api = _api(settings)
    try:
        _answer(lambda: api.create_repo(settings.repo, private=settings.private, exist_ok=True))
    except HubError as error:
        raise ConfigError(f"checkpoint.push_to_hub.repo={settings.repo}: {error}") from None


def upload_export(options: CheckpointConfig, out: Path) -> None:
    """If the settings ask for it, upload the export in `out`: the best one if the run keeps it.

    The export's export.json then names the repository, so that it is not uploaded there again. Raises
    HubError.
    """
    if (settings := options.push_to_hub) is None:
        return
    best = out / "hf_best"
    directory = best if options.keep_best is not None and best.is_dir() else out / "hf"
    export = json_object(directory / EXPORT)
    if export.get(_PUSHED) == settings.repo:
        return
    url = upload(settings, directory, f"megatron_gvpo: {directory.name} after step {export.get('step')}")
    log.warning("pushed %s to %s", directory, url)
    with suppress(OSError):  # then `--resume` pushes it again
        write_complete(directory / EXPORT, json.dumps(export | {_PUSHED: settings.repo}) + "\n")


def upload(settings: HubConfig, directory: Path, message: str) -> str:
    """Upload the files of a Hugging Face directory; returns the URL of the commit.

    Raises HubError, which says how to push the directory by hand.
    """
    api = _api(settings)

    def push() -> Any:
        # A finished run that is resumed has not made the repository at its start.
        api.create_repo(settings.repo, private=settings.private, exist_ok=True)
        return api.upload_folder(repo_id=settings.repo, folder_path=str(directory), commit_message=message)

    try:
        done = _answer(push)
    except HubError as error:
        raise HubError(
            f"cannot push {directory} to {settings.repo}: {error}; the directory is complete: push it with "
            f"`hf upload {settings.repo} {directory} .`"
        ) from None
    return str(done.commit_url)


def _api(settings: HubConfig) -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would break the run's own display
    from huggingface_hub import HfApi

    return HfApi(token=settings.token)


def _answer(ask: Callable[[], Any]) -> Any:
    """The hub's answer. Raises HubError with the error in one line."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return ask()
    except HfHubHTTPError as error:
        answer = error.response
        reason = getattr(error, "server_message", None) or answer.reason_phrase
        raise HubError(f"the hub answered {answer.status_code} ({reason})") from None
    except (OSError, ValueError, RuntimeError) as error:  # raised without a connection, or by the uploader
        raise HubError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpcore", "httpx2", "httpcore2"):
            raise
        raise HubError(f"{type(error).__name__}: {error}") from None

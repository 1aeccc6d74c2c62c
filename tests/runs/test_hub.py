"""checkpoint.push_to_hub: the real huggingface_hub against a stand-in for the hub on loopback.

The stand-in speaks the hub's older upload of large files; the newer one (Xet) is switched off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helpers.inputs.good_config import GOOD
from helpers.servers.hub_server import TOKEN, Hub, running_hub
from helpers.tiny_run import configure, fit

from megatron_gvpo.cli import main
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.secrets import as_written
from megatron_gvpo.core.yaml_files import Loader
from megatron_gvpo.runs import hub as hub_of_runs
from megatron_gvpo.settings.config import build_config
from megatron_gvpo.settings.sections import CheckpointConfig, HubConfig
from megatron_gvpo.training import trainer

PROGRAM = """
import json, sys
from pathlib import Path
from megatron_gvpo.settings.sections import CheckpointConfig
from megatron_gvpo.core.redaction import hide
from megatron_gvpo.core.secrets import resolve
from megatron_gvpo.runs.hub import prepare_repository, upload

settings = CheckpointConfig(**resolve({"push_to_hub": json.loads(sys.argv[1])})).push_to_hub
try:
    prepare_repository(settings)
    print(upload(settings, Path(sys.argv[2]), "a message"))
except Exception as error:
    print(type(error).__name__, hide(str(error)))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


def variables(url: str, token: str) -> dict[str, str]:
    return {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "MY_TOKEN": token}


def pushed(url: str, directory: Path, token: str = TOKEN, **settings: object) -> str:
    """The last line that the program prints; in its own process, because the library reads HF_* at import."""
    push = json.dumps({"repo": "me/model", "token": {"env": "MY_TOKEN"}, **settings})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, push, str(directory)],
        env=os.environ | variables(url, token),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.proof  # tests below push the same directory by themselves
def test_a_run_pushes_its_export(hub: Hub, task: Path, tmp_path: Path):
    run = [str(task / "run.yaml"), f"output_dir={tmp_path}/run", "algorithm=gpg", "train.steps=2"]
    run += ["data.eval=null", "checkpoint.push_to_hub={repo: me/model, token: {env: MY_TOKEN}}"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_gvpo", "train", *run],
        env=os.environ | variables(hub.url, TOKEN),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"pushed {tmp_path}/run/hf to {hub.url}/me/model/commit/" in done.stderr
    assert hub.commits == ["megatron_gvpo: hf after step 2"]
    repository = hub.repositories["me/model"]
    assert repository["visibility"] == "private"
    sent = {path.name: path.read_bytes() for path in (tmp_path / "run" / "hf").iterdir()}
    sent["export.json"] = sent["export.json"].replace(b', "pushed_to": "me/model"', b"")
    assert repository["files"] == sent and "model.safetensors" in sent
    assert TOKEN not in "".join(path.read_text() for path in (tmp_path / "run").glob("*.[jy]*"))


def test_the_commit_of_the_best_model_names_the_step_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sent: list[str] = []
    monkeypatch.setattr(hub_of_runs, "upload", lambda _, directory, message: sent.append(message))
    options = {"push_to_hub": {"repo": "me/model"}, "keep_best": {"metric": "eval/pass@1"}}
    for name, step in (("hf_best", 2), ("hf", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "export.json").write_text(json.dumps({"step": step}))
    hub_of_runs.upload_export(CheckpointConfig(**options), tmp_path)
    del options["keep_best"]
    hub_of_runs.upload_export(CheckpointConfig(**options), tmp_path)
    assert sent == ["megatron_gvpo: hf_best after step 2", "megatron_gvpo: hf after step 5"]


def test_a_finished_run_that_is_resumed_pushes_what_was_not_pushed_and_nothing_twice(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The push of a run that ended during it was lost: --resume said that nothing was left to do."""
    sent: list[str] = []

    def upload(settings: HubConfig, directory: Path, message: str) -> str:
        sent.append(f"{settings.repo}: {message}")
        if len(sent) == 1:
            raise hub_of_runs.HubError("no network")
        return "its url"

    monkeypatch.setattr(hub_of_runs, "upload", upload)
    monkeypatch.setattr(trainer, "prepare_repository", lambda settings: None)
    own, other = (f"checkpoint.push_to_hub.repo=me/{name}" for name in ("model", "other"))
    run = ("algorithm=gpg", "train.steps=1", "train.max_tokens_per_micro_batch=4096", "data.eval=null")
    with pytest.raises(hub_of_runs.HubError):
        fit(configure(task, tmp_path, *run, own))
    resume = ["train", str(tmp_path / "config.yaml"), "--resume"]
    assert main(resume) == 0 and sent == ["me/model: megatron_gvpo: hf after step 1"] * 2
    assert main(resume) == 0 and len(sent) == 2, "it is not pushed again"
    fit(configure(task, tmp_path, *run, other), resume=True)
    assert sent[2:] == ["me/other: megatron_gvpo: hf after step 1"]
    (tmp_path / "hf" / "export.json").write_text('{"step": 1}')  # another export of the same step
    assert main([*resume, own]) == 0 and len(sent) == 4


def test_a_repository_that_exists_stays_as_it_is(hub: Hub, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    for private in (True, False):
        assert pushed(hub.url, tmp_path, private=private).startswith(f"{hub.url}/me/model/commit/")
    assert hub.repositories["me/model"]["visibility"] == "private" and hub.commits == ["a message"] * 2


def test_a_wrong_token_is_refused_before_anything_is_sent(hub: Hub, tmp_path: Path):
    line = pushed(hub.url, tmp_path, token="hf_another_one")
    assert line.startswith("ConfigError checkpoint.push_to_hub.repo=me/model: the hub answered 401 (")
    assert hub.repositories == {} and "hf_another_one" not in line


def test_a_refused_push_says_how_to_push_by_hand(hub: Hub, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    hub.refuse_commits = True
    line = pushed(hub.url, tmp_path)
    assert line.startswith(f"HubError cannot push {tmp_path} to me/model: the hub answered 403 (")
    assert line.endswith(f"push it with `hf upload me/model {tmp_path} .`")


def test_a_hub_that_does_not_answer(tmp_path: Path):
    line = pushed("http://127.0.0.1:9", tmp_path)
    assert line.startswith("ConfigError checkpoint.push_to_hub.repo=me/model: ") and "Connect" in line


def test_the_token_comes_from_the_environment_and_is_never_written(monkeypatch: pytest.MonkeyPatch):
    values = yaml.load(GOOD, Loader)
    literal = {"repo": "me/model", "token": "hf_in_the_file"}
    with pytest.raises(ConfigError) as error:
        build_config({**values, "checkpoint": {"push_to_hub": literal}})
    assert "token: a secret in the configuration: give `{env: NAME}`" in str(error.value)
    assert "hf_in_the_file" not in str(error.value)
    monkeypatch.setenv("MY_TOKEN", "hf_in_the_environment")
    push = {"repo": "me/model", "token": {"env": "MY_TOKEN"}}
    config = build_config({**values, "checkpoint": {"push_to_hub": push}})
    assert config.checkpoint.push_to_hub is not None
    assert config.checkpoint.push_to_hub.token == "hf_in_the_environment"
    assert as_written(config)["checkpoint"]["push_to_hub"]["token"] == {"env": "MY_TOKEN"}
    with pytest.raises(ConfigError, match="has nothing to push"):
        build_config({**values, "checkpoint": {"push_to_hub": push, "export_hf": False}})

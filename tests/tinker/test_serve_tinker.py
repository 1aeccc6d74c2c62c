"""The released SDK and unmodified recipes of tinker-cookbook train against real servers."""

import json
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import HELPERS, ROOT
from helpers.servers.tinker_clients import KEY, run_client, serving

from megatron_gvpo.tinker.wire import MESSAGES

CLIENT = str(HELPERS / "programs" / "tinker_client.py")
ADAPTERS = "model: {path: PATH, dtype: float32, adapter: {rank: 4, alpha: 4}}"
WHOLE = "model: {path: PATH, dtype: float32}"
REST = "\noutput_dir: out\nserve: {key: {env: TINKER_TEST_KEY}}\nmax_tokens_per_micro_batch: 128\n"


@pytest.fixture
def folder(task: Path, tmp_path: Path) -> Path:
    """A directory with the tiny model in the folder `model`, and a configuration with adapters."""
    shutil.copytree(task / "model", tmp_path / "model")
    (tmp_path / "server.yaml").write_text(ADAPTERS.replace("PATH", "model") + REST)
    return tmp_path


def test_the_sdk_uses_each_part_of_the_api(folder: Path) -> None:
    with serving(folder) as url:
        assert url.startswith("http://127.0.0.1:")
        assert run_client(folder, CLIENT, url, "model", "4").endswith("done\n")
        program = str(ROOT / "examples" / "tinker" / "client.py")
        (folder / "client.py").write_text(Path(program).read_text().replace("RANK = 32", "RANK = 4"))
        assert "saved tinker://" in run_client(folder, "client.py", url, "model")
    [adapter] = (folder / "out/checkpoints").glob("*/sampler_weights/last/adapter/adapter_config.json")
    assert json.loads(adapter.read_text())["r"] == 4


@pytest.mark.proof
@pytest.mark.parametrize(
    ("layout", "ranks"), [("parallel.tp=2", 2), ("parallel.pp=2", 2), ("parallel.cp=2", 2), ("seed=1", 2)]
)
def test_the_sdk_trains_all_weights_in_each_layout(folder: Path, layout: str, ranks: int) -> None:
    (folder / "server.yaml").write_text(WHOLE.replace("PATH", "model") + REST)
    with serving(folder, layout, ranks=ranks) as url:
        assert run_client(folder, CLIENT, url, "model", "0").endswith("done\n")


@pytest.mark.proof  # test_tinker_sessions.py ends a silent session without a server
def test_a_client_that_dies_frees_its_session(folder: Path) -> None:
    """Its model makes room for the next client's. A request without the key does not keep it alive."""
    program = "\n".join(
        [
            "import os, sys, tinker",
            "service = tinker.ServiceClient(base_url=sys.argv[1])",
            "service.create_lora_training_client(base_model='model', rank=4).result()",
            "print(service.holder.get_session_id(), flush=True)",
            "os._exit(0)",
        ]
    )
    (folder / "dies.py").write_text(program)
    with serving(folder, "serve.most_models=1", "serve.session_seconds=15") as url:
        dead = run_client(folder, "dies.py", url).split()[-1]
        _, session = post(url, "create_session", {"tags": []})
        model = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "model"}
        model["lora_config"] = {"rank": 4}
        status, refusal = post(url, "create_model", model)
        assert (status, "1 models are in training" in refusal["detail"]) == (400, True)
        for _ in range(60):
            assert post(url, "session_heartbeat", {"session_id": dead}, key="tml-wrong")[0] == 401
            if (status := post(url, "create_model", model)[0]) == 200:
                break
            time.sleep(1)
        assert status == 200
        status, answer = post(url, "session_heartbeat", {"session_id": dead})
        assert (status, "said nothing for 15 s" in answer["detail"]) == (410, True)


def post(url: str, path: str, body: dict[str, Any], key: str = KEY) -> tuple[int, dict[str, Any]]:
    """The status and the answer of a request of the API."""
    request = urllib.request.Request(f"{url}/api/v1/{path}", json.dumps(body).encode(), {"X-API-Key": key})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_messages_are_those_of_the_sdk(tmp_path: Path) -> None:
    """Numbers, types and repetition of the fields; an enumeration is sent as an int32."""
    program = tmp_path / "fields.py"
    program.write_text(
        "import json\n"
        "from google.protobuf.descriptor import FieldDescriptor as F\n"
        "from tinker.proto import tinker_public_pb2 as p\n"
        "def kind(f):\n"
        "    if f.message_type is not None and f.message_type.GetOptions().map_entry:\n"
        "        return 'map:' + kind(f.message_type.fields_by_name['value'])\n"
        "    repeated = f.is_repeated if hasattr(f, 'is_repeated') else f.label == f.LABEL_REPEATED\n"
        "    names = {v: k[5:].lower() for k, v in vars(F).items() if k.startswith('TYPE_')}\n"
        "    name = f.message_type.name if f.message_type else names[f.type].replace('enum', 'int32')\n"
        "    return '*' * repeated + name\n"
        "fields = {m.name: {f.name: [f.number, kind(f)] for f in m.fields}"
        " for m in p.DESCRIPTOR.message_types_by_name.values()}\n"
        "print(json.dumps(fields))\n"
    )
    of_sdk = json.loads(run_client(tmp_path, str(program)).splitlines()[-1])
    for name, fields in MESSAGES.items():
        for field, description in fields.items():
            assert of_sdk[name][field] == list(description), f"{name}.{field}"

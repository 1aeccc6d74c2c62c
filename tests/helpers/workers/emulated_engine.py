"""A rank of a rollout server with an emulated GPU: the engine's own functions that receive weights, this
project's plugin in it, and a model that is parameters alone.

Arguments: a JSON file {"engine": name, "site": the site-packages of its environment, "shapes": {name: shape},
"meet": a file where the ranks form the server's own group}, this rank, and the server's number of ranks. Each
line of stdin is a request {"path": ..., "body": ...}; the path "save" writes this rank's parameters to the
file `body`-RANK. Each answer is a line of JSON: "" or an error.
"""

from __future__ import annotations

import base64
import importlib
import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers.workers.engine_files import EngineFiles
from megatron_gvpo.emulation import emulated_gpu
from megatron_gvpo.servers.server import PLUGINS
from megatron_gvpo.servers.sglang import WEIGHT_LOADER

# Files of the engines that receive and load weights, with the packages in which all files are real.
FILES = {
    "sglang": [
        "sglang.srt.model_executor.model_runner_components.weight_updater",
        "sglang.srt.weight_sync.tensor_bucket",
        "sglang.srt.utils",
    ],
    "vllm": [
        "vllm.distributed.weight_transfer.base",
        "vllm.distributed.weight_transfer.factory",
        "vllm.model_executor.model_loader.weight_utils",
        "vllm.model_executor.model_loader.reload",
    ],
}


class Model(nn.Module):
    """The parameters of a rank: its rows of each matrix, as if outputs are divided, and all vectors."""

    def __init__(self, shapes: dict[str, list[int]], rank: int, ranks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for name, shape in shapes.items():
            layer, _, weight = name.replace(".", "/").rpartition("/")
            if layer not in self.layers:
                self.layers[layer] = nn.Module()
            is_divided = len(shape) > 1 and shape[0] % ranks == 0
            rows = shape[0] // (ranks if is_divided else 1)
            parameter = nn.Parameter(torch.zeros(rows, *shape[1:], device="cuda"), requires_grad=False)
            parameter.weight_loader = _part_loader(rank, ranks) if is_divided else load_all  # type: ignore[attr-defined]
            self.layers[layer].register_parameter(weight, parameter)

    def load_weights(self, weights: Sequence[tuple[str, Any]]) -> None:
        parameters: dict[str, Any] = self.named()
        for name, tensor in weights:
            parameters[name].weight_loader(parameters[name], tensor)

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in Hugging Face's format."""
        named = self.named_parameters()
        return {name.removeprefix("layers.").replace("/", "."): parameter for name, parameter in named}


def load_all(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)


def _part_loader(rank: int, ranks: int) -> Any:
    def load_part(param: Tensor, loaded_weight: Tensor) -> None:
        rows = len(loaded_weight) // ranks
        param.data.copy_(loaded_weight.narrow(0, rank * rows, rows))

    return load_part


class SGLangRank:
    """SGLang's WeightUpdater, with the scheduler's calls of it."""

    def __init__(self, model: Model, rank: int) -> None:
        context = importlib.import_module("sglang.srt.runtime_context")
        setattr(context, "get_model", lambda: SimpleNamespace(weight_cache_mode="off"))  # noqa: B010 - a stand-in
        updater = importlib.import_module(FILES["sglang"][0])
        nothing: Any = None  # stands for parts of an engine that a push does not use
        self._rank = rank
        self._updater = updater.WeightUpdater(
            tp_rank=rank,
            device="cuda",
            gpu_id=rank,
            model_config=nothing,
            custom_weight_loaders={WEIGHT_LOADER: nothing},
            get_model=lambda: model,
            update_model_fields=nothing,
            recapture_cuda_graph=nothing,
            get_model_runner=nothing,
        )

    def post(self, path: str, body: dict[str, Any]) -> None:
        is_done, message = True, ""
        updater = self._updater
        if path == "/init_weights_update_group":
            is_done, message = updater.init_weights_update_group(**body)
        elif path == "/destroy_weights_update_group":
            updater.destroy_weights_update_group(**body)
        elif path == "/update_weights_from_distributed":
            names = ("names", "dtypes", "shapes", "group_name", "load_format")
            tensors = updater.receive_weights_from_distributed(**{name: body[name] for name in names})
            is_done, message = updater.load_weights_from_distributed(tensors)
        elif path == "/update_weights_from_tensor":
            named = pickle.loads(base64.b64decode(body["serialized_named_tensors"][self._rank]))
            is_done, message = updater.update_weights_from_tensor(named, body["load_format"])
        if not is_done:
            raise RuntimeError(message)


class VLLMRank:
    """The plugin's WeightTransferEngine, with the worker's calls of it; the model reloads by vLLM's code."""

    def __init__(self, model: Model, rank: int, ranks: int) -> None:
        reload = importlib.import_module("vllm.model_executor.model_loader.reload")
        with torch.device("cuda"):
            reload.record_metadata_for_reloading(model)
        parallel = SimpleNamespace(data_parallel_index=0, world_size=ranks, rank=rank)
        config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.float32))
        receiver = importlib.import_module("megatron_gvpo_vllm").Receiver
        self._receiver = receiver(None, config, torch.device("cuda", rank), model)

    def post(self, path: str, body: dict[str, Any]) -> None:
        receiver = self._receiver
        if path == "/init_weight_transfer_engine":
            receiver.init_transfer_engine(receiver.parse_init_info(body["init_info"]))
        elif path == "/update_weights":
            receiver.update_weights(body["update_info"])
        elif path == "/start_weight_update":
            receiver.start_weight_update()
        elif path == "/finish_weight_update":
            receiver.finish_weight_update()
        elif path == "/shutdown_weight_transfer_engine":
            receiver.shutdown()


def main() -> None:
    server, rank, ranks = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), int(sys.argv[3])
    emulated_gpu.install()
    torch.cuda.set_device(rank)
    sys.path.insert(0, str(PLUGINS))
    sys.meta_path.append(EngineFiles(server["site"], server["engine"], FILES[server["engine"]]))
    dist.init_process_group("nccl", init_method=f"file://{server['meet']}", rank=rank, world_size=ranks)
    model = Model(server["shapes"], rank, ranks)
    engine = SGLangRank(model, rank) if server["engine"] == "sglang" else VLLMRank(model, rank, ranks)
    for line in sys.stdin:
        request, problem = json.loads(line), ""
        try:
            if request["path"] == "save":
                weights = {name: weight.data.cpu() for name, weight in model.named().items()}
                save_file(weights, f"{request['body']}-{rank}")
            else:
                engine.post(request["path"], request["body"])
        except Exception as error:  # the trainer gets the error as the answer
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps(problem), flush=True)


if __name__ == "__main__":
    main()

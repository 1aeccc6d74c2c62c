"""Buckets in a GPU's memory between two processes with an emulated GPU, by CUDA's own handles (ipc.c).

The handle, the receiver and the counters of PyTorch are the real ones; the memory is a file in memory.
"""

from __future__ import annotations

from helpers import on_null_cuda

CODE = """
import json, subprocess, sys
from pathlib import Path

import torch
from megatron_gvpo.emulation import emulated_gpu

emulated_gpu.install()
from megatron_gvpo.weights.node import shared_storage

OTHER = '''
import json, sys
import torch
from megatron_gvpo.emulation import emulated_gpu
emulated_gpu.install()
from megatron_gvpo.servers.server import PLUGINS
sys.path.insert(0, str(PLUGINS))
from megatron_gvpo_memory import opened
for line in sys.stdin:
    handle, size = json.loads(line)
    try:
        flat = opened(handle, size)
    except RuntimeError as error:
        print(json.dumps(str(error)), flush=True)
        continue
    values, before = flat.view(torch.float32), torch.cuda.memory_allocated()
    answer = [values.device.index, values.tolist(), before]
    values.add_(1)  # as on a GPU, the trainer sees it
    del values, flat
    torch.cuda.ipc_collect()
    print(json.dumps(answer), flush=True)
'''

child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", OTHER], stdin=-1, stdout=-1, text=True)

def ask(handle, size):
    child.stdin.write(json.dumps([handle, size]) + "\\n")
    child.stdin.flush()
    return json.loads(child.stdout.readline())

allocated = torch.cuda.memory_allocated()
first = torch.arange(1000.0).cuda()
second = torch.arange(2000.0, device="cuda:1")
result = {"answers": [ask(shared_storage(flat), 4 * len(flat)) for flat in (first, second)]}
first.mul_(2)
result["again"] = ask(shared_storage(first), 4 * len(first))
result["here"] = first.tolist()
stale = shared_storage(second)
try:
    torch.UntypedStorage._new_shared_cuda(1, *second.untyped_storage()._share_cuda_()[1:])
    result["own"] = None
except RuntimeError as error:
    result["own"] = str(error)
stale["uuid"] = "another"
result["another"] = ask(stale, 8000)
del first
torch.cuda.ipc_collect()
result["left"] = torch.cuda.memory_allocated() - allocated
child.stdin.close()
result["code"] = child.wait(60)
"""


def test_another_process_maps_a_bucket_without_a_copy_and_gives_it_back() -> None:
    report = on_null_cuda.run_code(CODE, emulated=True)
    first, second = report["answers"]
    assert first[:2] == [0, [float(i) for i in range(1000)]]
    assert second[:2] == [1, [float(i) for i in range(2000)]]
    assert first[2] == 0, "the memory is not its own"
    assert report["again"][1] == [2.0 * (i + 1) for i in range(1000)]
    assert report["here"] == [2.0 * (i + 1) + 1 for i in range(1000)], "what the other process wrote"
    assert report["another"] == "this rank does not see the GPU another that the weights are on"
    assert report["left"] == 0, "nothing waits for a process that has given it back"
    assert report["code"] == 0

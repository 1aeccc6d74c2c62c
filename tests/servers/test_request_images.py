"""Requests with images, and what answers to them must say: a stand-in takes the place of the connection.

test_image_servers.py asks the real servers.
"""

from __future__ import annotations

import asyncio
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases.vision_cases import END, IMAGE, PROCESSOR, START, make_rows
from helpers.servers.fake_servers import admit_at_once
from PIL import Image as Picture

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.data.image_files import read
from megatron_gvpo.data.image_processor import ImageProcessor
from megatron_gvpo.groups import Image
from megatron_gvpo.sampling.server_checks import _check_processor
from megatron_gvpo.servers.http import ServerRefused
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.servers.request import Request
from megatron_gvpo.servers.request_images import ImageSender, RequestImage, difference, with_one_placeholder
from megatron_gvpo.servers.server import Completion
from megatron_gvpo.servers.sglang import SGLang
from megatron_gvpo.servers.vllm import VLLM
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.settings.servers import ServersConfig

PROMPT = [5, START, *[IMAGE] * 4, END, 6, START, IMAGE, IMAGE, END, 7]
SHORT = [5, START, IMAGE, END, 6, START, IMAGE, END, 7]
IMAGES = (RequestImage("data:a", "aa", 4, IMAGE), RequestImage("data:b", "bb", 2, IMAGE))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return tmp_path


class Connection:
    """Answers as a server that makes `prompt` of what it is asked, and drops its cache when it is told to."""

    url = "http://127.0.0.1:1"

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.bodies, self.cached = prompt, list[dict[str, Any]](), set[str]()

    async def post(self, path: str, body: Any = None, **_: Any) -> Any:
        if path not in ("/generate", "/inference/v1/generate"):
            return {"success": True}
        self.bodies.append(body)
        await asyncio.sleep(0)
        if path == "/generate":
            meta = {"output_token_logprobs": [[-0.5, 8, None]], "finish_reason": {"type": "stop"}}
            return {
                "output_ids": [8],
                "prompt_token_ids": self.prompt,
                "meta_info": {**meta, "weight_version": "0"},
            }
        for part in body["content_parts"]:
            if part["url"] is None and part["uuid"] not in self.cached:
                raise ServerRefused("Cache miss for image at index 0 but data is not provided.", 400)
            self.cached.add(part["uuid"])
        choice = {"token_ids": [8], "finish_reason": "stop", "logprobs": {"content": [{"logprob": -0.5}]}}
        return {"prompt_token_ids": self.prompt, "choices": [choice]}


def ask(server: Any, count: int = 1) -> list[Completion]:
    async def all_at_once() -> list[Completion]:
        calls = [server.sample(PROMPT, 9, i, SamplingConfig(), (6,), 1.0, IMAGES) for i in range(count)]
        return await asyncio.gather(*calls)

    return asyncio.run(all_at_once())


def test_pixels_are_those_of_the_trainer(directory: Path) -> None:
    """A processor with the same settings makes the trainer's pixels of the picture that a server gets."""
    processor, sender = ImageProcessor(str(directory)), ImageSender(str(directory), {"image_token_id": IMAGE})
    file = directory / "large.png"
    Picture.effect_noise((301, 77), 90).convert("RGB").resize((301, 77)).save(file)
    images = [image for row in make_rows(directory, processor).images or () for image in row]
    for image in [*images, processor.image(str(file))]:
        [sent] = sender.sent([image])
        assert sent.tokens == image.tokens
        again = processor.image(sent.url)
        assert again.grid == image.grid
        assert torch.equal(processor.pixels(again), processor.pixels(image))
        width, height = Picture.open(io.BytesIO(read(sent.url))).size
        assert (height, width) == (image.grid[1] * 4, image.grid[2] * 4)


def test_a_size_that_the_processor_would_change_again_is_not_sent(directory: Path) -> None:
    """With one area for all images, a size that it gives may be below the least that it leaves."""
    area = {"shortest_edge": 1024, "longest_edge": 1024}
    (directory / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "size": area}))
    processor, sender = ImageProcessor(str(directory)), ImageSender(str(directory), {"image_token_id": IMAGE})
    image = sender.picture()
    assert processor.image(sender.sent([image])[0].url).grid == image.grid
    _, high, wide = image.grid
    assert processor._grid(high * 4, wide * 4) != image.grid


def test_a_prompt_has_one_placeholder_for_each_image() -> None:
    assert with_one_placeholder(PROMPT, IMAGES) == SHORT
    assert with_one_placeholder([*PROMPT, IMAGE, IMAGE], IMAGES) == [*SHORT, IMAGE, IMAGE]  # sampled ones
    assert with_one_placeholder(PROMPT, ()) == PROMPT


@pytest.mark.parametrize("kind", [SGLang, VLLM])
def test_the_prompt_that_the_server_used_is_the_trainers(kind: Any) -> None:
    http = Connection(PROMPT)
    [sample] = ask(kind(http))
    assert (sample.token_ids, sample.logprobs) == ([8], [-0.5])
    assert {tuple(body.get("input_ids") or body["token_ids"]) for body in http.bodies} == {tuple(SHORT)}
    for prompt, message in (
        ([5, START, *[IMAGE] * 9, END, 7], "its prompt has 9 tokens of images, and the trainer's 6"),
        ([6, *PROMPT[1:]], r"its prompt has other tokens than the trainer's"),
        (None, "its answer does not say which prompt it used"),
    ):
        with pytest.raises(ServerRefused, match=f"{message}.*preprocessor_config.json") as refused:
            ask(kind(Connection(prompt)))  # type: ignore[arg-type]
        assert refused.value.is_request


def test_pixels_go_to_vllm_once_for_all_samples_of_a_prompt() -> None:
    http = Connection(PROMPT)
    server = VLLM(http)  # type: ignore[arg-type]
    assert len(ask(server, 8)) == 8
    with_pixels = [body for body in http.bodies if body["content_parts"][0]["url"]]
    assert len(http.bodies) == 9 and len(with_pixels) == 1
    assert with_pixels[0]["sampling_params"]["max_tokens"] == 1


def test_images_have_other_names_after_a_push_and_return_where_they_were_dropped() -> None:
    http = Connection(PROMPT)
    server = VLLM(http)  # type: ignore[arg-type]
    ask(server)
    before = set(http.cached)
    asyncio.run(server.flush_cache(1.0))
    ask(server)
    assert len(http.cached - before) == 2
    http.cached.clear()  # the server has dropped them
    http.bodies.clear()
    ask(server)
    assert [part["url"] for body in http.bodies for part in body["content_parts"]] == [
        *(None, None),
        *("data:a", "data:b"),
    ]


class Waiting(ImageSender):
    """Writes an image when it is told to, in all threads at once."""

    def __init__(self, path: str, model: dict[str, Any], threads: int) -> None:
        super().__init__(path, model)
        self.is_told_to_write, self._all = threading.Event(), threading.Barrier(threads)
        write = self._processor.png

        def png(image: Image) -> bytes:
            self._all.wait(60.0)
            assert self.is_told_to_write.wait(60.0)
            return write(image)

        self._processor.png = png  # type: ignore[method-assign]


def test_a_server_that_gets_weights_is_asked_for_no_response_to_an_image(directory: Path) -> None:
    """The images were written after the server was chosen: it had no request that a push could wait for."""
    sender, http = Waiting(str(directory), {"image_token_id": IMAGE}, 1), Connection([7])
    request = Request((7,), 1, 0, images=(sender.picture(),))

    async def run() -> None:
        pool = ServerPool([SGLang(http)], ServersConfig(), [8], print, images=sender)  # type: ignore[arg-type]
        admit_at_once(pool, 0)
        responses = asyncio.create_task(pool.generate([request], SamplingConfig()))
        await asyncio.sleep(0.1)
        assert await pool.take_out(1, abort=True) == pool.handles
        sender.is_told_to_write.set()
        await asyncio.sleep(0.5)
        assert http.bodies == []
        pool.admit(pool.handles[0], 0)
        await responses
        assert len(http.bodies) == 1

    asyncio.run(run())


def test_an_image_that_several_threads_write_is_kept_once(directory: Path) -> None:
    """Counted once for each sample of a prompt, it would soon leave no room for any other."""
    sender = Waiting(str(directory), {"image_token_id": IMAGE}, 4)
    sender.is_told_to_write.set()
    image = sender.picture()
    with ThreadPoolExecutor(4) as threads:
        [[url], *others] = [[each.url for each in sent] for sent in threads.map(sender.sent, [[image]] * 4)]
    assert others == [[url]] * 3 and sender._bytes == len(url)


def test_an_aborted_sample_ends_before_a_sampled_placeholder() -> None:
    sample = Completion([7, IMAGE, 8], [-1.0, -2.0, -3.0], "abort")
    assert sample.before(IMAGE) == Completion([7], [-1.0], "abort")
    assert sample.before(START) == sample


def test_another_processor_is_refused_by_name(directory: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    size = {"shortest_edge": 64, "longest_edge": 1024}
    for change, message in (
        ({"image_mean": [0.5, 0.5, 0.5]}, r"image_mean=\(0.5, 0.5, 0.5\)"),
        ({"size": size}, "longest_edge=1024"),
    ):
        (served / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **change}))
        with pytest.raises(ConfigError, match=f"{message} in preprocessor_config.json, but model.path="):
            _check_processor("rollout server U", served, str(directory))
    (served / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    _check_processor("rollout server U", served, str(directory))


def test_equal_prompts_have_no_difference() -> None:
    assert difference(tuple(PROMPT), PROMPT, IMAGE) is None

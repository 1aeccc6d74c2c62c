"""Tiny random models for reward servers, and stand-ins for such servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    Qwen2Config,
)

from helpers.inputs.chat_tokenizer import END, tokenizer

CONFIGS = {"qwen2": Qwen2Config, "llama": LlamaConfig}
POSITIONS = 256
QUIET = ("/health", "/model_info")  # paths for which a stand-in's answer is empty
Answer = Callable[[str, Any], Any]  # (path, body) -> the answer as JSON; an int is a status without one


def make_reward_model(directory: Path, family: str, seed: int = 0) -> Path:
    """Write a random sequence-classification model with one label."""
    return _make(directory, family, seed, AutoModelForSequenceClassification, num_labels=1)


def make_judge(directory: Path, family: str = "qwen2") -> Path:
    """Write a random language model with a chat template."""
    return _make(directory, family, 1, AutoModelForCausalLM, max_position_embeddings=2048)


def _make(directory: Path, family: str, seed: int, kind: Any, **own: Any) -> Path:
    tokens = tokenizer()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": END, "bos_token_id": None}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": POSITIONS, "vocab_size": len(tokens)}
    model = kind.from_config(CONFIGS[family](**{**sizes, **ids, **own}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)  # scores that differ from text to text
    model.save_pretrained(directory)
    tokens.save_pretrained(directory)
    return directory


def logits(directory: Path, chats: Sequence[Sequence[dict[str, str]]]) -> list[float]:
    """The logit of each chat by transformers, in fp32, one by one."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    own = AutoTokenizer.from_pretrained(directory)
    values = []
    for chat in chats:
        ids = own(own.apply_chat_template(list(chat), tokenize=False), add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            values.append(float(model(torch.tensor([ids])).logits[0, 0]))
    return values


@contextmanager
def standing_in(answer: Answer) -> Iterator[str]:
    """The address of a server with these answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            reply = answer(self.path, json.loads(data) if data else None)
            status, text = (reply, b"") if isinstance(reply, int) else (200, json.dumps(reply).encode())
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def scores(score: Callable[[list[int]], float], counted: Callable[[list[int]], int] = len) -> Answer:
    """An SGLang reward server."""

    def answer(path: str, body: Any) -> Any:
        if path in QUIET:
            return {}
        assert path == "/classify"
        return [
            {"embedding": [score(ids)], "meta_info": {"prompt_tokens": counted(ids)}}
            for ids in body["input_ids"]
        ]

    return answer

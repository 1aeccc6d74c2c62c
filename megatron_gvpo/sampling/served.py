"""The served engine: rank 0 sends requests to SGLang or vLLM servers, and all ranks get the answers."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from megatron_gvpo.conversations.conversations import conversations_of
from megatron_gvpo.core.collectives import all_gather_msgpack, broadcast_msgpack
from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import LOST, Group, Prompt, Rollout
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.end_tokens import StopStrings
from megatron_gvpo.megatron import parallel
from megatron_gvpo.sampling.server_checks import check_server
from megatron_gvpo.servers import leader
from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.launch.first_turn import give_turn
from megatron_gvpo.servers.leader import Command, Done, Failed, Push, Wait, follow, lead
from megatron_gvpo.servers.pool import PendingRequest, ServerPool
from megatron_gvpo.servers.request import Request, check_request, pack, requests_for, unpack
from megatron_gvpo.servers.session import ServerSession
from megatron_gvpo.servers.speculation import DraftCounter
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig, SamplingConfig
from megatron_gvpo.types import OnWait
from megatron_gvpo.weights.publisher import WeightSync
from megatron_gvpo.weights.transport import PushSettings

if TYPE_CHECKING:
    from megatron_gvpo.megatron.scorer import ScoredModel


@dataclass(frozen=True)
class PendingResponses:
    """Responses that were requested. Rank 0 alone has the `future`."""

    prompts: Sequence[Prompt]
    future: concurrent.futures.Future[list[list[Rollout]]] | None


def _wait(futures: Sequence[concurrent.futures.Future[Any]], until: str) -> bool:
    """Wait a moment, and return True if all are done. Raises the error of one of them."""
    done, others = concurrent.futures.wait(futures, timeout=0.2, return_when=until)
    for future in done:
        future.result()
    return not others


class ServedEngine:
    """The rollout servers of a run (see `RolloutEngine`). The servers are healthy inside the context manager.

    Colocated servers are awake from a push to the end of `collect`, and asleep otherwise. While they are
    awake, they use the memory of the trainer's part "training", and after the push that of the part
    "weights".
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        output_dir: str,
        cards: ModelCards,
        task: Task,
        policy: ScoredModel,
    ) -> None:
        self._cards, self._task = cards, task
        settings = PushSettings.of(model, rollout, output_dir, cards, parallel.device())
        self._weights = WeightSync(settings, policy, task.prompts)
        check = partial(check_server, model=model, rollout=rollout, cards=cards, task=task)
        ends = task.end_token_ids, StopStrings(task.tokenizer)
        self._open_servers = partial(ServerSession, model, rollout, output_dir, cards, *ends, check)
        self._memory = policy.memory if rollout.servers.colocated else None
        talks = rollout.conversation
        self._conversations = None if talks is None else conversations_of(talks, task)
        self._opened = ExitStack()  # closes the conversations, on rank 0
        self.servers: ServerSession | None = None  # set on rank 0 while the servers run
        self.asleep = False
        self._version = -1
        self._drafts = DraftCounter() if rollout.speculation is not None else None
        self._measured: dict[str, float] = {}  # metrics of the last batch of responses, on rank 0

    @property
    def version(self) -> int:
        """-1 while colocated servers are asleep: they have given their weights' memory away."""
        return -1 if self.asleep else self._version

    @property
    def metrics(self) -> dict[str, float]:
        return self._weights.metrics | self._measured

    @property
    def shares_gpus(self) -> bool:
        return self._memory is not None

    def __enter__(self) -> Self:
        """Start or find the servers. Raises ConfigError for one that does not fit, RolloutError for none."""
        if self._memory is not None:
            self._memory.release("training")
            self._give_weights()
            if dist.get_rank() == 0:
                give_turn()
        try:
            follow(self._start() if dist.get_rank() == 0 else None)
            self._sleep()
        except BaseException:  # Python does not call __exit__ then
            self._close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def sync(self, version: int) -> None:
        """Push the weights to all healthy servers, and prove the first pushes by a probe's log-probs."""
        if self._version < 0:
            self._weights.connect(self.servers)
        # The probe is computed now, because the push may release the memory of the weights.
        expected = self._weights.probe.expected()
        self._push(version)
        self._version = version
        if expected is not None:
            self._weights.probe.prove(version, expected)

    def submit(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, seed: int
    ) -> PendingResponses:
        return self.submit_requests(prompts, requests_for(prompts, n, seed), sampling)

    def submit_requests(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], sampling: SamplingConfig
    ) -> PendingResponses:
        """As `submit`, for requests of which each has its own number of responses, limit and seed."""
        model = self._cards.policy
        room = model.get("max_position_embeddings")
        for prompt, request in zip(prompts, requests, strict=True):
            if problem := check_request(request, sampling, model["vocab_size"], room):
                raise ValueError(f"prompt {prompt.id}: {problem}")
        if self.servers is None:
            return PendingResponses(prompts, None)
        pool = self.servers.pool
        if self._conversations is None:
            return PendingResponses(prompts, self.servers.loop.submit(pool.generate(requests, sampling)))
        talks = self._conversations.run_all(Speakers(pool, sampling), prompts, requests, sampling)
        return PendingResponses(prompts, self.servers.loop.submit(talks))

    def wait_for(
        self, tickets: Sequence[Sequence[PendingResponses]], count: int, due: int, on_wait: OnWait = None
    ) -> list[int]:
        """Wait for some of the entries. Colocated servers stay awake, until `collect`."""

        def complete(servers: ServerSession) -> list[int] | None:
            entries = [[ticket.future for ticket in entry if ticket.future] for entry in tickets]
            indices = [i for i, futures in enumerate(entries) if all(future.done() for future in futures)]
            if len(indices) >= count and indices[:due] == [*range(due)]:
                return indices[:count]
            _wait([future for futures in entries for future in futures if not future.done()], FIRST_COMPLETED)
            return None

        try:
            indices: list[int] = self._led(complete, on_wait)
        except BaseException:
            self._sleep()
            raise
        return indices

    def collect(self, tickets: Sequence[PendingResponses], on_wait: OnWait = None) -> list[Group]:
        """Wait for the complete groups. A server that comes back meanwhile gets the weights.

        Afterwards colocated servers sleep, and the trainer has its memory. Responses of other tickets stop
        then, and continue under the next weights.
        """
        futures = [ticket.future for ticket in tickets if ticket.future is not None]

        def packed(servers: ServerSession) -> list[list[dict[str, Any]]] | None:
            if not _wait(futures, FIRST_EXCEPTION):
                return None
            rows = [row for future in futures for row in future.result()]
            self._decode(rows)
            self._measure(servers)
            return pack(rows)

        try:
            rows = unpack(self._led(packed, on_wait))
        finally:
            for future in futures:
                future.cancel()  # has an effect only after an error
            self._sleep()
        prompts = [prompt for ticket in tickets for prompt in ticket.prompts]
        return [Group(prompt, rollouts) for prompt, rollouts in zip(prompts, rows, strict=True)]

    def _led(self, result: Callable[[ServerSession], Any], on_wait: OnWait) -> Any:
        """Call `result` on rank 0 until it returns a value; returns that on every rank. A collective."""
        next_command = None
        if self.servers is not None:
            next_command = partial(self._next_command, self.servers, result)
        while True:
            match lead(next_command):
                case Wait():
                    if on_wait is not None:
                        on_wait()
                case Push():
                    self._push(self._version)
                case Done(payload):
                    return payload
                case Failed() as failed:
                    raise failed.error

    def _next_command(self, servers: ServerSession, result: Callable[[ServerSession], Any]) -> Command:
        """Return rank 0's next command while it waits for responses."""
        deadline = time.monotonic() + leader.HEARTBEAT
        while time.monotonic() < deadline:
            try:
                payload = result(servers)
            except RolloutError as error:
                return Failed.by(error)
            if payload is not None:
                return Done(payload)
            if servers.pool.wants_weights:
                return Push()
        return Wait()

    def _measure(self, servers: ServerSession) -> None:
        self._measured = servers.pool.prefix_cache.take()
        if self._drafts is not None:
            running = [handle.server for handle in servers.pool.handles if not handle.is_lost]
            self._measured |= servers.loop.run(self._drafts.take(running)).metrics

    def _decode(self, rows: list[list[Rollout]]) -> None:
        flat = [rollout for row in rows for rollout in row if rollout.finish_reason != LOST]
        texts = self._task.tokenizer.batch_decode([r.token_ids for r in flat], skip_special_tokens=True)
        for rollout, text in zip(flat, texts, strict=True):
            rollout.text = text

    def _push(self, version: int) -> None:
        """Push, and give colocated servers the trainer's memory as they need it. A collective."""
        if self._memory is None:
            self._weights.push(version)
            return
        is_awake, self.asleep = not self.asleep, False
        try:
            self._memory.release("training")
            if is_awake:  # a server has come back; the others have the memory of the trainer's weights
                self._offload_servers()
            self._memory.restore("weights")
            self._memory.copy_weights_ahead()
            if self.servers is not None:
                self.servers.pool.wake()
            self._weights.push(version)
            self._give_weights()
            self._weights.open_servers()
        except BaseException:
            self._sleep()
            raise

    def _offload_servers(self) -> None:
        """Awake servers give their memory back; their responses stop, and continue after the push."""
        if self.servers is not None:
            self.servers.loop.run(self.servers.pool.offload())
        broadcast_msgpack(None)  # the other ranks take their memory back after rank 0's servers gave it

    def _give_weights(self) -> None:
        """Return when every rank has released the memory of its weights, so that servers may take it."""
        assert self._memory is not None
        self._memory.release("weights")
        all_gather_msgpack(None)  # a barrier; a broadcast would end on rank 0 before the others have released

    def _sleep(self) -> None:
        """Colocated servers release their memory, and the trainer takes its own again. A collective."""
        if self._memory is None or self.asleep:
            return
        if self.servers is not None:
            self.servers.loop.run(self.servers.pool.sleep())
        broadcast_msgpack(None)  # the other ranks take their memory back once rank 0's servers sleep
        self._memory.restore("weights")
        self._memory.restore("training")
        self.asleep = True

    def _start(self) -> Callable[[], Command]:
        """Return rank 0's next command while the servers start."""
        try:
            if self._conversations is not None:
                self._opened.enter_context(self._conversations)
            self.servers = self._open_servers()
        except ConfigError as error:
            failed = Failed.by(error)
        except OSError as error:
            failed = Failed(str(error))
        else:
            return self.servers.next_command
        return lambda: failed

    def _close(self) -> None:
        self._weights.close()
        if self.servers is not None:
            self.servers.close()
            self.servers = None
        self._opened.close()  # closed last, because a conversation may wait for its environment


class Speakers:
    """The policy on the servers, in the conversations of a batch (see `conversations.converse.Responder`).

    All turns of a conversation go to the same server while it is ready, because its cache has the earlier
    turns.
    """

    def __init__(self, pool: ServerPool, sampling: SamplingConfig) -> None:
        self._pool, self._sampling = pool, sampling
        self._preferred: dict[int, ServerHandle | None] = {}

    async def respond(self, conversation: int, request: Request) -> Rollout:
        pending = PendingRequest(request, self._preferred.get(conversation))
        rollout = await self._pool.respond(pending, 0, self._sampling)
        self._preferred[conversation] = pending.preferred
        return rollout

    def end(self, conversation: int) -> None:
        self._preferred.pop(conversation, None)

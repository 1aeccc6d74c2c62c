"""Sessions take turns, and samples of one kind that are neighbours go together."""

from typing import Any

from megatron_gvpo.tinker.queue import FairQueue, QueuedOperation
from megatron_gvpo.tinker.serve import divided, joined


def job(session: str, name: str, key: str | None = None, samples: int = 1) -> QueuedOperation:
    operation: dict[str, Any] = {"kind": "sample" if key else name, "orders": [name]}
    return QueuedOperation(session, operation, lambda _: None, key, samples)


def taken(queue: FairQueue) -> list[list[str]]:
    batches = []
    while jobs := queue.take(0):
        batches.append([f"{j.session_id}{j.operation['orders'][0]}" for j in jobs])
    return batches


def test_sessions_take_turns():
    queue = FairQueue()
    for name in ("1", "2", "3"):
        queue.put(job("a", name))
    queue.put(job("b", "1"))
    queue.put(job("c", "1"))
    assert taken(queue) == [["a1"], ["b1"], ["c1"], ["a2"], ["a3"]]


def test_a_late_session_does_not_wait_for_a_long_queue():
    queue = FairQueue()
    for name in ("1", "2", "3"):
        queue.put(job("a", name))
    assert [j.session_id for j in queue.take(0)] == ["a"]
    queue.put(job("b", "1"))
    assert taken(queue) == [["a2"], ["b1"], ["a3"]]


def test_samples_of_one_kind_go_together_and_keep_their_order():
    queue = FairQueue()
    for name, key in (("1", "x"), ("2", "x"), ("3", "y"), ("4", None), ("5", "y"), ("6", "y")):
        queue.put(job("a", name, key))
    assert taken(queue) == [["a1", "a2"], ["a3"], ["a4"], ["a5", "a6"]]


def test_samples_are_joined_up_to_a_limit():
    queue = FairQueue()
    for name in ("1", "2", "3"):
        queue.put(job("a", name, "x", samples=2000))
    assert taken(queue) == [["a1", "a2"], ["a3"]]


def test_the_jobs_of_a_session_that_has_ended_are_dropped():
    queue = FairQueue()
    queue.put(job("a", "1"))
    queue.put(job("b", "1"))
    assert [j.session_id for j in queue.drop("a")] == ["a"]
    assert taken(queue) == [["b1"]]


def test_each_joined_job_gets_its_own_outcome():
    jobs = [job("a", "1", "x"), job("a", "2", "x")]
    assert joined(jobs)["orders"] == ["1", "2"]
    assert divided(jobs, {"answers": [{"n": 1}, {"n": 2}]}) == [{"n": 1}, {"n": 2}]
    assert (joined([]), divided([], {})) == ({"kind": "idle"}, [])

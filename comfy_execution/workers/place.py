"""One worker, as the server sees it: started, given prompts, asked, stopped, started again."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from comfy_execution import events, supervisor
from comfy_execution.items import ExecutionStatus, QueueItem, cancelled_status, public_item
from comfy_execution.pending import Pending
from comfy_execution.queue import PromptQueue
from comfy_execution.recovery import crash_error, crashed_status
from comfy_execution.workers.affinity import NO_MODELS, Models
from comfy_execution.workers.channel import ChannelClosed, Launcher, WorkerChannel
from comfy_execution.workers.job import Job, NewsSink, WorkerGone
from comfy_execution.workers.messages import Message, PictureCodec, event_from, unpack_bytes

logger = logging.getLogger(__name__)

GRACE_S = 3.0
PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0

_uses = itertools.count(1)


class Place:
    """A worker that is kept running, and the prompt it has.

    A thread of its own starts the worker, takes its news and starts it again when it dies. The
    other methods may be called from any thread, also under the queue's lock unless they say
    otherwise: they never call the queue.

    Args:
        name: What logs call it.
        launcher: Starts the worker.
        queue: Where ended prompts go, and who is told that this place is free.
        sink: Where news go.
        codec: Unpacks previews.
        kill_after_s: The worker ends itself if its prompt does not stop in so many seconds; a
            little later it is killed, as native code may keep it from that. None: never.
    """

    def __init__(
        self,
        name: str,
        launcher: Launcher,
        queue: PromptQueue,
        sink: NewsSink,
        codec: PictureCodec,
        kill_after_s: float | None = None,
    ) -> None:
        self.name = name
        self.models: Models = NO_MODELS
        self.client: object = self  # nobody
        self.last_used = 0
        self.refusal: str | None = None
        self.memory: list[dict[str, Any]] = []
        self._launcher, self._queue, self._sink, self._codec = launcher, queue, sink, codec
        self._kill_after_s = kill_after_s
        self._lock = threading.RLock()
        self._channel: WorkerChannel | None = None
        self._ready: Message | None = None  # what the running worker said of itself
        self._job: Job | None = None
        self._news_item: QueueItem | None = None
        self._end: events.Event | None = None  # of the job, which is put on record first
        self._questions: dict[int, Future[Any]] = {}
        self._ending = threading.Event()
        self._deaths = 0  # since it was last ready
        self._thread = threading.Thread(target=self._run, name=f"worker-{name}", daemon=True)

    # --- what the pool asks -------------------------------------------------------------------

    def start(self) -> None:
        """Starts the worker; it is free once it has said that it is ready."""
        self._thread.start()

    @property
    def is_free(self) -> bool:
        """Whether it can take a prompt now."""
        return self._ready is not None and self._job is None and not self._ending.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether the worker is there, busy or not."""
        return self._ready is not None

    def lacks(self, entry: Pending) -> bool:
        """Whether the worker has not all node classes of a prompt; False while it starts."""
        return bool(self.missing(entry.item[2]))

    def missing(self, prompt: Mapping[str, Any]) -> list[str]:
        """Node classes of a prompt that the worker has not."""
        ready = self._ready
        if ready is None:
            return []
        wanted = {str(node.get("class_type")) for node in prompt.values()}
        return sorted(wanted - ready["nodes"])

    def health(self) -> dict[str, Any]:
        """State of the worker as plain JSON."""
        ready, job = self._ready or {}, self._job
        state = "starting" if self._ready is None else "idle" if job is None else "busy"
        return {
            "name": self.name,
            "state": state,
            "device": ready.get("device"),
            "pid": ready.get("pid"),
            "host": ready.get("host"),
            "prompt_id": job.prompt_id if job is not None else None,
        }

    def take(self, item: QueueItem, models: Models) -> None:
        """Keeps the place for a prompt that is about to leave the queue."""
        with self._lock:
            self._job = Job(item, models)
            self.client = item[3].get("client_id")
            self.last_used = next(_uses)

    def run(self, key: int) -> None:
        """Gives the worker the prompt it was kept for; if it has died, the queue gets it back.

        Not under the queue's lock.

        Args:
            key: The queue's key of the prompt.
        """
        with self._lock:
            job = self._job
            assert job is not None, "a place is kept before it is given a prompt"
            job.key = key
            is_gone = self._ready is None
            if not is_gone:
                self._send_job(job)
        if is_gone:
            self._lose(job, None)

    def stop(self, prompt_id: str) -> None:
        """Stops the prompt if it is this worker's."""
        with self._lock:
            job = self._job
            if job is None or job.prompt_id != prompt_id:
                return
            if not job.is_stopped and self._kill_after_s is not None:
                wait_s = self._kill_after_s + GRACE_S
                timer = threading.Timer(wait_s, self._kill_if_it_has, (job,))
                timer.daemon = True
                timer.start()
            job.is_stopped = True
            if job.is_sent:
                self._send({"do": "stop", "prompt_id": prompt_id})

    def _kill_if_it_has(self, job: Job) -> None:
        channel = self._channel
        if self._job is job and job.is_sent and channel is not None:
            logger.error("worker %s does not stop its prompt; killing it", self.name)
            channel.kill()

    def free(self, flags: Mapping[str, Any]) -> None:
        """Has the worker free memory, after its prompt if it has one."""
        with self._lock:
            self.models = NO_MODELS
            self._send({"do": "free", "flags": dict(flags)})

    def ask(self, what: str, given: Mapping[str, Any]) -> Future[Any]:
        """Asks the worker something; the answer may be ``WorkerGone``."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # who no longer wants it just does not look
        with self._lock:
            number = next(_uses)
            self._questions[number] = answer
            if not self._send({"do": "answer", "id": number, "what": what, "given": dict(given)}):
                self._questions.pop(number)
                answer.set_exception(WorkerGone(f"worker {self.name} is not there"))
        return answer

    def end(self) -> None:
        """Has the worker end; its prompt is left to the next process where there is a journal."""
        self._ending.set()
        with self._lock:
            self._send({"do": "end"})
            self._kill_unready()

    def _kill_unready(self) -> None:
        """A worker that still starts has nothing to finish, and would not listen for long."""
        if self._channel is not None and self._ready is None:
            self._channel.kill()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end, then forces it; says whether it came in time. Not under a lock."""
        self._thread.join(timeout_s)
        is_in_time = not self._thread.is_alive()
        channel = self._channel
        if channel is not None:
            channel.kill()
            self._thread.join(1.0)
        return is_in_time

    # --- sending ------------------------------------------------------------------------------

    def _send(self, message: Message) -> bool:
        """Sends if the worker is there; that it is gone is the reader's to notice."""
        if self._channel is None:
            return False
        try:
            self._channel.send(message)
        except ChannelClosed:
            return False
        return True

    def _send_job(self, job: Job) -> None:
        client = self._sink.client_info(job.item[3].get("client_id"))
        job.is_sent = True  # if it does not arrive, the worker's death is noticed
        self._send({"do": "run", "item": list(job.item), "client": client})
        if job.is_stopped:
            self._send({"do": "stop", "prompt_id": job.prompt_id})

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                channel = self._launcher.launch(self.name)
            except OSError as error:
                logger.error("worker %s cannot be started: %s", self.name, error)
            else:
                with self._lock:
                    self._channel = channel
                    if self._ending.is_set():
                        self._kill_unready()
                self._listen(channel)
                self._bury(channel)
            self._deaths += 1
            self._ending.wait(min(PAUSE_S * 2 ** min(self._deaths - 1, 16), LONGEST_PAUSE_S))

    def _listen(self, channel: WorkerChannel) -> None:
        """Takes news until there are none."""
        while True:
            try:
                message = channel.receive()
            except ChannelClosed:
                return
            try:
                with self._sink.news_of(self._news_item):
                    self._take(message)
            except Exception:  # one bad message must not end the place
                logger.exception("a message of worker %s could not be taken", self.name)

    def _take(self, message: Message) -> None:
        kind = message["say"]
        if kind == "event":
            self._take_event(message)
        elif kind == "sent":
            data = unpack_bytes(message["base64"]) if "base64" in message else message["data"]
            self._sink.send_sync(message["event"], data, message["sid"])
        elif kind == "done":
            self._take_result(message)
        elif kind == "answered":
            self._take_answer(message)
        elif kind == "health":
            self.memory = message["memory"]
        elif kind == "submit":
            self._submit(message["item"])
        elif kind == "ready":
            self._begin(message)
        elif kind == "refused":
            self.refusal = message["why"]
            logger.error("worker %s cannot work: %s", self.name, self.refusal)
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _begin(self, message: Message) -> None:
        with self._lock:
            self.models, self.refusal, self._deaths = NO_MODELS, None, 0
            self._ready = {**message, "nodes": frozenset(message["nodes"])}
        logger.info(
            "worker %s is ready: %s, process %s", self.name, message["device"], message["pid"]
        )
        self._queue.wake()

    def _submit(self, item: list[Any]) -> None:
        """Queues what a node submitted: last, or first if its number is negative."""
        last = self._queue.next_number()
        self._queue.put([-last - 1 if item[0] < 0 else last, *item[1:]])

    def _take_event(self, message: Message) -> None:
        event = event_from(message, self._codec)
        if isinstance(event, events.ExecutionStart) and self._job is not None:
            self._news_item = self._job.item
            with self._sink.news_of(self._news_item):
                self._sink.publish(event)
        elif events.ends_prompt(event):
            self._end = event
        else:
            self._sink.publish(event)

    def _announce_end(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            self._sink.publish(end)

    def _take_answer(self, message: Message) -> None:
        answer = self._questions.pop(message["id"], None)
        if answer is not None and "error" in message:
            answer.set_exception(RuntimeError(message["error"]))
        elif answer is not None:
            answer.set_result(message["value"])

    def _take_result(self, message: Message) -> None:
        job = self._job
        if job is None or job.prompt_id != message["prompt_id"]:
            return
        result = dict(message["result"])
        status = ExecutionStatus(**result.pop("status"))
        messages = status.messages
        was_stopped = bool(messages) and messages[-1][0] == events.ExecutionInterrupted.name
        is_left = was_stopped and self._ending.is_set()
        if not (is_left and self._queue.leave_to_next_process(job.key)):
            self._record(job, result, status)
        self._announce_end()  # had it not been possible to record it
        self._let_go(job.models)

    def _record(self, job: Job, result: Mapping[str, Any], status: ExecutionStatus) -> None:
        """Moves the prompt to the history; if its results cannot be kept, without them."""
        nothing: dict[str, Any] = {"outputs": {}, "meta": {}}
        for kept in (result, nothing):
            try:
                self._queue.task_done(job.key, kept, status, public_item, self._announce_end)
                return
            except Exception:  # the place must go on
                logger.exception("prompt %s has ended but is not on record", job.prompt_id)

    def _let_go(self, models: Models) -> None:
        with self._lock:
            self._job, self.models = None, models
        self._queue.wake()

    # --- death --------------------------------------------------------------------------------

    def _bury(self, channel: WorkerChannel) -> None:
        """The worker is gone: its prompt is tried again once, unless its own code killed it."""
        code = channel.exit_code()
        with self._lock:
            self._channel = self._ready = None
            job = self._job
            self.memory, self.models = [], NO_MODELS
            questions, self._questions = self._questions, {}
        for answer in questions.values():
            answer.set_exception(WorkerGone(f"worker {self.name} has ended"))
        if not self._ending.is_set():
            logger.error("worker %s ended (%s); starting it again", self.name, _cause(code))
        if job is not None and job.is_sent:
            self._lose(job, code)

    def _lose(self, job: Job, code: int | None) -> None:
        """The worker that was to run a prompt is gone."""
        with self._sink.news_of(job.item):
            self._settle(job, code)
        self._let_go(NO_MODELS)

    def _settle(self, job: Job, code: int | None) -> None:
        """Says what becomes of the prompt of a dead worker."""
        client_id = job.item[3].get("client_id")
        self._end = None  # the worker may have died between its word of the end and its results
        if self._ending.is_set() and self._queue.leave_to_next_process(job.key):
            return
        if job.is_stopped or self._ending.is_set():
            status = cancelled_status(job.prompt_id)
            told: events.Event = events.ExecutionInterrupted(
                job.prompt_id, "", "", (), events.now_ms(), client_id
            )
        else:
            is_native = code is not None and -code in supervisor.NATIVE_CRASH_SIGNALS
            if not is_native and self._queue.put_back(job.key):
                logger.info("prompt %s starts again", job.prompt_id)
                return
            told = crash_error(job.item, "The worker process")
            status = crashed_status(told)
        self._end = told
        self._record(job, {"outputs": {}, "meta": {}}, status)
        self._announce_end()
        if client_id is not None:
            self._sink.publish(events.Executing(None, job.prompt_id, client_id=client_id))


def _cause(code: int | None) -> str:
    return "no exit code is known" if code is None else supervisor.cause_of(code)

"""The worker as a process, against a queue that speaks HTTP."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from slipstream.protocol import access, codec
from slipstream.protocol.config import RunConfig, fingerprint, to_toml
from slipstream.protocol.messages import (
    ErrorBody,
    Group,
    TicketFailure,
    TicketReply,
    TicketRequest,
    WorkerReply,
    WorkerReport,
)
from tests.kit.fake_vllm import Fault, serving
from tests.kit.fake_vllm.tokenizer import tiny_tokenizer
from tests.kit.stand_in_queue import serving_at, tickets_for
from tests.kit.worker import fake, until

ROOT = Path(__file__).parents[2]
TASK = """
from slipstream.rollout_worker.task.task import Task

def reward(completions, **columns):
    return [0.0] * len(completions)

task = Task(dataset=[{"prompt": [{"role": "user", "content": "Multiply 2 by 3."}]}], rewards=[reward])
"""
# Without torch, as in the environment of a machine that only runs workers.
MAIN = """
import sys
sys.modules["torch"] = None
from slipstream.deploy.cli import main

sys.argv = ["slipstream", "worker", "run.toml", "--queue", sys.argv[1], "--name", "w1"]
main()
"""


class HttpQueue:
    """Issues one ticket until its group comes in, then none; keeps what is told and given back."""

    def __init__(self):
        self.ticket = tickets_for(1, 2)[0]
        self.servers = []
        self.reports = []
        self.requests = []
        self.failures = []
        self.groups = []
        self.app = web.Application()
        self.app.add_routes(
            [
                web.post(access.TICKETS, self.tickets),
                web.post(access.WORKER_OF, self.heartbeat),
                web.post(access.TICKET_FAIL_OF, self.fail),
                web.put(access.GROUP_OF, self.submit),
            ]
        )

    async def tickets(self, request):
        message = codec.decode_json(await request.read(), TicketRequest)
        self.requests.append(message)
        if self.groups or self.ticket.id in message.have:
            await asyncio.Event().wait()
        return web.Response(body=codec.encode_json(TicketReply([self.ticket], self.servers)))

    async def heartbeat(self, request):
        self.reports.append(codec.decode_json(await request.read(), WorkerReport))
        return web.Response(body=codec.encode_json(WorkerReply([], self.servers, finished=False)))

    async def fail(self, request):
        self.failures.append(codec.decode_json(await request.read(), TicketFailure))
        return web.Response(status=204)

    async def submit(self, request):
        self.groups.append(codec.decode(await request.read(), Group))
        return web.Response(status=201, body=b"new")


def folder_of_a_worker(path):
    """All that a worker elsewhere is given next to URL and token: the settings, the task, the tokenizer's files."""
    tokenizer = path / "tokenizer"
    tiny_tokenizer().save_pretrained(tokenizer)
    (path / "task.py").write_text(TASK)
    assert {file.name for file in tokenizer.iterdir()} <= {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    return {"model": {"path": str(tokenizer)}, "task": {"path": f"{path}/task.py:task"}}


@contextlib.asynccontextmanager
async def worker(values, queue_url, folder):
    """A worker as a process in `folder`; what is left of it is killed."""
    (folder / "run.toml").write_text(to_toml(RunConfig.model_validate(values)), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MAIN, queue_url),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SLIPSTREAM_TOKEN": "secret", "HF_HUB_OFFLINE": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_worker_in_a_folder_of_its_own_joins_is_killed_and_rejoins(tmp_path):
    """Without weights, without the learner's files and without torch."""
    values = folder_of_a_worker(tmp_path)
    server, queue = fake(faults=[Fault("hang")]), HttpQueue()
    async with serving(server) as url, serving(queue) as queue_url:
        queue.servers = serving_at(url, version=7)
        async with worker(values, queue_url, tmp_path) as process:
            await until(lambda: len(server.calls) == 1 or process.returncode is not None, timeout_s=60)
            assert process.returncode is None, (await process.stderr.read()).decode()
        async with worker(values, queue_url, tmp_path) as process:
            await until(lambda: queue.groups or process.returncode is not None, timeout_s=60)
            assert process.returncode is None, (await process.stderr.read()).decode()
    assert process.returncode == -signal.SIGKILL
    (group,) = queue.groups
    assert (group.ticket_id, group.worker_id, len(group.rollouts)) == ("t0", "w1", 2)
    first, second, *_ = [request for request in queue.requests if request.have == []]
    assert first.worker_id == second.worker_id == "w1"
    assert len({report.pid for report in queue.reports}) == 2
    fingerprints = [report.fingerprint for report in queue.reports]
    assert fingerprints == fingerprints[:1] * len(fingerprints)
    learners = fingerprint.of(RunConfig.model_validate(values), tiny_tokenizer())
    assert fingerprint.difference(learners, fingerprints[0]) is None


async def test_a_worker_that_is_refused_ends_with_the_queues_text(tmp_path):
    values = folder_of_a_worker(tmp_path)
    queue = HttpQueue()

    async def refuse(request):
        problem = ErrorBody("fingerprint", "worker w1: the tokenizer differs: a, the run has b")
        return web.Response(status=403, body=codec.encode_json(problem))

    queue.app = web.Application()
    queue.app.add_routes([web.post(access.WORKER_OF, refuse)])
    async with serving(queue) as queue_url, worker(values, queue_url, tmp_path) as process:
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    text = errors.decode()
    assert process.returncode == 2
    assert text.splitlines()[-1].startswith("slipstream: worker w1: the tokenizer differs: a, the run has b")
    assert "Traceback" not in text


async def test_sigterm_ends_a_worker_cleanly(tmp_path):
    """Its ticket is given back; the exit code is not 0, which would say that the run is finished."""
    values = folder_of_a_worker(tmp_path)
    server, queue = fake(faults=[Fault("hang")]), HttpQueue()
    async with serving(server) as url, serving(queue) as queue_url:
        queue.servers = serving_at(url, version=7)
        async with worker(values, queue_url, tmp_path) as process:
            await until(lambda: len(server.calls) == 1, timeout_s=60)
            process.send_signal(signal.SIGTERM)
            _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 128 + signal.SIGTERM, errors.decode()
    assert [failure.reason for failure in queue.failures] == ["worker_stopped"]


SLOWLY_MADE = """
import time
from pathlib import Path
from slipstream.rollout_worker.task.task import Task

def count(name):
    path = Path(name)
    path.write_text(str(int(path.read_text()) + 1 if path.exists() else 1))

class Box:
    def __init__(self):
        count("made")
        if Path("made").read_text() == "2":
            Path("making").touch()
            while not Path("go").exists():
                time.sleep(0.01)

    def reset(self):
        pass

    def get_reward(self):
        return 1.0

    def close(self):
        count("closed")

task = Task(dataset=[{"prompt": [{"role": "user", "content": "Hi."}]}], environment=Box)
"""


async def test_i9_sigterm_closes_an_environment_that_is_still_being_made(tmp_path):
    values = folder_of_a_worker(tmp_path) | {"worker": {"user_threads": 1, "episodes": 1}}
    (tmp_path / "task.py").write_text(SLOWLY_MADE)
    server, queue = fake(faults=[Fault("hang")]), HttpQueue()
    async with serving(server) as url, serving(queue) as queue_url:
        queue.servers = serving_at(url, version=7)
        async with worker(values, queue_url, tmp_path) as process:
            await until(lambda: (tmp_path / "making").exists() or process.returncode is not None, timeout_s=60)
            process.send_signal(signal.SIGTERM)
            await until(lambda: queue.failures or process.returncode is not None)
            (tmp_path / "go").touch()
            _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 128 + signal.SIGTERM, errors.decode()
    assert (tmp_path / "made").read_text() == (tmp_path / "closed").read_text() == "2"


HOSTILE = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from slipstream.rollout_worker.task.task import Task

pool, calls = ThreadPoolExecutor(1), []

def reward(completions, **columns):
    calls.append(pool.submit(threading.Event().wait))
    if len(calls) == 1:
        sys.stderr.close()
        raise KeyError("first")
    return [0.0] * len(completions)

task = Task(dataset=[{"prompt": [{"role": "user", "content": "Multiply 2 by 3."}]}], rewards=[reward])
"""


async def test_i9_a_task_that_closes_stderr_and_keeps_a_thread_at_work_lets_its_worker_work_and_end(tmp_path):
    """Once, a log line to the closed stream ended the worker, and Python waited for the task's executor at the end,
    for ever."""
    values = folder_of_a_worker(tmp_path)
    (tmp_path / "task.py").write_text(HOSTILE)
    server, queue = fake(), HttpQueue()
    async with serving(server) as url, serving(queue) as queue_url:
        queue.servers = serving_at(url, version=7)
        async with worker(values, queue_url, tmp_path) as process:
            await until(lambda: queue.groups or process.returncode is not None, timeout_s=60)
            assert process.returncode is None
            await until(lambda: any(report.notices for report in queue.reports))
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "KeyError: 'first'" in queue.reports[-1].notices[0].text

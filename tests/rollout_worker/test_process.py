"""The worker as a process, against a queue that speaks HTTP."""

import asyncio
import signal
import sys

from aiohttp import web

from protocol import codec, routes
from protocol.messages import TicketFailure, TicketReply, WorkerReply
from tests.kit.fake_vllm import Fault, serving
from tests.kit.fake_vllm.tokenizer import save_model_folder
from tests.kit.stand_in_queue import serving_at, tickets_for
from tests.kit.worker import fake, until

TASK = """
from rollout_worker.task import Task

def reward(completions, **columns):
    return [0.0] * len(completions)

task = Task(dataset=[{"prompt": [{"role": "user", "content": "Multiply 2 by 3."}]}], rewards=[reward])
"""
MAIN = """
import sys
from protocol.config import RunConfig
from rollout_worker.worker import run

sys.exit(run(RunConfig.model_validate_json(sys.argv[1]), sys.argv[2], "w1"))
"""


class HttpQueue:
    """Gives one ticket, then none; keeps what is given back."""

    def __init__(self):
        self.left = tickets_for(1, 2)
        self.servers = []
        self.failures = []
        self.app = web.Application()
        self.app.add_routes(
            [
                web.post(routes.TICKETS, self.tickets),
                web.post(routes.WORKER_OF, self.heartbeat),
                web.post(routes.TICKET_FAIL_OF, self.fail),
            ]
        )

    async def tickets(self, request):
        if not self.left:
            await asyncio.Event().wait()
        return web.Response(body=codec.encode_json(TicketReply([self.left.pop()], self.servers)))

    async def heartbeat(self, request):
        return web.Response(body=codec.encode_json(WorkerReply([], self.servers, finished=False)))

    async def fail(self, request):
        self.failures.append(codec.decode_json(await request.read(), TicketFailure))
        return web.Response(status=204)


async def test_sigterm_ends_a_worker_cleanly(tmp_path):
    """Its ticket is given back; the exit code is not 0, which would say that the run is finished."""
    (tmp_path / "task.py").write_text(TASK)
    values = {"model": {"path": str(save_model_folder(tmp_path))}, "task": {"path": f"{tmp_path}/task.py:task"}}
    server, queue = fake(faults=[Fault("hang")]), HttpQueue()
    async with serving(server) as url, serving(queue) as queue_url:
        queue.servers = serving_at(url, version=7)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MAIN, web.json_response(values).text, queue_url, stderr=asyncio.subprocess.PIPE
        )
        try:
            await until(lambda: len(server.calls) == 1, timeout_s=60)
            process.send_signal(signal.SIGTERM)
            _, errors = await asyncio.wait_for(process.communicate(), 20)
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 128 + signal.SIGTERM, errors.decode()
    assert [failure.reason for failure in queue.failures] == ["worker_stopped"]

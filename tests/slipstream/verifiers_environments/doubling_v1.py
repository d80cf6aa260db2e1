"""A task set of the library `verifiers`, whose program runs where the library does: no process for each episode."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import verifiers.v1 as vf


class DoublingData(vf.TaskData):
    answer: str


class DoublingTask(vf.Task[DoublingData, vf.State]):
    @vf.reward(weight=0.5)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class DoublingConfig(vf.TasksetConfig):
    count: int = 4


class DoublingTaskset(vf.Taskset[DoublingTask, DoublingConfig]):
    def load(self) -> Iterator[DoublingTask]:
        for number in range(self.config.count):
            data = DoublingData(prompt=f"What is {number} + {number}?", answer=str(2 * number))
            yield DoublingTask(data, self.config.task)


class AskingConfig(vf.HarnessConfig):
    """fails: instead of asking."""

    fails: bool = False


class AskingHarness(vf.Harness[AskingConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime: vf.Runtime) -> None:
        """Nothing is installed."""

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        if self.config.fails:
            return vf.ProgramResult(exit_code=1, stdout="", stderr="out of ideas")
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        async with httpx.AsyncClient(timeout=60) as client:
            reply = await client.post(
                f"{endpoint}/chat/completions",
                headers={"authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": [*messages, {"role": "user", "content": prompt}]},
            )
        reply.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["AskingHarness", "DoublingTaskset"]

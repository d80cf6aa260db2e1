"""Plays episodes in a framework's own environment: `python player.py SNIPPET`, where there is no Slipstream.

Reads a line of JSON for each episode, `[[base_url, api_key, model, temperature], {column: value}]`, and writes a line
with what the snippet's `agent` returned, or with the error that it raised.
"""

import asyncio
import importlib.util
import inspect
import json
import sys
import traceback
from types import SimpleNamespace


async def play(agent, endpoint, columns):
    base_url, api_key, model, temperature = endpoint
    root = base_url.removesuffix("/v1")
    given = SimpleNamespace(
        base_url=base_url, anthropic_base_url=root, api_key=api_key, model=model, temperature=temperature
    )
    found = agent(endpoint=given, **columns)
    return await found if inspect.isawaitable(found) else found


async def main():
    answers, sys.stdout = sys.stdout, sys.stderr  # frameworks print
    # As Slipstream imports a task file: griptape looks for the file of a class.
    spec = importlib.util.spec_from_file_location("snippet", sys.argv[1])
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answer = {"returned": await play(module.agent, *json.loads(line))}
        except Exception:
            answer = {"error": traceback.format_exc()[-3000:]}
        print(json.dumps(answer), file=answers, flush=True)


asyncio.run(main())

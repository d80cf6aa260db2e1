"""Stands in for Harbor's program 0.26.0, which needs Python 3.12 and containers: takes its trial configuration, asks
the model as its agent would, and writes `result.json` with the fields of `harbor.models.trial.result.TrialResult`."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


def main() -> None:
    assert sys.argv[1:4] == ["trial", "start", "-c"]
    config = json.loads(Path(sys.argv[4]).read_text())
    fault = (Path(config["task"]["path"]) / "fault").read_text()
    agent = config["agent"]
    body = {
        "model": agent["model_name"].removeprefix("openai/"),
        "messages": [{"role": "user", "content": "What is 2 + 2?"}],
    }
    headers = {
        "Authorization": f"Bearer {os.environ[agent['model_api_key_name']]}",
        "Content-Type": "application/json",
    }
    request = urllib.request.Request(f"{agent['base_url']}/chat/completions", json.dumps(body).encode(), headers)
    answer = json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]
    if fault == "hang":
        time.sleep(60)
    if fault == "flood":
        for _ in range(200):
            print("flood " * 10_000)
        sys.exit(3)
    rewards: Any = {"reward": float("nan") if fault == "nan" else float(answer == "4"), "tests": 2}
    failure = None
    if fault == "image":
        rewards, failure = None, {"exception_type": "ImageError", "exception_message": "no such image"}
    result = {"task_name": "sums", "verifier_result": {"rewards": rewards}, "exception_info": failure}
    folder = Path(config["trials_dir"]) / config["trial_name"]
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result))


main()

"""A task of Inspect, in a file as users have it."""

import time

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import generate, solver


@scorer(metrics=[accuracy()])
def judged(fault):
    async def score(state, target):
        if fault == "nan":
            return Score(value=float("nan"))
        return Score(value="C" if target.text in state.output.completion else "I")

    return score


@solver
def faulty(fault):
    async def solve(state, generate):
        if fault == "hang":
            time.sleep(60)  # noqa: ASYNC251 - a task may do so
        if fault == "image":
            raise ValueError("the image cannot be read")
        return state

    return solve


@task
def sums(fault=""):
    dataset = [Sample(input="What is 2 + 2?", target="4"), Sample(input="What is 3 + 3?", target="6")]
    return Task(dataset=dataset, solver=[faulty(fault), generate()], scorer=judged(fault))

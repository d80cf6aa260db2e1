"""Fits the rates to the run that they were read from, so that its own simulation goes as fast as the run went."""

from __future__ import annotations

import math
from dataclasses import replace

from slipstream.deploy.planning.rates import Rates, Record, server_count
from slipstream.deploy.planning.simulation import Simulation
from slipstream.protocol.config import RunConfig

# How often is tried, how near is near enough, and how much slower or faster a server may come out.
_TRIALS, _NEAR, _MOST = 6, 0.01, 4.0
# Steps of a trial, at least and at most; a run begins with little in its queue, so a short one is slower.
_STEPS = (20, 200)


def calibrated(record: Record) -> Rates:
    """Return the record's rates with servers that are as much slower, or faster, as the run shows them.

    A probe measures a server with nothing next to it. In a run it also takes in new weights, and on one machine learner
    and workers take part of its cores. Nothing is changed where servers do not limit the run.
    """
    rates, factor, before = record.rates, 1.0, None
    steps = min(max(record.measured.steps + 1, _STEPS[0]), _STEPS[1])
    for _ in range(_TRIALS):
        tried = replace(rates, curve=rates.curve.scaled(factor))
        found = Simulation(record.config, tried).run(steps).tokens_per_s / record.measured.tokens_per_s
        if before is not None and abs(math.log(found / before[1])) < 0.2 * abs(math.log(factor / before[0])):
            return replace(rates, curve=rates.curve.scaled(before[0]))
        if abs(found - 1) < _NEAR:
            return tried
        before, factor = (factor, found), min(_MOST, max(1 / _MOST, factor * found))
    return tried


def sharing_cores(rates: Rates, record: RunConfig, planned: RunConfig) -> Rates:
    """Return the rates of servers of which as many as are planned share the cores of those of the record."""
    slower = rates.curve.among(server_count(planned)) / rates.curve.among(server_count(record))
    return replace(rates, curve=rates.curve.scaled(slower))

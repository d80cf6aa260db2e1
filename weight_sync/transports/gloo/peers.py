"""Each pair of ranks proves over gloo itself that both hold the group's secret, before a byte of weights travels (I8).

gloo's own sockets know no authentication: who connects first to a rank's port, with the number that gloo expects there,
is taken for the other rank. So each rank sends each other one a nonce, and answers with an HMAC over both nonces and
both ranks. The rank whose place a stranger took cannot be reached by it any more, so there is nobody to answer for it.
"""

from __future__ import annotations

import hmac
import secrets
from datetime import timedelta
from typing import Any

import torch

from weight_sync.transports.gloo.rendezvous import NotProven, proof

# How long a peer may take to answer, at most.
PROOF_S = 15.0
_NONCE_TAG, _PROOF_TAG = 1_000_001, 1_000_002


def prove_peers(group: Any, rank: int, size: int, secret: bytes, timeout_s: float) -> None:
    """Blocks until every other rank of the process group has proved itself. Raises `NotProven`, or RuntimeError where
    one does not answer."""
    peers = [peer for peer in range(size) if peer != rank]
    ours = {peer: secrets.token_bytes(32) for peer in peers}
    theirs = _exchanged(group, rank, ours, _NONCE_TAG, timeout_s)
    answers = {peer: _answer(secret, rank, peer, ours[peer], theirs[peer]) for peer in peers}
    for peer, answer in _exchanged(group, rank, answers, _PROOF_TAG, timeout_s).items():
        if not hmac.compare_digest(answer, _answer(secret, peer, rank, theirs[peer], ours[peer])):
            raise NotProven(f"rank {peer} of the transfer does not hold its secret: a stranger took its place")


def _answer(secret: bytes, sender: int, to: int, senders_nonce: bytes, receivers_nonce: bytes) -> bytes:
    return proof(secret, b"gloo", sender.to_bytes(4), to.to_bytes(4), senders_nonce, receivers_nonce)


def _exchanged(group: Any, rank: int, messages: dict[int, bytes], tag: int, timeout_s: float) -> dict[int, bytes]:
    """What each peer sent, 32 bytes, while `messages` went to them."""
    timeout = timedelta(seconds=min(timeout_s, PROOF_S))
    out = {peer: torch.frombuffer(bytearray(message), dtype=torch.uint8) for peer, message in messages.items()}
    into = {peer: torch.zeros(32, dtype=torch.uint8) for peer in messages}
    sent = [group.send([tensor], peer, tag) for peer, tensor in out.items()]
    received = {peer: group.recv([tensor], peer, tag) for peer, tensor in into.items()}
    for peer, work in received.items():
        try:
            work.wait(timeout)
        except RuntimeError as error:
            raise RuntimeError(f"rank {peer} of the transfer did not prove itself: {error}") from error
    for work in sent:
        work.wait(timeout)
    return {peer: tensor.numpy().tobytes() for peer, tensor in into.items()}

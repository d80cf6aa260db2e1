"""Rollout worker: turns tickets into groups by running multi-turn, tool-using episodes against inference servers.

Sampled ids are appended as they came and are never tokenised again; each keeps its log-prob, and the policy version
and server that sampled it. Nothing that a user's function, a tool or a server does ends the worker.
"""

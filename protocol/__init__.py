"""The contract between Slipstream's processes: messages, codec, routes, client and run file.

This package imports no other Slipstream package and no torch, so that every process can afford it.
"""

"""Runs inside vLLM's processes: a plugin that adds engines, middleware in the API process, methods on the workers."""

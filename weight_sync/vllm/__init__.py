"""What runs inside vLLM's processes: the plugin that adds our engines, and the middleware that asks for the token."""

"""Starting Slipstream: the command line, the supervisor, and vLLM's server with the flags that RL needs."""

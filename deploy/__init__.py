"""Starting Slipstream: the command line, the launcher scripts and vLLM's server with the flags that RL needs."""

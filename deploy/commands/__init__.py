"""The commands of `slipstream` that are more than a call, one module each."""

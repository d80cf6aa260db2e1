"""The commands of `slipstream`."""

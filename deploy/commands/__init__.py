"""The larger commands of `slipstream`, one module each."""
